"""Output of a rank: lines, progress bars and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from distrib.training.job_parts import JobParts
from distrib.training.progress import show_progress

T = TypeVar("T")


class RankOutput:
    """Base class of `Job`: methods that print or report metrics, without waiting for other ranks."""

    _parts: JobParts

    @property
    def is_main(self) -> bool:
        """True on the main rank, which prints and saves. The main rank is rank 0.

        In mode async it may become another rank, so read this property each time. A disconnected rank waits here for the servers.
        """
        return self._parts.is_main

    def log(self, /, **metrics: Any) -> None:
        """Send metrics of this rank to the launcher, which writes them to `metrics.jsonl`. Does not wait for other ranks.

        Args:
            metrics: Numbers, strings, or lists and dicts of them. A tensor of one element is converted, which waits for its GPU.

        Raises:
            TrainingError: A value has another type, or all metrics together exceed 4 KiB.
        """
        self._parts.log(metrics)

    def print(self, *values: Any, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = True) -> None:
        """Print on the main rank only.

        Args:
            values: As for `print`.
            sep: As for `print`.
            end: As for `print`.
            file: As for `print`.
            flush: As for `print`, but True by default.
        """
        if self.is_main:
            print(*values, sep=sep, end=end, file=file, flush=flush)

    def progress(self, items: Iterable[T], /, *, total: int | None = None, text: str = "") -> Iterator[T]:
        """Iterate over items, with a progress bar on the main rank. Uses tqdm if it is installed, else prints a line every 10 s.

        Args:
            items: Such as a prepared loader.
            total: Number of items; None: their length, if they have one.
            text: Text before the bar.

        Example:
            for inputs, targets in job.progress(loader, text=f"epoch {epoch}"):
        """
        return show_progress(items, total=total, text=text, is_shown=self.is_main)
