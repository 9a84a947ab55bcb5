"""Statistics of repetitions and streams."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.probe.bench import statistics as samples


def test_outliers_are_counted_and_do_not_move_the_median():
    summary = samples.summarize([1.0, 1.001, 0.999, 1.0005, 0.9995, 3.0])
    assert summary.median == pytest.approx(1.0, rel=1e-3)
    assert (summary.outliers, summary.repetitions) == (1, 6)
    assert summary.variation < 0.001


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=40))
def test_the_median_of_any_repetitions_lies_between_minimum_and_maximum(values):
    summary = samples.summarize(values)
    assert min(values) <= summary.median <= max(values)
    assert 0 <= summary.outliers < len(values)
    assert summary.variation >= 0 <= summary.median_variation


@given(st.floats(1e5, 1e10), st.integers(0, 1 << 20), st.integers(1, 16), st.integers(20, 400))
def test_the_rate_of_a_steady_stream_is_found_after_its_burst(rate, burst, windows, count):
    stamps = [(n * 0.001, burst + int(rate * n * 0.001)) for n in range(count)]
    found = samples.stream_rates(stamps, skip_bytes=0, skip_seconds=0.002, windows=windows)
    assert 1 <= len(found) <= windows
    assert statistics.median(found) == pytest.approx(rate, rel=0.02)


def test_a_stream_that_is_too_short_has_no_rate():
    assert samples.stream_rates([(0.0, 100), (0.1, 200)], skip_bytes=0, skip_seconds=0, windows=4) == []
    assert samples.stream_rates([(0.0, 1), (0.1, 2), (0.2, 3)], skip_bytes=1000, skip_seconds=0, windows=4) == []
