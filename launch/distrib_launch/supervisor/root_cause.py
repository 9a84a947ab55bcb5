"""Root cause of a failed job: the rank that failed first, and the reason.

The exit record has a rank's uncaught exception. The tail of its stderr is read only if the rank ended in another way.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

from distrib import units
from distrib.cluster.node import name_hosts
from distrib.utils.ranges import ranges
from distrib_launch import output_filter
from distrib_launch.output_filter import LOST_CONNECTION
from distrib_launch.results import Failure
from distrib_launch.status_lines import failed_part, short_path
from distrib_launch.supervisor.rank_exit import ErrorRecord, RankExit, kind_of_error, signal_name

OUTPUT_LINES = 5
"""Number of last lines of stderr and of stdout that the report shows of a rank that ended without an exception."""

NCCL_TIMEOUT = "watchdog caught collective operation timeout"
"""Message of torch, in lower case, on ranks whose NCCL collective timed out because a rank did not take part."""

KNOWN_CAUSES = (
    (("torch.outofmemoryerror", "torch.cuda.outofmemoryerror", "cuda out of memory", "hiperroroutofmemory", "'out of memory'"),
     "out of GPU memory: use a smaller batch, or --accumulate N"),
    (("cuda error: device-side assert",), "a kernel's check failed: run once with -x CUDA_LAUNCH_BLOCKING=1"),
    (("uncorrectable ecc error", "gpu is lost", "cuda error: unspecified launch failure"),
     "the GPU fails, or a kernel wrote out of bounds: see nvidia-smi -q and dmesg (Xid) on that host"),
    (("no space left on device",), "a disk or /dev/shm of the host is full"),
    (("eoferror: eof when reading a line",), "ranks have no standard input: give what is asked for as arguments"),
    ((NCCL_TIMEOUT,), "not all ranks called this collective, or the network failed"),
    (("bus error", "killed by sigbus"), "often a /dev/shm that is too small for the DataLoader's workers"),
)  # fmt: skip
"""Fragments of error messages in lower case, and their meaning."""

LOST_CHILD = (
    "/multiprocessing/connection.py", "/multiprocessing/forkserver.py", "/multiprocessing/popen_", "DataLoader worker (pid",
)  # fmt: skip
"""Fragments of the traceback of a rank that lost a child process, such as a DataLoader worker."""

NOISE = re.compile(r"(\[rank\d+\]:)?(\[[IWE]\d{3,4} |\s*(frame #|Exception raised from |$))")
"""Pattern of lines that show no cause: torch's log lines (`[W1122 `), which also occur without a failure, and C++ stacks."""

FATAL_ERROR = "Fatal Python error: "
"""Beginning of the report of Python's faulthandler, which every rank has on."""

MPI_INIT_FRAMES = (" in _start_mpi", " in _init_mpi")
"""Ends of the innermost Python frame in MPI_Init: `training.world`, `probe.__main__`. See `engines.srun.BARRIERS`."""

AT_ONCE_SECONDS = 0.5
"""Time in which all ranks of a host are lost if the host ends. Open MPI kills the other ranks 1 s after one was killed."""

SAME_ERROR = "failed too, with the same exception"
FATES = ("timed out, too", "lost the connection to it", "failed too", "were stopped", "had finished")
"""Ends of the other ranks, in the order of the report."""

FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals of faults in the process itself."""


def first_failure(exits: Iterable[RankExit]) -> RankExit | None:
    """Return the root failure: the earliest that was not requested and is not a consequence of another failure.

    Args:
        exits: Exits of all ranks.
    """
    failed = [one for one in exits if one.failed]
    first = min(failed, key=lambda e: (bool(e.stopped_by), e.consequence, e.time, e.rank), default=None)
    if first and first.lost == "closed" and not first.stopped_by:
        # Slurm kills a job as soon as one of its MPI ranks died: no exit record arrives, and connections close in any order.
        return min((e for e in failed if e.lost and e.signal), key=lambda e: (e.time, e.rank), default=first)
    return first


def is_consequence(error: ErrorRecord | None, stderr: str, number: int | None = None) -> bool:
    """Return True if a rank failed because its connection to another rank broke.

    Args:
        error: Its uncaught exception, None for none.
        stderr: Tail of its stderr.
        number: Signal that ended it, None for none.
    """
    if error and error.secondary:
        return True
    if error and number in (None, signal.SIGABRT, signal.SIGINT):  # after other signals, the exception was not fatal
        return not _lost_child(error) and bool(LOST_CONNECTION.search(f"{error.traceback}\n{error.message}"))
    return bool(LOST_CONNECTION.search("\n".join(_last_lines(stderr))))


def fault_in(stderr: str) -> int | None:
    """Return the signal of the fault that Open MPI or Python reported before a process died, None for none.

    Args:
        stderr: Tail of its stderr.
    """
    for line in reversed(stderr.splitlines()):
        for number in FAULTS:
            name = signal.strsignal(number)
            if line.endswith(f"] Signal: {name} ({int(number)})") or line.replace("-", " ") == f"{FATAL_ERROR}{name}":
                return number
    return None


def describe_failure(first: RankExit, exits: Sequence[RankExit], log: Path, interpreter: str) -> Failure:
    """Return the failure that `result.json` reports.

    Args:
        first: Exit of the rank that failed first.
        exits: Exits of all ranks.
        log: Stderr of that rank.
        interpreter: Python that ran its script.
    """
    stderr = tail(log)
    # After an uncaught exception Python exits; threads of Gloo may abort it meanwhile (torch 2.13).
    error = None
    if first.exit_code and not first.lost and first.signal in (None, signal.SIGABRT):
        error = first.error or (error_in(stderr) if first.signal is None else None)
    code, message = _lost(first, exits) if first.lost else (_error_code(first), _message(first, exits, error, stderr))
    if error and (module := message.partition("ModuleNotFoundError: No module named '")[2].partition("'")[0]):
        message += f" (install {module.partition('.')[0]} for {interpreter} on {first.host})"
    if error and first.signal == signal.SIGABRT:
        message += " (and SIGABRT while Python was ending)"
    stack = [] if error or not first.signal else python_stack(stderr)
    if first.signal == signal.SIGSEGV and len(stack) > 1 and stack[1].endswith(MPI_INIT_FRAMES):
        message += " (in MPI_Init; with srun often open-mpi/ompi#12495: set SLURM_PMIX_FENCE=ring, or --engine mpirun)"
    said = f"{message}\n{error.traceback if error else ''}".lower()
    message += next((f" ({why})" for fragments, why in KNOWN_CAUSES if any(f in said for f in fragments)), "")
    if NCCL_TIMEOUT in message.lower():
        message += _awaited_ranks(exits)
    elif first.consequence and not first.stopped_by:
        code, message = "connection-lost", _disconnected(first, exits, message)
    return Failure(
        rank=first.rank, host=first.host, time=first.time, exit_code=first.exit_code, signal=first.signal,
        code=code, message=message, traceback=error.shown if error else "\n".join(stack), log=str(log),
    )  # fmt: skip


def _error_code(first: RankExit) -> str:
    if first.signal:
        return "out-of-memory" if "out of memory" in first.message else "rank-killed"
    return "rank-failed"


def _message(first: RankExit, exits: Sequence[RankExit], error: ErrorRecord | None, stderr: str) -> str:
    if first.message:
        return first.message
    if error:
        return error.message + (_child_error(stderr) if _lost_child(error) else "")
    if first.signal:
        return f"killed by {signal_name(first.signal)}" + _signal_cause(first, exits, stderr)
    last = "".join(_last_lines(stderr)[-1:])
    return f"exit code {first.exit_code}" + (f"; last line: {last}" if last else "")


def _signal_cause(first: RankExit, exits: Sequence[RankExit], stderr: str) -> str:
    if first.stopped_by == "engine":
        return " from outside: a user or the batch system ended the engine or the process around the rank"
    if first.signal != signal.SIGABRT:
        return ""
    if "gloo::EnforceNotMet" in stderr or "ollective mismatch" in stderr:
        closing = [one.rank for one in exits if one.closing and one.rank != first.rank]
        ended = f"; rank {ranges(closing)} had come to the end of its script" if closing and not first.closing else ""
        return (
            " (the ranks called different collectives: each must make the same calls of all_reduce, barrier and "
            f"step, as often as the others{ended})"
        )
    # C++ prints what() of an uncaught exception; hints of torch and a stack may follow.
    what = [line.strip() for line in stderr.splitlines() if line.strip().startswith("what():")]
    last = what[-1] if what else "".join(_last_lines(stderr)[-1:])
    return f"; last line: {last}" if last else ""


def _disconnected(first: RankExit, exits: Sequence[RankExit], message: str) -> str:
    """Return the message of a rank that lost its connection to another rank, although no rank failed before."""
    done = [one.rank for one in exits if not one.failed and not one.stopped_by]
    if not done:
        return f"{message} (it lost the connection to another rank, but no rank failed before: check the network)"
    return (
        f"lost the connection to another rank: rank {ranges(done)} had finished its script; "
        "call barrier, all_reduce and step equally often on all ranks"
    )


def _lost(first: RankExit, exits: Sequence[RankExit]) -> tuple[str, str]:
    """Return code and message of a rank that was lost without an exit record."""
    if first.signal:
        at_once = ", and all ranks were lost at once" if all(one.lost == "closed" for one in exits) else ""
        return "rank-killed", f"killed by {signal_name(first.signal)}, as its error output shows{at_once}"
    there = [one for one in exits if one.host == first.host]
    lost_host = f"host {first.host} was lost, with rank{'s' * (len(there) > 1)} {ranges([one.rank for one in there])}"
    hosts = len({one.host for one in exits})
    if first.lost == "silence":
        silent = list(dict.fromkeys(one.host for one in exits if one.lost == "silence"))
        if len(silent) > 1 and len(silent) + 1 >= hosts:
            return "host-lost", (
                f"{len(silent)} of {hosts} hosts were lost at once ({name_hosts(silent)}); "
                "check the network of this machine, then their switch and power"
            )
        return "host-lost", f"{lost_host}: {first.message}; check its power, kernel and network"
    if hosts > 1 and all(one.lost == "closed" for one in exits):
        return "rank-lost", (
            "all ranks were lost at once, without exit records: a user or the batch system killed the whole job "
            "(Slurm does so if an MPI rank dies or its PMIx fails); see the log of slurmd on the hosts"
        )
    last_seconds = max(one.time for one in there) - first.time
    if len(there) > 1 and last_seconds < AT_ONCE_SECONDS and all(one.lost for one in there):
        return "host-lost", f"{lost_host}: their connections closed at once; check whether it was shut down"
    return "rank-lost", f"lost without an exit record: its rank agent was killed ({first.message})"


def _awaited_ranks(exits: Sequence[RankExit]) -> str:
    """Return a note on the ranks that a timed-out collective waited for, if there are any."""
    elsewhere = [one.rank for one in exits if one.stopped_by == "launcher"]
    return f" (still running, so perhaps elsewhere in the script: rank {ranges(elsewhere)})" if elsewhere else ""


def _lost_child(error: ErrorRecord) -> bool:
    return any(part in error.traceback for part in LOST_CHILD) and not _is_of_child(error.traceback)


def _is_of_child(traceback: str) -> bool:
    entries = (", in _bootstrap", ", in spawn_main", ", in main")
    return any("/multiprocessing/" in line and line.endswith(entries) for line in traceback.splitlines())


def _child_error(stderr: str) -> str:
    """Return the error of the rank's last child process, from a traceback in the rank's stderr."""
    blocks = _without_rank(stderr).split("Traceback (most recent call last):\n")[1:]
    block = next((block for block in reversed(blocks) if _is_of_child(block)), "")
    headline = next((line for line in block.splitlines() if line and not line[0].isspace()), "")
    return f" (a process that it had started ended before: {headline})" if headline else ""


def error_in(stderr: str) -> ErrorRecord | None:
    """Return the last traceback in a text, for a rank that left no error record; None for none.

    Args:
        stderr: Tail of its stderr.
    """
    before, head, after = _without_rank(stderr).rpartition("Traceback (most recent call last):\n")
    lines = after.splitlines()
    end = next((n for n, line in enumerate(lines) if line and not line[0].isspace()), None)
    last = before.rstrip("\n").rpartition("\n")[2]
    if not head or end is None or last.startswith(("Exception in thread", "Exception ignored")):
        return None
    return ErrorRecord(message=lines[end], traceback=head + "\n".join(lines[: end + 1]))


def _without_rank(text: str) -> str:
    return re.sub(r"^\[rank\d+\]: ?", "", text, flags=re.MULTILINE)  # torch's prefix


def _before_stack(stderr: str) -> str:
    before, found, _ = stderr.rpartition(FATAL_ERROR)
    return before if found else stderr


def python_stack(stderr: str) -> list[str]:
    """Return the report of Python's faulthandler: the error, and the calls of the thread that crashed, innermost first.

    Args:
        stderr: Tail of the rank's stderr.
    """
    _, found, report = stderr.rpartition(FATAL_ERROR)
    error, *lines = report.splitlines() or [""]
    begin = next((n for n, line in enumerate(lines) if line.startswith("Current thread ")), len(lines))
    frames = itertools.takewhile(lambda line: line.startswith("  "), lines[begin + 1 :])
    own = [frame for frame in frames if "/distrib_launch/rank_agent/" not in frame][:19]
    return [f"{FATAL_ERROR}{error} (most recent call first):", *own] if found and own else []


def _last_lines(output: str) -> list[str]:
    """Return the last lines of a rank's output that may show why it ended."""
    lines = [line.strip() for line in _before_stack(output).splitlines()]
    kept = [line for line in lines if not NOISE.match(line) and not output_filter.NOISE.search(line.encode())]
    return kept[-OUTPUT_LINES:]


def tail(log: Path) -> str:
    """Return the last 64 KiB of a log, empty if it cannot be read.

    Args:
        log: Path of the log.
    """
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 65536))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def failure_report(failure: Failure, exits: Sequence[RankExit], *, started: float) -> str:
    """Format the failure in a few lines for the end of the terminal's output.

    Args:
        failure: First failure of the job.
        exits: Exits of all ranks.
        started: Unix time of the job's start.
    """
    by_itself = "" if failure.names_its_place else f"{failed_part(failure)} failed first: "
    lines = [by_itself + failure.message]
    if failure.rank is not None and failure.log and (failure.signal or not failure.traceback):
        for name, log in (("output", Path(failure.log).with_suffix(".out")), ("error output", Path(failure.log))):
            last = _last_lines(tail(log))
            if last and not failure.message.endswith(f"; last line: {''.join(last)}"):
                lines += [f"  its last {name}:", *("    " + line for line in last)]
    traceback = failure.traceback.splitlines()
    if len(traceback) > 1 and failure.message.startswith(traceback[-1]):
        traceback.pop()  # printed above
    shown = traceback[-20:]
    if len(shown) < len(traceback):
        lines.append(f"  ... {len(traceback) - len(shown)} lines more in its log")
    lines += ["  " + line for line in shown]
    for own in (one for one in exits if one.rank == failure.rank):
        seconds = max(0.0, failure.time - started)
        how = "" if own.how in failure.message or failure.code == "host-lost" else f"{own.how}, "
        lines.append(f"  {how}local rank {own.local_rank}, {seconds:.1f} s after the start")
    groups: dict[str, list[int]] = {}
    for one in exits:
        if one.rank != failure.rank:
            groups.setdefault(_fate(one, failure), []).append(one.rank)
    for fate in sorted(groups, key=lambda fate: [fate.startswith(begin) for begin in FATES], reverse=True):
        numbers = groups[fate]
        what = fate.replace("were ", "was ") if len(numbers) == 1 else fate
        if fate == "lost the connection to it":
            what += f" ({units.count_text(len(numbers), 'traceback')} in the logs)"
        lines.append(f"  rank{'s' * (len(numbers) > 1)} {ranges(numbers)}: {what}")
    return "\n".join([*lines, f"  its error output: {short_path(failure.log)}"])


def _fate(one: RankExit, failure: Failure) -> str:
    has_same_error = one.error and one.error.kind == kind_of_error(failure.message, failure.traceback)
    if one.stopped_by:
        # A rank that the launcher stops may have failed by the same error, such as a module that is missing on all hosts.
        return SAME_ERROR if one.exit_code and has_same_error else "were stopped"
    if one.consequence and not has_same_error:
        return "timed out, too" if NCCL_TIMEOUT in failure.message.lower() else "lost the connection to it"
    if has_same_error:
        return SAME_ERROR
    kind = f": {one.error.message.partition(':')[0]}" if one.error else ""
    return f"failed too{kind}" if one.failed else "had finished"
