"""All training modes on several ranks; `tests/scripts/modes.py` holds the assertions."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distrib.errors import TrainingError
from distrib.strategy import Strategy
from distrib.training.data.load_balancing import SETTINGS, BatchTiming, _ShareController, _updated_speeds
from distrib.training.data.sampler import proportional, share
from distrib.training.gradient_accumulation import BatchSamples, GradientAccumulator
from distrib.training.strategies.base import create_strategy
from distrib.training.world import World
from tests.conftest import SCRIPTS
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.forked, pytest.mark.usefixtures("inductor_cache")]

HOROVOD = {"backend": "horovod"}
AVERAGE = {"mode": "local", "outer": {"lr": 1.0, "momentum": 0.0}}


TOLD = {
    "apart": "warning: after 10 steps 3.weight differs on rank 1 from rank 0: replicas diverge",
    "apart_later": "warning: after 20 steps 3.weight differs on rank 1 from rank 0: replicas diverge",
    "itself": "note: dim, gather, logger of the prepared Net is DistributedDataParallel's",
    "saved_within": "the checkpoint has only the main rank's parameters",
    "short_rounds": "training may diverge",
    "sparse": "has sparse or complex gradients",
}
"""Messages that a lesson must print once, or must not print."""


@pytest.mark.parametrize(
    ("strategy", "ranks", "lessons", "told"),
    [
        pytest.param({}, 3, "apart exact wrapped several scaled nan mistakes unused", "apart", id="sync"),
        pytest.param(
            {}, 3, "apart_later itself compiled targets averaged ported unfrozen frozen sparse methods",
            "apart_later itself", id="sync, other models",
        ),
        pytest.param({"balance": True}, 3, "exact", "", id="balance", marks=pytest.mark.prioritized),
        pytest.param(HOROVOD, 2, "exact wrapped several scaled nan targets unfrozen half_frozen complex_ones released", "", id="horovod", marks=pytest.mark.horovod),
        pytest.param(
            {**HOROVOD, "accumulate": 3, "gradients": {"format": "fp16"}}, 2, "several scaled two_optimizers", "", id="horovod, fp16",
            marks=pytest.mark.horovod,
        ),
        pytest.param({**AVERAGE, "inner_steps": 4}, 2,
                     "wrapped itself compiled several scaled nan streamed targets averaged ported unfrozen short_rounds", "",
                     id="local"),
        pytest.param({"mode": "local", "inner_steps": 7}, 2, "outer unfrozen momentum short_rounds", "short_rounds", id="diloco"),
        pytest.param(
            {"mode": "local", "inner_steps": 8, "gradients": {"format": "bf16"},
             "outer": {"lr": 0.7, "momentum": 0.5, "fragments": 3, "overlap_steps": 2}}, 2, "streamed scaled short_rounds", "",
            id="streaming diloco",
        ),
        pytest.param({}, 2, "in_evaluation released fused late unwrapped hooks again refrozen in_turn closures handed_out unequal",
                     "unequal", id="sync, steps"),
        pytest.param({"gradients": {"format": "bf16"}}, 2, "sparse released stepped", "sparse", id="sync, bf16"),
        pytest.param({"accumulate": 3}, 2,
                     "sharpness exact scaled fused thrown_away uncounted again one_model two_optimizers stepped", "",
                     id="accumulate"),
        pytest.param({**AVERAGE, "inner_steps": 2}, 2,
                     "sharpness uncounted closures schedule_free named_twice hooks two_optimizers masks methods handed_out released", "",
                     id="local, steps"),
        pytest.param(
            {"mode": "local", "inner_steps": 4, "outer": {"overlap_steps": 2}}, 2, "one_outer_step", "",
            id="local, overlapped",
        ),
        pytest.param({"mode": "local"}, 2, "evaluated_settled saved_within unequal", "saved_within unequal",
                     id="local, one round"),
    ],
)  # fmt: skip
def test_lessons(strategy, ranks, lessons, told, tmp_path):
    words = json.dumps(strategy)
    result = run_ranks(ranks, SCRIPTS / "modes.py", tmp_path, *lessons.split(), DISTRIB_STRATEGY=words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split("\n")[:-1] == [f"{lesson}: learnt" for lesson in lessons.split()]
    _, *parts = re.split(r"^lesson: \w+\n", result.stderr, flags=re.MULTILINE)
    during = dict(zip(lessons.split(), parts, strict=True))
    for lesson in during.keys() & TOLD.keys():
        if lesson in told.split():  # a check may report diverged ranks a little later
            assert result.stderr.count(TOLD[lesson]) == 1, result.stderr
        else:
            assert TOLD[lesson] not in during[lesson], result.stderr
    # In mode local only one rank catches the error of lesson `nan`, and that rank takes fewer steps.
    diverged = {"apart", "apart_later", "unequal"} & {*told.split()}
    if strategy.get("mode") == "local":
        diverged |= {"nan"} & {*lessons.split()}
    assert result.stderr.count("replicas diverge") == len(diverged), result.stderr
    if "unequal" in during:
        taken = re.findall(r"warning: rank 0 has taken (\d+) steps, rank 1 (\d+): replicas diverge", result.stderr)
        assert [int(first) - int(second) for first, second in taken] == [3], result.stderr
    if "sparse" in told:
        assert "not as bf16" in during["sparse"]
    if "itself" in told:
        assert during["itself"].count("of the prepared") == 1, result.stderr
    if "stepped" in during:  # last lesson: prints at the end of the job and uses no DataLoader
        lines = [
            line for line in during["stepped"].splitlines() if not re.search("^  |DataLoader|replicas diverge", line)
        ]
        assert lines == [
            f"distrib: {n} of {n + 1} steps of SGD were skipped: gradients were nan or infinite" for n in (10, 11)
        ]


def test_gradients_that_a_script_sets_by_itself(launch, tmp_path):
    came_to = []
    for options in ((), ("--mode", "async", "--staleness", "0")):
        run = launch("-np", "2", *options, SCRIPTS / "modes.py", tmp_path, "functional")
        assert run.code == 0 and "functional: learnt" in run.out, run
        came_to += re.findall(r"came to ([0-9.]+)", run.out)
    assert float(came_to[0]) == pytest.approx(float(came_to[1]), rel=1e-4)  # staleness 0 gives the result of mode sync


@pytest.mark.parametrize(("lesson", "says"), [
    ("parted_in_the_middle", r"step\(\) of SGD was called by rank 0 5 times in 5 backward passes, by rank 1 5 times in 6 "),
    ("parted_at_the_end", r"step\(\) of SGD was called by rank 0 11 times in 11 backward passes, by rank 1 10 times in 12 "),
])  # fmt: skip
def test_ranks_that_come_to_different_batches_are_named(lesson, says, tmp_path):
    result = run_ranks(2, SCRIPTS / "modes.py", tmp_path, lesson, DISTRIB_STRATEGY='{"accumulate": 3}')
    assert result.returncode != 0
    assert re.search(says, result.stderr), result.stderr


def test_outer_momentum_in_other_fragments(tmp_path):
    for fragments in (2, 1):
        words = json.dumps({"mode": "local", "inner_steps": 4, "outer": {"fragments": fragments}})
        result = run_ranks(2, SCRIPTS / "modes.py", tmp_path, "momentum", DISTRIB_STRATEGY=words)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("mode", "ranks", "says"),
    [({"mode": "sync", "backend": "horovod"}, 2, "Horovod needs ranks that MPI started|not installed")],
)
def test_backends_that_cannot_be(mode, ranks, says):
    world = World(rank=0, size=ranks, local_rank=0, local_size=ranks)
    with pytest.raises(TrainingError, match=says):
        create_strategy(Strategy(**mode), world, torch.device("cpu"))


batches = st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=1, max_size=4)


@given(batches)
@settings(deadline=None)
def test_gradients_are_the_mean_over_all_samples(sizes):
    """Three ranks with different numbers of samples average their gradients over all samples."""
    generator = torch.Generator().manual_seed(0)
    shares = []
    per_batch = [[torch.randn(own, 4, generator=generator, dtype=torch.float64) for own in ranks] for ranks in sizes]
    for rank in range(3):
        weight = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        samples = BatchSamples(own=1, all=3)
        mean = GradientAccumulator(torch.optim.SGD([weight], lr=1.0), samples, ranks=3)
        mean.batches = len(sizes)
        for batch in per_batch:
            samples.own, samples.all = len(batch[rank]), sum(map(len, batch))
            mean.update_hooks()
            weight.grad = None
            (batch[rank] @ weight).mean().backward()
            last = mean.is_last
            mean.next_batch()
        assert last and not mean.is_begun
        shares.append(weight.grad)
    every = torch.cat([part for batch in per_batch for part in batch])
    torch.testing.assert_close(sum(shares) / 3, every.mean(0))


def test_a_model_that_is_frozen_for_the_turn_of_another_keeps_what_it_gathers():
    weight = torch.zeros(3, requires_grad=True)
    mean = GradientAccumulator(torch.optim.SGD([weight], lr=1.0), BatchSamples(), ranks=1)
    mean.batches = 2
    mean.update_hooks()
    for gradient in (torch.tensor([1.0, 0.0, 4.0]), torch.tensor([3.0, 2.0, 0.0])):
        weight.requires_grad_(False)
        mean.update_hooks()  # the script reads a batch while the weight is frozen
        weight.requires_grad_(True)
        weight.grad = None
        (weight * gradient).sum().backward()
        mean.next_batch()
    assert weight.grad.tolist() == [2.0, 1.0, 2.0]


def test_even_batches_cost_nothing():
    weight = torch.zeros(4, requires_grad=True)
    samples = BatchSamples(own=1, all=3)
    mean = GradientAccumulator(torch.optim.SGD([weight], lr=1.0), samples, ranks=3)
    for own, every, weighted in ((4, 12, False), (3, 10, True), (4, 12, False)):
        samples.own, samples.all = own, every
        mean.update_hooks()
        assert bool(mean.hooks) == weighted


def test_what_a_script_computes_beside_its_step_is_not_weighted():
    weight = torch.ones(2, requires_grad=True)
    GradientAccumulator(torch.optim.SGD([weight], lr=1.0), BatchSamples(own=3, all=4), ranks=2).update_hooks()
    loss = (2 * weight).sum()
    assert torch.autograd.grad(loss, weight, retain_graph=True)[0].tolist() == [2.0, 2.0]
    loss.backward()
    assert weight.grad.tolist() == [3.0, 3.0]


def test_a_parameter_of_two_optimizers_is_weighted_once():
    weight = torch.ones(2, requires_grad=True)
    samples = BatchSamples(own=3, all=4)
    means = [GradientAccumulator(torch.optim.SGD([weight], lr=1.0), samples, ranks=2) for _ in range(2)]
    for own in (3, 2, 3):
        samples.own = own
        for mean in means:
            mean.update_hooks()
        weight.grad = None
        weight.sum().backward()
        assert weight.grad.tolist() == [own / 2, own / 2]
    means[1].batches = 2
    with pytest.raises(TrainingError, match="in two optimizers"):
        means[1].update_hooks()


@given(st.integers(1, 2000), st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12))
def test_shares_in_proportion(samples, speeds):
    ranks = len(speeds)
    parts = [share(5, 5 + samples, rank, ranks, speeds) for rank in range(ranks)]
    assert [x for part in parts for x in part] == list(range(5, 5 + samples))
    if samples >= ranks:
        sizes = proportional(samples, speeds)
        assert min(sizes) >= (2 if samples >= 2 * ranks else 1) and sizes == [len(part) for part in parts]
        order = sorted(range(ranks), key=lambda rank: speeds[rank])
        assert all(sizes[a] <= sizes[b] + 1 for a, b in pairwise(order))


def took(seconds: float, varies: float = 0.01, samples: float = 8.0) -> BatchTiming:
    return BatchTiming(seconds * (1 - varies), seconds, seconds * (1 + varies), samples)


def test_shares_change_when_times_differ():
    assert _updated_speeds((took(0.1), took(0.102)), ()) == ()
    assert _updated_speeds((took(0.1), took(0.2)), ()) == (80.0, 40.0)
    assert _updated_speeds((took(0.1, varies=0.5), took(0.2, varies=0.5)), ()) == ()
    assert _updated_speeds((took(0.1), BatchTiming(0.0, 0.0, 0.0, 0.0)), (3.0, 1.0)) == (3.0, 1.0)
    assert proportional(16, (80.0, 40.0)) == [11, 5]


@pytest.mark.parametrize(("fixed", "each"), [(0.01, 0.0), (0.01, 1e-4), (0.0, 1e-3)])
@pytest.mark.parametrize("slow", [1.0, 2.0])
def test_shares_follow_the_speed_and_not_the_noise(fixed, each, slow):
    """Two ranks have steps of fixed time plus time per sample, with 10 % noise; their speed is equal or 2:1."""
    quarter = SETTINGS.measured_batches // 4
    for seed in range(60):
        noise, proportion, speeds = random.Random(seed), _ShareController(), (1.0, 1.0)
        for _ in range(50):
            sizes = proportional(32, speeds)
            paces = [fixed + each * size * factor for size, factor in zip(sizes, (1.0, slow), strict=True)]
            taken = [
                sorted(pace * noise.lognormvariate(0, 0.1) for _ in range(SETTINGS.measured_batches)) for pace in paces
            ]
            measured = [
                BatchTiming(times[quarter], times[SETTINGS.measured_batches // 2], times[-1 - quarter], size)
                for times, size in zip(taken, sizes, strict=True)
            ]
            speeds = proportion.update(measured) or (1.0, 1.0)
        if slow == 1.0 or not each:
            assert 0.35 < sizes[0] / 32 < 0.65, seed
        elif not fixed:
            assert 0.6 < sizes[0] / 32 < 0.75, seed


@pytest.mark.parametrize("mode", [[], ["--mode", "async"]], ids=["sync", "async"])
def test_what_the_library_makes_is_not_on_the_device_of_set_default_device(launch, tmp_path, mode):
    run = launch("-np", 2, *mode, SCRIPTS / "default_device.py", tmp_path)
    assert run.code == 0, run
    told = json.loads(next(line for line in run.out.splitlines() if "first" in line).partition("] ")[2])
    assert told["device"] == "meta"
    assert told["last"] < told["first"]
