"""From hosts, topology and options to a plan: who runs what, where. Pure; `--dry-run` prints it.

Every decision about a launch is made here, once; the engines only carry it out.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from distrib_launch import choose, engines, roles, training
from distrib_launch.options import GRACE_SECONDS
from distrib_launch.outlook.record import Outlook
from distrib_launch.ranges import ranges
from distrib_launch.rank import placement

from distrib import strategy as strategies
from distrib.cluster.hostfile import Host, HostList
from distrib.cluster.hostlist import MAX_SLOTS
from distrib.cluster.node import name_hosts
from distrib.cluster.slurm import SOURCE as SLURM
from distrib.errors import ConfigError
from distrib.strategy import Strategy

if TYPE_CHECKING:  # loading them takes a tenth of a short launch
    from distrib.cluster.topology import Gpus, Topology

FORWARDED_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "UCX_",
    "FI_",
    "CUBLAS_",
    "CUDNN_",
    "NVIDIA_TF32_",
    "CUDA_DEVICE_MAX_",
    "CUDA_LAUNCH_",
    "CUDA_MODULE_",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "HF_",
    "WANDB_",
    "HOROVOD_",
)
"""Variables that change how a job computes or talks; every host gets the launcher's own values."""

SET_BY_LAUNCHER = frozenset(
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
    ]
)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for, apart from the hosts."""

    script: str
    """The path of a file, or a module's name."""
    arguments: tuple[str, ...]
    interpreter: str
    directory: str
    run_dir: str
    ranks: int | None = None
    strategy: Strategy = Strategy()
    engine: str = "mpirun"
    mpirun: str | None = None
    ssh_command: str | None = None
    environment: dict[str, str] = {}
    wishes: choose.Wishes = choose.Wishes()
    bind: str = "auto"
    sync: str | None = None
    module: bool = False
    grace_seconds: float = GRACE_SECONDS
    """Between SIGTERM and SIGKILL."""
    job: str = msgspec.field(default_factory=lambda: secrets.token_hex(4))
    """The job's name; a plan made again for fewer hosts keeps it, for connections are open in its name."""
    run: str | None = None
    """The name of the job's first start, where it is started again."""
    restarts: int = 0
    """How often it was started again before."""
    max_restarts: int = 0


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the machine that plans: its names among the hosts, how many GPUs it shows, and its cores."""

    names: frozenset[str] = frozenset({"localhost"})
    gpus: int = 0
    machine: placement.Machine | None = None


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


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: where it runs, on what, and what its script finds in the environment.

    `role` is `worker`, or `server` for a parameter server: those are numbered after the workers.
    `device` is `cuda:N`, `cpu`, or `auto` where nobody has yet told whether the host has GPUs; the host decides then.
    `cpus`, such as `0-3` (empty: not bound), and `threads` are decided on the host too: None where it is not this one.
    """

    rank: int
    host: str
    local_rank: int
    role: str
    device: str
    environment: dict[str, str]
    cpus: str | None = None
    threads: int | None = None


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A job, wholly decided. `command` is what the engine runs on this machine.

    `job` is this start's name, `run` that of the first one: a job that failed is started again under another.
    """

    job: str
    run: str
    restarts: int
    world_size: int
    engine: str
    command: tuple[str, ...]
    script: tuple[str, ...]
    directory: str
    run_dir: str
    mode: str
    strategy: Strategy
    hosts: tuple[HostPlan, ...]
    ranks: tuple[RankPlan, ...]
    notes: tuple[str, ...]
    bind: str = "auto"
    ssh: tuple[str, ...] = ()
    """The words that reach a host, before its name."""
    ssh_config: str | None = None
    """The user's own configuration of ssh, where `ssh` reads one of ours that includes it."""
    sync: str | None = None
    """The folder that is brought to every host first."""
    network: str = ""
    """Why the hosts' interfaces were chosen as they were; empty before launch."""
    listen: tuple[str, ...] = ()
    """Addresses for the control channel; empty: those by which the hosts reach this machine."""
    seen_as: tuple[str, ...] = ()
    """Addresses of this machine from which the hosts saw it come when they were asked; empty before launch."""
    engine_environment: dict[str, str] = {}
    """What is set for the engine's own processes."""
    topology: str | None = None
    """The file that says what the hosts are made of."""
    outlook: Outlook | None = None
    """What was foretold of the job; None where its workload is not known."""
    warn_below: float = 0.8
    """The efficiency below which the wire is warned of."""

    @property
    def started(self) -> tuple[RankPlan, ...]:
        """The ranks in the order in which engines number what they start: host by host."""
        places = {host.name: place for place, host in enumerate(self.hosts)}
        return tuple(sorted(self.ranks, key=lambda rank: (places[rank.host], rank.local_rank)))

    def script_on(self, host: HostPlan, role: str = "worker") -> tuple[str, ...]:
        """The command of each rank on a host: the script, run by the host's own interpreter where it has one."""
        return (host.python or self.script[0], *(roles.COMMAND if role == "server" else self.script[1:]))


_SECRET = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW(OR)?D|CREDENTIAL|APIKEY|(^|_)(KEYS?|PASS|SSHPASS|PWD|PAT|AUTH)(_|$)", re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Whether the value of a variable of this name, such as WANDB_API_KEY and HF_TOKEN, is for the ranks alone."""
    return name != "PWD" and _SECRET.search(name) is not None


def without_secrets(plan: LaunchPlan) -> LaunchPlan:
    """The plan for the eyes of others."""
    ranks = tuple(
        msgspec.structs.replace(
            rank,
            environment={name: "***" if is_secret(name) else value for name, value in rank.environment.items()},
        )
        for rank in plan.ranks
    )
    return msgspec.structs.replace(plan, ranks=ranks)


def plan_hosts(
    host_list: HostList | None,
    topology: Topology | None,
    wanted: int | None,
    local_gpus: int,
    wishes: choose.Wishes = choose.Wishes(),  # noqa: B008 (it is frozen)
    *,
    in_step: bool = True,
) -> tuple[tuple[HostPlan, ...], tuple[Host, ...], tuple[str, ...], dict[str, int | None]]:
    """Decide how many ranks each host runs.

    Returns the hosts in rank order, those that are left idle, notes for the user, and how many GPUs each may use (None: unknown). `host_list` is
    None for a run on this machine alone, `wanted` is `-np`, `local_gpus` what this machine shows, `in_step` whether
    every rank waits for the slowest.
    """
    if host_list is None and wishes.include is wishes.exclude is wishes.pool is None:
        return _plan_this_machine(wanted, local_gpus)
    if host_list is None:
        from distrib.cluster.topology import Gpus

        host_list = HostList(hosts=(Host(name="localhost", slots=local_gpus or None),), source="here", dialect="")
        known: dict[str, Gpus | None] = {"localhost": Gpus(count=local_gpus)}
    else:
        known = {host.name: topology.gpus_of(host.name) if topology else None for host in host_list.hosts}
    slots = {}
    for host in host_list.hosts:
        gpus = known[host.name]
        unsaid = min((gpus and gpus.count) or 1, host.max_slots or MAX_SLOTS)
        slots[host.name] = host.slots if host.slots is not None else unsaid
    choices = choose.choose(host_list.hosts, known, slots, wishes)
    more = "--ntasks-per-node=N or -np N" if host_list.source == SLURM else ""
    notes = list(host_list.notes)
    if wanted is not None and wanted > sum(choice.slots for choice in choices):
        choices = choose.widen(choices, wanted)
    else:
        notes += _notes_on_slots(choices, known, more)
    total = sum(choice.slots for choice in choices)
    if wanted is not None and wishes.fewer:
        wanted = min(wanted, total)
    if wanted is not None and wanted > total:
        raise ConfigError(
            f"{wanted} ranks asked for with -np, but {host_list.source} has {total} slot(s) on {len(choices)} host(s)"
            + (" after your choice" if wishes.include or wishes.exclude or wishes.pool else ""),
            hint="ask for fewer, or give the hosts more slots",
        )
    shares = choose.share_out(choices, total if wanted is None else wanted, "spread" if wishes.spread else "fill")
    hosts = []
    counts: dict[str, int | None] = {}
    for choice, ranks in shares:
        host, gpus = choice.host, known[choice.host.name]
        chosen = choice.indices[:ranks] if choice.indices is not None else None
        hosts.append(
            HostPlan(name=host.name, ranks=ranks, user=host.user, port=host.port, python=host.python, chosen=chosen)
        )
        count = gpus.count if gpus else None
        counts[host.name] = len(chosen) if chosen is not None and count else count
    taken = {host.name for host in hosts}
    mixed = choose.mixed_pools(choose.pools([choice.host for choice, _ in shares], known)) if in_step else None
    notes += [mixed] if mixed else []
    if idle := tuple(choice.host for choice in choices if choice.host.name not in taken):
        notes.append(f"-np {wanted} leaves {len(idle)} host(s) idle, {idle[0].name} the first of them")
    return tuple(hosts), idle, tuple(notes), counts


def _notes_on_roles(host_list: HostList | None, hosts: Sequence[HostPlan]) -> tuple[str, ...]:
    """Of hosts for parameter servers in a job that has none."""
    taken = {host.name for host in hosts}
    apart = [
        host.name for host in (host_list.hosts if host_list else ()) if host.role == "server" and host.name in taken
    ]
    return tuple(
        f"{name} has role=server, which --mode async alone heeds: it trains like the others" for name in apart[:1]
    )


def _notes_on_slots(choices: Sequence[choose.Choice], known: Mapping[str, Gpus | None], more: str) -> list[str]:
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


def _plan_this_machine(
    wanted: int | None, gpus: int
) -> tuple[tuple[HostPlan, ...], tuple[Host, ...], tuple[str, ...], dict[str, int | None]]:
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
    return (HostPlan(name="localhost", ranks=ranks),), (), tuple(notes), {"localhost": gpus}


def forwarded(environ: Mapping[str, str], asked: Sequence[str]) -> dict[str, str]:
    """The variables that every rank gets: those whose prefix says so, then `-x NAME` and `-x NAME=VALUE`."""
    chosen = {name: value for name, value in environ.items() if name.startswith(FORWARDED_PREFIXES)}
    for item in asked:
        name, equals, value = item.partition("=")
        if not name or any(c in name for c in " \t\n\0"):
            raise ConfigError(f"-x {item}: no name of a variable", hint="write -x NAME or -x NAME=VALUE")
        if name in SET_BY_LAUNCHER or name.startswith("DISTRIB_"):
            raise ConfigError(f"-x {name}: the launcher sets this one itself, for each rank", hint="leave it out")
        if not equals and name not in environ:
            raise ConfigError(f"-x {name}: no such variable here", hint=f"set it, or write -x {name}=VALUE")
        chosen[name] = value if equals else environ[name]
    return chosen


def make_plan(
    options: Options,
    host_list: HostList | None,
    topology: Topology | None,
    here: Here = Here(),  # noqa: B008 (it is frozen)
) -> LaunchPlan:
    """Decide everything about a launch. Raises `ConfigError` when it cannot be."""
    from distrib_launch.engines import mpirun

    cpu_only = options.environment.get("CUDA_VISIBLE_DEVICES") == ""
    in_step = options.strategy.mode == "sync" and not options.strategy.balance and not cpu_only
    with_servers = options.strategy.mode == "async"
    host_list, apart = roles.split_roles(host_list) if with_servers else (host_list, ())
    wishes = msgspec.structs.replace(options.wishes, servers=tuple(host.name for host in apart))
    hosts, idle, notes, gpus = plan_hosts(host_list, topology, options.ranks, here.gpus, wishes, in_step=in_step)
    if with_servers:
        apart = choose.choose_servers(apart, wishes)
        hosts = roles.place_servers(hosts, apart, idle, options.strategy.servers)
        roles.check_replicas(hosts, options.strategy.replicas)
    else:
        notes += _notes_on_roles(host_list, hosts)
    world_size = sum(host.workers for host in hosts)
    job, run = options.job, options.run or options.job
    common = {
        **options.environment,
        "WORLD_SIZE": str(world_size),
        "ROLE_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": str(len(hosts)),
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": str(options.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "DISTRIB_JOB": job,
        "DISTRIB_MODE": options.strategy.mode,
        strategies.ENVIRONMENT: strategies.to_environment(options.strategy),
        "DISTRIB_RUN_DIR": options.run_dir,
    }
    if "PYTHONUNBUFFERED" not in common:
        common["PYTHONUNBUFFERED"] = "1"  # lines arrive when they are printed, not when a buffer is full
    ranks: list[RankPlan] = []
    for group, host in enumerate(hosts):
        count = 0 if cpu_only or not host.workers else gpus[host.name]
        if count and host.workers > count:
            raise ConfigError(
                f"{host.name}: {host.workers} slots, but {count} GPU(s)", hint="one rank per GPU; lower its slots"
            )
        shares = _shares(host, count, here, options)
        for local_rank in range(host.workers):
            rank = len(ranks)
            environment = {
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(host.workers),
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
                    cpus=ranges(shares[local_rank].cpus) if shares else None,
                    threads=shares[local_rank].threads if shares else None,
                )
            )
    ranks += _servers(hosts, common, len(ranks), "OMP_NUM_THREADS" in options.environment)
    notes += training.notes_on(options.strategy, [rank.device for rank in ranks], len({rank.host for rank in ranks}))
    ssh, ssh_config = mpirun.ssh_words(options.ssh_command, options.run_dir, hosts, job)
    plan = LaunchPlan(
        job=job,
        run=run,
        restarts=options.restarts,
        world_size=world_size,
        engine=options.engine,
        command=(),
        script=(options.interpreter, *(["-m"] if options.module else []), options.script, *options.arguments),
        directory=options.directory,
        run_dir=options.run_dir,
        mode=options.strategy.mode,
        strategy=options.strategy,
        hosts=hosts,
        ranks=tuple(ranks),
        notes=notes,
        bind=options.bind,
        sync=options.sync,
        ssh=tuple(ssh),
        ssh_config=ssh_config,
    )
    engine = engines.planner(options.engine)
    plan = msgspec.structs.replace(plan, command=engine.command(plan, options))
    return msgspec.structs.replace(plan, notes=(*notes, *engine.notes(plan)))


def _servers(hosts: Sequence[HostPlan], common: Mapping[str, str], first: int, threads_given: bool) -> list[RankPlan]:
    """The parameter servers, numbered after the workers."""
    found: list[RankPlan] = []
    total = sum(host.servers for host in hosts)
    for group, host in enumerate(hosts):
        for local_rank in range(host.workers, host.ranks):
            number = len(found)
            environment = {
                **common,
                "RANK": str(first + number),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(host.ranks),
                "GROUP_RANK": str(group),
                "ROLE_RANK": str(number),
                "ROLE_WORLD_SIZE": str(total),
                "DISTRIB_SERVER": str(number),
            }
            if not threads_given:
                environment["OMP_NUM_THREADS"] = "1"  # threads of OpenMP's would spin beside the workers
            found.append(
                RankPlan(
                    rank=first + number, host=host.name, local_rank=local_rank, role="server", device="cpu",
                    environment=environment, cpus="", threads=1,
                )
            )  # fmt: skip
    return found


def _shares(host: HostPlan, count: int | None, here: Here, options: Options) -> list[placement.Share]:
    """What the process around a rank will decide on this machine; nothing for the others."""
    if host.name not in here.names or here.machine is None:
        return []
    environ = dict(options.environment)
    gpus = here.gpus if count is None else count
    if host.chosen is not None and gpus and max(host.chosen) < here.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = placement.take_gpus(environ, host.chosen, here.gpus)
    told = environ.get("OMP_NUM_THREADS", "")
    found = []
    for local_rank in range(host.workers):
        share = placement.share_of(here.machine, local_rank, host.workers, environ, options.bind, on_gpus=bool(gpus))
        found.append(share._replace(threads=int(told)) if told.isdigit() else share)
    return found
