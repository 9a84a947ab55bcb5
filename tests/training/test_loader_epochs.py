"""Epochs of sharded loaders: passes, steps, evaluations, reads of a single rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Sampler

from distrib.training.data.epoch import StepClock
from tests.support.sharded_loaders import read, sharded


def test_epochs_advance_and_can_be_set_and_saved():
    loader = sharded(DataLoader(range(50), 5, shuffle=True), 1, 2)
    first, second = read(loader), read(loader)
    assert first != second
    loader.set_epoch(0)
    assert read(loader) == first
    again = sharded(DataLoader(range(50), 5, shuffle=True), 1, 2)
    again.load_state_dict(loader.state_dict())
    assert read(again) == second


class TwoLoaders:
    """Two loaders as one of two ranks reads them, and the steps that both ranks take."""

    def __init__(self) -> None:
        self.steps = 0
        self.kept: list[Iterator[torch.Tensor]] = []
        clock = StepClock(lambda: self.steps)
        self.loaders = [
            sharded(DataLoader(range(40), 5, shuffle=True), 0, 2, seed=seed, clock=clock) for seed in (5, 6)
        ]
        self.loader = self.loaders[0]

    def epoch(self, which: int, *between: Callable[[], object]) -> list[list[int]]:
        """Train on all batches of a loader. After each step, call the next function of `between` on this rank only."""
        learnt = []
        for number, batch in enumerate(self.loaders[which]):
            learnt.append(batch.tolist())
            self.steps += 1
            between[number % len(between)]() if between else None
        return learnt

    def steps_on_first_batches(self, which: int, *between: Callable[[], object]) -> list[list[int]]:
        """Train on the first batch of each of three passes. After each step, call the next function of `between`."""
        learnt = []
        for number in range(3):
            learnt.append(next(iter(self.loaders[which])).tolist())
            self.steps += 1
            between[number % len(between)]() if between else None
        return learnt

    def peek(self, which: int) -> None:
        next(iter(self.loaders[which]))

    def peek_and_keep(self, which: int) -> None:
        self.kept.append(iter(self.loaders[which]))
        next(self.kept[-1])

    def evaluate(self, which: int) -> None:
        sum(len(batch) for batch in self.loaders[which])

    @property
    def states(self) -> list[dict[str, int]]:
        return [loader.state_dict() for loader in self.loaders]


LOADERS = st.integers(0, 1)
READS = st.lists(st.tuples(st.sampled_from([TwoLoaders.peek, TwoLoaders.evaluate]), LOADERS), max_size=3)


@given(st.lists(st.tuples(LOADERS, READS, READS), min_size=1, max_size=5), st.booleans())
@settings(deadline=None, max_examples=60)
def test_reads_of_one_rank_alone_do_not_change_its_training_batches(epochs, keeps):
    plain, curious = TwoLoaders(), TwoLoaders()
    if keeps:
        curious.peek_and_keep(epochs[0][0])
    for which, before, between in epochs:
        for look, other in before:
            look(curious, other)
        alone = (functools.partial(look, curious, other) for look, other in between)
        assert curious.epoch(which, *alone) == plain.epoch(which)
        assert curious.states == plain.states
        for loader, saved in zip(curious.loaders, plain.states, strict=True):
            loader.load_state_dict(saved)


@given(st.lists(LOADERS, min_size=1, max_size=4), st.booleans(), st.none() | LOADERS)
@settings(deadline=None, max_examples=40)
def test_reads_of_one_rank_alone_do_not_change_steps_on_first_batches(epochs, keeps, evaluates):
    plain, curious = TwoLoaders(), TwoLoaders()
    if keeps:
        curious.peek_and_keep(epochs[0])
    for which in epochs:
        alone = () if evaluates is None else (lambda: curious.evaluate(evaluates),)
        assert curious.steps_on_first_batches(which, *alone) == plain.steps_on_first_batches(which)


def test_a_new_pass_after_a_step_has_another_first_batch():
    script, taken = TwoLoaders(), []
    for _ in range(4):
        taken.append(next(iter(script.loader)).tolist())
        script.steps += 1
    assert len({tuple(batch) for batch in taken}) == 4
    assert next(iter(script.loader)).tolist() == next(iter(script.loader)).tolist()
    assert script.loader.state_dict()["epoch"] == 4


def test_an_abandoned_pass_is_an_epoch_if_it_had_a_step():
    script = TwoLoaders()
    for _ in script.loader:
        break
    assert script.loader.state_dict()["epoch"] == 0
    for _ in script.loader:
        script.steps += 1
        assert script.loader.state_dict()["epoch"] == 1
        break
    assert script.loader.state_dict()["epoch"] == 1


def test_an_epoch_ends_with_its_pass_if_it_had_a_step():
    ended, steps = [], 0
    loader = sharded(DataLoader(range(4), 2), 0, 1, clock=StepClock(lambda: steps), on_epoch_end=ended.append)
    for _ in loader:
        pass
    for epoch in range(3):
        for _ in loader:
            steps += 1
        assert [one.number for one in ended] == [*range(epoch + 1)]


def test_two_concurrent_passes_have_different_orders():
    loader = sharded(DataLoader(range(50), 10, shuffle=True), 0, 1)
    pairs = [
        (int(a), int(b)) for one, other in zip(loader, loader, strict=True) for a, b in zip(one, other, strict=True)
    ]
    assert len(pairs) == 50 and sum(a == b for a, b in pairs) < 10


def test_the_epoch_of_any_sampler_can_be_set():
    class Turned(Sampler[int]):
        epoch = 5

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 16

        def __iter__(self):
            return iter([(number + self.epoch) % 16 for number in range(16)])

    sampler = Turned()
    inside = DataLoader(range(16), batch_sampler=BatchSampler(sampler, 8, False))
    for loader in (DataLoader(range(16), 8, sampler=sampler), inside):
        sampler.set_epoch(5)
        own = sharded(loader, 0, 2)
        for told, epoch in ((None, 5), (None, 6), (3, 3), (None, 4)):
            if told is not None:
                sampler.set_epoch(told)
            next(iter(own))  # counts as an epoch: the loader has no step counter
            assert sampler.epoch == epoch


def test_a_pass_counts_as_training_if_the_model_trains_after_the_first_batch():
    model, ended = nn.Linear(1, 1), []
    loader = sharded(
        DataLoader(torch.ones(4, 1), 2), 0, 1, is_training=lambda: model.training, on_epoch_end=ended.append
    )
    for epoch in range(1, 4):
        model.eval()
        for batch in loader:
            model.train()
            model(batch).sum().backward()
        assert len(ended) == epoch
        model.eval()
        for batch in loader:
            model(batch).sum()
        assert len(ended) == epoch


def test_an_evaluation_keeps_the_sample_count_of_the_current_training_batch():
    told = [(1, 2)]

    def samples(own: int, every: int) -> tuple[int, int]:
        told.append((own, every))
        return told[-2]

    training = [True]
    train, other = (
        sharded(DataLoader(range(size), 4), 0, 2, is_training=lambda: training[0], set_batch_samples=samples)
        for size in (13, 10)
    )
    seen = []
    for _ in train:
        now = told[-1]
        training[0] = False
        for _ in other:
            pass
        for _ in other:
            break
        training[0] = True
        seen.append((now, told[-1]))
    assert seen == [((4, 8), (4, 8)), ((3, 5), (3, 5))] and told[-1] == (1, 2)
