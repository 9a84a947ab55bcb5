"""Which names and addresses are this machine's, and which of them lead to the hosts."""

from __future__ import annotations

import socket
from collections.abc import Collection

from distrib.cluster.node import name_hosts
from distrib.errors import LaunchError
from distrib_launch.launch_plan import LaunchPlan


def own_names() -> frozenset[str]:
    """The names by which this machine is known without asking anybody."""
    name = socket.gethostname()
    return frozenset({"localhost", "127.0.0.1", "::1", name, name.partition(".")[0]})


def is_here(host: str) -> bool:
    """Whether a host's name is this machine's own, or stands for an address of it: one that a socket can have."""
    if host == socket.gethostname():  # which need not resolve
        return True
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind(address)
    except OSError:
        return False
    return True


def address_of(host: str) -> str:
    """The first address that a name stands for here; empty where it stands for none."""
    return next((target[0] for *_, target in _resolve(host)), "")


def own_addresses(plan: LaunchPlan) -> set[str]:
    """The addresses of this machine by which the plan's hosts reach it; nothing is sent.

    What the hosts saw is best: their names may be ssh's own (HostName in ~/.ssh/config), which nobody else resolves.
    """
    names = [host.name for host in plan.hosts]
    found = set(plan.seen_as) or sources(names) or sources([host.address for host in plan.hosts if host.address])
    if not found and all(is_here(name) for name in names):
        return {"127.0.0.1"}  # a machine alone, whose name stands for 127.0.1.1
    if not found:
        raise LaunchError(f"no network leads from here to {name_hosts(names)}", hint="check names and routes")
    return found


def sources(hosts: Collection[str]) -> set[str]:
    """The addresses from which this machine would call the hosts, none for those that are itself; nothing is sent."""
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
    return found


def _resolve(host: str) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)  # type: ignore[return-value]
    except socket.gaierror:
        return []
