"""Division of samples among ranks: global batches, shares, and the sampler of one rank."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from distrib.errors import TrainingError
from distrib.training.data.sampler import ShardSampler, _global_batches, proportional, share


@pytest.mark.parametrize(
    ("samples", "ranks", "batch_size", "drop_last", "wrap", "sizes"),
    [
        (64, 4, 8, False, True, [32, 32]),
        (40, 4, 8, False, True, [32, 8]),  # two samples for each rank
        (39, 4, 8, False, True, [20, 19]),
        (33, 4, 8, False, False, [17, 16]),
        (100, 4, 8, False, True, [32, 32, 18, 18]),
        (3, 2, 8, False, True, [3]),
        (4, 4, 8, False, True, [4]),
        (8, 4, 1, False, True, [4, 4]),
        (6, 4, 1, False, True, [4, 4]),  # continues with the first two
        (10, 4, 1, False, True, [4, 4, 4]),
        (6, 4, 1, False, False, [4, 2]),
        (5, 2, 2, False, True, [3, 2]),
        (63, 4, 8, True, True, [32]),
        (64, 4, 8, True, False, [32, 32]),
    ],
)
def test_sizes_of_global_batches(samples, ranks, batch_size, drop_last, wrap, sizes):
    edges = _global_batches(samples, ranks, batch_size, drop_last=drop_last, wrap=wrap)
    assert edges[0] == 0 and [stop - start for start, stop in pairwise(edges)] == sizes
    assert len(edges) == len(sizes) + 1 and edges[-1] == list(edges)[-1] and edges[-2] == list(edges)[-2]
    with pytest.raises(IndexError):
        edges[len(edges)]


@pytest.mark.parametrize(
    ("samples", "batch_size", "drop_last", "words", "hint"),
    [
        (3, 8, False, "3 sample(s) are too few for 4 ranks", "fewer ranks or more data;"),
        (3, 1, False, "3 sample(s) or batch(es) are too few", "fewer ranks or more data;"),
        (31, 8, True, "31 sample(s) are too few for 4 ranks x 8 with drop_last", "smaller batches or no drop_last;"),
    ],
)
def test_too_few_samples_are_refused(samples, batch_size, drop_last, words, hint):
    with pytest.raises(TrainingError) as refused:
        _global_batches(samples, 4, batch_size, drop_last=drop_last, wrap=True)
    assert words in str(refused.value) and hint in str(refused.value.hint)
    assert refused.value.code == "dataset-too-small"


@pytest.mark.parametrize(
    ("samples", "speeds", "sizes"),
    [
        (16, (80.0, 40.0), [11, 5]),
        (10, (1.0, 1.0, 1.0), [4, 3, 3]),
        (7, (3.0, 2.0), [4, 3]),
        (14, (3.0, 2.0, 1.0), [7, 5, 2]),
        (9, (100.0, 1.0, 1.0), [5, 2, 2]),
        (6, (100.0, 1.0, 1.0), [2, 2, 2]),
        (5, (1.0, 1.0, 1.0), [2, 2, 1]),
        (4, (1.0, 1.0), [2, 2]),
        (3, (5.0, 1.0), [2, 1]),
        (2, (5.0, 1.0), [1, 1]),
    ],
)
def test_samples_in_proportion_to_speeds(samples, speeds, sizes):
    assert proportional(samples, speeds) == sizes
    parts = [share(3, 3 + samples, rank, len(speeds), speeds) for rank in range(len(speeds))]
    assert [len(part) for part in parts] == sizes
    assert [x for part in parts for x in part] == list(range(3, 3 + samples))


def test_shares_are_even_without_a_speed_of_each_rank_or_a_sample_for_it():
    assert [share(0, 7, rank, 3) for rank in range(3)] == [range(3), range(3, 5), range(5, 7)]
    assert [share(1, 3, rank, 3, (9.0, 1.0, 1.0)) for rank in range(3)] == [range(1, 2), range(2, 3), range(3, 3)]
    assert share(0, 8, 0, 2, (9.0, 1.0, 1.0)) == range(4)
    assert share(0, 3, 0, 3, (9.0, 1.0, 1.0)) == range(1)


def part_of(source: Any, rank: int = 0, ranks: int = 1, **changes: Any) -> ShardSampler:
    options = {
        "batch_size": 4, "drop_last": False, "seed": 5, "wrap": lambda: True, "speeds": lambda step: (),
        "on_read": lambda: None,
    }  # fmt: skip
    return ShardSampler(source, rank=rank, ranks=ranks, **{**options, **changes})


def test_the_sizes_of_each_batch_are_those_of_this_rank_and_of_all():
    sampler = part_of(SequentialSampler(range(21)), 1, 2)
    assert sampler.sizes is None and sampler.first_order == ""
    assert list(sampler) == [[4, 5, 6, 7], [12, 13, 14, 15], [19, 20]]
    assert list(sampler.sizes) == [(4, 8), (4, 8), (2, 5)]
    assert len(sampler) == 3 and not sampler.is_uneven and sampler.first_order == ""
    assert list(part_of(SequentialSampler(range(21)), 1, 2, drop_last=True)) == [[4, 5, 6, 7], [12, 13, 14, 15]]


def test_items_of_a_batch_sampler_count_as_many_samples_as_they_hold():
    items = [[0, 1], "text", b"bytes", 7, torch.tensor([1, 2, 3]), torch.tensor(5)]
    sampler = part_of(items, 0, 2, batch_size=None)
    assert list(sampler)[:2] == [[0, 1], b"bytes"]
    assert list(sampler.sizes) == [(2, 3), (1, 2), (3, 4)]
    other = part_of(items, 1, 2, batch_size=None, speeds=lambda step: (100.0, 1.0))
    assert list(other)[:2] == ["text", 7] and list(other.sizes) == [(1, 3), (1, 2), (1, 4)]


@pytest.mark.parametrize("wrap", [True, False])
def test_ranks_without_a_share_of_the_last_batch_are_counted(wrap):
    samplers = [part_of(SequentialSampler(range(5)), rank, 3, batch_size=1, wrap=lambda: wrap) for rank in range(3)]
    assert [list(one) for one in samplers] == [[[0], [3]], [[1], [4]], [[2], [0]] if wrap else [[2]]]
    assert [len(one) for one in samplers] == [2, 2, 2 if wrap else 1]
    assert [one.is_uneven for one in samplers] == [not wrap] * 3


def test_the_speeds_of_a_step_divide_its_batch():
    speeds = [(), (3.0, 1.0)]
    shares = [list(part_of(range(16), rank, 2, speeds=lambda step: speeds[step])) for rank in range(2)]
    assert shares == [[[0, 1, 2, 3], [8, 9, 10, 11, 12, 13]], [[4, 5, 6, 7], [14, 15]]]


def test_an_order_with_replacement_is_the_same_for_any_number_of_ranks():
    def drawn(rank: int = 0, ranks: int = 1, **changes: Any) -> list[int]:
        source = RandomSampler(range(1000), replacement=True, num_samples=8 * 4096)
        sampler = part_of(source, rank, ranks, batch_size=4096, **changes)
        sampler.epoch = changes.get("seed", 5) - 5
        return [index for batch in sampler for index in batch]

    state = torch.get_rng_state()
    with torch.device("meta"):
        whole = drawn()
    assert torch.equal(torch.get_rng_state(), state)
    assert len(whole) == 8 * 4096 and set(whole) == set(range(1000))
    blocks = [tuple(whole[at : at + 4096]) for at in range(0, len(whole), 4096)]
    assert len(set(blocks)) == len(blocks)
    halves = drawn(0, 2), drawn(1, 2)
    assert [x for at in range(0, 4 * 4096, 4096) for half in halves for x in half[at : at + 4096]] == whole
    assert drawn(seed=6) != whole


class Drawing(Sampler[int]):
    """Sampler that draws from every global generator and one of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 12

    def __iter__(self):
        own = torch.randint(1 << 20, (3,), generator=self.generator).tolist()
        yield from [*own, *torch.randint(1 << 20, (3,)).tolist()]
        yield from [*(random.randrange(1 << 20) for _ in range(3)), *np.random.randint(1 << 20, size=3).tolist()]

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def states(source: Drawing) -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), source.generator.get_state().tolist()]  # fmt: skip


@pytest.mark.parametrize("in_batches", [False, True])
def test_every_rank_reads_the_same_random_order_and_changes_no_generator(in_batches):
    orders = []
    for start in (1, 2):  # as on ranks that have drawn other numbers before
        source = Drawing()
        torch.manual_seed(start)
        random.seed(start)
        np.random.seed(start)
        source.generator.manual_seed(start)
        before = states(source)
        read: list[None] = []
        sampler = part_of(
            BatchSampler(source, 4, False) if in_batches else source, batch_size=None if in_batches else 4,
            seed=1 << 40, on_read=lambda read=read: read.append(None),
        )  # fmt: skip
        epochs = [[*sampler]]
        digest = sampler.first_order
        sampler.epoch = 1
        epochs.append([*sampler])
        assert states(source) == before and source.epochs == [0, 1] and len(read) == 2
        assert isinstance(digest, str) and sampler.first_order == digest != ""
        orders.append((epochs, digest))
    assert orders[0] == orders[1]
    (first, second), _ = orders[0]
    assert not {x for batch in first for x in batch} & {x for batch in second for x in batch}


def test_generators_are_restored_after_an_error():
    class Failing(Drawing):
        def __iter__(self):
            yield from super().__iter__()
            raise OSError("no data")

    source = Failing()
    before = states(source)
    with pytest.raises(OSError, match="no data"):
        list(part_of(source))
    assert states(source) == before


def test_a_sampler_that_yields_far_more_than_its_length_is_refused():
    class Repeating(Sampler[int]):
        def __len__(self) -> int:
            return 8

        def __iter__(self):
            while True:
                yield 0

    with pytest.raises(TrainingError, match=r"Repeating .* 8, .* 1048704 ") as refused:
        list(part_of(Repeating()))
    assert "IterableDataset" in str(refused.value.hint) and refused.value.code == "loader-unsupported"
