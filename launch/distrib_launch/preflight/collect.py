"""Asks every host what it is, all at once, over ssh or Slurm; and tells one failure of these from another by their own words."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec

from distrib.cluster.inventory import (
    Inventory,
    InventoryQuery,
    InventoryReply,
    agent_program,
    own_inventory,
    parse_reply,
)
from distrib.cluster.node import name_hosts
from distrib.cluster.remote import connectivity_agent
from distrib.errors import LaunchError
from distrib_launch.engines import srun
from distrib_launch.preflight.check_result import Check, Way, error
from distrib_launch.preflight.connectivity import CALL_SECONDS, same_mtu
from distrib_launch.preflight.host_sessions import LOADER, SIGN, Connections, Patience
from distrib_launch.preflight.remote import Remote

SSH_SECONDS = 20.0
ANSWER_SECONDS = 90.0
"""From the call to the answer, where ssh has got in: Python on a cold network file system takes its time."""
LOGINS_PER_CPU = 16
"""So many logins at a time take this machine's processors no longer than others take to answer."""
SRUN_SAYS = "srun: "
BY_PROXY = "UNKNOWN port 65535"
"""What ssh calls its other end where ProxyJump or ProxyCommand leads there."""
PROXY_FAILS = "connect to host|could not resolve|permission denied|host key|timed out|prohibited|not found|no such file"
"""By which a line of ssh's, or of such a command, tells why it does not."""
TELL_SECONDS = 8.0
"""After which it is told who is still waited for."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A host to ask: with which interpreter, and how it is reached or, being this machine, need not be."""

    name: str
    python: str
    is_here: bool
    question: InventoryQuery
    by: Way = "ssh"
    user: str | None = None
    port: int | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a host said: its facts, or why there are none. `asked` and `answered` are Unix times on this machine.

    `ports` are where the host can be called while its connection is held, none where it cannot.
    """

    inventory: Inventory | None = None
    ports: tuple[int, ...] = ()
    problem: Check | None = None
    no_login: bool = False
    """Whether ssh was neither let in nor refused, or Slurm has begun nothing there."""
    asked: float = 0.0
    answered: float = 0.0


def ask_all(
    targets: Sequence[Target],
    remote: Remote,
    own_python: str,
    is_here: Callable[[str], bool],
    connections: Connections,
    say: Callable[[str], None],
) -> dict[str, Answer]:
    """Ask all targets in parallel; answers by host, in their order.

    `is_here` tells of a name not yet known to be this machine whether it is; it may take its time to resolve it. `say` hears
    of those that take long.
    """
    waiting = {target.name: None for target in targets}

    def ask(target: Target) -> Answer:
        answer = ask_one(target)
        waiting.pop(target.name, None)
        return answer

    def ask_one(target: Target) -> Answer:
        if target.is_here or is_here(target.name):  # and needs no daemon of the engine's
            alone = msgspec.structs.replace(target.question, programs=())
            target = msgspec.structs.replace(target, is_here=True, question=alone)
        if target.is_here and target.python == own_python:
            now = time.time()
            own = own_inventory(target.question)
            return Answer(inventory=own, ports=connections.listen(), asked=now, answered=time.time())
        command = [target.python, "-c", LOADER]
        if not target.is_here:
            command = remote.command(target.name, f"echo '{SIGN}'; {shlex.join(command)}")
            if remote.by == "ssh":
                command = connections.shared(command)
        answer = _ask(target, command, connections, None if target.is_here else remote.environment)
        if remote.by == "ssh" and _began(answer) and (why := _too_large(target, remote)):
            return msgspec.structs.replace(answer, problem=why, no_login=False)
        return answer

    if all(target.is_here for target in targets):
        return {target.name: ask(target) for target in targets}
    logins = LOGINS_PER_CPU * len(os.sched_getaffinity(0))
    with _told_of(waiting, say):
        told = dict(zip((t.name for t in targets), connections.all_at_once(ask, targets, logins), strict=True))
    if silent := [target for target in targets if told[target.name].no_login]:
        # With all at once a machine that has much to do may have been too slow itself.
        what = "login" if remote.by == "ssh" else "step"
        say(f"no {what} within {SSH_SECONDS:.0f} s: {name_hosts(t.name for t in silent)}; trying once more")
        told |= zip((t.name for t in silent), connections.all_at_once(ask_one, silent, logins), strict=True)
    return told


@contextlib.contextmanager
def _told_of(waiting: Collection[str], say: Callable[[str], None]) -> Iterator[None]:
    """Say, should it take long, which hosts have not answered."""

    def tell() -> None:
        say(f"waiting for the answer of {name_hosts(waiting)}")

    timer = threading.Timer(TELL_SECONDS, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _ask(
    target: Target, command: Sequence[str], connections: Connections, environment: Mapping[str, str] | None
) -> Answer:
    asked = time.time()
    try:
        patience = Patience(ANSWER_SECONDS if target.is_here else SSH_SECONDS, ANSWER_SECONDS)
        told = connections.ask(target.name, command, agent_program(target.question), patience, environment)
    except OSError as problem:
        if target.is_here:
            return Answer(problem=_no_interpreter(target, problem.strerror or str(problem)))
        hint = "install ssh, or name --ssh-command" if problem.errno == errno.ENOENT else "see ulimit -a"
        raise LaunchError(f"cannot run {command[0]}: {problem.strerror}", hint=hint) from None
    answered = time.time()
    if said := parse_reply(told.out, InventoryReply):
        return Answer(inventory=said.inventory, ports=said.ports, asked=asked, answered=answered)
    if told.code is None:
        return Answer(problem=_silent(target, told.out, told.err), no_login=not target.is_here and SIGN not in told.out)
    reached = target.is_here or SIGN in told.out
    out = told.out.replace(SIGN, "").strip()
    return Answer(problem=explain(target, told.code, told.err, out, reached=reached), asked=asked, answered=answered)


# -- what went wrong --------------------------------------------------------------------------------------------------


def explain(target: Target, code: int, err: str, out: str = "", *, reached: bool = True) -> Check:
    """Why a host gave no facts, from the exit code and the words of ssh or srun, the shell or Python there.

    `reached`: whether its shell has come to our command.
    """
    if target.by == "srun" and not target.is_here and not reached:
        return _explain_step(target, err)
    if code == 255 and target.by == "ssh" and not target.is_here:
        return _explain_ssh(target, err)
    lines = [line.strip() for line in err.splitlines() if line.strip() and not line.startswith(SRUN_SAYS)]
    words = lines[-1] if lines else f"exit code {code}"
    if not reached:
        said = [line for line in (out or err).splitlines() if line.strip() and "exec(" not in line]  # our own program
        says = f", and says {said[-1].strip()[:120]!r}" if said else ""
        return error(
            target.name, "ssh", f"ssh gets in, and its login shell ends before our command, with exit code {code}{says}",
            f"look for exit, exec or read in ~/.bashrc there, or for an account that may run no commands; try: {_try_it(target, '-V')}",
        )  # fmt: skip
    if "invalid literal for int()" in words or "exec('" in words:
        return error(
            target.name, "python", "its login shell has taken the standard input of our command",
            f"look for what reads, or redirects, it in ~/.bashrc there: echo hello | {_try_it(target, '-')}",
        )  # fmt: skip
    if code in (126, 127) or re.search(r"command not found|no such file or directory|permission denied", words, re.I):
        return _no_interpreter(target, words)
    if "SyntaxError" in err:
        return error(
            target.name, "python", f"{target.python} is too old for distrib", "distrib needs Python 3.10 or later"
        )
    if code == 0 and out:
        words = f"its login shell prints something else instead: {out.splitlines()[-1].strip()[:120]!r}"
    return error(target.name, "python", f"{target.python} does not run there: {words}", _try_it(target, "-V"))


def _no_interpreter(target: Target, words: str) -> Check:
    return error(
        target.name,
        "python",
        f"cannot run {target.python} there: {words}",
        "install distrib there too, at the same path, or name the host's interpreter in the hostfile: python=/PATH",
    )


def _explain_ssh(target: Target, err: str) -> Check:
    host = target.name
    login = f"{target.user}@{host}" if target.user else host
    port = f"-p {target.port} " if target.port else ""
    lines = [line.strip() for line in err.splitlines() if line.strip() and not line.startswith("Warning: Permanently")]
    words = lines[-1] if lines else "ssh says nothing"

    def says(pattern: str) -> bool:
        return re.search(pattern, err, re.IGNORECASE) is not None

    def because(reason: str, fix: str) -> Check:
        return error(host, "ssh", reason, fix)

    if BY_PROXY in err and not says("open failed: connect failed"):  # that is what a jump host says of the target
        failed = [line for line in lines if BY_PROXY not in line and re.search(PROXY_FAILS, line, re.IGNORECASE)]
        if failed:
            return because(
                f"the way to it, by ProxyJump or ProxyCommand, failed: {failed[-1]}",
                f"mend that host or command (ssh -G {host} | grep -i proxy shows it), then try: ssh {port}{login} true",
            )
    if says("could not resolve hostname"):
        return because(
            "its name does not resolve",
            f"correct the hostfile, or add the host to DNS or /etc/hosts here (if {host} is a file: give its path)",
        )
    if says("remote host identification has changed"):
        return because(
            "its host key is not the one that ssh knows: it was reinstalled, or another machine answers",
            f"if that is expected: ssh-keygen -R {shlex.quote(f'[{host}]:{target.port}') if target.port else host}, then ssh {port}{login} to look at the new key and accept it",
        )
    if says("host key verification failed|no .* host key is known"):
        return because(
            "its host key is not known here, and a launch cannot ask whether to trust it",
            f"ssh {port}{login} once and accept it, or ssh-keyscan {port}{host} >> ~/.ssh/known_hosts",
        )
    if match := re.search(r"permissions \d+ for '(.+)' are too open", err, re.IGNORECASE):
        return because(f"ssh ignores the key {match[1]}: others may read it", f"chmod 600 {shlex.quote(match[1])}")
    if match := re.search(r"bad owner or permissions on (\S+)", err, re.IGNORECASE):
        return because(f"ssh refuses {match[1]}: others may write it", f"chmod 600 {shlex.quote(match[1])}")
    if says("too many authentication failures"):
        return because(
            "it was offered too many keys", f"name the right one in ~/.ssh/config: Host {host}, IdentityFile"
        )
    if match := re.search(r"permission denied(?: \(([^)]*)\))?", err, re.IGNORECASE):
        allowed = f"; it takes {match[1]}" if match[1] else ""
        if match[1] and "publickey" not in match[1]:
            return because(
                f"its sshd takes no keys, only {match[1]}", f"on {host} set PubkeyAuthentication yes in sshd_config"
            )
        return because(
            f"it refuses our key{allowed}",
            f"ssh-copy-id {port}{login}, and on {host} chmod go-w ~ ~/.ssh ~/.ssh/authorized_keys; or may that user not log in? "
            "see journalctl -u ssh there",
        )
    if says("connection refused"):
        return because(
            f"it is up, but nothing listens on ssh's port {target.port or 22}",
            "start sshd there (systemctl start ssh), or name its port in the hostfile: port=N",
        )
    if says("timed out|no route to host|network is unreachable|host is down"):
        return because(words.removeprefix("ssh: "), _is_it_up(target))
    if says("connection (closed|reset)|kex_exchange_identification"):
        return because(
            f"its sshd hangs up: {words}",
            f"on {host} see journalctl -u ssh; MaxStartups and hosts.deny are usual causes",
        )
    return because(f"ssh cannot get in: {words}", f"try: ssh {port}{login} true")


def _explain_step(target: Target, err: str) -> Check:
    if told := srun.explain(err):
        return error(target.name, "srun", *told)
    return error(target.name, "srun", f"Slurm starts no step there{_of_srun(err)}", f"try: {_try_it(target, '-V')}")


def _of_srun(err: str) -> str:
    lines = [line.strip().removeprefix(SRUN_SAYS).removeprefix("error: ") for line in err.splitlines() if line.strip()]
    return f": {lines[0]}" if lines else ""


def _is_it_up(target: Target) -> str:
    return f"is {target.name} up, and does a firewall let ssh through? try: {_try_it(target, '-V')}"


def _silent(target: Target, out: str, err: str) -> Check:
    if target.is_here or SIGN in out:
        where = "" if target.is_here else f"{target.by} gets in, but "
        return error(
            target.name,
            "python",
            f"{where}{target.python} has not answered within {ANSWER_SECONDS:.0f} s",
            f"does a disk or a network file system hang there? try: {_try_it(target, '-V')}",
        )
    if target.by == "srun":
        what = f"Slurm has started no step there within {SSH_SECONDS:.0f} s{_of_srun(err)}"
        return error(target.name, "srun", what, f"see scontrol show node {target.name}, and slurmd's log there")
    waits = "; or does something in its ~/.bashrc wait, or read standard input?"
    return error(target.name, "ssh", f"no login within {SSH_SECONDS:.0f} s", _is_it_up(target) + waits)


def _began(answer: Answer) -> bool:
    """Whether ssh may have been connected and then heard nothing more."""
    said = answer.problem.reason if answer.problem else ""
    return answer.no_login or (said.startswith("Connection to ") and said.endswith("timed out"))


def _too_large(target: Target, remote: Remote) -> Check | None:
    """Whether ssh gets no answer since its packets are too large for the way: its first words are short, the next are not."""
    try:
        with Connections() as connections:  # a command in ssh's place may do anything
            told = connections.ask(target.name, [*remote.words, "-G", target.name], "", Patience(2.0, 2.0))
        settings = dict(line.split(maxsplit=1) for line in told.out.lower().splitlines() if " " in line)
        if settings.keys() & {"proxyjump", "proxycommand"}:
            return None
        name, port = settings.get("hostname", target.name), int(settings.get("port", 22))
        address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, ValueError):
        return None
    ((reason, lost, passed),) = connectivity_agent.test_targets([(str(address), port)], CALL_SECONDS)
    return error(target.name, "ssh", f"it takes our call, but {reason}", same_mtu(lost, passed)) if lost else None


def _try_it(target: Target, argument: str) -> str:
    port = f"-p {target.port} " if target.port else ""
    login = f"{target.user}@{target.name}" if target.user else target.name
    there = shlex.join([target.python, argument])
    if target.is_here:
        return there
    return f"ssh {port}{login} {there}" if target.by == "ssh" else f"srun --overlap -n1 -w {target.name} {there}"
