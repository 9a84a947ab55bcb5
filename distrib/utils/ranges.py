"""Whole numbers, and lists of them, as people and the kernel write them. Standard library only: rank agents import it."""

from __future__ import annotations

from collections.abc import Iterable


def is_whole_number(text: str) -> bool:
    """Return True for one to nine ASCII digits: int() also accepts other scripts, and refuses or slowly reads thousands of digits.

    Args:
        text: Text of a user or of a scheduler.
    """
    return text.isascii() and text.isdecimal() and len(text) < 10


def ranges(numbers: Iterable[int]) -> str:
    """Return `0-3,7` for 0, 1, 2, 3 and 7.

    Args:
        numbers: Whole numbers in any order, each once.
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
