"""Plan of a launch: hosts, ranks, devices, environment and command, as `--dry-run` prints it."""

from __future__ import annotations

import msgspec

from distrib.strategy import Strategy
from distrib_launch import rank_environment, rank_placement
from distrib_launch.launch_options import ContainerOptions
from distrib_launch.rank_placement import HostPlan
from distrib_launch.results import ForecastRecord


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its host, device, CPUs and environment. Parameter servers are numbered after the workers."""

    rank: int
    host: str
    local_rank: int
    role: str
    """`worker` or `server`."""
    device: str
    """`cpu`, `cuda:N`, or `auto` if the host decides because its GPUs are not known."""
    environment: dict[str, str]
    cpus: str | None = None
    """CPUs such as `0-3`, empty for no binding; None: decided on the host."""
    threads: int | None = None


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All decisions about one start of a job."""

    attempt_id: str = msgspec.field(name="job")
    """Name of this attempt: DISTRIB_JOB."""
    job_id: str = msgspec.field(name="run")
    """Name of the job: that of its first attempt."""
    restarts: int
    world_size: int
    engine: str
    command: tuple[str, ...]
    """Command of the engine on this machine."""
    script: tuple[str, ...]
    directory: str
    run_dir: str
    mode: str
    strategy: Strategy
    hosts: tuple[HostPlan, ...]
    ranks: tuple[RankPlan, ...]
    notes: tuple[str, ...]
    forwarded: tuple[str, ...] = ()
    """Names of the user's variables in `ranks`. Their values reach the hosts as the token does, not with assignments."""
    bind: str = "auto"
    ssh: tuple[str, ...] = ()
    """Command that reaches a host, without the host's name."""
    ssh_config: str | None = None
    """The user's ssh configuration if `ssh` reads a generated one that includes it."""
    sync: str | None = None
    """Folder that is copied to every host first."""
    network: str = ""
    """Reason for the choice of interfaces; empty before the preflight."""
    listen: tuple[str, ...] = ()
    """Addresses for the control channel; empty: those by which hosts reach this machine."""
    spare_slots: dict[str, int] = {}
    """Slots by host for processes that scripts start with MPI_Comm_spawn."""
    seen_as: tuple[str, ...] = ()
    """Addresses of this machine as the hosts saw them; empty before the preflight."""
    engine_environment: dict[str, str] = {}
    """Variables of the engine's own processes."""
    topology: str | None = None
    """File with the description of the hosts."""
    forecast: ForecastRecord | None = None
    """Predicted performance; None if the workload is not known."""
    warn_below: float = 0.8
    """Scaling efficiency below which a warning is given."""

    container: ContainerOptions = ContainerOptions()
    program: bool = False
    """True if `script` is a program, which runs without the interpreter before it."""

    @property
    def rank_command(self) -> tuple[str, ...]:
        """Command of a worker on this machine."""
        return self.script[1:] if self.program else self.script

    @property
    def started(self) -> tuple[RankPlan, ...]:
        """Ranks in the order in which engines number their processes: host by host."""
        places = {host.name: place for place, host in enumerate(self.hosts)}
        return tuple(sorted(self.ranks, key=lambda rank: (places[rank.host], rank.local_rank)))

    def script_on(self, host: HostPlan, role: str = "worker") -> tuple[str, ...]:
        """Return the command of each rank on a host.

        Args:
            host: Host of the plan; its own interpreter is used if it has one.
            role: `worker` or `server`.
        """
        return (
            host.python or self.script[0],
            *(rank_placement.SERVER_COMMAND if role == "server" else self.script[1:]),
        )


def without_secrets(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan with masked secrets, to show or write it.

    Args:
        plan: Any plan.
    """
    ranks = tuple(
        msgspec.structs.replace(rank, environment=rank_environment.mask_secrets(rank.environment))
        for rank in plan.ranks
    )
    return msgspec.structs.replace(plan, ranks=ranks)
