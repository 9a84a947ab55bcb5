"""End of a job: all ranks leave together, and a failed process exits even if a library hangs."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import time
import traceback as tracebacks
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from distrib.errors import TrainingError
from distrib.training.checks.divergence import DivergenceCheck
from distrib.training.checks.usage import UsageChecks
from distrib.training.collectives import JobCollectives
from distrib.training.compat import wait_for_gloo_callbacks
from distrib.training.rendezvous import wait_for_all_ranks
from distrib.training.strategies.base import ElasticStrategy
from distrib.training.telemetry.status_pipe import StatusPipe
from distrib.training.training_state import TrainingState
from distrib.utils.log import PLAIN, get_logger

log = get_logger("training")


@dataclass(frozen=True, kw_only=True)
class ShutdownTimeouts:
    """Longest waits at the end of a job."""

    failed_exit_seconds: float = 10.0
    """Exit of Python after a failure: destructors of communication libraries may wait for dead peers."""
    unequal_steps_gpu_seconds: float = 60.0
    """GPU computation if ranks took different numbers of steps: a GPU may wait for a collective that never comes."""


TIMEOUTS = ShutdownTimeouts()


class JobShutdown:
    """Closing of a job, once: by the script, its `with` block or the exit of the interpreter."""

    def __init__(
        self,
        state: TrainingState,
        collectives: JobCollectives,
        status: StatusPipe,
        usage: UsageChecks,
        divergence: DivergenceCheck | None,
    ) -> None:
        """Register the close of the job at the exit of the interpreter.

        Args:
            state: State of the training.
            collectives: The job's collectives.
            status: Reports to the launcher that the rank closes.
            usage: Checks that end with the job.
            divergence: Compares the ranks at close; None if replicas are not identical.
        """
        self.closed = False
        self._state, self._strategy, self._world = state, state.strategy, state.strategy.world
        self._collectives, self._status, self._usage, self._divergence = collectives, status, usage, divergence
        self._elastic = state.strategy if isinstance(state.strategy, ElasticStrategy) else None
        self._is_waiting = False
        """True while an error means that another rank has failed, because this rank has finished its own work."""
        has_others = self._world.size > 1 or self._world.comm is not None
        self._exit_watch = _ExitWatch(self._on_exit) if has_others else None

    def close(self) -> None:
        """Wait for the other ranks and disconnect. Collective."""
        self._status.closing()
        try:
            if self._world.size > 1 and not self._elastic and not dist.is_initialized():
                self._report_destroyed_group()
            else:
                self._close_together()
            self._strategy.close()
        except BaseException:
            self.abandon()
            raise
        self.closed = True
        self._usage.close()
        for stepper in self._state.steppers:
            stepper.close()
        if self._exit_watch is not None:
            self._exit_watch.close()
        if dist.is_initialized():
            wait_for_gloo_callbacks()
            dist.destroy_process_group()
        if self._world.finalize_mpi:
            self._world.finalize_mpi()

    def abandon(self) -> None:
        """Leave without the other ranks. After a failure they may never answer, and MPI's Finalize may hang."""
        if self.closed:
            return
        self.closed = True
        self._usage.close()
        if self._exit_watch is not None:
            self._exit_watch.close(failed=self._world.size > 1)
        if self._world.size > 1:
            wait_for_gloo_callbacks()

    def _close_together(self) -> None:
        if self._elastic:
            self._state.synchronize()
            self._wait_for_gpu()
            self._report_staleness(self._elastic.staleness())
            return
        if self._strategy.device.type == "cuda":
            self._detect_unequal_steps()
        for stepper in self._state.steppers:
            stepper.finalize()
        with self._waiting():
            wait_for_all_ranks(self._world, report=not self._status.is_read)
        self._strategy.synchronize()
        self._wait_for_gpu()
        with self._waiting():
            self._collectives.all_reduce(0.0, "sum")
            for observer in self._state.observers:
                observer.on_close()

    def _detect_unequal_steps(self) -> None:
        """Raise an error before this rank waits for its GPU, if the GPU waits for ranks that have taken fewer steps."""
        with self._waiting():
            wait_for_all_ranks(self._world, report=not self._status.is_read)
            unequal = self._divergence.compare_steps() if self._divergence else ""
        if not unequal:
            return
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        computed.record(torch.cuda.current_stream(self._strategy.device))
        deadline = time.monotonic() + TIMEOUTS.unequal_steps_gpu_seconds
        while not computed.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"{unequal}, and its GPU still waits for the others, which have finished their scripts",
                    hint="leave the loop after equally many steps on all ranks; decide early stopping by job.all_reduce(loss)",
                    code="step-counts-differ",
                )
            time.sleep(0.01)

    def _wait_for_gpu(self) -> None:
        if self._strategy.device.type == "cuda":
            torch.cuda.synchronize(self._strategy.device)  # destroying NCCL's group may abort transfers

    def _report_destroyed_group(self) -> None:
        for stepper in self._state.steppers:
            stepper.check_last_step(alone=True)
        effect = ", and each rank keeps its own parameters" if self._strategy.replicas_differ else ""
        if self._world.rank == 0:
            print(
                "distrib: warning: the script called torch.distributed.destroy_process_group(): the last checks between "
                f"ranks are skipped{effect}",
                flush=True,
            )

    def _report_staleness(self, seen: dict[str, float]) -> None:
        if self._elastic and self._elastic.is_main and seen and self._world.size > 1:
            self._status.metrics({"staleness": seen}, is_main=self._elastic.seems_main)
            others = f"median {seen['median']:g}, 95th percentile {seen['p95']:g}, at most {seen['max']:g}"
            print(f"distrib: a gradient was on average {seen['mean']:.2g} updates old ({others})", flush=True)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._is_waiting = True
        yield
        self._is_waiting = False

    def _on_exit(self, failed: bool) -> None:
        if failed:
            self.abandon()
            return
        try:
            if not self.closed:
                self.close()
        except TrainingError as error:
            log.info(f"rank {self._world.rank}: {error}", extra=PLAIN)
            exit_failed()
        except Exception as error:
            if not self._is_waiting:
                tracebacks.print_exc()
                exit_failed()
            # The script itself succeeded; the rank that failed reports it.
            log.info(f"rank {self._world.rank} could not wait for the other ranks: {error}", extra=PLAIN)


class _ExitWatch:
    """Call of a function when the interpreter exits, for scripts that do not close their job.

    It detects an uncaught exception and `sys.exit` with a failure. An `atexit` function alone does not get the exit code.
    """

    def __init__(self, on_exit: Callable[[bool], None]) -> None:
        """Install the hooks. `on_exit` is called with True after a failure."""
        self._leave = on_exit
        self._failed = self._abandoned = False
        self._process = os.getpid()
        self._hook, self._exit = sys.excepthook, sys.exit
        self._own_hook, self._own_exit = self._on_exception, self._on_exit  # a bound method is a new object each time
        sys.excepthook, sys.exit = self._own_hook, self._own_exit
        atexit.register(self._at_exit)

    def close(self, *, failed: bool = False) -> None:
        """Stop watching. If `failed`, the process ends `failed_exit_seconds` after Python begins to exit."""
        self._abandoned = failed
        if not failed:
            atexit.unregister(self._at_exit)
        if sys.excepthook == self._own_hook:
            sys.excepthook = self._hook
        if sys.exit == self._own_exit:
            sys.exit = self._exit

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._failed = True
        self._hook(kind, error, traceback)

    def _on_exit(self, status: str | int | None = None, /) -> NoReturn:
        self._failed = status not in (None, 0)
        self._exit(status)

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # not in a forked worker
            if not self._abandoned:
                self._leave(self._failed)
            if self._abandoned:
                faulthandler.dump_traceback_later(
                    TIMEOUTS.failed_exit_seconds, exit=True, file=sys.__stderr__ or sys.stderr
                )


def succeeded(error: BaseException | None) -> bool:
    """Test if a `with` block ended successfully.

    Args:
        error: The exception of the block, None without one.

    Returns:
        True without exception, and for SystemExit with success.
    """
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))


def exit_failed() -> NoReturn:
    """End this process with exit code 1 while Python is already exiting, which would end it with 0."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    os._exit(1)
