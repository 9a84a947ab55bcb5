"""Hang report: the place of every rank's main thread, and the ranks that the others wait for."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from distrib.cluster.node import name_hosts
from distrib.utils.json_text import decode_json
from distrib.utils.ranges import ranges
from distrib_launch.supervisor.rank_state import RankState

COLLECTIVE_CALL = re.compile(
    r"\b(all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|barrier|bcast|broadcast|gather|scatter|reduce|"
    r"recv|send|sendrecv|wait|waitall|probe)\w*(?=\s*\()",
    re.IGNORECASE,
)
"""Calls in a script's source line that wait for other ranks; MPI's functions are compiled and have no frame."""

GPU_CALLS = (".item(", ".cpu(", ".cuda(", ".to(", ".tolist(", ".numpy(", ".synchronize(", ".nonzero(")
"""Calls in a source line that wait for the GPU, which may itself wait for other ranks: the script runs ahead of its collectives."""

SHUTDOWN_FILE = "/distrib/training/shutdown.py"
RENDEZVOUS_FILE = "/distrib/training/rendezvous.py"
LOCAL_SGD_FILE = "/distrib/training/strategies/local_sgd.py"
SERVER_FILES = ("/distrib/training/parameter_server/", "/distrib/training/strategies/parameter_server.py")
GPU_FILES = (
    "/torch/cuda/streams.py", "/torch/cuda/__init__.py", "/distrib/training/nan_guard.py", "/distrib/training/to_device.py",
)  # fmt: skip
LOADER_FILES = ("/torch/utils/data/",)
COLLECTIVE_FILES = ("/torch/distributed/", "/horovod/", "/mpi4py/")
JOB_FILE = "/distrib/training/job.py"
TORCH_API_FILE = "/torch/distributed/distributed_c10d.py"
LIBRARY_FILES = (
    "<", "/site-packages/", "/dist-packages/", "/lib/python3.", "/distrib/training/", "/distrib_launch/rank_agent/",
)  # fmt: skip
"""Fragments of paths; `tests/launch/supervisor/test_hangs.py` checks that the files of distrib and torch exist."""


class StackFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One call on a stack."""

    name: str
    filename: str
    line: int

    @property
    def function(self) -> str:
        """Return the function's name without its class, which py-spy shows from Python 3.11 on."""
        return self.name.rpartition(".")[2]

    def source_line(self) -> str:
        """Return the text of its line, empty if the file cannot be read here."""
        return linecache.getline(self.filename, self.line)


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


AT_END = RankPlace(waits=True, what="job.close or MPI_Finalize, at the end of its script")
GPU_WAIT = "a call that waits for its GPU, and this perhaps for others"


class _Thread(msgspec.Struct):
    """Thread in the JSON of py-spy and `stack_dump`."""

    thread_name: str | None
    active: bool
    frames: tuple[StackFrame, ...]
    state: str = ""
    gpu: bool = True


def parse_stack(state: RankState, dump: bytes) -> Stack:
    """Return the stack in a JSON dump of py-spy.

    Args:
        state: State of the rank.
        dump: Output of `py-spy dump --json`, or an error message.
    """
    try:
        threads = decode_json(dump, list[_Thread])
        problem = "no Python thread"
    except msgspec.DecodeError:
        threads, problem = [], (dump.decode(errors="replace").strip().splitlines() or ["no stack"])[-1][:200]
    stack = Stack(
        rank=state.plan.rank, host=state.plan.host, step=state.step, closing=state.closing, problem=problem
    )  # fmt: skip
    if not threads:
        return stack
    main = next((thread for thread in threads if thread.thread_name == "MainThread"), threads[0])
    return msgspec.structs.replace(
        stack, frames=main.frames, running=main.active, state=main.state, gpu=main.gpu, problem=""
    )


def place_of(stack: Stack) -> RankPlace:
    """Return the activity of one rank as its stack shows it.

    Args:
        stack: Stack of the rank.
    """
    if stack.closing and (stack.problem or _passes(stack, SHUTDOWN_FILE)):
        return AT_END
    if stack.problem:
        return RankPlace(waits=False, what=f"an unknown place: {stack.problem}")
    own = next((i for i, frame in enumerate(stack.frames) if not _is_in(frame, LIBRARY_FILES)), None)
    where = ""
    if own is not None:
        frame = stack.frames[own]
        where = f"{Path(frame.filename).name}:{frame.line} in {frame.name}"
    if stack.state in ("T", "t"):
        what = "a stop by a signal or a debugger (Ctrl-Z, SIGSTOP: kill -CONT lets it go on)"
    elif awaited := _awaited_ranks(stack, own):
        return RankPlace(waits=True, what=awaited, where=where)
    elif _passes(stack, *LOADER_FILES):
        what = "the data loader"
    elif _waits_for_gpu(stack):
        return RankPlace(waits=True, what=GPU_WAIT, where=where)
    elif stack.state == "D":
        what = "a wait for a disk or a file system"
    else:
        what = stack.frames[0].name if stack.frames and own != 0 else "its own code"
    return RankPlace(waits=False, what=what, where=where)


def _is_in(frame: StackFrame, files: Sequence[str]) -> bool:
    return any(file in frame.filename for file in files)


def _passes(stack: Stack, *files: str) -> bool:
    return any(_is_in(frame, files) for frame in stack.frames)


def _awaited_ranks(stack: Stack, own: int | None) -> str:
    """Return the call in which a rank waits for other ranks, empty for none. `own` is the index of the script's innermost frame."""
    if not stack.frames:
        return ""
    inner = stack.frames[:own]
    if not stack.running:
        if _passes(stack, *SERVER_FILES):
            return "a wait for the parameter servers"
        if _is_in(stack.frames[0], (LOCAL_SGD_FILE,)):
            return "the average of all ranks (mode local)"
        if _passes(stack, RENDEZVOUS_FILE):
            return "distrib.init, for the other ranks"
    for frame in inner:
        if _is_in(frame, COLLECTIVE_FILES) and not frame.function.startswith("_") and frame.function != "wrapper":
            outer = next((call for call in reversed(inner) if _is_in(call, (JOB_FILE, TORCH_API_FILE))), frame)
            return f"job.{outer.function}" if _is_in(outer, (JOB_FILE,)) else outer.name
    backward = any(frame.function == "_engine_run_backward" for frame in inner)
    if backward and not stack.running and not _passes(stack, *LOADER_FILES):
        return "the backward pass, for gradients"
    call = COLLECTIVE_CALL.search(stack.frames[0].source_line()) if own == 0 else None
    return call[0] if call else ""


def _waits_for_gpu(stack: Stack) -> bool:
    if not stack.gpu or not stack.frames:
        return False
    inner = stack.frames[0]
    return _is_in(inner, GPU_FILES) or any(call in inner.source_line() for call in GPU_CALLS)


class HangReport:
    """Report on a hang, from the stacks of all workers."""

    def __init__(self, stacks: Sequence[Stack]) -> None:
        self.stacks = stacks
        self._groups = _grouped(stacks)

    @property
    def culprits(self) -> list[Stack]:
        """Return the ranks that the other ranks wait for; none if each rank waits for all.

        These are the ranks that do not wait. If all wait: those at the end of their script, else the smallest group at one place,
        else those with the fewest steps. If none waits on GPUs: those with the fewest steps.
        """
        stacks = self.stacks
        if self._is_unreadable:
            return []
        absent = [stack for place, members in self._groups.items() if not place.waits for stack in members]
        slowest = min(stack.step for stack in stacks)
        behind = [stack for stack in stacks if stack.step == slowest]
        if absent:
            # On GPUs a rank stops at an arbitrary place, as soon as the queue of kernels is full.
            anywhere = len(absent) == len(stacks) and all(stack.gpu for stack in stacks)
            return behind if anywhere else sorted(absent, key=lambda stack: stack.rank)
        if len(self._groups) > 1:
            by_size = sorted(self._groups.values(), key=lambda group: (len(group), min(stack.step for stack in group)))
            return self._groups.get(AT_END) or by_size[0]
        return behind if len(behind) < len(stacks) else []

    @property
    def waits_for_closed(self) -> bool:
        """Return True if all other ranks wait for ranks at the end of their script, which make no further collective call."""
        others = {place: members for place, members in self._groups.items() if place != AT_END}
        ended = max((stack.step for stack in self._groups.get(AT_END, ())), default=-1)
        # A GPU may still compute the awaited result, but not in a step that the ended ranks have not taken.
        return 0 < len(others) < len(self._groups) and all(
            place.waits and (place.what != GPU_WAIT or all(stack.step > ended >= 0 for stack in members))
            for place, members in others.items()
        )

    def lines(self, silent_seconds: float) -> list[str]:
        """Return the report for the terminal; its first line is the conclusion.

        Args:
            silent_seconds: Time without progress of any rank.
        """
        lines = [f"no progress for {silent_seconds:g} s{self._conclusion()}"]
        for place, members in self._groups.items():
            steps = sorted({stack.step for stack in members if stack.step >= 0})
            at = f", step {steps[0]}" + (f" to {steps[-1]}" if len(steps) > 1 else "") if steps else ""
            hosts = name_hosts(stack.host for stack in members)
            lines.append(f"  {_ranks(members)} on {hosts}: in {place}{at}")
        if remedy := self._remedy:
            lines.append(f"  {remedy}")
        return lines

    @property
    def _remedy(self) -> str:
        """Return the advice to the user, empty if no stack can be read."""
        if self._is_unreadable:
            return ""
        if self.waits_for_closed:
            return "let all ranks leave their loops after the same number of steps; decide by a mean such as job.all_reduce(loss)"
        if not self.culprits:
            return "distrib-topo check tests the hosts and the network between them"
        if len(self.culprits) == len(self.stacks):
            return (
                "if the script works this long without a step or a line, print one in between, or raise --hang-timeout"
            )
        return (
            "let every rank make the same collective calls (backward, step, barrier, all_reduce): docs/how-to/hang.md"
        )

    def _conclusion(self) -> str:
        guilty = self.culprits
        waiting = [stack for stack in self.stacks if stack not in guilty]
        calls = " and ".join(dict.fromkeys(place.what for place in _grouped(waiting) if place.waits))
        calls = calls or ("kernels on their GPUs" if waiting else "a collective")
        if guilty and waiting:
            several = len(guilty) > 1
            who = f"{_ranks(guilty)} are" if several else f"{_ranks(guilty)} on {guilty[0].host} is"
            wait = "ranks wait" if len(waiting) > 1 else "rank waits"
            place = place_of(guilty[0])
            return f": {who} in {place}; {len(waiting)} {wait} for {'them' if several else 'it'} in {calls}"
        if guilty:
            return ", and no rank is seen to wait for another"
        if self._is_unreadable:
            return f", and no stack can be read: {self.stacks[0].problem}"
        return f": all {len(self.stacks)} ranks wait in {calls}; check the network"

    @property
    def _is_unreadable(self) -> bool:
        return all(stack.problem for stack in self.stacks) and AT_END not in self._groups


def _ranks(stacks: Sequence[Stack]) -> str:
    return f"rank{'s' * (len(stacks) > 1)} {ranges([stack.rank for stack in stacks])}"


def _grouped(stacks: Sequence[Stack]) -> dict[RankPlace, list[Stack]]:
    groups: dict[RankPlace, list[Stack]] = {}
    for stack in stacks:
        groups.setdefault(place_of(stack), []).append(stack)
    return groups
