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
    GradientBucket,
    candidate_bounds,
    ddp_bounds,
    ddp_bucket_bytes,
    ddp_buckets,
    even_bounds,
    finish_seconds,
    hook_bucket_bytes,
    hook_buckets,
    is_averaged_by_ddp,
    optimal_bounds,
)
from distrib.bandwidth_model.workload import Gradient
from distrib.strategy import Gradients, Strategy
from distrib.training.gradients import comm_hook

wires = st.builds(
    AllReduceCost,
    overhead_seconds=st.floats(1e-5, 1e-1),
    seconds_per_byte=st.floats(1e-10, 1e-6),
    inside_seconds_per_byte=st.floats(0, 1e-6),
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


COST = AllReduceCost(overhead_seconds=1.0, seconds_per_byte=0.5, inside_seconds_per_byte=0.25)


def test_buckets_cross_the_network_one_after_the_other():
    # 6 bytes are ready at 3.0, summed inside the host until 4.5, and cross until 8.5; 4 bytes until 11.5, and 1.0 inside.
    assert finish_seconds((6, 10), [4, 2, 4], [1.0, 3.0, 2.0], COST) == 12.5
    assert finish_seconds((6, 10), [4, 2, 4], [1.0, 3.0, 20.0], COST) == 25.0
    assert finish_seconds((), [], [], COST) == 0.0


def test_of_equal_finish_times_the_fewest_buckets_are_chosen():
    free = AllReduceCost(overhead_seconds=0.0, seconds_per_byte=2.0**-10)
    assert optimal_bounds([64] * 4, [0.0] * 4, free) == (256,)


def test_boundaries_inside_a_gradient_are_multiples_of_the_grain():
    early = AllReduceCost(overhead_seconds=0.0, seconds_per_byte=1.0, inside_seconds_per_byte=1.0)
    ends = optimal_bounds([10_000, 6, 10_000], [0.0] * 3, early, grain_bytes=100)
    assert len(ends) > 5 and all(end % 100 in (0, 6) for end in ends)


def test_sizes_of_ddps_buckets():
    assert ddp_bounds([1 << 20, 24 << 20, 1 << 20, 5], None) == (1 << 20, 26 << 20, (26 << 20) + 5)
    assert ddp_bounds([3, 3, 4, 1], 6) == (6, 11)
    assert ddp_bounds([]) == ()
    assert [ddp_bucket_bytes(size) for size in (0, 33_333_333, 1 << 40)] == [2 << 20, 3_333_333, 25 << 20]
    assert [hook_bucket_bytes(size) for size in (0, 33_333_333)] == [256 << 10, 520_833]
    assert [even_bounds(0, 9), even_bounds(640, 10**6), even_bounds(640, 1), even_bounds(100, 64)] == [
        (), (640,), tuple(range(64, 641, 64)), (64, 100)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "one_rank_per_host", "total_bytes", "expected"),
    [
        (Strategy(), True, 1 << 30, True),
        (Strategy(), False, 256 << 10, True),
        (Strategy(), False, (256 << 10) + 1, False),
        (Strategy(gradients=Gradients("fp16")), True, 1, False),
        (Strategy(all_reduce="hierarchical"), True, 1, False),
        (Strategy(bucket_bytes=1 << 20), True, 1, False),
    ],
)
def test_exact_gradients_of_one_rank_per_host_or_small_models_are_averaged_by_ddp(
    strategy, one_rank_per_host, total_bytes, expected
):
    assert is_averaged_by_ddp(total_bytes, strategy, one_rank_per_host=one_rank_per_host) is expected


STREAM = [
    Gradient(name=f"p{n}", elements=(n + 1) << 18, size_bytes=(n % 3 + 1) << 20, ready_seconds=0.1 * (7 - abs(n - 7)))
    for n in range(10)
]
TOTAL = sum(gradient.size_bytes for gradient in STREAM)


def test_buckets_of_ddp_sum_up_their_gradients():
    first, *_, last = found = ddp_buckets(STREAM, 5 << 20)
    assert first == GradientBucket(
        size_bytes=6 << 20, elements=6 << 18, tensors=3, ready_seconds=STREAM[2].ready_seconds
    )
    assert last == GradientBucket(
        size_bytes=1 << 20, elements=10 << 18, tensors=1, ready_seconds=STREAM[9].ready_seconds
    )
    assert found[2].ready_seconds == STREAM[7].ready_seconds  # the latest of gradients 6 to 8, not the last
    assert [bucket.size_bytes >> 20 for bucket in ddp_buckets(STREAM)] == [1, 18]


def test_the_hook_keeps_the_buckets_that_must_stay_whole_or_that_ddp_averages():
    whole = Strategy(gradients=Gradients("powersgd", rank=4), bucket_bytes=5 << 20)
    assert hook_buckets(STREAM, whole, COST, ranks_per_host=2) == ddp_buckets(STREAM, 5 << 20)
    assert hook_buckets(STREAM, Strategy(), COST, ranks_per_host=1) == ddp_buckets(STREAM, 2 << 20)
    many = [*STREAM, *STREAM, *STREAM]  # 57 MiB: a tenth is 5.7 MiB
    assert hook_buckets(many, Strategy(), COST, ranks_per_host=1) == ddp_buckets(many, ddp_bucket_bytes(3 * TOTAL))


def test_the_hook_divides_ddps_buckets_evenly_where_a_size_is_given_or_inside_one_host():
    given_size = hook_buckets(STREAM, Strategy(bucket_bytes=5 << 20), COST, ranks_per_host=2)
    assert [bucket.size_bytes >> 20 for bucket in given_size] == [3, 3, 3, 3, 3, 3, 1]
    assert given_size[0] == GradientBucket(
        size_bytes=3 << 20, elements=3 << 18, tensors=3, ready_seconds=STREAM[2].ready_seconds
    )
    default = hook_buckets(STREAM, Strategy(), None, ranks_per_host=2)
    assert [bucket.size_bytes for bucket in default] == [1 << 20] * 19
    assert [bucket.ready_seconds for bucket in default[:3]] == [STREAM[n].ready_seconds for n in (0, 1, 1)]
    assert [bucket.elements for bucket in default[:3]] == [1 << 18, 1 << 18, 1 << 18]


def test_the_hook_joins_and_divides_buckets_where_the_cost_of_a_bucket_is_known():
    wire = AllReduceCost(overhead_seconds=0.01, seconds_per_byte=1e-8)
    found = hook_buckets(STREAM, Strategy(), wire, ranks_per_host=2)
    ready = [gradient.ready_seconds for gradient in STREAM]
    sizes = [gradient.size_bytes for gradient in STREAM]
    ends = optimal_bounds(sizes, ready, wire, max_bytes=wire.large_enough_bytes)
    assert [bucket.size_bytes for bucket in found] == lengths(ends) and 1 < len(ends) < len(STREAM)
    owner = [next(n for n, edge in enumerate(itertools.accumulate(sizes)) if edge >= end) for end in ends]
    assert [bucket.ready_seconds for bucket in found] == [ready[n] for n in owner]
    begins = [next(n for n, edge in enumerate(itertools.accumulate(sizes)) if edge > end) for end in (0, *ends[:-1])]
    assert [bucket.tensors for bucket in found] == [last - first + 1 for first, last in zip(begins, owner, strict=True)]
    elements = sum(gradient.elements for gradient in STREAM)
    assert [bucket.elements for bucket in found] == pytest.approx([n / TOTAL * elements for n in lengths(ends)])


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


def lengths(ends):
    return [end - start for start, end in itertools.pairwise((0, *ends))]


@pytest.mark.parametrize("largest", [1 << 20, 3 << 20])
def test_a_bound_is_kept(largest):
    ends = optimal_bounds(
        [8 << 20] * 3, [0.0, 0.0, 0.0], AllReduceCost(overhead_seconds=1.0, seconds_per_byte=1e-9), max_bytes=largest
    )
    assert max(b - a for a, b in itertools.pairwise((0, *ends))) <= largest


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
