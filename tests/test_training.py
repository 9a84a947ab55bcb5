"""The training library: data sharding, checkpoints, a single rank, and several ranks under mpirun."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import distrib
from distrib.errors import TrainingError
from distrib.strategy import Strategy, parse_gradients
from distrib.training import Job, ShardedLoader, checksums
from distrib.training import job as job_module
from distrib.training.checkpoint import checkpoint_format
from distrib.training.checks import divergence
from distrib.training.data.epoch import StepClock
from distrib.training.data.sampler import _global_batches, share
from distrib.training.data.sharded_loader import LoaderContext, _every_nth
from distrib.training.model_parameters import has_misplaced_state
from distrib.training.rendezvous import _choose_interface, _exchange_hosts, _own_address
from distrib.training.strategies.ddp import wrap_model
from distrib.training.sync_batchnorm import convert_batchnorm
from distrib.training.to_device import move_to_device
from distrib.training.world import World, _from_mpi, find_device, find_world
from distrib.utils import netif
from tests import fork_server

ROOT = Path(__file__).parent.parent
SCRIPTS = Path(__file__).parent / "scripts"


def run_ranks(
    ranks: int, script: Path, *arguments: object, seconds: float = 400, forked: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `script` on `ranks` ranks of this host with mpirun only; `forked` uses the fork server."""
    mpirun = Path(sys.executable).parent / "mpirun"
    options = ["--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "-np", str(ranks)]
    command = [mpirun, *options, sys.executable, script, *arguments]
    python = fork_server.environment(str(ROOT)) if forked else {"PYTHONPATH": str(ROOT)}
    tools = {**python, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **tools, **variables},
    )
    with process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(process.pid).children(recursive=True)[::-1]:
                if child.name().startswith("python"):
                    child.send_signal(signal.SIGABRT)  # prints the stacks of a hang
            out, err = process.communicate(timeout=seconds)
            pytest.fail(f"no end after {seconds:g} s\n{out}\n{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(autouse=True)
def no_variable_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set the variable, which torch.optim sets at its first use. The check for changed variables would report it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job of this process only, for any launcher of the tests."""
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "DISTRIB_STRATEGY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISTRIB_DEVICE", "cpu")
    monkeypatch.setattr(job_module, "_job", None)
    with distrib.init() as alone:
        yield alone


def sharded(
    loader: DataLoader[Any], rank: int, ranks: int, trains: bool | None = True, **options: Any
) -> ShardedLoader:
    """Return a loader of a job with no components except `options`."""
    seed = options.pop("seed", 5)
    context: dict[str, Any] = {
        "device": torch.device("cpu"), "is_training": lambda: trains, "clock": StepClock(lambda: None),
        "set_batch_samples": lambda own, every: (own, every),
    }  # fmt: skip
    return ShardedLoader(loader, LoaderContext(rank=rank, ranks=ranks, **{**context, **options}), seed=seed)


def read(loader: ShardedLoader) -> list[list[int]]:
    return [[int(x) for x in batch] for batch in loader]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [x for batch in batches for x in batch]


# Data sharding

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
def test_shares_are_even_and_in_order(start, size, ranks):
    shares = [share(start, start + size, rank, ranks) for rank in range(ranks)]
    assert [x for part in shares for x in part] == list(range(start, start + size))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_batches_are_those_of_one_process_with_the_whole_batch():
    """Four ranks with batches of 8 together read the batches of one rank with 32, in each epoch."""
    one = sharded(DataLoader(range(440), 32, shuffle=True), 0, 1)
    four = [sharded(DataLoader(range(440), 8, shuffle=True), rank, 4) for rank in range(4)]
    epochs = []
    for _ in range(2):
        whole = read(one)
        assert whole == [flat(parts) for parts in zip(*map(read, four), strict=True)]
        epochs.append(whole)
    assert epochs[0] != epochs[1]


def test_a_sampler_may_promise_more_than_anybody_reads():
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


def test_a_small_last_batch_is_levelled_with_the_one_before():
    edges = _global_batches(32 + 4, ranks=4, batch_size=8, drop_last=False, wrap=True)
    assert [stop - start for start, stop in pairwise(edges)] == [18, 18]


def test_epochs_go_on_by_themselves_and_can_be_set_and_saved():
    loader = sharded(DataLoader(range(50), 5, shuffle=True), 1, 2)
    first, second = read(loader), read(loader)
    assert first != second
    loader.set_epoch(0)
    assert read(loader) == first
    again = sharded(DataLoader(range(50), 5, shuffle=True), 1, 2)
    again.load_state_dict(loader.state_dict())
    assert read(again) == second


class Script:
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


WHICH = st.integers(0, 1)
LOOKS = st.lists(st.tuples(st.sampled_from([Script.peek, Script.evaluate]), WHICH), max_size=3)


@given(st.lists(st.tuples(WHICH, LOOKS, LOOKS), min_size=1, max_size=5), st.booleans())
@settings(deadline=None, max_examples=60)
def test_what_one_rank_reads_by_itself_does_not_change_what_it_trains_on(epochs, keeps):
    plain, curious = Script(), Script()
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


@given(st.lists(WHICH, min_size=1, max_size=4), st.booleans(), st.none() | WHICH)
@settings(deadline=None, max_examples=40)
def test_nor_does_a_look_where_each_step_takes_the_first_batch_of_a_new_pass(epochs, keeps, evaluates):
    plain, curious = Script(), Script()
    if keeps:
        curious.peek_and_keep(epochs[0])
    for which in epochs:
        alone = () if evaluates is None else (lambda: curious.evaluate(evaluates),)
        assert curious.steps_on_first_batches(which, *alone) == plain.steps_on_first_batches(which)


def test_batches_of_passes_of_their_own_are_others_once_a_step_was_taken():
    script, taken = Script(), []
    for _ in range(4):
        taken.append(next(iter(script.loader)).tolist())
        script.steps += 1
    assert len({tuple(batch) for batch in taken}) == 4
    assert next(iter(script.loader)).tolist() == next(iter(script.loader)).tolist()
    assert script.loader.state_dict() == {"epoch": 4}


def test_a_pass_that_was_left_is_an_epoch_if_a_step_was_taken_from_it():
    script = Script()
    for _ in script.loader:
        break
    assert script.loader.state_dict() == {"epoch": 0}
    for _ in script.loader:
        script.steps += 1
        assert script.loader.state_dict() == {"epoch": 1}
        break
    assert script.loader.state_dict() == {"epoch": 1}


def test_an_epoch_ends_as_its_pass_does_if_a_step_was_taken():
    ended, steps = [], 0
    loader = sharded(DataLoader(range(4), 2), 0, 1, clock=StepClock(lambda: steps), on_epoch_end=ended.append)
    for _ in loader:
        pass
    for epoch in range(3):
        for _ in loader:
            steps += 1
        assert [one.number for one in ended] == [*range(epoch + 1)]


def test_the_order_follows_from_the_generator_and_leaves_it_alone(job):
    generator = torch.Generator().manual_seed(11)
    state, before = generator.get_state(), torch.get_rng_state()
    order = read(job.prepare(DataLoader(range(20), 20, shuffle=True, generator=generator)))[0]
    assert order == torch.randperm(20, generator=torch.Generator().manual_seed(11)).tolist()
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_samplers_are_shared_out():
    sampler = WeightedRandomSampler([1.0] * 30, 20)
    shares = [read(sharded(DataLoader(range(30), 5, sampler=sampler), rank, 2)) for rank in range(2)]
    whole = read(sharded(DataLoader(range(30), 10, sampler=sampler), 0, 1))
    assert whole == [a + b for a, b in zip(*shares, strict=True)]


def test_batch_samplers_are_shared_out_by_batch():
    batches = [[0, 1], [2], [3, 4, 5], [6], [7]]
    loaders = [DataLoader(range(8), batch_sampler=batches) for _ in range(2)]
    assert [read(sharded(one, rank, 2, False)) for rank, one in enumerate(loaders)] == [batches[::2], batches[1::2]]
    trained = [read(sharded(one, rank, 2, True)) for rank, one in enumerate(loaders)]
    assert trained == [batches[::2], [[2], [6], [0, 1]]]


def test_a_loader_without_batches_is_shared_out_by_sample():
    assert [int(x) for x in sharded(DataLoader(range(7), batch_size=None), 1, 2, False)] == [1, 3, 5]


def test_a_distributed_sampler_stays_and_has_its_epochs_set():
    sampler = DistributedSampler(range(20), num_replicas=2, rank=0)
    loader = sharded(DataLoader(range(20), 5, sampler=sampler), 0, 2)
    assert read(loader) != read(loader)
    with pytest.raises(TrainingError, match=r"shards for 2 rank\(s\), expected 3"):
        sharded(DataLoader(range(20), 5, sampler=sampler), 0, 3)


def test_a_distributed_sampler_in_a_batch_sampler_stays_too():
    sampler = DistributedSampler(range(20), num_replicas=2, rank=1)
    loader = sharded(DataLoader(range(20), batch_sampler=BatchSampler(sampler, 4, False)), 1, 2)
    first, second = flat(read(loader)), flat(read(loader))
    assert len(first) == len(second) == 10 and first != second
    with pytest.raises(TrainingError, match=r"shards for 2 rank\(s\), expected 3"):
        sharded(DataLoader(range(20), batch_sampler=BatchSampler(sampler, 4, False)), 0, 3)


def test_two_readings_side_by_side_have_orders_of_their_own():
    loader = sharded(DataLoader(range(50), 10, shuffle=True), 0, 1)
    pairs = [
        (int(a), int(b)) for one, other in zip(loader, loader, strict=True) for a, b in zip(one, other, strict=True)
    ]
    assert len(pairs) == 50 and sum(a == b for a, b in pairs) < 10


def test_a_sampler_without_a_length_is_refused():
    class Endless(Sampler[int]):
        def __iter__(self):
            return count()

    class Repeating(Endless):
        def __len__(self):
            return 8

    with pytest.raises(TrainingError, match="Endless has no length"):
        sharded(DataLoader(range(8), 2, sampler=Endless()), 0, 2)
    with pytest.raises(TrainingError, match="Repeating has a length of 8, and yields 1048704 items and more"):
        read(sharded(DataLoader(range(8), 2, sampler=Repeating()), 0, 2))


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


def test_a_model_that_is_put_into_training_mode_with_the_batch_in_hand_trains():
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


def test_an_evaluation_leaves_the_weight_of_the_batch_in_hand():
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


def test_rounds_of_a_stream():
    whole = [list(_every_nth(iter("abcde"), rank, 2, whole_rounds=lambda: True)) for rank in range(2)]
    assert whole == [["a", "c"], ["b", "d"]]
    assert list(_every_nth(iter("abcde"), 0, 2, whole_rounds=lambda: False)) == ["a", "c", "e"]


def test_of_a_stream_no_batches_of_others_are_kept():
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


def test_workers_read_the_share():
    # other start methods leave a helper process behind until this process exits
    loader = sharded(DataLoader(range(40), 5, num_workers=2, shuffle=True, multiprocessing_context="fork"), 1, 2)
    seen = set(flat(read(loader)))
    assert len(seen) == 20 and seen < set(range(40))


def test_batches_are_moved_however_they_are_nested():
    batch = {"a": [torch.ones(2), (torch.zeros(1), "text")], "b": 3}
    there = move_to_device(batch, torch.device("meta"))
    assert there["a"][0].is_meta and there["a"][1][0].is_meta
    assert (there["a"][1][1], there["b"]) == ("text", 3)


@dataclasses.dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    words: tuple[str, torch.Tensor]
    half: torch.Tensor = dataclasses.field(init=False, default=torch.ones(1))


class Graph:
    """Object with its own `to` method, which does not return the object."""

    def to(self, device):
        self.at = device


class Quantity:
    def to(self, unit):
        raise TypeError("not a unit")


def test_batches_of_classes_of_their_own_are_moved_too():
    meta = torch.device("meta")
    batch = collections.UserDict(ids=torch.ones(2, dtype=torch.long), pair=Pair(torch.ones(3), ("a", torch.ones(1))))
    quantity = Quantity()
    there = move_to_device([batch, Graph(), quantity], meta)
    assert isinstance(there[0], collections.UserDict) and there[0]["ids"].is_meta
    pair = there[0]["pair"]
    assert pair.x.is_meta and pair.half.is_meta and pair.words[0] == "a" and pair.words[1].is_meta
    assert there[1].at == meta and there[2] is quantity
    assert not batch["ids"].is_meta and not batch["pair"].x.is_meta  # the script's own batch is unchanged


def test_sums_are_of_all_parts_whatever_the_layout(monkeypatch):
    monkeypatch.setattr(checksums.split_for_sum, "__kwdefaults__", {"max_elements": 7})
    values = torch.arange(60.0).view(3, 4, 5)
    for same in (values, values.permute(2, 0, 1), values.double(), values[None, None]):
        (digest,) = divergence.compute_checksums([nn.ParameterDict({"weight": nn.Parameter(same)})])
        assert (digest.sum, digest.norm) == (pytest.approx(1770), pytest.approx(values.norm().item()))
        assert all(part.numel() <= 12 for part in checksums.split_for_sum(same))
    own = divergence._checksum("weight", values)
    assert own.differs((1770.0 + own.norm, own.norm))
    unknown = divergence._checksum("weight", torch.eye(3).to_sparse())
    assert not own.differs((unknown.sum, unknown.norm)) and not unknown.differs((own.sum, own.norm))


class Activated(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def test_a_normalization_that_does_more_is_not_replaced():
    plain = convert_batchnorm(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm2d(2)))
    assert [type(layer).__name__ for layer in plain] == ["SyncBatchNorm"] * 2
    with pytest.raises(TrainingError, match=r"sync_batchnorm: body\.0 is a Activated, which does more than normalize"):
        convert_batchnorm(nn.ModuleDict({"body": nn.Sequential(Activated(2))}))


# World and network interfaces


def test_worlds(capsys):
    alone = World(rank=0, size=1, local_rank=0, local_size=1)
    assert find_world({}) == alone
    inside_slurm = {"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    plan = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for environ in (plan, {**plan, **inside_slurm}):
        assert find_world(environ) == World(rank=3, size=4, local_rank=1, local_size=2)
        assert not find_world(environ).on_one_host
    for wrong in ({"RANK": "4"}, {"WORLD_SIZE": "x"}, {"LOCAL_RANK": "2"}):
        with pytest.raises(TrainingError):
            find_world({**plan, **wrong})
    assert capsys.readouterr().err == ""
    for rank in "01":  # only one rank prints the warning for all
        assert find_world({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": rank}) == alone
        assert find_world({"PMI_SIZE": "2", "PMI_RANK": rank}) == alone
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(", and each is a job of its own")[0] for line in told] == [
        "distrib: warning: srun started 8 processes",
        "distrib: warning: mpirun started 2 processes",
    ]
    with pytest.raises(TrainingError, match=r"MPI started 1 rank\(s\), but 8 were planned \(OMPI_COMM_WORLD_SIZE\)"):
        mpi = types.SimpleNamespace(COMM_WORLD=types.SimpleNamespace(rank=0, size=1))
        _from_mpi(mpi, {"OMPI_COMM_WORLD_SIZE": "8"}, True)


def test_ranks_of_which_some_see_no_gpu_do_not_wait_for_each_other():
    store, hosts = torch.distributed.HashStore(), []
    with ThreadPoolExecutor(2) as ranks:
        for backends in (["gloo", "gloo"], ["gloo", "cpu:gloo,cuda:nccl"]):
            calls = [ranks.submit(_exchange_hosts, store, rank, 2, backend) for rank, backend in enumerate(backends)]
            hosts += [call.exception() or len({*call.result()}) for call in calls]
            store = torch.distributed.HashStore()
    assert hosts[:2] == [1, 1]
    assert [str(error).partition(";")[0] for error in hosts[2:]] == ["rank 0 see no GPU, but other ranks do"] * 2


def test_devices(monkeypatch):
    assert find_device(0, {"DISTRIB_DEVICE": "cpu"}) == torch.device("cpu")
    with pytest.raises(TrainingError, match="names no device"):
        find_device(0, {"DISTRIB_DEVICE": "toaster"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(TrainingError, match=r"local rank 2 was given GPU 2, but torch sees 2 GPU"):
        find_device(2, {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainingError, match=r"torch cannot use GPUs here: Torch not compiled with CUDA"):
        find_device(0, {"DISTRIB_DEVICE": "cuda:0"})


def test_addresses(monkeypatch):
    assert _own_address(True) == "127.0.0.1"
    monkeypatch.setenv("DISTRIB_ADDRESS", "198.18.0.1")
    assert _own_address(True) == "198.18.0.1"
    monkeypatch.delenv("DISTRIB_ADDRESS")
    addresses = [("lo", "127.0.0.1"), ("lo", "::1"), ("eth0", "fe80::1"), ("eth0", "2001:db8::1")]
    monkeypatch.setattr(netif, "interface_addresses", lambda: addresses)
    monkeypatch.setattr(netif, "is_up", lambda name: True)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert _own_address(False) == "2001:db8::1"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # restores the variable after the test
    _choose_interface(False, "localhost")  # a host name that other hosts cannot reach
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0" and "NCCL_SOCKET_IFNAME" not in os.environ


def test_importing_loads_neither_torch_nor_mpi():
    code = "import distrib, sys; print(*(m for m in ('torch', 'mpi4py', 'numpy') if m in sys.modules), dir(distrib))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert out.startswith("[") and "'init'" in out
    with pytest.raises(AttributeError):
        _ = distrib.nothing


# A single rank


def test_alone_everything_is_trivial(job, capsys):
    assert (job.rank, job.world_size, job.local_rank, job.local_world_size, job.is_main) == (0, 1, 0, 1, True)
    model, optimizer, loader = nn.Linear(1, 1), None, DataLoader(TensorDataset(torch.ones(10, 1)), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.scale_lr(0.5))
    prepared = job.prepare(loader, model, optimizer)
    assert prepared[1:] == (model, optimizer) and isinstance(prepared[0], ShardedLoader)
    assert job.prepare(model) is model is job.unwrap(model)
    assert job.prepare(prepared[0]) is prepared[0]
    assert job.all_reduce(3) == 3.0 and job.all_reduce(torch.tensor([2.0]), "max").tolist() == [2.0]
    job.barrier()
    job.print("one", 2, sep="-", flush=True)
    assert capsys.readouterr().out == "one-2\n"
    assert distrib.init() is job
    assert job.warmup(optimizer, 10).get_last_lr() == [0.5]
    with pytest.raises(TrainingError, match="no op 'median'"):
        job.all_reduce(1, "median")
    with pytest.raises(TrainingError, match="cannot prepare a str"):
        job.prepare("model")


def test_a_closed_job_says_so(job):
    job.close()
    job.close()
    for use in (job.barrier, distrib.init, lambda: job.prepare(nn.Linear(1, 1))):
        with pytest.raises(TrainingError, match="closed"):
            use()


def test_asynchronous_training_needs_servers(monkeypatch):
    monkeypatch.setattr(job_module, "_job", None)
    monkeypatch.setenv("DISTRIB_STRATEGY", '{"mode":"async"}')
    with pytest.raises(TrainingError, match="there is no parameter server; distrib-launch --mode async starts them"):
        distrib.init()


def test_checkpoints_come_back(job, tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    path = tmp_path / "new" / "last.pt"
    values = {"epoch": 4, "history": [0.5, None], "table": {"x": torch.ones(2)}}
    job.save(path, model=model, optimizer=optimizer, schedule=schedule, **values)
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    other_optimizer = torch.optim.Adam(other.parameters())
    back = job.restore(path, model=other, optimizer=other_optimizer, epoch=0, best=1.0)
    assert (back["epoch"], back["best"], back["history"]) == (4, 1.0, [0.5, None])
    assert torch.equal(back["table"]["x"], torch.ones(2))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert [entry.name for entry in path.parent.iterdir()] == ["last.pt"]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_values_come_back_to_where_they_were(job, tmp_path, monkeypatch):
    """The state of random generators must be on the CPU, and so must an average of the weights."""
    average, state = torch.ones(3), torch.get_rng_state()
    tag = torch.serialization.location_tag
    on_gpu = average.untyped_storage().data_ptr()
    monkeypatch.setattr(
        torch.serialization, "location_tag", lambda storage: "cuda:3" if storage.data_ptr() == on_gpu else tag(storage)
    )
    edges = {"coo": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr(), "none": torch.empty(0)}
    job.save(tmp_path / "last.pt", average=average, state=state, edges=edges)
    data = (tmp_path / "last.pt").read_bytes()
    values, _ = checkpoint_format.read(data, {}, torch.device("meta"), source="last.pt")
    assert values["average"].is_meta
    assert torch.equal(values["edges"]["coo"].to_dense(), torch.eye(3)) and values["edges"]["csr"].device.type == "cpu"
    torch.set_rng_state(values["state"])


def test_checkpoints_that_are_none(job, tmp_path, capfd):
    path = tmp_path / "last.pt"
    assert job.restore(path, model=nn.Linear(1, 1), epoch=0) == {"epoch": 0}
    assert capfd.readouterr().err == f"distrib: note: no file {path}: nothing is restored\n"
    torch.save({"model": nn.Linear(1, 1).state_dict(), "epoch": 3}, path)
    with pytest.raises(TrainingError, match="was not written by") as told:
        job.restore(path)
    assert "before job.prepare(model)" in told.value.hint
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(TrainingError, match="no checkpoint"):
        job.restore(path)
    with pytest.raises(TrainingError, match="cannot save path, a PosixPath"):
        job.save(path, path=path)
    with pytest.raises(TrainingError, match=r"cannot save config\['paths'\]\[1\], a PosixPath"):
        job.save(path, config={"lr": 0.1, "paths": ["here", path]})
    assert path.read_bytes() == b"not a checkpoint"
    job.save(path, model=nn.Linear(1, 1))
    with pytest.raises(TrainingError, match="no state of optimizer; it holds model"):
        job.restore(path, optimizer=torch.optim.SGD([torch.ones(1, requires_grad=True)]))
    with pytest.raises(TrainingError, match="does not fit"):
        job.restore(path, model=nn.Linear(2, 1))


def test_checkpoints_hold_python_numbers(job, tmp_path):
    """A numpy schedule leaves numpy numbers in the optimizer, which torch.load would refuse."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.05 * (1 + np.cos(np.float64(1.0)))
    job.save(
        tmp_path / "last.pt", optimizer=optimizer, model=model, best=np.float32(0.5), seen={np.int64(3): [np.True_]}
    )
    assert type(optimizer.param_groups[0]["lr"]) is np.float64
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    back = job.restore(tmp_path / "last.pt", optimizer=other, model=nn.Linear(1, 1))
    assert back == {"best": 0.5, "seen": {3: [True]}}
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_states_that_could_not_be_restored_leave_the_old_checkpoint(job, tmp_path):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    job.save(tmp_path / "last.pt", optimizer=optimizer)
    before = (tmp_path / "last.pt").read_bytes()
    optimizer.param_groups[0]["history"] = np.ones(2)
    with pytest.raises(
        TrainingError, match=r"cannot save optimizer\['param_groups'\]\[0\]\['history'\]: a ndarray could"
    ):
        job.save(tmp_path / "last.pt", optimizer=optimizer)
    assert (tmp_path / "last.pt").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir() if not entry.is_dir()] == ["last.pt"]


def test_status_lines(monkeypatch):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    monkeypatch.setenv("DISTRIB_STATUS_FD", str(writing))
    monkeypatch.setenv("DISTRIB_DEVICE", "cpu")
    monkeypatch.setattr(job_module, "_job", None)
    with distrib.init() as job:
        weight = torch.ones(1, requires_grad=True)
        optimizer = job.prepare(torch.optim.SGD([weight], lr=0.1))
        for _ in range(50):
            optimizer.step()
        job.log(loss=torch.tensor(0.5), accuracy=float("nan"), epochs=[1, 2])
        with pytest.raises(TrainingError, match="4096"):
            job.log(text="x" * 5000)
        with pytest.raises(TrainingError, match="is a object"):
            job.log(thing=object())
        lines = [json.loads(line) for line in os.read(reading, 65536).splitlines()]
        assert lines[0] == {"step": 1} and len(lines) < 10
        assert lines[-1] == {"metrics": {"loss": 0.5, "accuracy": "nan", "epochs": [1, 2]}, "main": True}
        if {"step": 50} not in lines:  # the last step is reported at close, as the rank may hang now
            assert select.select([reading], [], [], 10)[0]
            assert [json.loads(line) for line in os.read(reading, 65536).splitlines()] == [{"step": 50}]
        for _ in range(2000):
            job.log(text="x" * 4000)  # queue full: drops lines instead of blocking
        os.close(reading)
        job.log(loss=1)
        os.close(writing)
        job.log(loss=1)


# Several ranks


def test_gradient_truth(tmp_path):
    """After 20 steps, 4 ranks have the parameters of one process that trains with plain torch on the same batches."""
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    from tests.scripts.truth import make_data, make_model

    result = run_ranks(4, SCRIPTS / "truth.py", tmp_path, 8, 32 * 20)
    assert result.returncode == 0, result.stderr
    data = make_data(32 * 20)
    shuffled = RandomSampler(data, generator=torch.Generator().manual_seed(3))
    for order, sampler in ("in order", SequentialSampler(data)), ("shuffled", shuffled):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in BatchSampler(sampler, 32, False):
            inputs, targets = data[batch]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        four = torch.load(tmp_path / f"{order}.pt", weights_only=True)
        assert four["values"] == {"steps": 20}
        for name, value in model.state_dict().items():
            torch.testing.assert_close(four["states"]["model"][name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("lessons", "variables"),
    [("uneven,collectives,checkpoints", {}), ("collectives,checkpoints", {"LESSON_WITHOUT_WITH": "1"})],
    ids=["with", "without"],
)
def test_ranks_agree(lessons, variables, tmp_path):
    result = run_ranks(3, SCRIPTS / "lessons.py", lessons, tmp_path, **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == [f"{lesson}: learnt" for lesson in lessons.split(",")]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python's own fork is safe since 3.12")
def test_threads_come_to_rest_before_a_rank_forks():
    """A forked process, such as a loader worker, may otherwise wait forever for a lock (CPython issue 112275)."""
    result = run_ranks(2, SCRIPTS / "lessons.py", "forks")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_loader_that_was_not_prepared_is_told_of_once(tmp_path):
    script = tmp_path / "forgotten.py"
    script.write_text(
        "import sys, distrib, torch\n"
        "job = distrib.init()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]\n"
        "model, *optimizers = job.prepare(model, *optimizers)\n"
        "loader = torch.utils.data.DataLoader(torch.ones(8, 2), 2)\n"
        "if sys.argv[1:]:\n"
        "    read = job.prepare(loader)\n"
        "    loader = read if 'read' in sys.argv else loader\n"
        "for batch in loader:\n"
        "    model(batch).sum().backward()\n"
        "    [optimizer.step() for optimizer in optimizers]\n"
    )
    result = run_ranks(2, script)
    assert result.returncode == 0 and result.stderr.count("no DataLoader was passed to job.prepare") == 1, result.stderr
    result = run_ranks(2, script, "prepared")
    assert result.returncode == 0 and result.stderr.count("no prepared DataLoader was read") == 1, result.stderr
    result = run_ranks(2, script, "read")
    assert result.returncode == 0 and "DataLoader" not in result.stderr, result.stderr


def test_a_refusal_at_the_end_of_a_script_is_a_failure(tmp_path):
    script = tmp_path / "by_hand.py"
    script.write_text(
        "import sys, distrib, torch\n"
        "job = distrib.init()\n"
        "model = job.prepare(torch.nn.Linear(2, 1))\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "if sys.argv[1:]:\n"
        "    model.bias.data -= 0.1 * job.rank * model.bias.grad\n"
        "print('done')\n"
    )
    result = run_ranks(2, script, DISTRIB_STRATEGY='{"mode": "local"}')
    assert result.returncode == 0, result.stderr  # no parameter was updated
    result = run_ranks(2, script, "learn", DISTRIB_STRATEGY='{"mode": "local"}')
    assert result.returncode == 1 and "done" in result.stdout, result.stderr
    assert "distrib: rank 0: bias differs between ranks, and no prepared optimizer has it" in result.stderr


def test_a_rank_that_cannot_end_its_last_round_has_failed(tmp_path):
    script = tmp_path / "full.py"
    script.write_text(
        "import distrib\n"
        "job = distrib.init()\n"
        "def settle():\n    raise RuntimeError('none left')\n"
        "job._parts.strategy.synchronize = settle\n"
    )
    result = run_ranks(1, script)
    assert result.returncode == 1 and "RuntimeError: none left" in result.stderr, result.stderr


@pytest.mark.parametrize("does", ["handles", "asks"])
def test_what_a_script_does_after_its_job(tmp_path, does):
    """It may handle an error of the job's block for a long time, or continue with the MPI that it initialized."""
    script = tmp_path / "goes_on.py"
    script.write_text(
        "import sys, time\n"
        "if 'asks' in sys.argv:\n    from mpi4py import MPI\n"
        "import distrib\n"
        "from distrib.training import shutdown as leaving\n"
        "leaving.TIMEOUTS = leaving.ShutdownTimeouts(failed_exit_seconds=0.2)\n"
        "try:\n"
        "    with distrib.init() as job:\n"
        "        if 'handles' in sys.argv:\n"
        "            raise KeyError('batch')\n"
        "    print('the sum is', MPI.COMM_WORLD.allreduce(job.rank), flush=True)\n"
        "except KeyError:\n"
        "    time.sleep(0.6)\n"
        "    print('saved', flush=True)\n"
    )
    result = run_ranks(2, script, does)
    assert result.stdout.splitlines() == ["saved" if does == "handles" else "the sum is 1"] * 2, result.stderr


@pytest.mark.parametrize("mode", ["sync", "local"])
def test_a_rank_that_looks_into_the_training_loader_trains_on_its_share_all_the_same(mode, tmp_path):
    script = tmp_path / "curious.py"
    script.write_text(
        "import distrib, torch\n"
        "from torch.utils.data import DataLoader\n"
        "with distrib.init() as job:\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    loader = DataLoader(torch.arange(64.0).view(64, 1), 8, shuffle=True)\n"
        "    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), 1e-6), loader)\n"
        "    if job.is_main:\n"
        "        first = next(iter(loader))\n"
        "    for epoch in range(3):\n"
        "        read = torch.zeros(64)\n"
        "        for batch in loader:\n"
        "            read[batch.long().view(-1)] += 1\n"
        "            optimizer.zero_grad()\n"
        "            model(batch).sum().backward()\n"
        "            optimizer.step()\n"
        "        print('once', int((job.all_reduce(read, 'sum') == 1).sum()))\n"
        "        if job.is_main:\n"
        "            with torch.no_grad():\n"
        "                sum(model(batch).sum() for batch in loader)\n"
    )
    result = run_ranks(2, script, DISTRIB_STRATEGY=json.dumps({"mode": mode}))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("once 64\n") == 6


def test_one_rank_needs_nobody_to_start_it_and_none_to_end(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(
        "import distrib, torch\n"
        "with distrib.init() as job:\n"
        "    print(sum(len(batch) for batch in job.prepare(torch.utils.data.DataLoader(torch.ones(8, 2), 2))), 'samples')\n"
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200)
    assert (result.returncode, result.stdout) == (0, "8 samples\n"), result.stderr


STREAMS = """
import sys, time
import distrib, torch
from torch.utils.data import DataLoader, IterableDataset
job = distrib.init()
frozen = torch.nn.Linear(1, 1).requires_grad_(False)
class Stream(IterableDataset):
    def __iter__(self):
        first, step = (job.rank, 2) if sys.argv[1] == "shared-out" else (0, 1)
        for number in range(first, 16, step):
            yield torch.tensor([float(number)]), {"number": number, "text": str(number)}
model = torch.nn.Sequential(frozen, torch.nn.Linear(1, 1))
model, optimizer, loader = job.prepare(model, torch.optim.SGD(model[1].parameters(), 1e-4), DataLoader(Stream(), 2))
if sys.argv[1] == "loaded" and job.is_main:
    frozen.bias.data.fill_(7)
try:
    for numbers, _ in loader:
        model(numbers).sum().backward()
        optimizer.step()
except distrib.errors.TrainingError as error:
    print(error, file=sys.stderr, flush=True)
    time.sleep(3)  # mpirun ends the others when one has ended
    sys.exit(1)
"""


@pytest.mark.parametrize("mode, how, times", [("sync", "whole", 0), ("local", "shared-out", 1)])
def test_a_stream_that_shares_itself_out_is_told_of(tmp_path, mode, how, times):
    script = tmp_path / "streams.py"
    script.write_text(STREAMS)
    result = run_ranks(2, script, how, DISTRIB_STRATEGY=json.dumps({"mode": mode}))
    told = result.stderr.count("does not begin with the same samples on every rank")
    assert (result.returncode, told) == (0, times), result.stderr


def test_weights_that_one_rank_alone_has_loaded_are_refused(tmp_path):
    script = tmp_path / "streams.py"
    script.write_text(STREAMS)
    result = run_ranks(2, script, "loaded", DISTRIB_STRATEGY=json.dumps({"mode": "sync"}))
    assert result.returncode == 1
    assert result.stderr.count("training begins with other values in 0.bias on rank 1 than on rank 0") == 2


def test_ranks_whose_samples_or_orders_differ(tmp_path):
    """The script asserts that each sample is read once; the test asserts the messages of rank 0."""
    result = run_ranks(2, SCRIPTS / "samples.py")
    assert result.returncode == 0, result.stderr
    (sampler,) = [line for line in result.stderr.splitlines() if line.startswith("distrib: warning")]
    assert "does not begin with the same samples on every rank" in sampler
    refused = result.stdout.splitlines()
    assert len(refused) == 2
    for line in refused:
        assert "rank 1 prepares something else" in line and "Subset.indices" in line and "manual_seed" in line


TWO_HEADS = """
import sys
import distrib, torch
from torch import nn

class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, noise):
        return self.layer(noise)

class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.true, self.kind = nn.Linear(2, 4), nn.Linear(4, 1), nn.Linear(4, 5)

    def forward(self, image):
        found = self.layer(image)
        return self.true(found), self.kind(found)

job = distrib.init()
generator, judge = Generator(), Judge()
of_generator, of_judge, of_both = (
    torch.optim.SGD(parameters, lr=0.1)
    for parameters in (generator.parameters(), judge.parameters(), [*generator.parameters(), *judge.parameters()])
)
generator, judge, of_generator, of_judge, of_both = job.prepare(
    generator, judge, of_generator, of_judge, of_both, find_unused_parameters="unused" in sys.argv
)
torch.manual_seed(job.rank)
for step in range(6):
    of_generator.zero_grad()
    judge(generator(torch.randn(4, 3)))[0].mean().backward()
    of_generator.step()
    of_judge.zero_grad()
    sum(map(torch.sum, judge(torch.randn(4, 2)))).backward()
    of_judge.step()
    of_both.zero_grad()
    loss = judge(generator(torch.randn(4, 3)))[1].square().mean()
    (loss * float("nan") if "nan" in sys.argv and step == 4 and job.rank else loss).backward()
    of_both.step()
whole = torch.cat([p.flatten() for model in (generator, judge) for p in model.parameters()])
assert torch.equal(whole, job.all_reduce(whole, "max")), whole
print("alike")
"""


def test_a_model_trained_by_one_output_at_a_time(tmp_path):
    """Two models with equal parameter names share one optimizer, as in an InfoGAN."""
    script = tmp_path / "heads.py"
    script.write_text(TWO_HEADS)
    result = run_ranks(2, script)
    assert result.returncode and "kind.weight, kind.bias got no gradient" in result.stderr
    result = run_ranks(2, script, "unused")
    assert (result.returncode, result.stdout) == (0, "alike\n" * 2), result.stderr
    result = run_ranks(2, script, "unused", "nan")
    assert "step 5: the gradient of Generator.layer.weight (and of" in result.stderr and "on rank 1" in result.stderr


LIKE_OTHERS = """
import distrib, torch
job = distrib.init()
model, alone = torch.nn.Linear(2, 1), torch.zeros(1, requires_grad=True)
optimizer, of_alone = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([alone], lr=0.1)
model, optimizer = job.prepare(model, optimizer)
torch.manual_seed(job.rank)
for _ in range(2):  # by itself, with a seed of its own
    (model(torch.randn(4, 2)).sum() * alone.exp()).backward()
    optimizer.step()
    of_alone.step()
hits = torch.tensor([True, False, True])
print(job.all_reduce(hits, "sum").tolist(), job.all_reduce(hits).tolist(), job.all_reduce(hits, "max").tolist())
"""


def test_an_optimizer_of_no_prepared_model_is_reported(tmp_path):
    script = tmp_path / "others.py"
    script.write_text(LIKE_OTHERS)
    result = run_ranks(2, script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[2, 0, 2] [1.0, 0.0, 1.0] [True, False, True]"] * 2
    (told,) = [line for line in result.stderr.splitlines() if line.startswith("distrib: ")]
    assert "SGD was not passed to job.prepare, and its parameters belong to no prepared model" in told


def test_models_that_the_script_wraps_itself(tmp_path):
    result = run_ranks(2, SCRIPTS / "wrapped_by_hand.py")
    assert (result.returncode, result.stdout.count("all is well")) == (0, 2), result.stderr
    told = [line for line in result.stderr.splitlines() if line.startswith("distrib: ")]
    assert len(told) == 1 and "no DataLoader was passed to job.prepare" in told[0], result.stderr


FIRST_STEP = """
import sys
import distrib, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
job = distrib.init()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.one, self.other = nn.Embedding(4, 2, max_norm=0.1), nn.Linear(2, 1), nn.Linear(2, 1)
        self.own = nn.Parameter(torch.full((3,), float(job.rank)))
    def forward(self, x):
        one = self.one(self.rows(x))
        if sys.argv[1] == "unused":
            return one if job.rank else one + self.other(self.rows(x))
        return one + self.other(self.rows(x)) + self.own.sum()
torch.manual_seed(1)
model = Model()
if sys.argv[1] == "unused":
    del model.own
else:
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["own"])
    model = DDP(model)
model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
model(torch.tensor([job.rank])).sum().backward()
optimizer.step()
print("stepped", flush=True)
"""


def test_the_first_step_is_refused_for_a_reason_only(tmp_path):
    """Parameters that DistributedDataParallel ignores, and embeddings that change in forward, belong to each rank."""
    script = tmp_path / "first.py"
    script.write_text(FIRST_STEP)
    result = run_ranks(2, script, "own")
    assert result.returncode == 0 and result.stdout.count("stepped") == 2, result.stderr
    result = run_ranks(2, script, "unused")
    assert result.returncode == 1 and "other.weight, other.bias got no gradient in this step" in result.stderr, (
        result.stderr
    )


NEVER_PREPARED = """
import sys
import distrib, torch

with distrib.init() as job:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(8, 2), 2)
    if "loader" in sys.argv:
        loader = job.prepare(loader)
    if "model" in sys.argv:
        model = job.prepare(model)
    for batch in loader:
        optimizer.zero_grad()
        model(batch.to(job.device)).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("strategy", "prepared", "code", "says"),
    [
        ({}, "model loader", 0, "SGD was not passed to job.prepare, but the model that it trains was: unequal batches"),
        ({"accumulate": 2}, "model loader", 1, "the model that it trains was: its batches are not accumulated"),
        ({"mode": "local", "inner_steps": 2}, "model loader", 1, "trains was: replicas would diverge; model, "),
        ({"mode": "local", "inner_steps": 2}, "loader", 0, "its parameters belong to no prepared model"),
        ({}, "", 0, "its parameters belong to no prepared model"),
    ],
)
def test_an_optimizer_that_was_not_prepared_is_told_of(tmp_path, strategy, prepared, code, says):
    script = tmp_path / "forgotten.py"
    script.write_text(NEVER_PREPARED)
    result = run_ranks(2, script, *prepared.split(), DISTRIB_STRATEGY=json.dumps(strategy))
    assert bool(result.returncode) == bool(code) and says in result.stderr, result.stderr
    assert code or result.stderr.count("distrib: ") == 1, result.stderr


WITHOUT_WITH = {"LESSON_WITHOUT_WITH": "1"}


@pytest.mark.parametrize(
    ("variables", "how", "code"),
    [
        *(({}, "raise", 1), ({}, "exit", 7)),  # the `with` statement sees a SystemExit of either origin
        *((WITHOUT_WITH, how, code) for how, code in (("raise", 1), ("exit", 7))),
    ],
)
def test_a_rank_that_fails_leaves_at_once(variables, how, code):
    begin = time.monotonic()
    result = run_ranks(2, SCRIPTS / "lessons.py", "fails", how, **variables)
    assert result.returncode == code, result.stdout + result.stderr
    assert ("this rank fails" in result.stderr) == (how == "raise")
    assert time.monotonic() - begin < 40


def test_a_launcher_that_does_not_tell_the_place_on_the_host(tmp_path):
    """The ranks of a host determine local rank and local size themselves, such as under plain srun."""
    script = tmp_path / "places.py"
    script.write_text(
        "import os, sys\nfor name in [n for n in os.environ if 'LOCAL' in n and not sys.argv[1:]]:\n    del os.environ[name]\n"
        "import distrib\nwith distrib.init() as job:\n"
        "    print(job.rank, job.local_rank, job.local_world_size, flush=True)\n"
    )
    result = run_ranks(3, script)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(result.stdout.split("\n")[:-1]) == ["0 0 3", "1 1 3", "2 2 3"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        meets = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, "told"], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **meets, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]  # fmt: skip
    assert [rank.communicate(timeout=200)[0] for rank in ranks] == ["0 0 2\n", "1 1 2\n"]


def test_the_plan_and_mpi_must_agree(tmp_path):
    result = run_ranks(2, SCRIPTS / "lessons.py", "collectives", WORLD_SIZE="3")
    assert result.returncode == 1
    assert "MPI started 2 rank(s), but 3 were planned" in result.stderr


def test_the_example_learns_on_two_ranks():
    result = run_ranks(2, ROOT / "examples" / "train_cnn.py", "--epochs", 3)
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith("validation accuracy ") and float(last.split()[2]) >= 95


def test_a_scaler_that_leaves_out_all_steps_is_told_of(job, capfd):
    model, optimizer = job.prepare(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), 0.1))
    scaler = job.prepare(torch.amp.GradScaler("cpu"))

    def step(factor):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    for factor in [float("inf")] * 39 + [1.0] + [float("inf")] * 39:
        step(factor)
    assert "GradScaler" not in capfd.readouterr().err
    for _ in range(50):
        step(float("nan"))
    assert capfd.readouterr().err.count("the GradScaler has left out 40 steps of SGD in a row") == 1


def test_an_optimizer_whose_numbers_are_elsewhere_is_known():
    """The optimizer may have been prepared before its model moved. Step counts may be on any device."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    assert not has_misplaced_state(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    state["step"] = state["step"].to("meta")
    assert not has_misplaced_state(optimizer)
    state["exp_avg"] = state["exp_avg"].to("meta")
    assert has_misplaced_state(optimizer)


def test_balance_with_powersgd_on_gpus_is_refused():
    strategy = Strategy(balance=True, gradients=parse_gradients("powersgd:2"))
    with pytest.raises(TrainingError, match="powersgd waits on GPUs"):
        wrap_model(nn.Linear(2, 1), torch.device("cuda", 0), 2, find_unused_parameters=False, settings=strategy)


@pytest.mark.gpu
def test_one_gpu():
    device = find_device(0, {})
    assert device == torch.device("cuda", 0) == torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(TrainingError, match="torch sees"):
        find_device(torch.cuda.device_count(), {})
    loader = DataLoader(torch.arange(8.0), 4, pin_memory=True)
    batches = sharded(loader, 0, 1, device=device)
    assert [batch.device for batch in batches] == [device, device]
