"""Lists of whole numbers as people and the kernel write them. Standard library only: rank agents import it."""

from __future__ import annotations

from collections.abc import Iterable


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
