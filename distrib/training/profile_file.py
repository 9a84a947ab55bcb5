"""Who wants a profile of the script, and how they get it: a file that the script names, or the launcher (`--profile`)."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from distrib.bandwidth_model.workload import Workload, write_workload
from distrib.environment import DISTRIB_PROFILE, DISTRIB_RESULT_FD
from distrib.errors import TrainingError
from distrib.training import shutdown
from distrib.training.profiler import Profiler, Wish
from distrib.utils.log import PLAIN, get_logger

log = get_logger("training")


LEAVING_SECONDS = 3.0
"""After which a script has ended that was run for its profile, whatever threads it has."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher gets, through `DISTRIB_RESULT_FD`: the workload and how many steps were measured, or why there is none."""

    workload: Workload | None = None
    steps: int = 0
    problem: str = ""

    def send(self) -> None:
        data = msgspec.json.encode(self)
        while data:
            data = data[os.write(int(os.environ[DISTRIB_RESULT_FD]), data) :]


class Profiles:
    """Those of one job, which measures one at a time, on one rank alone."""

    def __init__(self, device: torch.device, environ: Mapping[str, str], *, alone: bool) -> None:
        self._device, self._alone = device, alone
        self._profiler: Profiler | None = None
        text = environ.get(DISTRIB_PROFILE)
        self._for_launcher = bool(text)
        if text:
            wish = msgspec.json.decode(text, type=Wish)
            self._begin(wish, self._answer, lambda problem: self._leave(Answer(problem=problem)))

    @property
    def measures(self) -> bool:
        """Whether one is being measured."""
        return self._profiler is not None and not self._profiler.finished

    def begin(self, path: str | os.PathLike[str], *, warmup_steps: int, steps: int) -> None:
        """See `Job.profile`."""
        if self.measures:
            raise TrainingError("a profile is being measured already", hint="leave out job.profile() or --profile")
        wish = Wish(name=Path(sys.argv[0] or "script").stem, warmup_steps=warmup_steps, steps=steps)
        self._begin(wish, lambda workload, _: write_workload(path, workload))

    def watch(self, thing: Any) -> None:
        """Something was prepared."""
        if self._profiler:
            self._profiler.watch(thing)

    def end(self) -> None:
        """The script ends: what was measured has to do. Raises TrainingError where it is too little; the launcher is told instead."""
        if not self._profiler or self._profiler.finished:
            return
        try:
            self._profiler.close()
        except TrainingError as error:
            if not self._for_launcher:
                raise
            Answer(problem=error.what).send()
        except SystemExit:
            pass  # the script is at its end anyway

    def _begin(
        self, wish: Wish, done: Callable[[Workload, int], None], hopeless: Callable[[str], None] | None = None
    ) -> None:
        if not self._alone:
            raise TrainingError("a profile is measured on one rank alone", hint="run the script without other ranks")
        self._profiler = Profiler(self._device, wish, done, hopeless=hopeless)
        atexit.register(self._at_exit)

    def _answer(self, workload: Workload, steps: int) -> None:
        self._leave(Answer(workload=workload, steps=steps))

    def _leave(self, answer: Answer) -> None:
        """The launcher knows all that it wanted to."""
        answer.send()
        shutdown.exit_within(LEAVING_SECONDS)
        raise SystemExit(0)

    def _at_exit(self) -> None:
        try:
            self.end()
        except TrainingError as error:
            log.info(f"{error}", extra=PLAIN)
