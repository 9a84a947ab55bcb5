"""From hosts, topology and options to a plan: who runs what, where. Pure; `--dry-run` prints it.

Every decision about a launch is made here, once; the engines only carry it out.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from distrib.cluster.hostfile import HostList
from distrib.errors import ConfigError
from distrib.strategy import Strategy
from distrib.utils.ranges import ranges
from distrib_launch import engines, host_selection, rank_environment, server_placement
from distrib_launch.cli import training_options
from distrib_launch.cli.options import GRACE_SECONDS
from distrib_launch.forecast_record import Outlook
from distrib_launch.rank_agent import affinity
from distrib_launch.slots import HostPlan, plan_hosts

if TYPE_CHECKING:  # loading them takes a tenth of a short launch
    from distrib.cluster.topology import Topology


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
    wishes: host_selection.Wishes = host_selection.Wishes()
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
    machine: affinity.Machine | None = None


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
    """What was predicted of the job; None where its workload is not known."""
    warn_below: float = 0.8
    """The efficiency below which the wire is warned of."""

    @property
    def started(self) -> tuple[RankPlan, ...]:
        """The ranks in the order in which engines number what they start: host by host."""
        places = {host.name: place for place, host in enumerate(self.hosts)}
        return tuple(sorted(self.ranks, key=lambda rank: (places[rank.host], rank.local_rank)))

    def script_on(self, host: HostPlan, role: str = "worker") -> tuple[str, ...]:
        """The command of each rank on a host: the script, run by the host's own interpreter where it has one."""
        return (host.python or self.script[0], *(server_placement.COMMAND if role == "server" else self.script[1:]))


def without_secrets(plan: LaunchPlan) -> LaunchPlan:
    """The plan for the eyes of others."""
    ranks = tuple(
        msgspec.structs.replace(
            rank,
            environment=rank_environment.mask_secrets(rank.environment),
        )
        for rank in plan.ranks
    )
    return msgspec.structs.replace(plan, ranks=ranks)


def make_plan(
    options: Options,
    host_list: HostList | None,
    topology: Topology | None,
    here: Here = Here(),  # noqa: B008 (it is frozen)
) -> LaunchPlan:
    """Decide everything about a launch. Raises `ConfigError` when it cannot be."""
    from distrib_launch.engines import mpirun

    visible = options.environment.get("CUDA_VISIBLE_DEVICES")
    cpu_only = visible is not None and not affinity.listed_gpus(visible)
    in_step = options.strategy.mode == "sync" and not options.strategy.balance and not cpu_only
    with_servers = options.strategy.mode == "async"
    host_list, apart = server_placement.split_roles(host_list) if with_servers else (host_list, ())
    wishes = msgspec.structs.replace(options.wishes, servers=tuple(host.name for host in apart))
    placed = plan_hosts(host_list, topology, options.ranks, here.gpus, wishes, in_step=in_step)
    hosts, notes = placed.hosts, placed.notes
    if with_servers:
        apart = host_selection.choose_servers(apart, wishes)
        hosts = server_placement.place_servers(hosts, apart, placed.idle, options.strategy.servers)
        server_placement.check_replicas(hosts, options.strategy.replicas)
    else:
        notes += server_placement.notes_without_servers(host_list, hosts)
    gpus = dict.fromkeys(placed.gpus, 0) if cpu_only else placed.gpus
    workers = _workers(hosts, gpus, here, options)
    servers = _servers(hosts, len(workers), options)
    ranks = (*workers, *servers)
    notes += training_options.notes_on(
        options.strategy, [rank.device for rank in ranks], len({rank.host for rank in ranks})
    )
    ssh, ssh_config = mpirun.ssh_words(options.ssh_command, options.run_dir, hosts, options.job)
    plan = LaunchPlan(
        job=options.job,
        run=options.run or options.job,
        restarts=options.restarts,
        world_size=len(workers),
        engine=options.engine,
        command=(),
        script=(options.interpreter, *(["-m"] if options.module else []), options.script, *options.arguments),
        directory=options.directory,
        run_dir=options.run_dir,
        mode=options.strategy.mode,
        strategy=options.strategy,
        hosts=hosts,
        ranks=ranks,
        notes=notes,
        bind=options.bind,
        sync=options.sync,
        ssh=tuple(ssh),
        ssh_config=ssh_config,
    )
    engine = engines.planner(options.engine)
    plan = msgspec.structs.replace(plan, command=engine.command(plan, options))
    return msgspec.structs.replace(plan, notes=(*notes, *engine.notes(plan)))


def _workers(hosts: Sequence[HostPlan], gpus: Mapping[str, int | None], here: Here, options: Options) -> list[RankPlan]:
    """The ranks that run the script. Raises ConfigError where a host has fewer GPUs than slots."""
    found: list[RankPlan] = []
    for group, host in enumerate(hosts):
        count = gpus[host.name] if host.workers else 0
        if count and host.workers > count:
            raise ConfigError(
                f"{host.name}: {host.workers} slots, but {count} GPU(s)", hint="one rank per GPU; lower its slots"
            )
        shares = _shares(host, count, here, options)
        for local_rank in range(host.workers):
            found.append(
                RankPlan(
                    rank=len(found),
                    host=host.name,
                    local_rank=local_rank,
                    role="worker",
                    device="auto" if count is None else f"cuda:{local_rank}" if count else "cpu",
                    environment=rank_environment.planned(
                        options, hosts, group=group, local_rank=local_rank, rank=len(found)
                    ),
                    cpus=ranges(shares[local_rank].cpus) if shares else None,
                    threads=shares[local_rank].threads if shares else None,
                )
            )
    return found


def _servers(hosts: Sequence[HostPlan], first: int, options: Options) -> list[RankPlan]:
    """The parameter servers, numbered after the workers."""
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


def _shares(host: HostPlan, count: int | None, here: Here, options: Options) -> list[affinity.Share]:
    """What the process around a rank will decide on this machine; nothing for the others."""
    if host.name not in here.names or here.machine is None:
        return []
    environ = dict(options.environment)
    gpus = here.gpus if count is None else count
    if host.chosen is not None and gpus and max(host.chosen) < here.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = affinity.take_gpus(environ, host.chosen, here.gpus)
    told = environ.get("OMP_NUM_THREADS", "")
    found = []
    for local_rank in range(host.workers):
        share = affinity.share_of(here.machine, local_rank, host.workers, environ, options.bind, on_gpus=bool(gpus))
        found.append(share._replace(threads=int(told)) if told.isdigit() else share)
    return found
