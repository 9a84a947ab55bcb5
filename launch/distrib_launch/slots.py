"""From a list of hosts to those that take part, and how many ranks each runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from distrib.cluster.host_expression import MAX_SLOTS
from distrib.cluster.hostfile import Host, HostList
from distrib.cluster.node import name_hosts
from distrib.cluster.slurm import SOURCE as SLURM
from distrib.errors import ConfigError
from distrib_launch import host_selection

HERE = "this machine"
"""What stands for the source of hosts where none were named."""

if TYPE_CHECKING:  # loading them takes a tenth of a short launch
    from distrib.cluster.topology import Gpus, Topology


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One host's part: how to reach it and how many ranks it runs, of which the last `servers` are parameter servers."""

    name: str
    ranks: int
    servers: int = 0
    user: str | None = None
    port: int | None = None
    python: str | None = None
    """Absolute path of its own interpreter; None where it is the launcher's."""
    chosen: tuple[int, ...] | None = None
    """Indices of the GPUs (on a host without any: slots) that were chosen for its ranks, in order."""
    interface: str | None = None
    """The network interface that leads to the other hosts, chosen at launch; None where there are no others."""
    address: str | None = None
    """That interface's address."""
    shell: str | None = None
    """The login shell there, where the host was asked."""

    @property
    def workers(self) -> int:
        """The ranks that run the script."""
        return self.ranks - self.servers


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts that take part, in rank order, and those that are left `idle`; `gpus`: how many a host's ranks may use (None: unknown)."""

    hosts: tuple[HostPlan, ...]
    gpus: dict[str, int | None]
    notes: tuple[str, ...]
    idle: tuple[Host, ...] = ()


def plan_hosts(
    host_list: HostList | None,
    topology: Topology | None,
    wanted: int | None,
    local_gpus: int,
    wishes: host_selection.Wishes = host_selection.Wishes(),  # noqa: B008 (it is frozen)
    *,
    in_step: bool = True,
) -> Placed:
    """Decide how many ranks each host runs.

    `host_list` is None for a run on this machine alone, `wanted` is `-np`, `local_gpus` what this machine shows, `in_step`
    whether every rank waits for the slowest. Raises ConfigError where the hosts have no room, or too few GPUs.
    """
    known: dict[str, Gpus | None]
    if host_list is None:
        if wishes.include is wishes.exclude is wishes.pool is None:
            return _plan_this_machine(wanted, local_gpus)
        from distrib.cluster.topology import Gpus

        host_list = HostList(hosts=(Host(name="localhost", slots=local_gpus or None),), source=HERE, dialect="")
        known = {"localhost": Gpus(count=local_gpus)}
    else:
        known = {host.name: topology.gpus_of(host.name) if topology else None for host in host_list.hosts}
    slots = {host.name: _slots_of(host, known[host.name]) for host in host_list.hosts}
    choices = host_selection.choose(host_list.hosts, known, slots, wishes)
    notes = list(host_list.notes)
    if wanted is not None and wanted > _room(choices):
        choices = host_selection.widen(choices, wanted)
    else:
        more = "--ntasks-per-node=N or -np N" if host_list.source == SLURM else ""
        notes += _notes_on_slots(choices, known, more)
    ranks = _ranks(choices, wanted, wishes, host_list.source)
    shares = host_selection.share_out(choices, ranks, "spread" if wishes.spread else "fill")
    hosts = [_host_plan(choice, share) for choice, share in shares]
    mixed = (
        host_selection.mixed_pools(host_selection.pools([choice.host for choice, _ in shares], known))
        if in_step
        else None
    )
    notes += [mixed] if mixed else []
    taken = {host.name for host in hosts}
    if idle := tuple(choice.host for choice in choices if choice.host.name not in taken):
        notes.append(f"-np {wanted} leaves {len(idle)} host(s) idle, {idle[0].name} the first of them")
    gpus = {host.name: _gpus_for(host, known[host.name]) for host in hosts}
    return Placed(hosts=tuple(hosts), gpus=gpus, notes=tuple(notes), idle=idle)


def _slots_of(host: Host, gpus: Gpus | None) -> int:
    """As many as the hostfile says, else one for each GPU that is known of, else one."""
    if host.slots is not None:
        return host.slots
    return min((gpus and gpus.count) or 1, host.max_slots or MAX_SLOTS)


def _room(choices: Sequence[host_selection.Choice]) -> int:
    return sum(choice.slots for choice in choices)


def _ranks(
    choices: Sequence[host_selection.Choice], wanted: int | None, wishes: host_selection.Wishes, source: str
) -> int:
    """How many ranks there will be on these hosts."""
    room = _room(choices)
    if wanted is None or (wishes.fewer and wanted > room):
        return room
    if wanted > room:
        most = sum(
            choice.slots if choice.indices else max(choice.slots, choice.host.max_slots or 0) for choice in choices
        )
        more = f", {most} with max_slots" if most > room else ""
        chosen = " after your choice" if wishes.include or wishes.exclude or wishes.pool else ""
        raise ConfigError(
            f"{wanted} ranks asked for with -np, but {source} has {room} slot(s) on {len(choices)} host(s){more}{chosen}",
            hint=f"-H {choices[0].host.name}:N gives this machine N slots"
            if source == HERE and choices[0].indices is None
            else "ask for fewer, or give the hosts more slots",
        )
    return wanted


def _host_plan(choice: host_selection.Choice, ranks: int) -> HostPlan:
    host = choice.host
    chosen = choice.indices[:ranks] if choice.indices is not None else None
    return HostPlan(name=host.name, ranks=ranks, user=host.user, port=host.port, python=host.python, chosen=chosen)


def _gpus_for(host: HostPlan, gpus: Gpus | None) -> int | None:
    count = gpus.count if gpus else None
    return len(host.chosen) if host.chosen is not None and count else count


def _notes_on_slots(choices: Sequence[host_selection.Choice], known: Mapping[str, Gpus | None], more: str) -> list[str]:
    """What was assumed where nobody said how many slots there are; `more` is how to have more, where not by slots."""
    notes: list[str] = []
    bare: list[str] = []
    for choice in choices:
        name, gpus = choice.host.name, known[choice.host.name]
        if choice.host.slots is not None or choice.indices is not None:
            continue
        if gpus and gpus.count:
            notes.append(f"{name}: no slots given; one per GPU of the topology, {gpus.count}")
        else:
            bare.append(name)
    if bare:
        notes.append(
            f"{name_hosts(bare)}: no slots given; 1 rank each ({more or f'say {bare[0]}:N or slots=N'} for more)"
        )
    return notes


def _plan_this_machine(wanted: int | None, gpus: int) -> Placed:
    notes: list[str] = []
    ranks = wanted or gpus or 1
    if ranks > MAX_SLOTS:
        raise ConfigError(f"-np {ranks}: more than the {MAX_SLOTS} ranks that a host may have", hint="ask for fewer")
    if wanted is None:
        notes.append(
            f"no hosts given: this machine, {gpus} rank(s), one per GPU"
            if gpus
            else "no hosts given and no GPU here: this machine, 1 rank (-np N for more, -H for other hosts)"
        )
    elif gpus and ranks > gpus:
        raise ConfigError(
            f"{ranks} ranks asked for with -np, but this machine shows {gpus} GPU(s)",
            hint="one rank per GPU, of those in CUDA_VISIBLE_DEVICES where it is set; to run on the CPU instead, add -x CUDA_VISIBLE_DEVICES=",
        )
    return Placed(hosts=(HostPlan(name="localhost", ranks=ranks),), gpus={"localhost": gpus}, notes=tuple(notes))
