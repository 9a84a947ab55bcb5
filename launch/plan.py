"""From hosts, topology and options to a plan: who runs what, where. Pure; `--dry-run` prints it.

Every decision about a launch is made here, once; the engines only carry it out.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import msgspec

from distrib.cluster.hostfile import HostList
from distrib.cluster.topology import Topology
from distrib.errors import ConfigError

FORWARDED_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "UCX_",
    "FI_",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "HF_",
    "WANDB_",
    "HOROVOD_",
)
"""Variables that change how a job computes or talks; every host gets the launcher's own values."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for, apart from the hosts."""

    script: str
    arguments: tuple[str, ...]
    interpreter: str
    directory: str
    run_dir: str
    ranks: int | None = None
    mode: str = "sync"
    engine: str = "mpirun"
    mpirun: str | None = None
    ssh_command: str | None = None
    environment: dict[str, str] = {}


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One host's part: how to reach it and how many ranks it runs."""

    name: str
    ranks: int
    user: str | None = None
    port: int | None = None


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: where it runs, on what, and what its script finds in the environment.

    `device` is `cuda:N`, `cpu`, or `auto` where nobody has yet told whether the host has GPUs; the host decides then.
    """

    rank: int
    host: str
    local_rank: int
    role: str
    device: str
    environment: dict[str, str]


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A job, wholly decided. `command` is what the engine runs on this machine."""

    job: str
    world_size: int
    engine: str
    command: tuple[str, ...]
    script: tuple[str, ...]
    directory: str
    run_dir: str
    mode: str
    hosts: tuple[HostPlan, ...]
    ranks: tuple[RankPlan, ...]
    notes: tuple[str, ...]


def plan_hosts(
    host_list: HostList | None, topology: Topology | None, wanted: int | None, local_gpus: int
) -> tuple[tuple[HostPlan, ...], tuple[str, ...], dict[str, int | None]]:
    """Decide how many ranks each host runs.

    Returns the hosts in rank order, notes for the user, and each host's GPU count (None: unknown). `host_list` is None
    for a run on this machine alone, `wanted` is `-np`, `local_gpus` what this machine shows.
    """
    if host_list is None:
        return _plan_this_machine(wanted, local_gpus)
    notes = list(host_list.notes)
    gpus: dict[str, int | None] = {}
    slots: dict[str, int] = {}
    bare: list[str] = []
    for host in host_list.hosts:
        known = topology.gpus_of(host.name) if topology else None
        gpus[host.name] = known.count if known else None
        if host.slots is not None:
            slots[host.name] = host.slots
        elif known and known.count:
            slots[host.name] = known.count
            notes.append(f"{host.name}: no slots given; one per GPU of the topology, {known.count}")
        else:
            slots[host.name] = 1
            bare.append(host.name)
    if bare:
        shown = ", ".join(bare[:5]) + (f" and {len(bare) - 5} more" if len(bare) > 5 else "")
        notes.append(f"{shown}: no slots given; 1 rank each (say {bare[0]}:N or slots=N for more)")
    total = sum(slots.values())
    left = total if wanted is None else wanted
    if left > total:
        raise ConfigError(
            f"{left} ranks asked for with -np, but {host_list.source} has {total} slot(s) on {len(slots)} host(s)",
            hint="ask for fewer, or give the hosts more slots",
        )
    hosts = []
    for host in host_list.hosts:
        take = min(slots[host.name], left)
        left -= take
        if take:
            hosts.append(HostPlan(name=host.name, ranks=take, user=host.user, port=host.port))
    idle = [host.name for host in host_list.hosts][len(hosts) :]
    if idle:
        notes.append(f"-np {wanted} leaves {len(idle)} host(s) idle, {idle[0]} the first of them")
    return tuple(hosts), tuple(notes), gpus


def _plan_this_machine(
    wanted: int | None, gpus: int
) -> tuple[tuple[HostPlan, ...], tuple[str, ...], dict[str, int | None]]:
    notes: list[str] = []
    ranks = wanted or gpus or 1
    if wanted is None:
        notes.append(
            f"no hosts given: this machine, {gpus} rank(s), one per GPU"
            if gpus
            else "no hosts given and no GPU here: this machine, 1 rank (-np N for more, -H for other hosts)"
        )
    elif gpus and ranks > gpus:
        raise ConfigError(
            f"{ranks} ranks asked for with -np, but this machine shows {gpus} GPU(s)",
            hint="one rank per GPU; to run on the CPU instead, add -x CUDA_VISIBLE_DEVICES=",
        )
    return (HostPlan(name="localhost", ranks=ranks),), tuple(notes), {"localhost": gpus}


def forwarded(environ: Mapping[str, str], asked: Sequence[str]) -> dict[str, str]:
    """The variables that every rank gets: those whose prefix says so, then `-x NAME` and `-x NAME=VALUE`."""
    chosen = {name: value for name, value in environ.items() if name.startswith(FORWARDED_PREFIXES)}
    for item in asked:
        name, equals, value = item.partition("=")
        if not name or any(c in name for c in " \t\n\0"):
            raise ConfigError(f"-x {item}: no name of a variable", hint="write -x NAME or -x NAME=VALUE")
        if not equals and name not in environ:
            raise ConfigError(f"-x {name}: no such variable here", hint=f"set it, or write -x {name}=VALUE")
        chosen[name] = value if equals else environ[name]
    return chosen


def make_plan(
    options: Options, host_list: HostList | None, topology: Topology | None, *, local_gpus: int = 0
) -> LaunchPlan:
    """Decide everything about a launch. Raises `ConfigError` when it cannot be."""
    from distrib_launch.engines import mpirun

    hosts, notes, gpus = plan_hosts(host_list, topology, options.ranks, local_gpus)
    world_size = sum(host.ranks for host in hosts)
    job = secrets.token_hex(4)
    cpu_only = options.environment.get("CUDA_VISIBLE_DEVICES") == ""
    common = {
        **options.environment,
        "WORLD_SIZE": str(world_size),
        "ROLE_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": str(len(hosts)),
        "TORCHELASTIC_RUN_ID": job,
        "DISTRIB_JOB": job,
        "DISTRIB_MODE": options.mode,
        "DISTRIB_RUN_DIR": options.run_dir,
    }
    if "PYTHONUNBUFFERED" not in common:
        common["PYTHONUNBUFFERED"] = "1"  # lines arrive when they are printed, not when a buffer is full
    ranks: list[RankPlan] = []
    for group, host in enumerate(hosts):
        count = 0 if cpu_only else gpus[host.name]
        if count and host.ranks > count:
            raise ConfigError(
                f"{host.name}: {host.ranks} slots, but {count} GPU(s)", hint="one rank per GPU; lower its slots"
            )
        for local_rank in range(host.ranks):
            rank = len(ranks)
            environment = {
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(host.ranks),
                "GROUP_RANK": str(group),
                "ROLE_RANK": str(rank),
            }
            device = "auto" if count is None else f"cuda:{local_rank}" if count else "cpu"
            ranks.append(
                RankPlan(
                    rank=rank,
                    host=host.name,
                    local_rank=local_rank,
                    role="worker",
                    device=device,
                    environment=environment,
                )
            )
    return LaunchPlan(
        job=job,
        world_size=world_size,
        engine=options.engine,
        command=mpirun.command(options, hosts),
        script=(options.interpreter, options.script, *options.arguments),
        directory=options.directory,
        run_dir=options.run_dir,
        mode=options.mode,
        hosts=hosts,
        ranks=tuple(ranks),
        notes=notes,
    )
