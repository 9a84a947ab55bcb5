"""From exit records to the one failure that came first, told so that a tired person can act on it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from distrib.cluster.node import name_hosts
from distrib.utils.ranges import ranges
from distrib_launch.results import Failure

TAIL_BYTES = 64 << 10
TAIL_LINES = 20

CONSEQUENCE = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|connection was likely closed|"
    r"ncclRemoteError|remote process exited|communicator was aborted|NCCL communicator .* aborted|"
    r"socket has failed to connect|recvValue failed|MPI_ERR_PROC_FAILED|MPI_ERR_REVOKED|"
    r"gloo.*timed out|timed out waiting .*ms for recv|watchdog caught collective operation timeout|"
    r"HorovodInternalError|failed to recv, got 0 bytes",
    re.IGNORECASE,
)
"""What Gloo, NCCL, torch's store, MPI and Horovod say when another rank is gone."""

TIMED_OUT = re.compile(r"watchdog caught collective operation timeout", re.IGNORECASE)
"""What torch says where NCCL's time is up: of ranks that are there, about one that is not."""

KINDS = (
    (re.compile(r"torch\.(cuda\.)?OutOfMemoryError|CUDA out of memory|hipErrorOutOfMemory|Cuda failure \d+ 'out of memory'"),
     "out of GPU memory: a smaller batch, gradient accumulation or a larger GPU would help"),
    (re.compile(r"CUDA error: device-side assert"), "a kernel's check failed: run once with -x CUDA_LAUNCH_BLOCKING=1"),
    (re.compile(r"uncorrectable ECC error|GPU is lost|CUDA error: unspecified launch failure"),
     "a GPU that fails, or a kernel that wrote where it must not: nvidia-smi -q and dmesg (Xid) on that host tell"),
    (re.compile(r"No space left on device"), "a disk or /dev/shm of the host is full"),
    (re.compile(r"EOFError: EOF when reading a line"), "ranks have no standard input: give what is asked for as arguments"),
    (TIMED_OUT,
     "not all ranks came to this collective: one was elsewhere, or the network stood still"),
    (re.compile(r"bus error", re.IGNORECASE), "often a /dev/shm that is too small for the DataLoader's workers"),
)  # fmt: skip
"""Words of well-known ends, and what they mean."""

PARENT = re.compile(
    r'File "[^"]*(?<!torch)/multiprocessing/(?:connection|forkserver|popen_\w+)\.py"|DataLoader worker \(pid.*\) exited unexpectedly'
)
CHILD = re.compile(r'File "[^"]*/multiprocessing/\w+\.py", line \d+, in (?:_bootstrap|spawn_main|main)\b')
"""In the traceback of a rank that lost a process of its own, such as a loader's; and in that of such a process."""

MISMATCH = re.compile(r"gloo::EnforceNotMet|[Cc]ollective mismatch")
"""What Gloo dies of where ranks meet in different collectives: by SIGABRT, with a C++ stack for last words."""

TORCH_LOG = re.compile(r"(\[rank\d+\]:)?\[[IWE]\d{3,4} ")
"""How torch's own log lines begin, which come and go with no failure: month and day, in C++ without a zero before them."""

WHAT = re.compile(r"^\s*(what\(\):.*\S)", re.MULTILINE)
"""What C++ says of an exception that ends a process; what it advises comes after it."""

NCCL_SAYS = re.compile(r"nccl[A-Z]\w+: |Last error:")
"""How NCCL's own words begin, in lines of their own below the exception."""

ASIDE = re.compile(r"Exception (in thread|ignored)")
"""Before a traceback that ends no script: of a thread, or of a destructor."""

ASIDE_LINES = 3
"""So much may be said between the traceback that ends a script and such a one, which comes as the script's processes end."""

STACK_LINE = re.compile(r"(\[rank\d+\]:)?\s*(frame #|Exception raised from |$)")
"""A line of the stack that C++ prints after what it says."""

FAULT = re.compile(
    r"^\[[^\s:]+:\d+\] Signal: [^()\n]+ \((\d+)\)$|^Fatal Python error: (Segmentation fault|Bus error|Illegal instruction)$",
    re.MULTILINE,
)
"""What Open MPI, and Python's faulthandler, print in a process that makes a fault, before it dies."""

TOO_EARLY = re.compile(r"mca_pml_ob1_recv_frag_callback_match.*ompi_mpi_init", re.DOTALL)
"""In Open MPI's stack of a rank that was sent a message before it was ready for any; see `engines.srun.BARRIERS`."""

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Python 3.13 and later colours tracebacks where FORCE_COLOR is set, whoever reads them."""

FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that a process gets for what it did itself."""

SYNTAX_ERROR = re.compile(
    r'^  File "(.+)", line (\d+)\n(?:.*\n){0,3}(?:Syntax|Indentation|Tab)Error: .+\Z', re.MULTILINE
)
"""How Python ends on a script that it cannot read: without the head of a traceback."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank ended, as its exit record told or its silence showed.

    `time` is on the launcher's clock. `exit_code` is None where no record came; then `lost` tells whether the connection
    was closed or fell silent, and `signal` is of the fault that its last words tell of. `stopped_by` is empty when it ended
    of its own accord. `consequence`: its last words were about a connection to another rank. `closing`: its script had come
    to its end. `words` are those of the exception with which one ended that was being stopped.
    """

    rank: int
    local_rank: int
    host: str
    time: float
    exit_code: int | None
    signal: int | None
    stopped_by: str
    message: str
    lost: Literal["", "closed", "silence"] = ""
    consequence: bool = False
    closing: bool = False
    words: str = ""

    @property
    def failed(self) -> bool:
        return self.exit_code != 0 or self.signal is not None

    @property
    def code(self) -> int:
        """What the launcher exits with when this failure came first."""
        return 128 + self.signal if self.signal else self.exit_code or 1


def first_failure(endings: Iterable[Ending]) -> Ending | None:
    """The failure that caused the others: the earliest that nobody asked for and that is not about another rank."""
    failed = [ending for ending in endings if ending.failed]
    first = min(failed, key=lambda e: (bool(e.stopped_by), e.consequence, e.time, e.rank), default=None)
    if first and first.lost == "closed" and not first.stopped_by:
        # Slurm kills a job at once when one of its MPI ranks has died: before any could tell, and in no order.
        return min((e for e in failed if e.lost and e.signal), key=lambda e: (e.time, e.rank), default=first)
    return first


def is_consequence(log: Path, killed_by: int | None = None) -> bool:
    """Whether a rank's last words are about a connection to another one. `killed_by` is the signal that it died of."""
    text = tail(log)
    # One that died of a signal has survived what it printed before, but for those by which Python itself ends.
    traceback = last_traceback(text) if killed_by in (None, signal.SIGABRT, signal.SIGINT) else ""
    last = "\n".join([line for line in text.splitlines() if not STACK_LINE.match(line)][-5:])
    return not _lost_a_child(traceback) and bool(CONSEQUENCE.search(traceback or last))


def fault_in(log: Path) -> int | None:
    """The number of the signal of a fault that a rank's last words tell of."""
    found = FAULT.findall(tail(log))
    if not found:
        return None
    number, name = found[-1]
    return next((s for s in FAULTS if s == int(number or 0) or (name and signal.strsignal(s) == name)), None)


def words_of(log: Path) -> str:
    """The line that names the last exception in a log; empty where there is none."""
    traceback = last_traceback(tail(log))
    return last_words(traceback) if traceback else ""


def describe(first: Ending, endings: Iterable[Ending], log: Path, interpreter: str, *, apart: bool = False) -> Failure:
    """Read the rank's error output for what it died of. `apart`: it was without the launcher's PYTHONPATH."""
    words = tail(log)
    # Python prints a traceback and then exits. One that died of a signal left at most an old, handled one behind, but
    # for SIGABRT: Gloo's threads may abort a Python that is ending (torch 2.13).
    aborted = first.signal == signal.SIGABRT
    traceback = last_traceback(words) if first.exit_code and (aborted or not first.signal) else ""
    message = first.message
    if first.lost and first.signal:
        message = f"killed by {signal_name(first.signal)}, as its last words tell"
        message += ", and all ranks were lost at once" * all(ending.lost == "closed" for ending in endings)
    elif first.lost:
        message = _lost(first, endings)
    elif not message and traceback:
        message = last_words(traceback) + _child(words, traceback)
        if missing := re.match(r"ModuleNotFoundError: No module named '([\w.]+)'", message):
            message += f" (install {missing[1].partition('.')[0]} for {interpreter} on {first.host}{', or hand on what is set here: -x PYTHONPATH' * apart})"
        if aborted:
            message += " (and SIGABRT while Python was ending)"
    elif not message and first.signal:
        message = f"killed by {signal_name(first.signal)}"
        if first.stopped_by == "engine":
            message += " from outside: somebody, or the batch system, ended the engine or the process around the rank"
        if aborted and MISMATCH.search(words):
            message += (
                " (the ranks called different collectives: each must make the same calls of all_reduce, barrier and "
                f"step, as often as the others{_at_end(first, endings)})"
            )
        elif aborted and (last := (WHAT.findall(words) or [_last_line(words)])[-1]):
            message += f"; last words: {last}"
    elif not message:
        last = _last_line(words)
        message = f"exit code {first.exit_code}" + (f"; last words: {last}" if last else "")
        if unreadable := SYNTAX_ERROR.search(words.rstrip()):
            message = f"{last} ({Path(unreadable[1]).name}:{unreadable[2]})"
    if first.signal == signal.SIGSEGV and TOO_EARLY.search(words):
        message += " (in MPI_Init, as a message came too early: open-mpi/ompi#12495; SLURM_PMIX_FENCE=ring, or --engine mpirun)"
    for known, meaning in KINDS:
        if known.search(message) or (traceback and known.search(traceback)):
            message += f" ({meaning})"
            break
    if TIMED_OUT.search(message):
        elsewhere = [e.rank for e in endings if e.stopped_by == "launcher"]
        message += f" (still there, and perhaps what they waited for: rank {ranges(elsewhere)})" if elsewhere else ""
    elif first.consequence and not first.stopped_by:
        done = [e.rank for e in endings if not e.failed and not e.stopped_by and e.time <= first.time]
        why = (
            f"rank {ranges(done)} had ended with exit code 0"
            if done
            else "no rank is known to have failed before: the network?"
        )
        message += f" (it lost the connection to another rank, and {why})"
    return Failure(
        rank=first.rank,
        host=first.host,
        time=first.time,
        exit_code=first.exit_code,
        signal=first.signal,
        message=message,
        traceback=traceback,
        log=str(log),
    )


def _last_line(words: str) -> str:
    """The last line of a log that says something; empty where none does."""
    lines = (line.strip() for line in reversed(words.splitlines()))
    return next((line for line in lines if not TORCH_LOG.match(line) and not STACK_LINE.match(line)), "")


def _at_end(first: Ending, endings: Iterable[Ending]) -> str:
    ended = [ending.rank for ending in endings if ending.closing and ending.rank != first.rank]
    return f"; rank {ranges(ended)} had come to the end of its script" if ended and not first.closing else ""


def _child(words: str, traceback: str) -> str:
    """What a process that the rank had started died of, where that is what the rank died of."""
    if not _lost_a_child(traceback):
        return ""
    earlier = last_traceback(_plain(words).rpartition(traceback)[0])
    return f" (a process that it had started ended before: {last_words(earlier)})" if CHILD.search(earlier) else ""


def _lost_a_child(traceback: str) -> bool:
    return bool(PARENT.search(traceback)) and not CHILD.search(traceback)


def _lost(first: Ending, endings: Iterable[Ending]) -> str:
    endings = list(endings)
    there = [ending for ending in endings if ending.host == first.host]
    if first.lost == "silence":
        silent = list(dict.fromkeys(ending.host for ending in endings if ending.lost == "silence"))
        hosts = len({ending.host for ending in endings})
        if len(silent) > 1 and len(silent) + 1 >= hosts:
            return (
                f"{len(silent)} of {hosts} hosts vanished at once ({name_hosts(silent)}): look at the network of "
                "this machine first, then at their switch and power"
            )
        who = f" (ranks {ranges([ending.rank for ending in there])})" if len(there) > 1 else ""
        return f"host {first.host} vanished: {first.message}{who}; power, kernel or network"
    if len({ending.host for ending in endings}) > 1 and all(ending.lost == "closed" for ending in endings):
        return (
            "all ranks were lost at once, without an exit record: somebody, or the batch system, killed the whole job "
            "(Slurm does so where an MPI rank dies, or where its PMIx fails: the log of slurmd on the hosts tells)"
        )
    if len(there) > 1 and all(ending.lost for ending in there):
        return f"every rank of {first.host} was lost at once, without an exit record; was the host shut down?"
    return f"the process around it was killed, it left no exit record ({first.message})"


def tail(log: Path) -> str:
    """The last `TAIL_BYTES` of a log, as text."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return COLOUR.sub("", file.read().decode(errors="replace"))
    except OSError:
        return ""


def last_traceback(text: str) -> str:
    """The last Python traceback in a text, whole, or an empty string; torch's `[rank3]: ` before its lines is left out."""
    text = _plain(text)
    start = text.rfind("Traceback (most recent call last):")
    if start < 0:
        return ""
    # A chained exception has several; the story begins with the first of the chain.
    chained = ("\nThe above exception was the direct cause", "\nDuring handling of the above exception")
    while (link := max(text.rfind(words, 0, start) for words in chained)) > 0:
        earlier = text.rfind("Traceback (most recent call last):", 0, link)
        if earlier < 0 or text[link:start].count("\n") > 4:
            break
        start = earlier
    # A progress bar that ends no line may stand before it; of a group of exceptions its frame does.
    frame = text[text.rfind("\n", 0, start) + 1 : start].rpartition("\r")[2]
    start -= len(frame) if re.fullmatch(r"[\s|+]*(Exception Group )?", frame) else 0
    before, _, said = text[:start].rstrip("\n").rpartition("\n")
    if ASIDE.match(said) and (own := last_traceback(before)):
        between = before.rpartition(own)[2].splitlines()
        if len([line for line in between if line.strip() and not TORCH_LOG.match(line)]) <= ASIDE_LINES:
            return own
    lines = text[start:].splitlines()
    end = len(lines)
    for index in range(1, len(lines)):
        line = lines[index]
        if line and not line[0].isspace() and not line.startswith(("Traceback", "The above", "During")):
            end = index + 1
            while end < len(lines) and _goes_on(lines[end - 1], lines[end]):
                end += 1
            if not any(words.strip() in "\n".join(lines[index : index + 4]) for words in chained):
                break
    return "\n".join(lines[:end])


def _goes_on(before: str, line: str) -> bool:
    """Whether a line below that which names an exception is more of what it says."""
    return line[:1].isspace() or bool(NCCL_SAYS.match(line)) or before.startswith("Last error:")


def _plain(text: str) -> str:
    return re.sub(r"^\[rank\d+\]: ?", "", text, flags=re.MULTILINE)


def last_words(traceback: str) -> str:
    """The line of a traceback that names the exception."""
    traceback, _, nccl = traceback.partition("\nLast error:\n")
    lines = [line for line in traceback.splitlines() if line.strip() and not NCCL_SAYS.match(line)]
    if nccl:
        return ": ".join((last_words("\n".join(lines)), nccl.splitlines()[0]))
    group = next((line.strip(" |") for line in lines if re.match(r"\s+\| \w[\w.]*Group: ", line)), "")
    return group or next((line for line in reversed(lines) if not line[0].isspace()), lines[-1])


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 99` where there is no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def report(failure: Failure, endings: Iterable[Ending], *, started: float) -> str:
    """The failure in a few lines, for the end of the terminal's output. `started`: Unix time of the job's start."""
    who = f"rank {failure.rank} on {failure.host}" if failure.rank is not None else failure.host
    lines = [f"{who} failed first: {failure.message}"]
    if failure.traceback:
        shown = failure.traceback.splitlines()
        skipped = len(shown) - TAIL_LINES
        lines += [f"  ... {skipped} lines more in its log"] if skipped > 0 else []
        lines += ["  " + line for line in shown[-TAIL_LINES:]]
    others = [ending for ending in endings if ending.rank != failure.rank]
    own = next((ending for ending in endings if ending.rank == failure.rank), None)
    if own is not None:
        code = f"{signal_name(own.signal)}" if own.signal else f"exit code {own.exit_code}"
        how = "no exit record" if own.exit_code is None else code
        lines.append(f"  {how}, local rank {own.local_rank}, {max(0.0, failure.time - started):.1f} s after the start")

    def alike(ending: Ending) -> bool:
        """Whether one that was being stopped had died of the same thing, as where a module is missing everywhere."""
        return bool(ending.words) and failure.message.startswith(ending.words)

    lost = "timed out, too" if TIMED_OUT.search(failure.message) else "lost the connection to it"
    for words, ranks in (
        (lost, [e.rank for e in others if e.consequence and not e.stopped_by]),
        ("failed too", [e.rank for e in others if e.failed and not e.consequence and (not e.stopped_by or alike(e))]),
        ("were stopped", [e.rank for e in others if e.stopped_by and not alike(e)]),
        ("had finished", [e.rank for e in others if not e.failed and not e.stopped_by]),
    ):
        if ranks:
            what = words.replace("were ", "was ") if len(ranks) == 1 else words
            lines.append(f"  rank{'s' * (len(ranks) > 1)} {ranges(ranks)}: {what}")
    lines.append(f"  its error output: {failure.log}")
    return "\n".join(lines)
