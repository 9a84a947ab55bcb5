"""Lists of numbers as ranges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distrib.utils.ranges import ranges


@given(st.sets(st.integers(0, 50), min_size=1))
def test_ranges_name_every_number(numbers):
    named = set()
    for part in ranges(numbers).split(","):
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == numbers
