"""Decisions about a launch, each made here, once; the engines carry them out. Pure, but for a look at the script."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from distrib.cluster.hostfile import HostList
from distrib.environment import DISTRIB_SHARE_GPUS
from distrib.errors import ConfigError
from distrib.strategy import Strategy
from distrib.utils.ranges import is_whole_number, ranges
from distrib_launch import engines, host_selection, rank_environment, rank_placement
from distrib_launch.engines import ssh
from distrib_launch.launch_options import LaunchOptions
from distrib_launch.launch_plan import LaunchPlan, RankPlan
from distrib_launch.rank_agent import affinity
from distrib_launch.rank_placement import HostPlan

if TYPE_CHECKING:  # loading them takes a tenth of a short launch
    from distrib.cluster.topology import Topology


SHARED_GPUS_NOTE = "--share-gpus: all ranks use Gloo instead of NCCL; ranks that share a GPU are slower, and each needs its own memory there"
"""Warning of a launch whose ranks may share GPUs."""


class LocalMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that plans: its names in host lists, its number of GPUs and its cores."""

    names: frozenset[str] = frozenset({"localhost"})
    gpus: int = 0
    machine: affinity.HostResources | None = None


def build_plan(
    options: LaunchOptions,
    host_list: HostList | None,
    topology: Topology | None,
    local: LocalMachine = LocalMachine(),  # noqa: B008 (it is frozen)
) -> LaunchPlan:
    """Decide everything about a launch.

    Args:
        options: LaunchOptions with `engine`, `environment` and `run_dir` filled in.
        host_list: Hosts of the user; None: this machine.
        topology: Description of the hosts.
        local: This machine.

    Raises:
        ConfigError: The options cannot be met by the hosts.
    """
    strategy = options.strategy
    visible = options.environment.get("CUDA_VISIBLE_DEVICES")
    cpu_only = visible is not None and not affinity.listed_gpus(visible)
    synchronous = strategy.mode == "sync" and not strategy.balance and not cpu_only
    has_servers = strategy.mode == "async"
    host_list, dedicated = rank_placement.split_server_hosts(host_list) if has_servers else (host_list, ())
    host_filter = msgspec.structs.replace(options.host_filter, server_hosts=tuple(host.name for host in dedicated))
    placement = rank_placement.place_workers(
        host_list,
        topology,
        options.ranks,
        local.gpus,
        host_filter,
        synchronous=synchronous,
        share_gpus=options.share_gpus,
    )
    hosts, notes = placement.hosts, placement.notes
    if has_servers:
        dedicated = host_selection.select_server_hosts(dedicated, host_filter)
        hosts = rank_placement.place_servers(hosts, dedicated, placement.idle, strategy.servers)
        rank_placement.check_replicas(hosts, strategy.replicas)
    else:
        notes += rank_placement.notes_on_ignored_roles(host_list, hosts)
    gpus = dict.fromkeys(placement.gpus, 0) if cpu_only else placement.gpus
    workers = _workers(hosts, gpus, local, options)
    if any(DISTRIB_SHARE_GPUS in rank.environment for rank in workers):
        notes += (SHARED_GPUS_NOTE,)
    ranks = (*workers, *_servers(hosts, len(workers), options))
    notes += _notes_on_ineffective_options(
        strategy, [rank.device for rank in ranks], len({rank.host for rank in ranks})
    )
    ssh_command, ssh_config = ssh.ssh_words(options.ssh_command, options.run_dir, hosts, options.attempt_id)
    plan = LaunchPlan(
        attempt_id=options.attempt_id,
        job_id=options.job_id or options.attempt_id,
        restarts=options.restarts,
        world_size=len(workers),
        engine=options.engine,
        command=(),
        script=(options.interpreter, *(["-m"] if options.module else []), options.script, *options.arguments),
        program=options.program,
        directory=options.directory,
        run_dir=options.run_dir,
        mode=strategy.mode,
        strategy=strategy,
        hosts=hosts,
        ranks=ranks,
        notes=notes,
        forwarded=tuple(options.environment),
        bind=options.bind,
        sync=options.sync,
        container=options.container,
        ssh=tuple(ssh_command),
        ssh_config=ssh_config,
        spare_slots={} if has_servers else _spare_slots(placement, host_list, local, options),
    )
    engine = engines.get(options.engine)
    plan = msgspec.structs.replace(plan, command=engine.command(plan, options))
    return msgspec.structs.replace(plan, notes=(*notes, *engine.notes(plan)))


def _spare_slots(
    placement: rank_placement.Placement, host_list: HostList | None, local: LocalMachine, options: LaunchOptions
) -> dict[str, int]:
    """Return the slots for MPI_Comm_spawn by host. Idle hosts, which are not checked, have some only if the script spawns."""
    if host_list is None:
        cores = sum(map(len, local.machine.nodes.values())) if local.machine else 0
        spare = {host.name: cores - host.ranks for host in placement.hosts}
    else:
        special = {host.name for host in placement.idle if host.user or host.port or host.python}
        spare = {name: slots for name, slots in placement.spare_slots.items() if name not in special}
        text = b""
        with contextlib.suppress(OSError):
            text = b"" if options.module else Path(options.script).read_bytes()
        if b"Spawn" not in text and b"MPIPoolExecutor" not in text:
            spare = {name: slots for name, slots in spare.items() if name in placement.gpus}
    return {name: slots for name, slots in spare.items() if slots > 0}


def _notes_on_ineffective_options(strategy: Strategy, devices: Collection[str], hosts: int) -> tuple[str, ...]:
    gpus = any(device.startswith("cuda") for device in devices)
    if strategy.all_reduce != "auto" and gpus:
        return (f"--all-reduce {strategy.all_reduce} is for CPU hosts: between GPUs NCCL chooses the algorithm",)
    compresses_inside = strategy.backend != "torch" or strategy.all_reduce == "flat"
    if strategy.mode == "sync" and not compresses_inside and not strategy.gradients.exact and hosts == 1 and not gpus:
        return (
            f"--gradients {strategy.gradients} changes nothing on one CPU host: only traffic between hosts is compressed",
        )
    return ()


def _workers(
    hosts: Sequence[HostPlan], gpus: Mapping[str, int | None], local: LocalMachine, options: LaunchOptions
) -> list[RankPlan]:
    """Plan the ranks that run the script. Raises ConfigError if a host has fewer GPUs than slots and they are not shared."""
    found: list[RankPlan] = []
    shared = options.share_gpus and any(_may_share(gpus[host.name], host.workers) for host in hosts if host.workers)
    more = {DISTRIB_SHARE_GPUS: "1"} if shared else {}
    for group, host in enumerate(hosts):
        count = gpus[host.name] if host.workers else 0
        if count and host.workers > count and not shared:
            raise ConfigError(
                f"{host.name}: {host.workers} slots, but {count} GPU(s)",
                hint="lower its slots to one rank per GPU, or share the GPUs with --share-gpus",
                code="too-many-ranks",
            )
        shares = _shares(host, count, local, options)
        for local_rank in range(host.workers):
            found.append(
                RankPlan(
                    rank=len(found),
                    host=host.name,
                    local_rank=local_rank,
                    role="worker",
                    device="auto" if count is None else f"cuda:{local_rank % count}" if count else "cpu",
                    environment={
                        **rank_environment.planned(options, hosts, group=group, local_rank=local_rank, rank=len(found)),
                        **more,
                    },
                    cpus=ranges(shares[local_rank].cpus) if shares else None,
                    threads=shares[local_rank].threads if shares else None,
                )
            )
    return found


def _may_share(gpus: int | None, workers: int) -> bool:
    """Test if ranks of a host may have to share a GPU: it has fewer GPUs than ranks, or an unknown number."""
    return workers > 1 if gpus is None else 0 < gpus < workers


def _servers(hosts: Sequence[HostPlan], first: int, options: LaunchOptions) -> list[RankPlan]:
    """Plan the parameter servers, numbered after the workers."""
    found: list[RankPlan] = []
    for group, host in enumerate(hosts):
        for local_rank in range(host.workers, host.ranks):
            server = len(found)
            environment = rank_environment.planned(
                options, hosts, group=group, local_rank=local_rank, rank=first + server, server=server
            )
            found.append(
                RankPlan(
                    rank=first + server, host=host.name, local_rank=local_rank, role="server", device="cpu",
                    environment=environment, cpus="", threads=1,
                )
            )  # fmt: skip
    return found


def _shares(host: HostPlan, count: int | None, local: LocalMachine, options: LaunchOptions) -> list[affinity.Share]:
    """Predict the CPUs that the rank agents on this machine will choose; empty for other hosts."""
    if host.name not in local.names or local.machine is None:
        return []
    environ = dict(options.environment)
    gpus = local.gpus if count is None else count
    if host.chosen is not None and gpus and max(host.chosen) < local.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = affinity.take_gpus(environ, host.chosen, local.gpus)
    threads = environ.get("OMP_NUM_THREADS", "")
    found = []
    for local_rank in range(host.workers):
        share = affinity.share_of(local.machine, local_rank, host.workers, environ, options.bind, on_gpus=bool(gpus))
        found.append(share._replace(threads=int(threads)) if is_whole_number(threads) else share)
    return found
