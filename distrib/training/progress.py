"""Progress of a loop: tqdm's bar if tqdm is installed, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

T = TypeVar("T")

LINE_INTERVAL_SECONDS = 10.0
"""Interval of the lines without tqdm: that at which the launcher shows a bar on a terminal."""


def show_progress(iterable: Iterable[T], *, total: int | None, text: str, is_shown: bool) -> Iterator[T]:
    """Yield the items of an iterable, and show their number on standard error.

    Args:
        iterable: The items.
        total: Their number; None: the iterable's length if it has one.
        text: Text before the bar or in each line.
        is_shown: False to show nothing.
    """
    if not is_shown:
        yield from iterable
    elif tqdm is not None:
        with tqdm(iterable, desc=text or None, total=total) as bar:
            yield from bar
    else:
        yield from _with_lines(iterable, total, text)


def _with_lines(iterable: Iterable[T], total: int | None, text: str) -> Iterator[T]:
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    begun = shown = time.monotonic()
    for number, item in enumerate(iterable, 1):
        yield item
        now = time.monotonic()
        if now - shown >= LINE_INTERVAL_SECONDS or number == total:
            shown = now
            of_all = f" of {total}" if total is not None else ""
            rate = number / max(now - begun, 1e-9)
            print(f"{text and text + ': '}{number}{of_all}, {rate:,.1f}/s", file=sys.stderr, flush=True)
