"""From the stacks of ranks that stand still to who waits for whom."""

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
"""Calls that wait for other ranks. MPI's are compiled, so that only the line of the script shows them."""

SERVER_FILES = re.compile(r"/distrib/training/(parameter_server/|strategies/parameter_server)[\w/]*\.py$")
AVERAGE_FILES = re.compile(r"/distrib/training/strategies/local_sgd\.py$")
"""Mode local's, which waits for all ranks, in a call that is compiled."""
MEET_FILES = re.compile(r"/distrib/training/rendezvous\.py$")
JOB_FILE = re.compile(r"/distrib/training/job\.py$")
COLLECTIVE_FILES = re.compile(r"/(torch/distributed|horovod|mpi4py)/")
SURE_FILES = re.compile(r"/(torch/distributed/distributed_c10d\.py|horovod/|mpi4py/)")
GPU_FILES = re.compile(r"/torch/cuda/(streams|__init__)\.py$|/distrib/training/(nan_guard|to_device)\.py$")
GPU_CALL = re.compile(r"\.(item|cpu|cuda|to|tolist|numpy|synchronize|nonzero)\s*\(")
"""Calls that wait for what a GPU computes, as copies to it of memory that is not pinned do; it may itself wait for other ranks, as the
script runs on past its collectives."""
LIBRARY_FILES = re.compile(r"/(site-packages|dist-packages)/|/lib/python3\.\d+/|/distrib/training/|^<")


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One call on a stack."""

    name: str
    filename: str
    line: int

    @property
    def function(self) -> str:
        """The name without that of its class, which py-spy can tell from Python 3.11 on."""
        return self.name.rpartition(".")[2]

    @property
    def place(self) -> str:
        return f"{Path(self.filename).name}:{self.line}"


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """The main thread of a rank's script, innermost call first; `problem` says why there is none.

    `running` is whether the thread had the processor; `step` the last step that it reported, -1 for none. `state` is the
    kernel's letter where a signal or a debugger has stopped it (T, t) or it waits for a disk (D).
    `gpu` is whether it may compute on a GPU, which it does without the processor.
    """

    rank: int
    host: str
    step: int
    frames: tuple[Frame, ...] = ()
    running: bool = False
    state: str = ""
    gpu: bool = True
    problem: str = ""
    closing: bool = False


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is doing: `waits` for other ranks or not, `what` in words, `where` in the script."""

    waits: bool
    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


AT_END = Place(waits=True, what="job.close, at the end of its script", where="")
GONE = Place(
    waits=True, what="the exit of its process, at the end of its script (MPI_Finalize waits for all ranks)", where=""
)


def parse_stack(rank: int, host: str, step: int, dump: bytes, *, closing: bool = False) -> Stack:
    """A stack from what py-spy wrote as JSON."""

    class Thread(msgspec.Struct):
        thread_name: str | None
        active: bool
        frames: list[Frame]
        state: str = ""
        gpu: bool = True

    try:
        threads = msgspec.json.decode(dump, type=list[Thread])
    except msgspec.DecodeError:
        problem = dump.decode(errors="replace").strip().splitlines() or ["no stack"]
        return Stack(rank=rank, host=host, step=step, closing=closing, problem=problem[-1][:200])
    if not threads:
        return Stack(rank=rank, host=host, step=step, closing=closing, problem="no Python thread")
    main = next((thread for thread in threads if thread.thread_name == "MainThread"), threads[0])
    frames = tuple(main.frames)
    return Stack(
        rank=rank,
        host=host,
        step=step,
        closing=closing,
        frames=frames,
        running=main.active,
        state=main.state,
        gpu=main.gpu,
    )


def place_of(stack: Stack) -> Place:
    """What one rank is doing, as far as its stack tells."""
    if stack.problem:
        return GONE if stack.closing else Place(waits=False, what=f"an unknown place: {stack.problem}", where="")
    own = next((i for i, frame in enumerate(stack.frames) if not LIBRARY_FILES.search(frame.filename)), None)
    inner = stack.frames[:own]
    where = f"{stack.frames[own].place} in {stack.frames[own].name}" if own is not None else ""
    if stack.state in ("T", "t"):
        what = "a stop by a signal or a debugger (Ctrl-Z, SIGSTOP; kill -CONT lets it go on)"
        return Place(waits=False, what=what, where=where)
    if any(frame.function == "close" and JOB_FILE.search(frame.filename) for frame in stack.frames):
        return AT_END
    if any(SERVER_FILES.search(frame.filename) for frame in stack.frames) and not stack.running:
        return Place(waits=True, what="a wait for the parameter servers", where=where)
    if _is_average(stack):
        return Place(waits=True, what="the average of all ranks (mode local)", where=where)
    if is_meeting(stack) and not stack.running:
        return Place(waits=True, what="distrib.init, for the other ranks", where=where)
    for frame in inner:
        if (
            COLLECTIVE_FILES.search(frame.filename)
            and not frame.function.startswith("_")
            and frame.function != "wrapper"
        ):
            return Place(waits=True, what=frame.name, where=where)
    if any("/torch/utils/data/" in frame.filename for frame in stack.frames):
        return Place(waits=False, what="the data loader", where=where)
    if any(map(_is_backward, inner)) and not stack.running:
        return Place(waits=True, what="the backward pass, for gradients", where=where)
    if own == 0:
        line = linecache.getline(stack.frames[0].filename, stack.frames[0].line)
        if call := COLLECTIVE_CALL.search(line):
            return Place(waits=True, what=call[0].rstrip("( "), where=where)
    if _is_for_gpu(stack):
        return Place(waits=True, what="a call that waits for its GPU, and this perhaps for others", where=where)
    if stack.state == "D":
        return Place(waits=False, what="a wait for a disk or a file system", where=where)
    innermost = stack.frames[0] if stack.frames else None
    what = f"{innermost.name}" if innermost and own != 0 else ""
    return Place(waits=False, what=what or "its own code", where=where)


def is_importing(stack: Stack) -> bool:
    """Whether a rank loads a module, or its Python is not there yet."""
    return bool(stack.problem) or any(frame.filename.startswith("<frozen importlib") for frame in stack.frames)


def is_meeting(stack: Stack) -> bool:
    """Whether a rank stands where all ranks of a job find each other."""
    return any(frame.function in ("join", "_meet") and MEET_FILES.search(frame.filename) for frame in stack.frames)


def is_computing(stack: Stack) -> bool:
    """Whether a rank uses the processor and waits for nobody."""
    return stack.running and not place_of(stack).waits


def culprits(stacks: Sequence[Stack]) -> list[Stack]:
    """The ranks that the others wait for: those that do not wait themselves (on GPUs, where none is seen to wait, those with the fewest
    steps); else those that left their script early, or are at a place of their own."""
    if all(stack.problem and not stack.closing for stack in stacks):
        return []
    places = {stack.rank: place_of(stack) for stack in stacks}
    absent = [stack for stack in stacks if not places[stack.rank].waits]
    slowest = min(stack.step for stack in stacks)
    if len(absent) == len(stacks) and all(stack.gpu for stack in stacks):
        # With GPUs they stop anywhere, once so many kernels wait that no more are taken.
        return [stack for stack in stacks if stack.step == slowest]
    if absent:
        return absent
    by_place = _grouped(stacks)
    if len(by_place) > 1:
        return (
            by_place.get(AT_END)
            or by_place.get(GONE)
            or min(by_place.values(), key=lambda one: (len(one), min(s.step for s in one)))
        )
    return [stack for stack in stacks if stack.step == slowest] if slowest < max(s.step for s in stacks) else []


def wait_for_ended(stacks: Sequence[Stack]) -> bool:
    """Whether ranks wait for such as have left their script: nothing can come of it."""
    others = [stack for stack in stacks if place_of(stack) != AT_END]
    ended = max((stack.step for stack in stacks if place_of(stack) == AT_END), default=-1)
    # A GPU may compute by itself what is waited for; of a step that the ended have not taken it waits for them.
    return 0 < len(others) < len(stacks) and all(
        _surely_waits(stack) or (_is_for_gpu(stack) and stack.step > ended >= 0) for stack in others
    )


def ask_in_vain(stacks: Sequence[Stack]) -> bool:
    """The same, where they have asked the job, or wait in backward without a GPU, which may compute it by itself; collectives that
    they call may be of some ranks only."""
    others = [stack for stack in stacks if place_of(stack) != AT_END]
    return wait_for_ended(stacks) and all(
        _is_average(one)
        or any(JOB_FILE.search(frame.filename) or (not one.gpu and _is_backward(frame)) for frame in one.frames)
        for one in others
    )


def _surely_waits(stack: Stack) -> bool:
    """Whether a rank is in a collective call, by the files of those who have them, not by words that others use, too."""
    sure = any(SURE_FILES.search(frame.filename) or _is_backward(frame) for frame in stack.frames)
    return place_of(stack).waits and (sure or _is_average(stack))


def _is_average(stack: Stack) -> bool:
    return not stack.running and bool(stack.frames) and AVERAGE_FILES.search(stack.frames[0].filename) is not None


def _is_for_gpu(stack: Stack) -> bool:
    if not stack.gpu or not stack.frames:
        return False
    inner = stack.frames[0]
    return bool(GPU_FILES.search(inner.filename) or GPU_CALL.search(linecache.getline(inner.filename, inner.line)))


def _is_backward(frame: Frame) -> bool:
    return frame.function == "_engine_run_backward"


def all_wait(stacks: Sequence[Stack]) -> bool:
    """Whether each rank is seen to wait for others, and for none of them in particular: what is between them may be at fault."""
    return not culprits(stacks) and not all(stack.problem for stack in stacks)


def report(stacks: Sequence[Stack], silent_seconds: float) -> list[str]:
    """Who waits for whom, in lines for the terminal; the first is the verdict."""
    guilty = culprits(stacks)
    waiting = [stack for stack in stacks if stack not in guilty]
    groups = _grouped(waiting)
    waits_in = " and ".join(dict.fromkeys(place.what for place in groups if place.waits))
    waits_in = waits_in or ("kernels on their GPUs" if waiting else "a collective")
    if guilty and waiting:
        rank = guilty[0]
        others = f"{len(waiting)} rank{'s wait' if len(waiting) > 1 else ' waits'} for it in {waits_in}"
        if len(guilty) > 1:
            who = f"ranks {ranges([stack.rank for stack in guilty])} are"
            others = others.replace(" for it ", " for them ")
        else:
            who = f"rank {rank.rank} on {rank.host} is"
        lines = [f"no progress for {silent_seconds:g} s: {who} in {place_of(rank)}; {others}"]
    elif guilty:
        lines = [f"no progress for {silent_seconds:g} s, and no rank is seen to wait for another"]
    elif not all_wait(stacks):
        lines = [f"no progress for {silent_seconds:g} s, and no stack can be read: {stacks[0].problem}"]
    else:
        lines = [
            f"no progress for {silent_seconds:g} s: all {len(stacks)} ranks wait in {waits_in}; is the network up?"
        ]
    for place, members in _grouped(stacks).items():
        steps = sorted({stack.step for stack in members if stack.step >= 0})
        at = f", step {steps[0]}" + (f" to {steps[-1]}" if len(steps) > 1 else "") if steps else ""
        shown = name_hosts(stack.host for stack in members)
        lines.append(
            f"  rank{'s' * (len(members) > 1)} {ranges([stack.rank for stack in members])} on {shown}: in {place}{at}"
        )
    if wait_for_ended(stacks):
        lines.append(
            "  let all ranks leave their loops after as many steps: where a measurement decides (early stopping), by that of all, such as "
            "job.all_reduce(loss)"
        )
    return lines


def _grouped(stacks: Sequence[Stack]) -> dict[Place, list[Stack]]:
    groups: dict[Place, list[Stack]] = {}
    for stack in stacks:
        groups.setdefault(place_of(stack), []).append(stack)
    return groups
