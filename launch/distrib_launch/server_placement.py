"""Where parameter servers run (mode async): beside the workers of every host, or on hosts of their own. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from distrib.cluster.hostfile import Host, HostList
from distrib.errors import ConfigError
from distrib_launch.slots import HostPlan

COMMAND = ("-m", "distrib.training.parameter_server")
"""What a server runs, after its host's interpreter."""


def split_roles(host_list: HostList | None) -> tuple[HostList | None, tuple[Host, ...]]:
    """The hosts for workers, and those that the hostfile sets apart with role=server."""
    if host_list is None:
        return None, ()
    apart = tuple(host for host in host_list.hosts if host.role == "server")
    workers = tuple(host for host in host_list.hosts if host.role != "server")
    if not workers:
        raise ConfigError(f"{host_list.source}: every host has role=server", hint="leave some to the workers")
    return msgspec.structs.replace(host_list, hosts=workers), apart


def place_servers(
    workers: Sequence[HostPlan], apart: Sequence[Host], idle: Sequence[Host], wanted: int | None
) -> tuple[HostPlan, ...]:
    """`workers` with servers added, and after them the hosts that have servers only.

    Without `wanted`: one on every host set apart, or, where there is none, one on every worker's host. With it, as many:
    on the hosts set apart, else on `idle` ones, else beside the workers. Raises ConfigError for too many.
    """
    if wanted is None and not apart:
        return tuple(msgspec.structs.replace(host, ranks=host.ranks + 1, servers=1) for host in workers)
    own = apart or idle
    count = len(apart) if wanted is None else wanted
    room = sum(host.slots or 1 for host in apart) if apart else sum(host.ranks for host in workers)
    if count > room:
        what = f"the hosts with role=server have {room} slot(s)" if apart else f"there are {room} worker(s)"
        more = "give those hosts more slots" if apart else "start more workers"
        raise ConfigError(f"--servers {count}, but {what}", hint=f"ask for {room} or fewer, or {more}")
    if not own:
        counts = [count // len(workers) + (n < count % len(workers)) for n in range(len(workers))]
        return tuple(
            msgspec.structs.replace(host, ranks=host.ranks + servers, servers=servers)
            for host, servers in zip(workers, counts, strict=True)
        )
    counts = [count // len(own) + (n < count % len(own)) for n in range(len(own))]
    return (
        *workers,
        *(
            HostPlan(name=host.name, ranks=servers, servers=servers, user=host.user, port=host.port, python=host.python)
            for host, servers in zip(own, counts, strict=True)
            if servers
        ),
    )


def check_replicas(hosts: Sequence[HostPlan], replicas: int) -> None:
    """Raises ConfigError where no other server could keep a replica."""
    if replicas and sum(host.servers for host in hosts) < 2:
        raise ConfigError(
            "--replicas 1, but there is one parameter server only, and no other to keep its replica",
            hint="use --servers 2 or more, or leave it out",
        )


def notes_without_servers(host_list: HostList | None, hosts: Sequence[HostPlan]) -> tuple[str, ...]:
    """Of hosts for parameter servers in a job that has none."""
    taken = {host.name for host in hosts}
    apart = [
        host.name for host in (host_list.hosts if host_list else ()) if host.role == "server" and host.name in taken
    ]
    return tuple(
        f"{name} has role=server, which --mode async alone heeds: it trains like the others" for name in apart[:1]
    )
