"""Sharded loaders: shares of samples, batches and samplers of each rank."""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import count, islice, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

from distrib.errors import TrainingError
from distrib.training.data.sampler import _global_batches, share
from distrib.training.data.sharded_loader import _every_nth
from tests.support.sharded_loaders import flat, read, sharded

shapes = given(
    samples=st.integers(1, 300), ranks=st.integers(1, 9), batch_size=st.integers(1, 20), shuffle=st.booleans()
)


@shapes
@settings(deadline=None, max_examples=150)
def test_evaluation_reads_every_sample_once_and_training_takes_equal_steps(samples, ranks, batch_size, shuffle):
    loader = DataLoader(range(samples), batch_size, shuffle=shuffle)
    if samples < ranks:
        with pytest.raises(TrainingError, match="too few"):
            sharded(loader, 0, ranks)
        return
    for training in (True, False):
        loaders = [sharded(loader, rank, ranks, training) for rank in range(ranks)]
        shares = [read(one) for one in loaders]
        steps = [len(batches) for batches in shares]
        assert steps == [len(one) for one in loaders]
        seen = Counter(x for batches in shares for batch in batches for x in batch)
        assert seen.keys() == set(range(samples))
        assert all(1 <= len(batch) <= batch_size for batches in shares for batch in batches)
        if training or batch_size > 1:
            assert len(set(steps)) == 1
        if not training or batch_size > 1:
            assert set(seen.values()) == {1}
        assert sum(seen.values()) - samples < ranks


@shapes
def test_drop_last_gives_full_batches_only(samples, ranks, batch_size, shuffle):
    loader = DataLoader(range(samples), batch_size, shuffle=shuffle, drop_last=True)
    if samples < ranks * batch_size:
        with pytest.raises(TrainingError, match="drop_last"):
            sharded(loader, 0, ranks)
        return
    shares = [read(sharded(loader, rank, ranks)) for rank in range(ranks)]
    assert {len(batch) for batches in shares for batch in batches} == {batch_size}
    seen = [x for batches in shares for batch in batches for x in batch]
    assert len(seen) == len(set(seen)) == samples // (ranks * batch_size) * ranks * batch_size


@given(st.integers(0, 1000), st.integers(0, 300), st.integers(1, 20))
def test_shares_of_a_range_are_even_and_in_order(start, size, ranks):
    shares = [share(start, start + size, rank, ranks) for rank in range(ranks)]
    assert [x for part in shares for x in part] == list(range(start, start + size))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_batches_of_all_ranks_form_the_global_batch_of_one_process():
    """Four ranks with batches of 8 together read the batches of one rank with 32, in each epoch."""
    one = sharded(DataLoader(range(440), 32, shuffle=True), 0, 1)
    four = [sharded(DataLoader(range(440), 8, shuffle=True), rank, 4) for rank in range(4)]
    epochs = []
    for _ in range(2):
        whole = read(one)
        assert whole == [flat(parts) for parts in zip(*map(read, four), strict=True)]
        epochs.append(whole)
    assert epochs[0] != epochs[1]


def test_a_sampler_of_10_billion_samples_is_sharded_lazily():
    """A sampler may have 10^10 samples with replacement, as in minGPT, which stops after a number of steps."""
    loaders = []
    for rank in range(2):
        source = RandomSampler(range(1000), replacement=True, num_samples=10**10)
        loaders.append(sharded(DataLoader(range(1000), 32, sampler=source), rank, 2))
    assert {len(loader) for loader in loaders} == {10**10 // 64}
    first = [[batch.tolist() for batch in islice(loader, 200)] for loader in loaders]
    again = [[batch.tolist() for batch in islice(loader, 200)] for loader in loaders]
    assert first[0] != first[1] and first != again
    drawn = [index for batches in first for batch in batches for index in batch]
    assert len(drawn) == 2 * 200 * 32 and len(set(drawn)) == 1000


def test_a_small_last_batch_is_evened_out_with_the_one_before():
    edges = _global_batches(32 + 4, ranks=4, batch_size=8, drop_last=False, wrap=True)
    assert [stop - start for start, stop in pairwise(edges)] == [18, 18]


def test_the_order_follows_the_generator_without_changing_its_state(job):
    generator = torch.Generator().manual_seed(11)
    state, before = generator.get_state(), torch.get_rng_state()
    order = read(job.prepare(DataLoader(range(20), 20, shuffle=True, generator=generator)))[0]
    assert order == torch.randperm(20, generator=torch.Generator().manual_seed(11)).tolist()
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(torch.get_rng_state(), before)


def test_any_sampler_is_sharded():
    sampler = WeightedRandomSampler([1.0] * 30, 20)
    shares = [read(sharded(DataLoader(range(30), 5, sampler=sampler), rank, 2)) for rank in range(2)]
    whole = read(sharded(DataLoader(range(30), 10, sampler=sampler), 0, 1))
    assert whole == [a + b for a, b in zip(*shares, strict=True)]


def test_batch_samplers_are_sharded_by_batch():
    batches = [[0, 1], [2], [3, 4, 5], [6], [7]]
    loaders = [DataLoader(range(8), batch_sampler=batches) for _ in range(2)]
    assert [read(sharded(one, rank, 2, False)) for rank, one in enumerate(loaders)] == [batches[::2], batches[1::2]]
    trained = [read(sharded(one, rank, 2, True)) for rank, one in enumerate(loaders)]
    assert trained == [batches[::2], [[2], [6], [0, 1]]]


def test_a_loader_without_batches_is_sharded_by_sample():
    assert [int(x) for x in sharded(DataLoader(range(7), batch_size=None), 1, 2, False)] == [1, 3, 5]


def test_a_distributed_sampler_is_kept_and_its_epoch_is_set():
    sampler = DistributedSampler(range(20), num_replicas=2, rank=0)
    loader = sharded(DataLoader(range(20), 5, sampler=sampler), 0, 2)
    assert read(loader) != read(loader)
    with pytest.raises(TrainingError, match=r" 2 rank.*expected 3"):
        sharded(DataLoader(range(20), 5, sampler=sampler), 0, 3)


def test_a_distributed_sampler_in_a_batch_sampler_is_kept():
    sampler = DistributedSampler(range(20), num_replicas=2, rank=1)
    loader = sharded(DataLoader(range(20), batch_sampler=BatchSampler(sampler, 4, False)), 1, 2)
    first, second = flat(read(loader)), flat(read(loader))
    assert len(first) == len(second) == 10 and first != second
    with pytest.raises(TrainingError, match=r" 2 rank.*expected 3"):
        sharded(DataLoader(range(20), batch_sampler=BatchSampler(sampler, 4, False)), 0, 3)


def test_a_sampler_without_or_with_a_wrong_length_is_refused():
    class Endless(Sampler[int]):
        def __iter__(self):
            return count()

    class Repeating(Endless):
        def __len__(self):
            return 8

    with pytest.raises(TrainingError, match="Endless has no length"):
        sharded(DataLoader(range(8), 2, sampler=Endless()), 0, 2)
    with pytest.raises(TrainingError, match=r"Repeating .* 8, .* 1048704"):
        read(sharded(DataLoader(range(8), 2, sampler=Repeating()), 0, 2))


def test_a_stream_is_sharded_in_whole_rounds_for_training():
    whole = [list(_every_nth(iter("abcde"), rank, 2, whole_rounds=lambda: True)) for rank in range(2)]
    assert whole == [["a", "c"], ["b", "d"]]
    assert list(_every_nth(iter("abcde"), 0, 2, whole_rounds=lambda: False)) == ["a", "c", "e"]


def test_batches_of_other_ranks_are_not_kept_in_memory():
    class Batch:
        pass

    alive = weakref.WeakSet()

    def stream():
        for _ in range(24):
            alive.add(batch := Batch())
            assert len(alive) <= 4  # the script's batch, this rank's next, the one before, and this one
            yield batch
            del batch

    assert sum(1 for _ in _every_nth(stream(), 0, 8, whole_rounds=lambda: True)) == 3


def test_the_loader_keeps_its_options():
    loader = DataLoader(range(9), 4, num_workers=1, collate_fn=tuple, timeout=30, persistent_workers=True)
    loader.num_samples = 9  # type: ignore[attr-defined]
    kept = sharded(loader, 0, 1)
    assert kept.num_samples == 9 and not hasattr(kept, "num_classes")
    assert (kept.num_workers, kept.collate_fn, kept.timeout, kept.persistent_workers) == (1, tuple, 30, True)
    assert (kept.batch_size, len(kept), len(kept.dataset)) == (4, 3, 9)


def test_loader_workers_read_the_share_of_their_rank():
    # other start methods leave a helper process behind until this process exits
    loader = sharded(DataLoader(range(40), 5, num_workers=2, shuffle=True, multiprocessing_context="fork"), 1, 2)
    seen = set(flat(read(loader)))
    assert len(seen) == 20 and seen < set(range(40))


def test_without_gradients_each_sample_is_read_once():
    """Also if the model is in training mode."""
    with torch.no_grad():
        ranks = [flat(read(sharded(DataLoader(range(21)), rank, 2))) for rank in range(2)]
    assert sorted(ranks[0] + ranks[1]) == list(range(21))
