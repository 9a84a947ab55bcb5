"""Slurm: the ranks are the tasks of one job step, placed exactly as the plan says.

Inside an allocation the step runs in it; elsewhere srun asks Slurm for the hosts first, with what its own variables say
(SLURM_PARTITION, SLURM_ACCOUNT, SLURM_TIMELIMIT, ...). As with mpirun, what counts are the ranks' own exit records.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distrib.cluster import slurm
from distrib.errors import ConfigError
from distrib_launch.engines.engine import Engine
from distrib_launch.engines.remote_shell import RemoteShell

if TYPE_CHECKING:
    from distrib_launch.launch_options import LaunchOptions
    from distrib_launch.launch_plan import LaunchPlan

HOSTFILE = "srun-hosts.txt"
PROGRAMS = "srun-programs.txt"
LIMIT_SECONDS = 30
"""At least so long before its time limit Slurm sends SIGTERM to the ranks of a job that srun itself asked for."""

LIMIT_MOST_SECONDS = 65_535
AFTER_GRACE_SECONDS = 10
"""What the launcher needs to hear of all ends and write the result."""

PROBE_SECONDS = 10.0
CPUS_OF_GPU_RANK = 2
"""One for the rank, and one for what loads its data."""
MORE_PROCESSORS = "ask for more with --cpus-per-task=N or --exclusive, for sbatch or salloc"
BINDS_GPUS = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND", "SLURM_TRES_BIND")
"""With these in its environment srun divides GPUs among its tasks, and shows each rank one only."""
BY_TASK = ("SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK")
"""What an allocation gave by task; the step's tasks, which are the plan's ranks, may be others."""
NOT_OF_A_STEP = ("SSH_CONNECTION", "SLURM_DISTRIBUTION")
"""What a host that is asked must not take for its own: how the user came here, and how the job's tasks are to be placed."""
GPUS = "--gres=gpu:"
GPU_VARIABLES = ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GRES", "SLURM_TRES_PER_TASK")

EXPLANATIONS = (
    ("Invalid node name", "Slurm does not know every host of the plan", "use the names that sinfo -N shows"),
    ("Requested nodes are busy", "the hosts are busy with other jobs of Slurm's", "wait for them, or see squeue"),
    (
        "Requested node configuration is not available",
        "Slurm cannot give the hosts as planned",
        "name hosts of this allocation or of one partition (sinfo -N), with no more slots than they have CPUs",
    ),
    ("More processors requested", "the plan has more ranks than Slurm allows here", "use fewer slots, or allocate more"),
    ("Invalid partition", "Slurm has no such partition", "see sinfo; SLURM_PARTITION names another"),
    ("Invalid account", "Slurm refuses the account", "SLURM_ACCOUNT names another"),
    ("Unable to contact slurm controller", "Slurm's controller does not answer", "see scontrol ping"),
    ("Could not establish a configuration source", "this machine belongs to no Slurm", "use --engine mpirun"),
    ("Job/step already completing", "the Slurm job is over", "ask for another allocation"),
    ("Invalid job id", "the Slurm job of SLURM_JOB_ID is over", "ask for another allocation"),
    ("task launch failed", "Slurm could not start the ranks", "see slurmd's log on that host; SLURM_MPI_TYPE=none may help"),
)  # fmt: skip
"""Words of srun's, what they mean, and what to do."""


BARRIERS = {"SLURM_PMIX_FENCE": "ring"}
"""How Slurm makes ranks wait for each other in MPI_Init. By its tree some pass before others are there, which then die of their messages
(open-mpi/ompi#12495): on three busy hosts 84 of 382 starts of six ranks, with its default, which has both, 6 of 383, and by
its ring none of 480 (Slurm 22.05.8, PMIx 4.2.2, Open MPI 5.0.11; 26 November 2026)."""

CANCELLED = re.compile(r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+\w))?")
"""What the node's daemon prints into the job's output."""


def find_srun() -> str | None:
    """The absolute path of srun, or None."""
    found = shutil.which("srun")
    return str(Path(found).absolute()) if found else None


def in_allocation(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is inside a job of Slurm's."""
    return "SLURM_JOB_ID" in environ


def allocation(environ: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """What Slurm says of its job, with the GPUs of `salloc --gres=gpu:N`, of which the variables say nothing."""
    said = ("ENVIRONMENT", "SLURM_GPUS_ON_NODE", *GPU_VARIABLES)  # a batch script is told all
    if not in_allocation(environ) or any(name in environ for name in said):
        return environ
    gpus = _gpu_counts(_told(["squeue", "--noheader", f"--jobs={environ['SLURM_JOB_ID']}", "--format=%b"]))
    return {**environ, "SLURM_GPUS_PER_NODE": str(gpus)} if gpus else environ


def refuse_several_launchers(environ: Mapping[str, str]) -> None:
    """Raises ConfigError where srun starts this launcher once for each of its tasks, each to run the whole job."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    shell = any(name.startswith("SLURM_PTY_") for name in environ) or (sys.stdin and sys.stdin.isatty())
    if in_allocation(environ) and tasks not in ("", "1") and not shell:  # of --pty there is one alone
        raise ConfigError(
            f"srun has started this launcher {tasks} times, and each would run the whole job",
            hint="leave out srun: distrib-launch starts the ranks itself, on all hosts of the allocation",
        )


def _step() -> list[str]:
    """What makes a step of the allocation that is given all of it, beside its other steps."""
    words = ["--overlap", "--overcommit"]
    # A step has all GPUs of its job only if it is told how many: else those that were asked for by task, or for the
    # whole job, are divided, and those of hosts that were asked for whole stay away.
    if gpus := slurm.gpus_per_host(os.environ):
        words += [f"{GPUS}{gpus}"]
    return words + _all_gpus_for_each(ENGINE.environment(os.environ))


def _all_gpus_for_each(environ: Mapping[str, str]) -> list[str]:
    """Each rank chooses among all of its host, though Slurm would divide them."""
    return ["--gpu-bind=none"] if any(name in environ for name in BINDS_GPUS) else []


def few_processors(cpus: int, ranks: int, *, on_gpus: bool) -> str:
    """What is to be said of a host on which Slurm gave so many processors; empty where they are enough.

    It gives a task one where nothing was said.
    """
    if cpus >= ranks * (CPUS_OF_GPU_RANK if on_gpus else 1):
        return ""
    return f"Slurm gave {cpus} processor{'s' * (cpus > 1)} for {ranks} rank{'s' * (ranks > 1)}"


def job_name(plan: LaunchPlan) -> str:
    """The name that squeue shows."""
    return f"distrib-{plan.job}"


def _gpus_per_node(plan: LaunchPlan) -> int:
    """GPUs that every host must give: one for each rank of the fullest; where the plan does not know, if they have any."""
    devices = {rank.device for rank in plan.ranks if rank.role == "worker"}
    most = max(host.workers for host in plan.hosts)
    if devices == {"cpu"}:
        return 0
    return min(most, *_gpus_of(plan)) if "auto" in devices else most


def _gpus_of(plan: LaunchPlan) -> list[int]:
    """How many GPUs each host has, by what Slurm knows of it."""
    hosts = ",".join(host.name for host in plan.hosts)
    told = _told(["sinfo", "--noheader", "--Node", f"--nodes={hosts}", "--format=%N %G"])
    known = dict(line.split(maxsplit=1) for line in told.splitlines() if " " in line.strip())
    return [_gpu_counts(known.get(host.name, "")) for host in plan.hosts]


def _gpu_counts(text: str) -> int:
    """All GPUs of `gpu:a100:4(S:0-1),gpu:h100:2,nvme:1`."""
    return sum(int(count) for count in re.findall(r"(?:^|[,:/])gpu(?::[^:,()]+)?:(\d+)", text))


def _told(command: Sequence[str]) -> str:
    """What one of Slurm's commands prints; nothing where it is not here or has nothing to say."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _mpi(srun: str) -> str:
    """Slurm's part in MPI: PMIx where it works, so that scripts that use MPI find each other; empty: as the user says.

    `srun --mpi=list` names plugins that cannot be loaded too, so it is tried; nothing is submitted.
    """
    if "SLURM_MPI_TYPE" in os.environ:
        return ""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
    try:
        tried = subprocess.run(
            [srun, "--mpi=pmix", "--test-only", "--ntasks=1", "true"],
            env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:  # a controller that has much to do; what may be there is known here
        return "pmix" if re.search(r"\bpmix\b", _told([srun, "--mpi=list"])) else "none"
    except OSError:
        return "none"
    return "none" if "MPI" in tried.stderr else "pmix"


class Srun(Engine):
    """Slurm's srun: the ranks are the tasks of one job step."""

    limits_cpus = True
    shutdown_seconds = 3.0
    """An srun that is ended has Slurm kill all processes at once, with those that would have cleaned up."""

    def command(self, plan: LaunchPlan, options: LaunchOptions) -> tuple[str, ...]:
        srun = find_srun()
        if srun is None:
            raise ConfigError("--engine srun: no srun here", hint="run it where Slurm is, or use --engine mpirun")
        if any(host.name == "localhost" for host in plan.hosts):
            raise ConfigError(
                "--engine srun: no hosts",
                hint="name Slurm's nodes with -H, or run inside sbatch or salloc, which name them",
            )
        words = [srun, "--job-name", job_name(plan), "--ntasks", str(len(plan.ranks))]
        # One line per rank: the only way by which Slurm takes unequal slots, and hosts in any order. It says how many nodes there
        # are, too: Slurm 24.11 takes no --nodes beside it.
        words += ["--distribution=arbitrary", f"--nodelist={plan.run_dir}/{HOSTFILE}"]
        # The token comes with the environment. Who failed, and when the others end, is the supervisor's to say.
        words += ["--export=ALL", "--input=none", "--unbuffered", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none"]
        if plan.mode == "async":
            words += ["--no-kill"]  # where Slurm gives a node up
        if in_allocation():
            words += _step()
        else:
            before = max(LIMIT_SECONDS, math.ceil(options.grace_seconds) + AFTER_GRACE_SECONDS)
            words += [f"--signal=TERM@{min(before, LIMIT_MOST_SECONDS)}"]
            if (gpus := _gpus_per_node(plan)) and not any(name in os.environ for name in GPU_VARIABLES):
                words += [f"{GPUS}{gpus}"]
            words += _all_gpus_for_each(os.environ)
        if kind := _mpi(srun):
            words += [f"--mpi={kind}"]
        if any(host.python for host in plan.hosts):
            return (*words, "--multi-prog", f"{plan.run_dir}/{PROGRAMS}")
        return (*words, options.interpreter, "-m", "distrib_launch.rank_agent")

    def shell(self, plan: LaunchPlan) -> RemoteShell | None:
        if not in_allocation():
            return None
        words = [
            plan.command[0],
            "--job-name",
            job_name(plan),
            "--quiet",
            "--nodes=1",
            "--ntasks=1",
            "--export=ALL",
            "--unbuffered",
        ]
        environ = {name: value for name, value in self.environment(os.environ).items() if name not in NOT_OF_A_STEP}
        return RemoteShell(
            transport="srun", words=(*words, "--cpu-bind=none", "--mpi=none", *_step()), environment=environ
        )

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        dropped: tuple[str, ...] = ()
        if in_allocation(environ):
            dropped = BY_TASK + (BINDS_GPUS + GPU_VARIABLES if slurm.gpus_per_host(environ) else ())
        return {**BARRIERS, **{name: value for name, value in environ.items() if name not in dropped}}

    def notes(self, plan: LaunchPlan) -> tuple[str, ...]:
        said = []
        if in_allocation():
            said.append(f"started with srun inside Slurm job {os.environ['SLURM_JOB_ID']} (--engine mpirun: over ssh)")
            if plan.mode == "async" and len(plan.hosts) > 1:
                said.append(
                    "when a node is lost, Slurm ends the whole allocation, unless it was asked for with --no-kill"
                )
        elif asked := next((word for word in plan.command if word.startswith(GPUS)), None):
            said.append(
                f"Slurm is asked for {asked.removeprefix(GPUS)} GPU(s) on each host (SLURM_GPUS_PER_NODE=N: for another number; "
                "-x CUDA_VISIBLE_DEVICES=: for none)"
            )
        if "--mpi=none" in plan.command:
            said.append(
                "this Slurm has no PMIx: torch.distributed works, but ranks of a script that uses MPI or Horovod do not "
                "find each other (--engine mpirun)"
            )
        return tuple(said)

    def write_files(self, run_dir: Path, plan: LaunchPlan) -> None:
        (run_dir / HOSTFILE).write_text("".join(f"{rank.host}\n" for rank in plan.started))
        if any(host.python for host in plan.hosts):
            programs = {host.name: plan.script_on(host)[0] for host in plan.hosts}
            lines = [f"{n} {programs[rank.host]} -m distrib_launch.rank_agent\n" for n, rank in enumerate(plan.started)]
            (run_dir / PROGRAMS).write_text("".join(lines))

    def queued(self, log: Path) -> str:
        words = log.read_text(errors="replace")
        lines = [line for line in words.splitlines() if "queued and waiting for resources" in line]
        if not lines or "has been allocated resources" in words:
            return ""
        why = re.search(r"^srun: (Req\w+ .+)", words, re.MULTILINE)  # it may be more than others' jobs
        return why[1] if why else lines[-1].removeprefix("srun: ")

    def explain(self, output: str) -> tuple[str, str] | None:
        for sign, what, hint in EXPLANATIONS:
            if line := next((line for line in output.splitlines() if sign in line), ""):
                return f"{what}: {line.strip()}", hint
        return None

    def cancelled(self, output: str, *, for_a_reason: bool = False) -> str:
        told = CANCELLED.search(output)
        if not told or (for_a_reason and not told[1]):  # it gives none where a rank has died that MPI knew
            return ""
        return (
            f"Slurm ended the job: {told[1].lower()}"
            if told[1]
            else "Slurm ended the job: cancelled, or its time is up"
        )

    def cleanup_command(self, plan: LaunchPlan) -> tuple[str, ...] | None:
        scancel = shutil.which("scancel")
        if in_allocation() or scancel is None:
            return None
        return scancel, "--quiet", f"--name={job_name(plan)}"


ENGINE = Srun()
