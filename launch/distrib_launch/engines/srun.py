"""srun engine: the ranks are the tasks of one Slurm job step, placed exactly as planned.

Inside an allocation the step runs in it. Elsewhere srun first requests the hosts, with the values of its own variables
(SLURM_PARTITION, SLURM_ACCOUNT, SLURM_TIMELIMIT, ...). As with mpirun, the exit records of the ranks decide the outcome.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distrib.cluster import slurm
from distrib.errors import ConfigError
from distrib_launch.engines.engine import AGENT, Engine
from distrib_launch.engines.remote_shell import RemoteShell

if TYPE_CHECKING:
    from distrib_launch.launch_options import LaunchOptions
    from distrib_launch.launch_plan import LaunchPlan

HOSTFILE = "srun-hosts.txt"
"""File in the run directory with the host of each rank."""
PROGRAMS = "srun-programs.txt"
"""File in the run directory for `--multi-prog`, with the command of each rank."""
MORE_CPUS_HINT = "request more with --cpus-per-task=N or --exclusive of sbatch or salloc"
BINDS_GPUS = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND", "SLURM_TRES_BIND")
"""Variables with which srun divides GPUs among its tasks, so that each rank sees only one."""
BY_TASK = ("SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK")
"""Variables of an allocation that count per task; the step has other tasks, the planned ranks."""
NOT_OF_A_STEP = ("SSH_CONNECTION", "SLURM_DISTRIBUTION")
"""Variables that the preflight's steps must not inherit: the user's own ssh login, and the placement of the job's tasks."""
GPUS = "--gres=gpu:"
"""Option with the number of GPUs on each host."""
GPU_VARIABLES = ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GRES", "SLURM_TRES_PER_TASK")

EXPLANATIONS = (
    ("Invalid node name", "Slurm does not know every host of the plan", "use the names that sinfo -N shows"),
    ("Requested nodes are busy", "other Slurm jobs use the hosts", "wait for them, or see squeue"),
    (
        "Requested node configuration is not available",
        "Slurm cannot give the hosts as planned",
        "name hosts of this allocation or of one partition (sinfo -N), with no more slots than they have CPUs",
    ),
    ("More processors requested", "the plan has more ranks than Slurm allows here", "use fewer slots, or allocate more"),
    ("Invalid partition", "Slurm has no such partition", "see sinfo; SLURM_PARTITION names another"),
    ("Invalid account", "Slurm refuses the account", "SLURM_ACCOUNT names another"),
    ("Unable to contact slurm controller", "Slurm's controller does not reply", "see scontrol ping"),
    ("Could not establish a configuration source", "Slurm is not configured on this machine", "use --engine mpirun"),
    ("Job/step already completing", "the Slurm job is over", "request another allocation"),
    ("Invalid job id", "the Slurm job of SLURM_JOB_ID is over", "request another allocation"),
    ("task launch failed", "Slurm could not start the ranks", "see slurmd's log on that host; SLURM_MPI_TYPE=none may help"),
)  # fmt: skip
"""Text in srun's output, its cause, and a hint."""


BARRIERS = {"SLURM_PMIX_FENCE": "ring"}
"""Algorithm of the barrier (PMIx fence) in MPI_Init. With Slurm's tree, some ranks leave it before others have reached it; their messages
then crash the late ranks (open-mpi/ompi#12495). Failed starts of six ranks on three busy hosts: tree 84 of 382, the default, which
uses both, 6 of 383, ring 0 of 480 (Slurm 22.05.8, PMIx 4.2.2, Open MPI 5.0.11; 26 November 2026)."""


def _find_srun() -> str | None:
    """Return the absolute path of srun; None if there is none."""
    found = shutil.which("srun")
    return str(Path(found).absolute()) if found else None


def in_allocation(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if this process is inside a Slurm job.

    Args:
        environ: Environment of the process.
    """
    return "SLURM_JOB_ID" in environ


def allocation(environ: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Return the environment with the GPUs of `salloc --gres=gpu:N`, which Slurm's variables omit.

    Args:
        environ: Environment of the process; returned unchanged outside a Slurm job or if it has the number of GPUs.
    """
    complete = ("ENVIRONMENT", "SLURM_GPUS_ON_NODE", *GPU_VARIABLES)  # in a batch script the variables are complete
    if not in_allocation(environ) or any(name in environ for name in complete):
        return environ
    gpus = _gpu_counts(_slurm_output(["squeue", "--noheader", f"--jobs={environ['SLURM_JOB_ID']}", "--format=%b"]))
    return {**environ, "SLURM_GPUS_PER_NODE": str(gpus)} if gpus else environ


def refuse_several_launchers(environ: Mapping[str, str]) -> None:
    """Raise an error if srun started this launcher in several tasks, each of which would run the whole job.

    Args:
        environ: Environment of the process.

    Raises:
        ConfigError: This process is one of several tasks, and not an interactive shell.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    shell = any(name.startswith("SLURM_PTY_") for name in environ) or (sys.stdin and sys.stdin.isatty())
    if in_allocation(environ) and tasks not in ("", "1") and not shell:  # --pty starts the shell in one task only
        raise ConfigError(
            f"srun has started this launcher {tasks} times, and each would run the whole job",
            hint="leave out srun: distrib-launch starts the ranks on all hosts of the allocation",
            code="launcher-under-srun",
        )


def _step() -> list[str]:
    """Return the options of a step that gets the whole allocation and runs beside its other steps."""
    words = ["--overlap", "--overcommit"]
    # A step gets all GPUs of its job only if it requests their number. Otherwise Slurm divides GPUs that were requested per task
    # or for the whole job, and gives none of those of exclusive hosts.
    if gpus := slurm.gpus_per_host(os.environ):
        words += [f"{GPUS}{gpus}"]
    return words + _all_gpus_for_each(ENGINE.environment(os.environ))


def _all_gpus_for_each(environ: Mapping[str, str]) -> list[str]:
    """Return the option that shows each rank all GPUs of its host, if srun would divide them."""
    return ["--gpu-bind=none"] if any(name in environ for name in BINDS_GPUS) else []


def few_cpus_reason(cpus: int, ranks: int, *, on_gpus: bool) -> str:
    """Return the reason why a host has too few CPUs; empty if they suffice. Slurm gives one CPU per task by default.

    Args:
        cpus: CPUs that Slurm gave on the host.
        ranks: Ranks on the host.
        on_gpus: True if the ranks use GPUs.
    """
    if cpus >= ranks * (2 if on_gpus else 1):  # a rank on a GPU needs a CPU for itself and one for its data loader
        return ""
    return f"Slurm gave {cpus} CPU{'s' * (cpus > 1)} for {ranks} rank{'s' * (ranks > 1)}"


def _job_name(plan: LaunchPlan) -> str:
    """Return the job's name in squeue."""
    return f"distrib-{plan.attempt_id}"


def _gpus_per_node(plan: LaunchPlan) -> int:
    """Return the GPUs to request on every host: one for each rank of the fullest host.

    If the devices are unknown, Slurm's own count limits the request.
    """
    devices = {rank.device for rank in plan.ranks if rank.role == "worker"}
    most = max(host.workers for host in plan.hosts)
    if devices == {"cpu"}:
        return 0
    return min(most, *_gpus_of(plan)) if "auto" in devices else most


def _gpus_of(plan: LaunchPlan) -> list[int]:
    """Return the number of GPUs of each host, as Slurm reports it."""
    hosts = ",".join(host.name for host in plan.hosts)
    output = _slurm_output(["sinfo", "--noheader", "--Node", f"--nodes={hosts}", "--format=%N %G"])
    known = dict(line.split(maxsplit=1) for line in output.splitlines() if " " in line.strip())
    return [_gpu_counts(known.get(host.name, "")) for host in plan.hosts]


def _gpu_counts(text: str) -> int:
    """Add up the GPUs in text such as `gpu:a100:4(S:0-1),gpu:h100:2,nvme:1`."""
    return sum(int(count) for count in re.findall(r"(?:^|[,:/])gpu(?::[^:,()]+)?:(\d{1,9})", text))


def _run_slurm(command: Sequence[str], environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10)


def _slurm_output(command: Sequence[str]) -> str:
    """Return the output of a Slurm command; empty if it is not installed or does not end in time."""
    try:
        return _run_slurm(command).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _mpi(srun: str) -> str:
    """Return the value of `--mpi`: `pmix` if it works, else `none`; empty if the user has set SLURM_MPI_TYPE.

    `srun --mpi=list` also names plugins that cannot be loaded, so a test run tries PMIx; it submits nothing.
    """
    if "SLURM_MPI_TYPE" in os.environ:
        return ""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
    try:
        tried = _run_slurm([srun, "--mpi=pmix", "--test-only", "--ntasks=1", "true"], environ)
    except subprocess.TimeoutExpired:  # Slurm's controller is busy; the list of plugins needs no controller
        return "pmix" if re.search(r"\bpmix\b", _slurm_output([srun, "--mpi=list"])) else "none"
    except OSError:
        return "none"
    return "none" if "MPI" in tried.stderr else "pmix"


class _Srun(Engine):
    """Slurm's srun, which starts the ranks as the tasks of one job step."""

    limits_cpus = True
    forwards_environment = True
    shutdown_seconds = 3.0
    """Slurm kills all processes as soon as srun is ended, including those that clean up after the ranks."""

    def command(self, plan: LaunchPlan, options: LaunchOptions) -> tuple[str, ...]:
        """Return the srun command line."""
        srun = _find_srun()
        if srun is None:
            raise ConfigError(
                "--engine srun: no srun here", hint="run it where Slurm is, or use --engine mpirun", code="tool-missing"
            )
        if any(host.name == "localhost" for host in plan.hosts):
            raise ConfigError(
                "--engine srun: no hosts",
                hint="name Slurm's nodes with -H, or run inside sbatch or salloc, which name them",
                code="no-hosts",
            )
        words = [srun, "--job-name", _job_name(plan), "--ntasks", str(len(plan.ranks))]
        # One line per rank: only this form allows unequal slots and any order of hosts. The file also gives the number of nodes:
        # Slurm 24.11 rejects --nodes beside it.
        words += ["--distribution=arbitrary", f"--nodelist={plan.run_dir}/{HOSTFILE}"]
        # --export=ALL passes the token. The supervisor decides which rank failed and when the other ranks end, not srun.
        words += ["--export=ALL", "--input=none", "--unbuffered", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none"]
        if plan.mode == "async":
            words += ["--no-kill"]  # the step continues if Slurm loses a node
        if in_allocation():
            words += _step()
        else:
            # Slurm sends SIGTERM this long before the time limit: the grace time of the ranks, and 10 s to write the result.
            before = max(30, math.ceil(options.grace_seconds) + 10)
            words += [f"--signal=TERM@{min(before, 65_535)}"]  # the largest value of --signal: srun(1)
            if (gpus := _gpus_per_node(plan)) and not any(name in os.environ for name in GPU_VARIABLES):
                words += [f"{GPUS}{gpus}"]
            words += _all_gpus_for_each(os.environ)
        if kind := _mpi(srun):
            words += [f"--mpi={kind}"]
        if any(host.python for host in plan.hosts):
            return (*words, "--multi-prog", f"{plan.run_dir}/{PROGRAMS}")
        return (*words, options.interpreter, *AGENT)

    def shell(self, plan: LaunchPlan) -> RemoteShell | None:
        """Return srun, which runs steps in the allocation; None outside one."""
        if not in_allocation():
            return None
        words = (
            plan.command[0], "--job-name", _job_name(plan), "--quiet", "--nodes=1", "--ntasks=1", "--export=ALL", "--unbuffered",
            "--cpu-bind=none", "--mpi=none", *_step(),
        )  # fmt: skip
        environ = {name: value for name, value in self.environment(os.environ).items() if name not in NOT_OF_A_STEP}
        return RemoteShell(transport="srun", words=words, environment=environ)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of srun: the ring barrier, and no per-task settings of the allocation."""
        dropped: tuple[str, ...] = ()
        if in_allocation(environ):
            dropped = BY_TASK + (BINDS_GPUS + GPU_VARIABLES if slurm.gpus_per_host(environ) else ())
        return {**BARRIERS, **{name: value for name, value in environ.items() if name not in dropped}}

    def notes(self, plan: LaunchPlan) -> tuple[str, ...]:
        """Return notes on the allocation, the requested GPUs and MPI."""
        notes = []
        if in_allocation():
            notes.append(f"started with srun inside Slurm job {os.environ['SLURM_JOB_ID']} (--engine mpirun: over ssh)")
            if plan.mode == "async" and len(plan.hosts) > 1:
                notes.append("if a node fails, Slurm ends the whole allocation, unless it was requested with --no-kill")
        elif requested := next((word for word in plan.command if word.startswith(GPUS)), None):
            notes.append(
                f"{requested.removeprefix(GPUS)} GPU(s) are requested on each host (SLURM_GPUS_PER_NODE=N: another number; "
                "-x CUDA_VISIBLE_DEVICES=: none)"
            )
        if "--mpi=none" in plan.command:
            notes.append(
                "this Slurm has no PMIx: torch.distributed works, but each rank of a script with MPI or Horovod runs alone; "
                "use --engine mpirun for those"
            )
        return tuple(notes)

    def write_files(self, run_dir: Path, plan: LaunchPlan) -> None:
        """Write the host of each rank, and the interpreter of each rank if hosts have different ones."""
        (run_dir / HOSTFILE).write_text("".join(f"{rank.host}\n" for rank in plan.started))
        if any(host.python for host in plan.hosts):
            programs = {host.name: plan.script_on(host)[0] for host in plan.hosts}
            lines = [f"{n} {programs[rank.host]} {shlex.join(AGENT)}\n" for n, rank in enumerate(plan.started)]
            (run_dir / PROGRAMS).write_bytes(os.fsencode("".join(lines)))

    def queued(self, log: Path) -> str:
        """Return the message of an srun that waits for resources; empty if it does not wait."""
        words = log.read_text(errors="replace")
        lines = [line for line in words.splitlines() if "queued and waiting for resources" in line]
        if not lines or "has been allocated resources" in words:
            return ""
        why = re.search(r"^srun: (Req\w+ .+)", words, re.MULTILINE)  # the reason is more than a busy queue
        return why[1] if why else lines[-1].removeprefix("srun: ")

    def explain(self, output: str) -> tuple[str, str] | None:
        """Return a message and a hint for a known error of srun; None for others."""
        for sign, what, hint in EXPLANATIONS:
            if line := next((line for line in output.splitlines() if sign in line), ""):
                return f"{what}: {line.strip()}", hint
        return None

    def cancelled(self, output: str, *, for_a_reason: bool = False) -> str:
        """Return a message if Slurm ended the job; empty if it did not."""
        # The line that slurmd prints when Slurm cancels a job. It has no reason after the death of a rank that used MPI.
        found = re.search(r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+\w))?", output)
        if not found or (for_a_reason and not found[1]):
            return ""
        return f"Slurm ended the job: {found[1].lower() if found[1] else 'cancelled, or its time is up'}"

    def cleanup_command(self, plan: LaunchPlan) -> tuple[str, ...] | None:
        """Return the scancel command that ends a job which srun requested; None inside an allocation."""
        scancel = shutil.which("scancel")
        if in_allocation() or scancel is None:
            return None
        return scancel, "--quiet", f"--name={_job_name(plan)}"


ENGINE = _Srun()
