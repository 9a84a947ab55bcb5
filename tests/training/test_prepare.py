"""Models, optimizers and loaders of a script, prepared or not."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from distrib.errors import TrainingError
from distrib.strategy import Strategy, parse_gradients
from distrib.training.model_parameters import has_misplaced_state
from distrib.training.strategies.ddp import wrap_model
from tests.conftest import SCRIPTS
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("inductor_cache")


@pytest.mark.processes
def test_a_loader_that_was_not_prepared_is_reported_once(tmp_path):
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
    torch.optim.SGD(parameters, lr=0.01)
    for parameters in (generator.parameters(), judge.parameters(), [*generator.parameters(), *judge.parameters()])
)
generator, judge, of_generator, of_judge, of_both = job.prepare(
    generator, judge, of_generator, of_judge, of_both, find_unused_parameters="unused" in sys.argv
)
torch.manual_seed(job.rank)
for step in range(12):
    if step == 6:
        whole = torch.cat([p.flatten() for model in (generator, judge) for p in model.parameters()])
        assert torch.equal(whole, job.all_reduce(whole, "max")), whole
        print("alike", flush=True)
    of_generator.zero_grad()
    judge(generator(torch.randn(4, 3)))[0].mean().backward()
    of_generator.step()
    of_judge.zero_grad()
    sum(map(torch.sum, judge(torch.randn(4, 2)))).backward()
    of_judge.step()
    of_both.zero_grad()
    loss = judge(generator(torch.randn(4, 3)))[1].square().mean()
    (loss * float("nan") if step == 10 and job.rank else loss).backward()
    of_both.step()
"""


@pytest.mark.processes
def test_parameters_without_gradient_are_refused_unless_declared_unused(tmp_path):
    """Two models with equal parameter names share one optimizer, as in an InfoGAN."""
    script = tmp_path / "heads.py"
    script.write_text(TWO_HEADS)
    result = run_ranks(2, script)
    assert result.returncode and "kind.weight, kind.bias got no gradient" in result.stderr
    result = run_ranks(2, script, "unused")
    assert result.returncode and result.stdout == "alike\n" * 2, result.stderr
    assert "step 11: the gradient of Generator.layer.weight (and of" in result.stderr and "on rank 1" in result.stderr


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


@pytest.mark.processes
def test_an_optimizer_of_no_prepared_model_is_reported(tmp_path):
    script = tmp_path / "others.py"
    script.write_text(LIKE_OTHERS)
    result = run_ranks(2, script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[2, 0, 2] [1.0, 0.0, 1.0] [True, False, True]"] * 2
    (told,) = [line for line in result.stderr.splitlines() if line.startswith("distrib: ")]
    assert "neither SGD nor its model was passed to job.prepare" in told


@pytest.mark.processes
def test_models_wrapped_by_the_script_are_accepted(tmp_path):
    result = run_ranks(2, SCRIPTS / "wrapped_by_hand.py")
    assert (result.returncode, result.stdout.count("all is well")) == (0, 2), result.stderr
    told = [line for line in result.stderr.splitlines() if line.startswith("distrib: ")]
    assert len(told) == 1 and "no DataLoader was passed to job.prepare" in told[0], result.stderr


FIRST_STEP = """
import distrib, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
job = distrib.init()
class Model(nn.Module):
    def __init__(self, unused):
        super().__init__()
        self.unused = unused
        self.rows, self.one, self.other = nn.Embedding(4, 2, max_norm=0.1), nn.Linear(2, 1), nn.Linear(2, 1)
        if not unused:
            self.own = nn.Parameter(torch.full((3,), float(job.rank)))
    def forward(self, x):
        one = self.one(self.rows(x))
        if self.unused:
            return one if job.rank else one + self.other(self.rows(x))
        return one + self.other(self.rows(x)) + self.own.sum()
torch.manual_seed(1)
for unused in (False, True):
    model = Model(unused)
    if not unused:
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["own"])
        model = DDP(model)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    model(torch.tensor([job.rank])).sum().backward()
    optimizer.step()
    print("stepped", flush=True)
"""


@pytest.mark.processes
def test_the_first_step_is_refused_for_missing_gradients_but_not_for_ignored_parameters(tmp_path):
    """Parameters that DistributedDataParallel ignores, and embeddings that change in forward, belong to each rank."""
    script = tmp_path / "first.py"
    script.write_text(FIRST_STEP)
    result = run_ranks(2, script)
    assert result.returncode == 1 and result.stdout.count("stepped") == 2, result.stderr
    assert "other.weight, other.bias got no gradient in this step" in result.stderr


NOT_ALL_PREPARED = """
import sys
import distrib, torch
from torch.utils.data import DataLoader

with distrib.init() as job:
    for case in sys.argv[1:]:
        job.print("case:", case, file=sys.stderr)
        model, loader = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), DataLoader(torch.ones(8, 2), 2)
        trained = model if case == "one of two" else [model]
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in trained]
        if case != "nothing":
            loader = job.prepare(loader)
        if case in ("model", "one of two"):
            model = job.prepare(model)
        if case == "one of two":
            optimizers[0] = job.prepare(optimizers[0])
        error = None
        try:
            for batch in loader:
                model(batch.to(job.device)).sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        except distrib.TrainingError as caught:
            error = caught
        job.print("refused on", job.all_reduce(float(error is not None), "sum"), error, file=sys.stderr)
"""
ONLY_THE_MODEL = "SGD was not passed to job.prepare, but the model that it trains was: "


@pytest.mark.parametrize(
    ("strategy", "cases"),
    [
        ({}, {"model": (0, f"{ONLY_THE_MODEL}unequal batches"), "one of two": (0, "steps not counted\n  call model, optimizer = job.prepare(model, optimizer)"),
              "nothing": (0, "nor its model was passed to job.prepare")}),
        ({"accumulate": 2}, dict.fromkeys(["model", "one of two"], (2, f"{ONLY_THE_MODEL}its batches are not accumulated"))),
        ({"mode": "local", "inner_steps": 2},
         {"loader": (0, "nor its model was passed to job.prepare"),
          **dict.fromkeys(["model", "one of two"], (2, f"{ONLY_THE_MODEL}replicas would diverge; model, "))}),
        pytest.param({"backend": "horovod"}, {"one of two": (2, f"{ONLY_THE_MODEL}replicas would diverge; model, ")},
                     marks=pytest.mark.horovod),
    ],
)  # fmt: skip
@pytest.mark.processes
def test_optimizers_that_were_not_prepared_are_reported_or_refused(tmp_path, strategy, cases):
    script = tmp_path / "forgotten.py"
    script.write_text(NOT_ALL_PREPARED)
    result = run_ranks(2, script, *cases, DISTRIB_STRATEGY=json.dumps(strategy))
    assert result.returncode == 0, result.stderr
    _, *parts = result.stderr.split("case: ")
    for part, (case, (refusing_ranks, says)) in zip(parts, cases.items(), strict=True):
        assert part.startswith(case) and says in part and f"refused on {refusing_ranks:.1f} " in part, result.stderr
        assert refusing_ranks or part.count("distrib: ") == 1, result.stderr


def test_a_scaler_that_skips_40_steps_is_reported_once(job, capfd):
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
    assert capfd.readouterr().err.count("the GradScaler skipped 40 steps of SGD in a row") == 1


def test_optimizer_state_on_another_device_is_detected():
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
    with pytest.raises(TrainingError, match="powersgd waits"):
        wrap_model(nn.Linear(2, 1), torch.device("cuda", 0), 2, find_unused_parameters=False, settings=strategy)
