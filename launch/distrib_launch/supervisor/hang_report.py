"""Hang report: the place of every rank's main thread, and the ranks that the others wait for."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from distrib.cluster.node import name_hosts
from distrib.utils.ranges import ranges

COLLECTIVE_CALL = re.compile(
    r"\b(all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|barrier|bcast|broadcast|gather|scatter|reduce|"
    r"recv|send|sendrecv|wait|waitall|probe)\w*\s*\(",
    re.IGNORECASE,
)
"""Calls in a script's source line that wait for other ranks; MPI's functions are compiled and have no frame."""

GPU_CALL = re.compile(r"\.(item|cpu|cuda|to|tolist|numpy|synchronize|nonzero)\s*\(")
"""Calls that wait for the GPU, which may itself wait for other ranks: the script runs ahead of its collectives."""

JOB_FILE = "/distrib/training/job.py"
SHUTDOWN_FILE = "/distrib/training/shutdown.py"
RENDEZVOUS_FILE = "/distrib/training/rendezvous.py"
LOCAL_SGD_FILE = "/distrib/training/strategies/local_sgd.py"
SERVER_FILES = ("/distrib/training/parameter_server/", "/distrib/training/strategies/parameter_server.py")
GPU_FILES = (
    "/torch/cuda/streams.py", "/torch/cuda/__init__.py", "/distrib/training/nan_guard.py", "/distrib/training/to_device.py",
)  # fmt: skip
COLLECTIVE_FILES = ("/torch/distributed/", "/horovod/", "/mpi4py/")
CERTAIN_FILES = ("/torch/distributed/distributed_c10d.py", "/horovod/", "/mpi4py/")
LIBRARY_FILES = (
    "/site-packages/", "/dist-packages/", "/lib/python3.", "/distrib/training/", "/distrib_launch/rank_agent/",
)  # fmt: skip
NAMED_FUNCTIONS = {SHUTDOWN_FILE: "close", RENDEZVOUS_FILE: "join"}
"""Functions of distrib that a stack is recognized by; `tests/test_hangs.py` checks that they exist."""


class StackFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One call on a stack."""

    name: str
    filename: str
    line: int

    @property
    def function(self) -> str:
        """Return the function's name without its class, which py-spy shows from Python 3.11 on."""
        return self.name.rpartition(".")[2]

    @property
    def place(self) -> str:
        """Return file and line, such as `train.py:41`."""
        return f"{Path(self.filename).name}:{self.line}"

    def is_in(self, *files: str) -> bool:
        """Return True if the path of its file contains one of some fragments.

        Args:
            *files: Fragments of paths.
        """
        return any(file in self.filename for file in files)

    @property
    def is_of_library(self) -> bool:
        """Return True if the file belongs to Python or a library, not to the user."""
        return self.filename.startswith("<") or self.is_in(*LIBRARY_FILES)

    @property
    def is_backward(self) -> bool:
        """Return True for torch's backward pass, which waits for gradients of other ranks."""
        return self.function == "_engine_run_backward"

    def is_named(self, file: str) -> bool:
        """Return True if this is the function of a file in `NAMED_FUNCTIONS`.

        Args:
            file: Key of `NAMED_FUNCTIONS`.
        """
        return self.is_in(file) and self.function == NAMED_FUNCTIONS[file]


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """Main thread of a rank's script, innermost call first."""

    rank: int
    host: str
    step: int
    """Last reported step, -1 for none."""
    frames: tuple[StackFrame, ...] = ()
    running: bool = False
    """True if the thread had a CPU."""
    state: str = ""
    """The kernel's letter if a signal or a debugger stopped the process (T, t) or it waits for a disk (D), else empty."""
    gpu: bool = True
    """True if the process may use a GPU, which computes while the thread waits."""
    problem: str = ""
    """Reason why there are no frames; empty if there are."""
    closing: bool = False
    """True if the rank reported the end of its script."""


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of a rank: `what` describes it, `where` is the place in the script, `waits` is True if it needs other ranks."""

    waits: bool
    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


IN_CLOSE = RankPlace(waits=True, what="job.close, at the end of its script")
IN_EXIT = RankPlace(
    waits=True, what="the exit of its process, at the end of its script (MPI_Finalize waits for all ranks)"
)


class _Thread(msgspec.Struct):
    """Thread in the JSON of py-spy and `stack_dump`."""

    thread_name: str | None
    active: bool
    frames: tuple[StackFrame, ...]
    state: str = ""
    gpu: bool = True


def parse_stack(rank: int, host: str, step: int, dump: bytes, *, closing: bool = False) -> Stack:
    """Return the stack in a JSON dump of py-spy.

    Args:
        rank: Global rank.
        host: Name of its host.
        step: Last step that it reported, -1 for none.
        dump: Output of `py-spy dump --json`, or an error message.
        closing: True if the rank reported the end of its script.
    """
    try:
        threads = msgspec.json.decode(dump, type=list[_Thread])
        problem = "" if threads else "no Python thread"
    except msgspec.DecodeError:
        threads, problem = [], (dump.decode(errors="replace").strip().splitlines() or ["no stack"])[-1][:200]
    if not threads:
        return Stack(rank=rank, host=host, step=step, problem=problem, closing=closing)
    main = next((thread for thread in threads if thread.thread_name == "MainThread"), threads[0])
    return Stack(
        rank=rank, host=host, step=step, frames=main.frames, running=main.active, state=main.state, gpu=main.gpu,
        closing=closing,
    )  # fmt: skip


def place_of(stack: Stack) -> RankPlace:
    """Return the activity of one rank as its stack shows it.

    Args:
        stack: Stack of the rank.
    """
    if stack.problem:
        return IN_EXIT if stack.closing else RankPlace(waits=False, what=f"an unknown place: {stack.problem}")
    own = next((i for i, frame in enumerate(stack.frames) if not frame.is_of_library), None)
    inner = stack.frames[:own]
    where = f"{stack.frames[own].place} in {stack.frames[own].name}" if own is not None else ""
    if stack.state in ("T", "t"):
        what = "a stop by a signal or a debugger (Ctrl-Z, SIGSTOP; kill -CONT lets it go on)"
        return RankPlace(waits=False, what=what, where=where)
    if any(frame.is_named(SHUTDOWN_FILE) for frame in stack.frames):
        return IN_CLOSE
    if (awaited := _awaited_peers(stack, inner)) or (awaited := _awaited_in_source(stack, own)):
        return RankPlace(waits=True, what=awaited, where=where)
    if any(frame.is_in("/torch/utils/data/") for frame in stack.frames):
        return RankPlace(waits=False, what="the data loader", where=where)
    if _waits_for_gpu(stack):
        return RankPlace(waits=True, what="a call that waits for its GPU, and this perhaps for others", where=where)
    if stack.state == "D":
        return RankPlace(waits=False, what="a wait for a disk or a file system", where=where)
    inside = stack.frames[0].name if stack.frames and own != 0 else ""
    return RankPlace(waits=False, what=inside or "its own code", where=where)


def _awaited_peers(stack: Stack, inner: Sequence[StackFrame]) -> str:
    """Return the call of distrib, torch, Horovod or MPI in which a rank waits for other ranks, empty for none."""
    if any(frame.is_in(*SERVER_FILES) for frame in stack.frames) and not stack.running:
        return "a wait for the parameter servers"
    if _waits_for_average(stack):
        return "the average of all ranks (mode local)"
    if any(frame.is_named(RENDEZVOUS_FILE) for frame in stack.frames) and not stack.running:
        return "distrib.init, for the other ranks"
    for frame in inner:
        if frame.is_in(*COLLECTIVE_FILES) and not frame.function.startswith("_") and frame.function != "wrapper":
            return frame.name
    in_loader = any(frame.is_in("/torch/utils/data/") for frame in stack.frames)
    if not in_loader and not stack.running and any(frame.is_backward for frame in inner):
        return "the backward pass, for gradients"
    return ""


def _awaited_in_source(stack: Stack, own: int | None) -> str:
    """Return the compiled call that a script waits in, by the text of its source line, empty for none."""
    if own != 0:
        return ""
    call = COLLECTIVE_CALL.search(linecache.getline(stack.frames[0].filename, stack.frames[0].line))
    return call[0].rstrip("( ") if call else ""


def _waits_for_average(stack: Stack) -> bool:
    """Return True if a rank of mode local waits in a compiled call for the others."""
    return not stack.running and bool(stack.frames) and stack.frames[0].is_in(LOCAL_SGD_FILE)


def _waits_for_gpu(stack: Stack) -> bool:
    if not stack.gpu or not stack.frames:
        return False
    inner = stack.frames[0]
    return inner.is_in(*GPU_FILES) or bool(GPU_CALL.search(linecache.getline(inner.filename, inner.line)))


def is_starting(stack: Stack, *, silent: bool) -> bool:
    """Return True if a rank may still be starting: it imports, has no Python yet, or computes.

    Args:
        stack: Stack of the rank.
        silent: True if no rank has printed or reported anything so far; only then a rank that computes counts as starting.
    """
    imports = any(frame.filename.startswith("<frozen importlib") for frame in stack.frames)
    return bool(stack.problem) or imports or (silent and stack.running and not place_of(stack).waits)


def culprits(stacks: Sequence[Stack]) -> list[Stack]:
    """Return the ranks that the other ranks wait for; none if each rank waits for all.

    These are the ranks that do not wait. If all wait: those at the end of their script, else the smallest group at one place, else
    those with the fewest steps. If none waits on GPUs: those with the fewest steps.

    Args:
        stacks: Stacks of all workers.
    """
    if all(stack.problem and not stack.closing for stack in stacks):
        return []
    absent = [stack for stack in stacks if not place_of(stack).waits]
    slowest = min(stack.step for stack in stacks)
    behind = [stack for stack in stacks if stack.step == slowest]
    if absent:
        # On GPUs a rank stops at an arbitrary place, as soon as the queue of kernels is full.
        return behind if len(absent) == len(stacks) and all(stack.gpu for stack in stacks) else absent
    groups = _grouped(stacks)
    if len(groups) > 1:
        smallest = min(groups.values(), key=lambda group: (len(group), min(stack.step for stack in group)))
        return groups.get(IN_CLOSE) or groups.get(IN_EXIT) or smallest
    return behind if len(behind) < len(stacks) else []


def wait_for_ended(stacks: Sequence[Stack]) -> bool:
    """Return True if all other ranks wait for ranks that are in `job.close`: they will wait forever.

    Args:
        stacks: Stacks of all workers.
    """
    others = [stack for stack in stacks if place_of(stack) != IN_CLOSE]
    ended = max((stack.step for stack in stacks if place_of(stack) == IN_CLOSE), default=-1)
    # A GPU may still compute the awaited result, but not in a step that the ended ranks have not taken.
    return 0 < len(others) < len(stacks) and all(
        _certainly_waits(stack) or (_waits_for_gpu(stack) and stack.step > ended >= 0) for stack in others
    )


def wait_for_ended_in_job(stacks: Sequence[Stack]) -> bool:
    """Return True if all other ranks wait in calls that need every rank, and which the ended ranks will not make.

    A collective of the script may need only some ranks, and a GPU may finish a backward pass by itself.

    Args:
        stacks: Stacks of all workers.
    """
    others = [stack for stack in stacks if place_of(stack) != IN_CLOSE]
    return wait_for_ended(stacks) and all(
        _waits_for_average(one) or any(f.is_in(JOB_FILE) or (not one.gpu and f.is_backward) for f in one.frames)
        for one in others
    )


def _certainly_waits(stack: Stack) -> bool:
    """Return True if the files on the stack, not words of its source, show a collective."""
    certain = any(frame.is_in(*CERTAIN_FILES) or frame.is_backward for frame in stack.frames)
    return place_of(stack).waits and (certain or _waits_for_average(stack))


def all_wait(stacks: Sequence[Stack]) -> bool:
    """Return True if every rank waits for other ranks; the network may have failed.

    Args:
        stacks: Stacks of all workers.
    """
    return not culprits(stacks) and not all(stack.problem for stack in stacks)


def report_lines(stacks: Sequence[Stack], silent_seconds: float) -> list[str]:
    """Return the report for the terminal; its first line is the conclusion.

    Args:
        stacks: Stacks of all workers.
        silent_seconds: Time without progress of any rank.
    """
    lines = [f"no progress for {silent_seconds:g} s{_conclusion(stacks)}"]
    for place, members in _grouped(stacks).items():
        steps = sorted({stack.step for stack in members if stack.step >= 0})
        at = f", step {steps[0]}" + (f" to {steps[-1]}" if len(steps) > 1 else "") if steps else ""
        hosts = name_hosts(stack.host for stack in members)
        numbers = ranges([stack.rank for stack in members])
        lines.append(f"  rank{'s' * (len(members) > 1)} {numbers} on {hosts}: in {place}{at}")
    if wait_for_ended(stacks):
        lines.append(
            "  let all ranks leave their loops after as many steps: where a measurement decides (early stopping), by that of all, such as "
            "job.all_reduce(loss)"
        )
    return lines


def _conclusion(stacks: Sequence[Stack]) -> str:
    guilty = culprits(stacks)
    waiting = [stack for stack in stacks if stack not in guilty]
    calls = " and ".join(dict.fromkeys(place.what for place in _grouped(waiting) if place.waits))
    calls = calls or ("kernels on their GPUs" if waiting else "a collective")
    if guilty and waiting:
        first, several = guilty[0], len(guilty) > 1
        who = f"ranks {ranges([s.rank for s in guilty])} are" if several else f"rank {first.rank} on {first.host} is"
        wait = "ranks wait" if len(waiting) > 1 else "rank waits"
        return f": {who} in {place_of(first)}; {len(waiting)} {wait} for {'them' if several else 'it'} in {calls}"
    if guilty:
        return ", and no rank is seen to wait for another"
    if not all_wait(stacks):
        return f", and no stack can be read: {stacks[0].problem}"
    return f": all {len(stacks)} ranks wait in {calls}; is the network up?"


def _grouped(stacks: Sequence[Stack]) -> dict[RankPlace, list[Stack]]:
    groups: dict[RankPlace, list[Stack]] = {}
    for stack in stacks:
        groups.setdefault(place_of(stack), []).append(stack)
    return groups
