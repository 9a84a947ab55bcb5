"""What is asked of the hosts: how they reach this machine, and what is wrong with one that does not answer."""

from __future__ import annotations

import shlex
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from distrib.errors import LaunchError, PreflightError

SSH_SECONDS = 20


def own_addresses(hosts: Sequence[str]) -> set[str]:
    """The addresses of this machine from which it reaches `hosts`; nothing is sent."""
    found = set()
    for host in hosts:
        for family, _, _, _, target in _resolve(host):
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                try:
                    sock.connect(target)
                except OSError:
                    continue
                address = sock.getsockname()[0]
            if not address.startswith("127.") and address != "::1":
                found.add(address)
                break
    if not found:
        raise LaunchError(f"no network leads from here to {', '.join(list(hosts)[:5])}", hint="check names and routes")
    return found


def _resolve(host: str) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)  # type: ignore[return-value]
    except socket.gaierror:
        return []


def diagnose(hosts: Sequence[str], ssh: Sequence[str], interpreter: str) -> PreflightError | None:
    """Ask each host, in parallel, why it did not start its ranks; None when all of them seem fit."""
    with ThreadPoolExecutor(max_workers=min(64, max(1, len(hosts)))) as pool:
        problems = [p for p in pool.map(lambda host: _ask(host, ssh, interpreter), hosts) if p]
    return PreflightError("\n".join(problems)) if problems else None


def _ask(host: str, ssh: Sequence[str], interpreter: str) -> str | None:
    question = f"{shlex.quote(interpreter)} -c 'import distrib_launch.rank' && echo fit"
    try:
        answer = subprocess.run(
            [*ssh, host, question], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SSH_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"{host}: ssh gives no answer within {SSH_SECONDS} s; is the host up?"
    if "fit" in answer.stdout:
        return None
    words = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
    if answer.returncode == 255:
        return f"{host}: ssh cannot get in: {words}; try: {shlex.join([*ssh, host, 'true'])}"
    if answer.returncode in (126, 127):
        return f"{host}: cannot run {interpreter} there: {words}"
    return f"{host}: {interpreter} cannot import distrib_launch: {words}; install distrib there too"
