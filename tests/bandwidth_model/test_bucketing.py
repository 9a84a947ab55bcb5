"""Bucket boundaries in the stream of gradients."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrib.bandwidth_model.bucketing import (
    BUCKETS,
    AllReduceCost,
    candidate_bounds,
    ddp_bounds,
    even_bounds,
    finish_seconds,
    optimal_bounds,
)
from distrib.training.gradients import comm_hook

wires = st.builds(
    AllReduceCost,
    overhead_seconds=st.floats(1e-5, 1e-1),
    seconds_per_byte=st.floats(1e-10, 1e-6),
    inside_seconds_per_byte=st.floats(0, 1e-9),
)


@st.composite
def gradients(draw, most=40):
    """Draw gradient sizes (multiples of four) and their ready times, in order."""
    sizes = draw(st.lists(st.integers(1, 1 << 20).map(lambda n: 4 * n), min_size=1, max_size=most))
    waits = draw(st.lists(st.floats(0, 0.1), min_size=len(sizes), max_size=len(sizes)))
    return sizes, list(itertools.accumulate(waits))


@given(gradients(), wires, st.none() | st.integers(1, 1 << 22))
@settings(deadline=None, max_examples=50)
def test_a_cut_covers_every_byte_once(stream, wire, largest):
    sizes, ready = stream
    ends = optimal_bounds(sizes, ready, wire, max_bytes=largest)
    assert list(ends) == sorted(set(ends))
    assert ends[0] > 0 and ends[-1] == sum(sizes)
    assert len(ends) <= 2 * BUCKETS.max_atoms + len(sizes)
    assert all(end % 4 == 0 for end in ends)


@given(gradients(most=7), wires)
@settings(deadline=None, max_examples=30)
def test_no_cut_at_the_ends_of_gradients_is_better(stream, wire):
    sizes, ready = stream
    sizes = [size + (1 << 20) for size in sizes]  # too large to be merged with its neighbour
    mine = finish_seconds(optimal_bounds(sizes, ready, wire), sizes, ready, wire)
    ends = list(itertools.accumulate(sizes))
    for count in range(len(sizes)):
        for inner in itertools.combinations(ends[:-1], count):
            assert mine <= finish_seconds((*inner, ends[-1]), sizes, ready, wire) * (1 + 1e-9)


@given(st.integers(0, 1 << 24).map(lambda n: 4 * n), st.integers(1 << 12, 1 << 22))
def test_even_pieces_are_even(total, piece):
    ends = even_bounds(total, piece, 4)
    assert (ends[-1] if ends else 0) == total
    sizes = [b - a for a, b in itertools.pairwise((0, *ends))]
    assert all(0 < size <= max(piece, 4) + 4 for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 8


def test_a_slow_wire_starts_early_and_a_costly_piece_is_large():
    sizes, ready = [4 << 20] * 10, [0.02 * i for i in range(1, 11)]
    eager = optimal_bounds(
        sizes, ready, AllReduceCost(overhead_seconds=1e-4, seconds_per_byte=12e-9, inside_seconds_per_byte=1e-9)
    )
    assert eager[0] <= 4 << 20  # sent before the second gradient is ready
    lazy = optimal_bounds(sizes, ready, AllReduceCost(overhead_seconds=1.0, seconds_per_byte=12e-9))
    assert lazy == (40 << 20,)


def test_where_compute_takes_longest_the_last_piece_is_small():
    sizes, ready = [1 << 20] * 20, [0.05 * i for i in range(1, 21)]
    ends = optimal_bounds(sizes, ready, AllReduceCost(overhead_seconds=1e-3, seconds_per_byte=2e-9))
    assert sum(sizes) - ends[-2] <= 1 << 20


@pytest.mark.parametrize("largest", [1 << 20, 3 << 20])
def test_a_bound_is_kept(largest):
    ends = optimal_bounds(
        [8 << 20] * 3, [0.0, 0.0, 0.0], AllReduceCost(overhead_seconds=1.0, seconds_per_byte=1e-9), max_bytes=largest
    )
    assert max(b - a for a, b in itertools.pairwise((0, *ends))) <= largest


def lengths(ends):
    return [end - start for start, end in itertools.pairwise((0, *ends))]


@given(gradients(), wires)
@settings(deadline=None, max_examples=50)
def test_what_is_tried_covers_every_byte_and_ends_with_ddps_own_buckets(stream, wire):
    sizes, ready = stream
    tried = candidate_bounds(sizes, ready, wire)
    assert all(sum(lengths(ends)) == sum(sizes) and min(lengths(ends)) > 0 for ends in tried)
    assert tried[-1] == ddp_bounds(sizes)
    if len(tried) == 1:  # compute-bound: the network waits for the ranks
        assert sum(sizes) * wire.seconds_per_byte < finish_seconds(tried[0], sizes, ready, wire) / 2


def test_on_a_slow_wire_the_clock_decides_between_cuts_that_a_model_finds_alike():
    sizes, ready = [5 << 18] * 80, [0.2 * i / 80 for i in range(1, 81)]
    slow = AllReduceCost(overhead_seconds=2e-5, seconds_per_byte=45e-9)
    best, coarse, short, plain = candidate_bounds(sizes, ready, slow)
    late, soon = (finish_seconds(ends, sizes, ready, slow) for ends in (plain, best))
    assert soon > (1 - BUCKETS.min_gain_fraction) * late  # too close for the model to decide
    assert (
        max(lengths(short))
        <= BUCKETS.max_bucket_seconds / slow.seconds_per_byte
        < max(lengths(coarse))
        < max(lengths(plain))
    )
    fast = AllReduceCost(overhead_seconds=2e-5, seconds_per_byte=1e-10)
    assert candidate_bounds(sizes, ready, fast) == [plain]


def test_nothing_is_cut_into_nothing():
    assert optimal_bounds([], [], AllReduceCost(overhead_seconds=1.0, seconds_per_byte=1.0)) == ()


@given(st.lists(st.integers(1, 30 << 20), min_size=1, max_size=50))
def test_ddps_buckets_end_where_a_gradient_does(sizes):
    ends = ddp_bounds(sizes)
    assert ends[-1] == sum(sizes)
    assert set(ends) <= set(itertools.accumulate(sizes))
    lengths = [end - start for start, end in itertools.pairwise((0, *ends))]
    assert all(length >= 25 << 20 for length in lengths[1:-1])
    assert lengths[0] >= min(1 << 20, sum(sizes))


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=4, unique=True), st.floats(0, 100))
def test_the_trial_ignores_the_first_step_of_each_turn(paces, disturbance):
    """The first step of each turn is slow here. The candidate with the fastest other steps wins."""
    now, last, chosen = 0.0, None, None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_hook, "time", SimpleNamespace(perf_counter=lambda: now))
        patch.setattr(comm_hook.dist, "all_reduce", lambda _: None)
        for (number,) in comm_hook.compare_bounds([(number,) for number in range(len(paces))]):
            now += paces[number] + (disturbance if number != last else 0.0)
            last = chosen = number
    assert paces[chosen] == pytest.approx(min(paces), rel=1e-6)
