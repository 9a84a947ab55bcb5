"""Number of workers and parameter servers on each host. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from distrib.cluster.host_expression import MAX_SLOTS
from distrib.cluster.hostfile import Host, HostList
from distrib.cluster.node import Gpus, name_hosts
from distrib.cluster.slurm import SOURCE as SLURM
from distrib.errors import ConfigError
from distrib.units import count_text
from distrib_launch import host_selection
from distrib_launch.host_selection import HostFilter, SelectedHost

if TYPE_CHECKING:  # loading them takes a tenth of a short launch
    from distrib.cluster.topology import Topology

THIS_MACHINE = "this machine"
"""Source of the hosts in messages if the user named none."""

SERVER_COMMAND = ("-m", "distrib.training.parameter_server")
"""Words of a parameter server's command after the interpreter."""

NO_SLOTS = "no slots given"
"""Begin of the note on a list of hosts without any counts, which a launch prints with `-v` only."""


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Part of one host in a job: connection and ranks, of which the last `servers` are parameter servers."""

    name: str
    ranks: int
    servers: int = 0
    user: str | None = None
    port: int | None = None
    python: str | None = None
    """Absolute path of its own interpreter; None: the launcher's path."""
    chosen: tuple[int, ...] | None = None
    """Indices of the GPUs, or of slots on a host without GPUs, that its ranks use in order; None: the first ones."""
    interface: str | None = None
    """Network interface to the other hosts, chosen at the start; None if there are no others."""
    address: str | None = None
    """Address of that interface."""

    @property
    def workers(self) -> int:
        """Number of ranks that run the script."""
        return self.ranks - self.servers


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts of the workers in rank order, and hosts without ranks."""

    hosts: tuple[HostPlan, ...]
    gpus: dict[str, int | None]
    """Number of GPUs that a host's ranks may use; None: not known."""
    notes: tuple[str, ...]
    idle: tuple[Host, ...] = ()
    spare_slots: dict[str, int] = {}
    """Slots without a rank by host, also of idle hosts."""


def place_workers(
    host_list: HostList | None,
    topology: Topology | None,
    wanted: int | None,
    local_gpus: int,
    host_filter: HostFilter = HostFilter(),  # noqa: B008 (it is frozen)
    *,
    synchronous: bool = True,
    share_gpus: bool = False,
) -> Placement:
    """Decide the number of workers on each host.

    Args:
        host_list: Hosts of the user; None: this machine.
        topology: Description of the hosts.
        wanted: Value of `-np`; None: every slot.
        local_gpus: Number of GPUs of this machine.
        host_filter: Selection of hosts.
        synchronous: Every rank waits for the slowest one in each step.
        share_gpus: Allow more ranks than GPUs.

    Raises:
        ConfigError: There are too few slots or GPUs.
    """
    known: dict[str, Gpus | None]
    if host_list is None:
        if host_filter.is_empty:
            return _place_on_this_machine(wanted, local_gpus, share_gpus=share_gpus)
        host_list = HostList(hosts=(Host(name="localhost", slots=local_gpus or None),), source=THIS_MACHINE, dialect="")
        known = {"localhost": Gpus(count=local_gpus)}
    else:
        known = {host.name: topology.gpus_of(host.name) if topology else None for host in host_list.hosts}
    slots = {host.name: _slots_of(host, known[host.name]) for host in host_list.hosts}
    selected = host_selection.select_hosts(host_list.hosts, known, slots, host_filter)
    notes = list(host_list.notes)
    if wanted is not None and wanted > _sum_of_slots(selected):
        selected = host_selection.widen_to_max_slots(selected, wanted)
    else:
        notes += _notes_on_slots(selected, known, from_slurm=host_list.source == SLURM)
    ranks = _count_ranks(selected, wanted, host_filter, host_list.source)
    shares = host_selection.distribute_ranks(selected, ranks, spread=host_filter.spread)
    hosts = [_host_plan(each, share) for each, share in shares]
    if synchronous:
        types = host_selection.hosts_by_gpu_type([each.host for each, _ in shares], known)
        notes += filter(None, [host_selection.mixed_gpu_note(types)])
    taken = {host.name for host in hosts}
    if idle := tuple(each.host for each in selected if each.host.name not in taken):
        notes.append(f"-np {wanted} leaves {count_text(len(idle), 'host')} idle, from {idle[0].name} on")
    gpus = {host.name: _usable_gpus(host, known[host.name]) for host in hosts}
    used = {host.name: host.ranks for host in hosts}
    spare = {each.host.name: left for each in selected if (left := each.slots - used.get(each.host.name, 0)) > 0}
    return Placement(hosts=tuple(hosts), gpus=gpus, notes=tuple(notes), idle=idle, spare_slots=spare)


def _slots_of(host: Host, gpus: Gpus | None) -> int:
    """As in the hostfile, else one for each known GPU, else one."""
    if host.slots is not None:
        return host.slots
    return min((gpus and gpus.count) or 1, host.max_slots or MAX_SLOTS)


def _sum_of_slots(selected: Sequence[SelectedHost]) -> int:
    return sum(each.slots for each in selected)


def _count_ranks(selected: Sequence[SelectedHost], wanted: int | None, host_filter: HostFilter, source: str) -> int:
    room = _sum_of_slots(selected)
    if wanted is None or (host_filter.allow_fewer_ranks and wanted > room):
        return room
    if wanted > room:
        most = sum(each.slots if each.indices else max(each.slots, each.host.max_slots or 0) for each in selected)
        more = f", {most} with max_slots" if most > room else ""
        filtered = "" if host_filter.is_empty else " after your choice"
        raise ConfigError(
            f"{wanted} ranks requested with -np, but {source} has {room} slot(s) on {len(selected)} host(s){more}{filtered}",
            hint=f"-H {selected[0].host.name}:N gives this machine N slots"
            if source == THIS_MACHINE and selected[0].indices is None
            else "request fewer ranks, or give the hosts more slots",
            code="too-many-ranks",
        )
    return wanted


def _host_plan(each: SelectedHost, ranks: int) -> HostPlan:
    host = each.host
    chosen = each.indices[:ranks] if each.indices is not None else None
    return HostPlan(name=host.name, ranks=ranks, user=host.user, port=host.port, python=host.python, chosen=chosen)


def _usable_gpus(host: HostPlan, gpus: Gpus | None) -> int | None:
    count = gpus.count if gpus else None
    return len(host.chosen) if host.chosen is not None and count else count


def _notes_on_slots(
    selected: Sequence[SelectedHost], known: Mapping[str, Gpus | None], *, from_slurm: bool
) -> list[str]:
    """Notes on hosts whose number of slots was assumed."""
    notes: list[str] = []
    bare: list[str] = []
    for each in selected:
        name, gpus = each.host.name, known[each.host.name]
        if each.host.slots is not None or each.indices is not None:
            continue
        if gpus and gpus.count:
            notes.append(f"{name}: {NO_SLOTS}; one per GPU of the topology, {gpus.count}")
        else:
            bare.append(name)
    if bare:
        more = "--ntasks-per-node=N or -np N" if from_slurm else f"write {bare[0]}:N or slots=N"
        every = "" if len(bare) == len(selected) and not from_slurm else f"{name_hosts(bare)}: "
        notes.append(f"{every}{NO_SLOTS}; 1 rank each ({more} for more)")
    return notes


def _place_on_this_machine(wanted: int | None, gpus: int, *, share_gpus: bool) -> Placement:
    notes: list[str] = []
    ranks = wanted or gpus or 1
    if ranks > MAX_SLOTS:
        raise ConfigError(
            f"-np {ranks}: more than the {MAX_SLOTS} ranks that a host may have",
            hint="request fewer ranks",
            code="too-many-ranks",
        )
    if wanted is None:
        notes.append(
            f"no hosts given: this machine, {gpus} rank(s), one per GPU"
            if gpus
            else "no hosts given and no GPU here: this machine, 1 rank (-np N for more, -H for other hosts)"
        )
    elif gpus and ranks > gpus and not share_gpus:
        raise ConfigError(
            f"{ranks} ranks requested with -np, but this machine shows {gpus} GPU(s)",
            hint="start one rank per GPU, share them with --share-gpus, or run on the CPU: -x CUDA_VISIBLE_DEVICES=",
            code="too-many-ranks",
        )
    return Placement(hosts=(HostPlan(name="localhost", ranks=ranks),), gpus={"localhost": gpus}, notes=tuple(notes))


# -- parameter servers (mode async) -----------------------------------------------------------------------------------


def split_server_hosts(host_list: HostList | None) -> tuple[HostList | None, tuple[Host, ...]]:
    """Separate the hosts of workers from those with `role=server`.

    Args:
        host_list: Hosts of the user; None: this machine.

    Raises:
        ConfigError: Every host has `role=server`.
    """
    if host_list is None:
        return None, ()
    dedicated = tuple(host for host in host_list.hosts if host.role == "server")
    workers = tuple(host for host in host_list.hosts if host.role != "server")
    if not workers:
        raise ConfigError(
            f"{host_list.source}: every host has role=server", hint="leave some hosts to the workers", code="no-hosts"
        )
    return msgspec.structs.replace(host_list, hosts=workers), dedicated


def place_servers(
    workers: Sequence[HostPlan], dedicated: Sequence[Host], idle: Sequence[Host], wanted: int | None
) -> tuple[HostPlan, ...]:
    """Add parameter servers: on dedicated hosts, else on idle ones, else beside the workers.

    Args:
        workers: Hosts with workers.
        dedicated: Hosts with `role=server`.
        idle: Selected hosts without ranks.
        wanted: Value of `--servers`; None: one on each dedicated host, or on each worker's host if there is none.

    Returns:
        The hosts of `workers`, followed by those that run servers only.

    Raises:
        ConfigError: There are too few slots or workers for so many servers.
    """
    if wanted is None and not dedicated:
        return tuple(msgspec.structs.replace(host, ranks=host.ranks + 1, servers=1) for host in workers)
    own = dedicated or idle
    count = len(dedicated) if wanted is None else wanted
    room = sum(host.slots or 1 for host in dedicated) if dedicated else sum(host.ranks for host in workers)
    if count > room:
        what = f"the hosts with role=server have {room} slot(s)" if dedicated else f"there are {room} worker(s)"
        more = "give those hosts more slots" if dedicated else "start more workers"
        raise ConfigError(f"--servers {count}, but {what}", hint=f"request {room} or fewer, or {more}")
    places = len(own or workers)
    counts = [count // places + (n < count % places) for n in range(places)]
    if not own:
        return tuple(
            msgspec.structs.replace(host, ranks=host.ranks + servers, servers=servers)
            for host, servers in zip(workers, counts, strict=True)
        )
    return (
        *workers,
        *(
            HostPlan(name=host.name, ranks=servers, servers=servers, user=host.user, port=host.port, python=host.python)
            for host, servers in zip(own, counts, strict=True)
            if servers
        ),
    )


def check_replicas(hosts: Sequence[HostPlan], replicas: int) -> None:
    """Raise ConfigError if no second server can hold a replica.

    Args:
        hosts: Hosts with their servers.
        replicas: Value of `--replicas`.
    """
    if replicas and sum(host.servers for host in hosts) < 2:
        raise ConfigError(
            "--replicas 1 needs two parameter servers, but there is one",
            hint="use --servers 2 or more, or leave it out",
            code="option-conflict",
        )


def notes_on_ignored_roles(host_list: HostList | None, hosts: Sequence[HostPlan]) -> tuple[str, ...]:
    """Return a note if a host with `role=server` trains because the job has no servers.

    Args:
        host_list: Hosts of the user.
        hosts: Hosts of the job.
    """
    taken = {host.name for host in hosts}
    listed = host_list.hosts if host_list else ()
    ignored = [host.name for host in listed if host.role == "server" and host.name in taken]
    return tuple(f"{name} has role=server, which has an effect in --mode async only: it trains" for name in ignored[:1])
