"""Run lessons that every training mode must pass: `modes.py FOLDER NAME...`, with the strategy of the environment."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import re
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import swa_utils
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import distrib
from devices import on_gpu, seeded
from distrib.errors import TrainingError
from distrib.strategy import strategy_from_environment
from distrib.training import optimizer_step as steps

STRATEGY = strategy_from_environment(os.environ)


def gathered(thing: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def make_data(samples: int) -> TensorDataset:
    generator = seeded(2)
    return TensorDataset(
        torch.randn(samples, 6, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    )


def make_model(*, normalizes: bool = not STRATEGY.balance) -> nn.Module:
    torch.manual_seed(1)
    middle = nn.BatchNorm1d(16) if normalizes else nn.Identity()
    return nn.Sequential(nn.Linear(6, 16), middle, nn.Tanh(), nn.Linear(16, 3))


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assert_alike(model: nn.Module) -> None:
    """Assert that the model and its buffers are identical on all ranks."""
    first, *others = gathered({name: value.clone() for name, value in model.state_dict().items()})
    for other in others:
        for name, value in first.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=0)


def exact(job: distrib.Job) -> None:
    """Match one process with the whole batch over two epochs with uneven last batches and clipping."""
    model, reference = make_model(normalizes=False), make_model(normalizes=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(make_data(47 * job.world_size + 7), 4, shuffle=True)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    inner = job.unwrap(model)
    slow = job.rank == 1 and STRATEGY.balance
    group: list[Any] = []
    sizes: list[int] = []
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10**6)
    steps = 0
    for _ in range(2):
        model.train()
        for inputs, targets in loader:
            if slow:
                time.sleep(0.02 * len(inputs))  # exceeds the noise of a busy machine
            sizes.append(len(inputs))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            before = parameters_of(inner)
            optimizer.step()
            schedule.step()
            steps += bool((parameters_of(inner) != before).any())

            parts = gathered((inputs, targets))
            group.append([torch.cat(part) for part in zip(*parts, strict=True)])
            if len(group) == STRATEGY.accumulate:
                # The mean is over the samples of all batches.
                samples = sum(len(ys) for _, ys in group)
                reference_optimizer.zero_grad()
                for xs, ys in group:
                    (nn.functional.cross_entropy(reference(xs), ys, reduction="sum") / samples).backward()
                nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
                reference_optimizer.step()
                group.clear()
    assert steps == len(sizes) // STRATEGY.accumulate
    torch.testing.assert_close(parameters_of(inner), parameters_of(reference), rtol=0, atol=1e-5)
    assert_alike(inner)
    if STRATEGY.balance:
        last = gathered(sizes[-3])
        assert last[1] < min(last[:1] + last[2:]), f"the slow rank's batches should have become smaller: {last}"


def wrapped(job: distrib.Job) -> None:
    """Check no_sync, an evaluation on rank 0 only, and unchanged names in checkpoints."""
    plain = make_model()
    plain.middle = torch.compile(nn.Linear(2, 2), backend="eager")  # type: ignore[assignment]
    names = [name.replace("_orig_mod.", "") for name in plain.state_dict()]
    plain.forward = lambda x: plain[3](plain[2](plain[1](plain[0](x)))) + plain.middle(x[:, :2]).sum()  # type: ignore[assignment,index]
    model = job.prepare(plain)
    optimizer = job.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.randn(4, 6, generator=seeded(job.rank))
    with model.no_sync():
        model(inputs).square().mean().backward()
    local = plain[0].weight.grad.clone()  # type: ignore[index,union-attr]
    assert not torch.equal(*gathered(local)[:2])
    model(inputs).square().mean().backward()
    if STRATEGY.mode == "sync":
        mean = sum(gathered(local)) / job.world_size
        torch.testing.assert_close(plain[0].weight.grad, 2 * mean)  # type: ignore[index,union-attr]
    optimizer.step()
    optimizer.zero_grad()
    copied = copy.deepcopy(plain)
    with copied.no_sync() if hasattr(copied, "no_sync") else model.no_sync():
        pass
    if job.is_main:  # synchronized buffers would hang here
        model.eval()
        with torch.no_grad():
            model(inputs)
        model.train()
    job.settle()
    assert_alike(plain)
    path = Path(sys.argv[1]) / f"{job.rank}.pt"
    job.save(path, model=model, optimizer=optimizer)
    job.barrier()
    if job.is_main:
        assert list(torch.load(path, weights_only=True)["states"]["model"]) == names
    with torch.no_grad():
        plain[0].weight.zero_()  # type: ignore[index,operator]
    job.restore(path, model=model, optimizer=optimizer)
    assert plain[0].weight.abs().sum() > 0  # type: ignore[index,operator]


def several(job: distrib.Job) -> None:
    """Train two models with an optimizer each, one with a frozen parameter; both stay identical."""
    first, second = make_model(), make_model()
    frozen = second[3].weight.requires_grad_(False)  # type: ignore[index,union-attr,operator]
    one = torch.optim.AdamW(first.parameters(), 1e-2)
    two = torch.optim.SGD(second.parameters(), 0.1)
    first, second, one, two, loader = job.prepare(first, second, one, two, DataLoader(make_data(60), 5, shuffle=True))
    before = parameters_of(second)
    kept = frozen.detach().clone()
    for inputs, targets in loader:
        for model, optimizer in ((first, one), (second, two)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    for model in (first, second):
        assert_alike(job.unwrap(model))
    assert torch.equal(frozen, kept) and not torch.equal(before, parameters_of(second))


def scaled(job: distrib.Job) -> None:
    """Skip one step with a GradScaler if the gradient is infinite on one rank; ranks stay identical."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(make_data(32 * job.world_size), 4))
    scaler = job.prepare(torch.amp.GradScaler(torch.get_default_device().type, init_scale=256.0, growth_interval=5))
    scales = []
    for batch, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if batch == 2 and job.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert_alike(job.unwrap(model))
    assert torch.isfinite(parameters_of(model)).all()
    if STRATEGY.mode == "sync":
        assert 128.0 in scales and len(set(scales)) <= 3
    elif job.rank != 1:
        assert min(scales) == 256.0


def raises(words: str, work: Callable[[], object], kind: type[Exception] = TrainingError) -> None:
    try:
        work()
    except kind as error:
        assert re.search(words, str(error)), error
    else:
        raise AssertionError(f"no error: {words}")


def mistakes(job: distrib.Job) -> None:
    """Report each mistake on every rank; no rank hangs."""
    for other, words in (
        (
            nn.Linear(2, 3),
            "rank 1 prepares something else than rank 0: in Linear, 2 parameters of 36 bytes, 2 trainable, not 2 parameters of 24 bytes",
        ),
        (nn.Sequential(nn.Linear(2, 2)), "rank 1 prepares something else than rank 0: Sequential, not Linear"),
        (nn.Linear(2, 2, bias=False), "in Linear, 1 parameters of 16 bytes"),
    ):
        raises(words, lambda other=other: job.prepare(other if job.rank == 1 else nn.Linear(2, 2)))
    raises("Linear, not Linear and SGD", lambda: job.prepare(*things(job.rank == 1)))
    raises(
        "DataLoader of 9 samples, not DataLoader of 8 samples",
        lambda: job.prepare(DataLoader(make_data(9 if job.rank == 1 else 8), 2)),
    )
    model = nn.Linear(2, 3)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups[:1] if job.rank == 1 else groups, lr=0.1)
    raises(r"in SGD, groups of \[1\] parameters, not groups of \[1, 1\]", lambda: job.prepare(model, optimizer))
    if not on_gpu():
        raises("sync_batchnorm on CPUs", lambda: job.prepare(nn.BatchNorm1d(2), sync_batchnorm=True))
    raises(
        "in the options of job.prepare, on_nan='skip', not on_nan='raise'",
        lambda: job.prepare(nn.Linear(2, 2), on_nan="skip" if job.rank == 1 else "raise"),
    )
    raises(r"accumulate\('4'\)", lambda: job.accumulate("4"))  # type: ignore[arg-type]
    job.prepare(nn.ReLU())
    raises("Sequential has lazy layers", lambda: job.prepare(nn.Sequential(nn.LazyLinear(2))))

    left, right = nn.Linear(2, 2), nn.Linear(2, 2)
    job.prepare(left)
    foreign = job.prepare(torch.optim.SGD([*left.parameters(), *right.parameters()], lr=0.1))
    raises(r"parameter 2 of group 0 of the SGD, \[2, 2\], belongs to no prepared model", foreign.step)


def things(short: bool) -> Iterator[Any]:
    model = nn.Linear(2, 2)
    yield model
    if not short:
        yield torch.optim.SGD(model.parameters(), lr=0.1)


def unused(job: distrib.Job) -> None:
    """Report parameters without gradients before the other ranks wait for them."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inner = job.unwrap(model)
    inner.forward = lambda x: inner[0](x)  # type: ignore[index,assignment]
    model(torch.ones(2, 6)).sum().backward()
    raises(f"rank {job.rank}: 1.weight, 1.bias got no gradient", optimizer.step)


def unwrapped(job: distrib.Job) -> None:
    """Refuse training that bypasses the prepared model, also after the prepared model was evaluated."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, _ = job.prepare(model, optimizer)
    with torch.no_grad():
        prepared(torch.randn(4, 6))
    model(torch.randn(4, 6)).sum().backward()
    raises("gradients that were not all-reduced", optimizer.step)


def again(job: distrib.Job) -> None:
    """Prepare an optimizer and its model twice; the steps do not change."""
    model = make_model()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model, optimizer = job.prepare(job.unwrap(model), optimizer)
    before, taken = parameters_of(job.unwrap(model)), []
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        taken.append(not torch.equal(parameters_of(job.unwrap(model)), before))
        before = parameters_of(job.unwrap(model))
    every = STRATEGY.accumulate
    assert taken == [step % every == 0 for step in range(1, 7)], taken


def nan(job: distrib.Job) -> None:
    """Report a nan gradient, or skip its step on all ranks."""
    for on_nan in ("skip", "raise"):
        model = make_model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), on_nan=on_nan)
        for step in range(1, 4):
            optimizer.zero_grad()
            inputs = torch.ones(4, 6)
            if step == 2 and job.rank == 1:
                inputs[0, 0] = float("nan")
            model(inputs + torch.randn(4, 6)).sum().backward()
            if on_nan == "raise" and step == 2 and (STRATEGY.mode == "sync" or job.rank == 1):
                raises(
                    r"step 2: the gradient of 0.weight \(and of \d+ more\) is nan or infinite on rank 1;",
                    lambda optimizer=optimizer: (optimizer.step(), job.settle()),  # the step does not wait for a GPU
                )
                break
            optimizer.step()
        assert torch.isfinite(parameters_of(model)).all() or (on_gpu() and on_nan == "raise")
    optimizer.zero_grad()
    job.barrier()


def outer(job: distrib.Job) -> None:
    """Match torch's SGD with Nesterov momentum for the outer step, also after a restored checkpoint."""
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = job.prepare(model, optimizer)
    common = nn.Linear(5, 3)
    common.load_state_dict(model.state_dict())
    nesterov = torch.optim.SGD(common.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    generator = seeded(job.rank)
    path = Path(sys.argv[1]) / "outer.pt"
    for round_ in range(3):
        alone = copy.deepcopy(model)
        alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
        for _ in range(STRATEGY.inner_steps or 0):
            inputs = torch.randn(4, 5, generator=generator)
            for one, other in ((model, optimizer), (alone, alone_optimizer)):
                other.zero_grad()
                one(inputs).square().mean().backward()
                other.step()
        ways = gathered(
            [old.detach() - new.detach() for old, new in zip(common.parameters(), alone.parameters(), strict=True)]
        )
        for parameter, *way in zip(common.parameters(), *ways, strict=True):
            parameter.grad = sum(way) / job.world_size  # type: ignore[assignment]
        nesterov.step()
        torch.testing.assert_close(parameters_of(model), parameters_of(common), rtol=0, atol=1e-6)
        if round_ == 1:
            job.save(path, model=model, optimizer=optimizer)
            job.barrier()
            job.restore(path, model=model, optimizer=optimizer)


def streamed(job: distrib.Job) -> None:
    """Train with fragments and overlap: ranks differ within an epoch, and are identical after it."""
    torch.manual_seed(job.rank)
    data = make_data(400)
    target = torch.randn(6, 3, generator=seeded(5))
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
    model, optimizer, loader = job.prepare(
        model, torch.optim.SGD(model.parameters(), 0.05), DataLoader(data, 5, shuffle=True)
    )
    losses, differed = [], False
    for _ in range(6):
        total = 0.0
        for batch, (inputs, _) in enumerate(loader):
            optimizer.zero_grad()
            loss = (model(inputs) - inputs @ target).square().mean()
            loss.backward()
            optimizer.step()
            total += loss.item()
            if batch == 4:
                first, second, *_ = gathered(parameters_of(model))
                differed |= not torch.equal(first, second)
        losses.append(job.all_reduce(total))
        assert_alike(model)
    assert differed and losses[-1] < 0.1 * losses[0], losses


def make_plain_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def thrown_away(job: distrib.Job) -> None:
    """Ignore gradients that the script clears before a step, such as a generator's through the discriminator."""
    generator = seeded(job.rank)
    for set_to_none in (True, False):
        model, reference = make_plain_model(), make_plain_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = job.prepare(model, optimizer)
        for _ in range(2):
            group = []
            for _ in range(STRATEGY.accumulate):
                optimizer.zero_grad(set_to_none)
                real, fake, other = torch.randn(3, 4, 6, generator=generator)
                for inputs in (real, fake):
                    model(inputs).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                model(other).sum().mul(100).backward()
                group += gathered((real, fake))
            reference_optimizer.zero_grad()
            for parts in group:
                for inputs in parts:
                    (reference(inputs).square().mean() / len(group)).backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            reference_optimizer.step()
        torch.testing.assert_close(parameters_of(model), parameters_of(reference), rtol=0, atol=1e-5)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization as in most scripts, with other step names and an inner optimizer."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, options)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.clone()
                parameter.add_(parameter.grad, alpha=0.05 / (norm.item() + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["old"])
        self.base_optimizer.step()
        self.zero_grad()


def uncounted(job: distrib.Job) -> None:
    """Refuse a step that bypasses the prepared optimizer, and name the optimizer to prepare."""

    def steps(model: nn.Module, sam: Sam, count: int) -> None:
        for _ in range(count):
            inputs = torch.randn(4, 6)
            model(inputs).square().mean().backward()
            sam.first_step()
            model(inputs).square().mean().backward()
            sam.second_step()

    torch.manual_seed(job.rank)
    plain = make_plain_model()
    sam = Sam(plain.parameters(), lr=0.1)
    model, _ = job.prepare(plain, sam)
    raises("SGD updated parameters of the prepared Sam .* job.prepare", lambda: steps(model, sam, 1))

    plain = make_plain_model()
    sam = Sam(plain.parameters(), lr=0.1)
    before = parameters_of(plain)
    model, _ = job.prepare(plain, sam.base_optimizer)
    steps(model, sam, 2 * STRATEGY.accumulate)
    job.settle()
    assert_alike(plain)
    assert not torch.equal(parameters_of(plain), before)


def sharpness(job: distrib.Job) -> None:
    """Minimize sharpness by hand: compute gradients at shifted parameters, and return nearly to the original ones."""
    plain = make_plain_model()
    model, optimizer = job.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    before = parameters_of(plain)
    generator = seeded(job.rank)
    for _ in range(2 * STRATEGY.accumulate):
        inputs = torch.randn(4, 6, generator=generator)
        model(inputs).square().mean().backward()
        with torch.no_grad():
            ways = [parameter.grad * 0.05 for parameter in model.parameters()]
            for parameter, way in zip(model.parameters(), ways, strict=True):
                parameter.add_(way)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        with torch.no_grad():
            for parameter, way in zip(model.parameters(), ways, strict=True):
                parameter.sub_(way)
        optimizer.step()
        optimizer.zero_grad()
    job.settle()
    assert (parameters_of(plain) - before).abs().max() > 1e-3


def functional(job: distrib.Job) -> None:
    """Set gradients of torch.func, whose functions receive the parameters before any layer runs."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = job.unwrap(model)
    generator = seeded(job.rank)
    weights = torch.arange(6.0)
    losses = []
    for _ in range(60):
        inputs = torch.randn(16, 6, generator=generator)

        def loss(parameters: dict[str, torch.Tensor], inputs: torch.Tensor = inputs) -> torch.Tensor:
            out = torch.func.functional_call(plain, parameters, (inputs,)).squeeze(1)
            return (out - torch.tanh(inputs @ weights)).square().mean()

        present = {name: value.detach() for name, value in plain.named_parameters()}
        losses.append(float(loss(present)))
        gradients = torch.func.grad(loss)(present)
        for name, parameter in plain.named_parameters():
            parameter.grad = job.all_reduce(gradients[name]) if STRATEGY.mode == "sync" else gradients[name]
        optimizer.step()
    if STRATEGY.mode != "async":
        job.settle()
        assert_alike(plain)
    assert sum(losses[-20:]) / 20 < 0.5 * max(losses[:5]), losses
    job.print(f"came to {parameters_of(plain).double().abs().sum():.4f}")


def short_rounds(job: distrib.Job) -> None:
    model = make_plain_model()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()


def part(job: distrib.Job, left_out: set[int]) -> None:
    """Skip the step of some of twelve batches on rank 1 only."""
    model = make_plain_model()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in range(12):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6)).square().mean()
        if job.rank == 1 and batch in left_out:
            loss = loss * float("inf")
        loss.backward()
        if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            optimizer.step()


def parted_in_the_middle(job: distrib.Job) -> None:
    part(job, {4})


def parted_at_the_end(job: distrib.Job) -> None:
    part(job, {9, 10})


def fused(job: distrib.Job) -> None:
    """Scale a fused optimizer by a GradScaler, refuse one that is not prepared, and leak no tensors."""

    def steps(scaler: torch.amp.GradScaler, count: int) -> None:
        model = make_plain_model()
        model, optimizer = job.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 6)).square().mean()
            scaler.scale(loss * (float("inf") if len(tensors) == 2 and job.rank == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            steps_taken.append(job.stepped)
            gc.collect()
            tensors.append(sum(type(thing) is torch.Tensor for thing in gc.get_objects()))
        assert_alike(job.unwrap(model))

    tensors: list[int] = []
    steps_taken: list[bool] = []
    if STRATEGY.accumulate > 1:
        raises("a GradScaler leaves out steps", lambda: steps(torch.amp.GradScaler(torch.get_default_device().type), 1))
    steps(job.prepare(torch.amp.GradScaler(torch.get_default_device().type)), 24)
    assert tensors[11] == tensors[23], tensors
    every = STRATEGY.accumulate
    assert [n for n, taken in enumerate(steps_taken) if taken] == [n for n in range(every - 1, 24, every) if n != 2]


def late(job: distrib.Job) -> None:
    """Report a nan that is known one step later, as on a GPU, and write no checkpoint with it."""
    made = steps.NanGuard
    steps.NanGuard = lambda *words, **options: made(*words, **options | {"late": True})  # type: ignore[assignment,misc]
    path = Path(sys.argv[1]) / "late.pt"
    words = r"step 2: the gradient of 0.weight \(and of \d+ more\) is nan or infinite"
    for end in ("a step", "the epoch", "a checkpoint"):
        model = make_plain_model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        good = copy.deepcopy(model.state_dict())
        for step in (1, 2):
            optimizer.zero_grad()
            inputs = torch.full((4, 6), float("nan") if step == 2 and job.rank == 1 else 1.0)
            model(inputs).sum().backward()
            optimizer.step()
        model.load_state_dict(good)  # removes the nan from the gradients of the next step
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        if end == "a step":
            raises(f"{words} on rank 1;", optimizer.step)
        elif end == "the epoch":
            raises(f"{words} on rank 1;", job.settle)
        else:
            raises(words, lambda model=model: job.save(path, model=model))
            assert not path.exists()
            raises(words, job.settle)


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        yield from (make_data(self.samples)[index] for index in range(self.samples))


def in_evaluation(job: distrib.Job) -> None:
    """Train a model in evaluation mode, with fixed normalization."""

    def train(loader: Any) -> int:
        batches = 0
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            batches += 1
            xs, ys = (torch.cat(part) for part in zip(*gathered((inputs, targets)), strict=True))
            reference_optimizer.zero_grad()
            nn.functional.cross_entropy(reference(xs), ys).backward()
            reference_optimizer.step()
        return batches

    model, reference = make_model(), make_model().eval()
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.eval()
    stream = job.prepare(DataLoader(Stream(4 * (2 * job.world_size + 1)), 4))
    assert train(stream) == 2
    with torch.no_grad():
        read = sum(1 for _ in stream)
    assert sum(gathered(read)) == 2 * job.world_size + 1  # an evaluation reads all samples
    assert train(job.prepare(DataLoader(make_data(5 * job.world_size + 1), 4))) == 2
    torch.testing.assert_close(parameters_of(model), parameters_of(reference), rtol=0, atol=1e-5)
    single = job.prepare(DataLoader(make_data(2 * job.world_size + 1), 1))
    raises("some ranks have a batch less .* call model.train()", lambda: train(single))


def stepped(job: distrib.Job) -> None:
    """Report in `job.stepped` if a step was taken or skipped."""
    model = make_plain_model()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), on_nan="skip")
    seen = []
    for group in range(12):
        for _ in range(STRATEGY.accumulate):
            optimizer.zero_grad()
            model(torch.full((4, 6), float("nan") if group and job.rank == 1 else 1.0)).sum().backward()
            before = parameters_of(model)
            optimizer.step()
            assert job.stepped == (not torch.equal(parameters_of(model), before))
            seen.append(job.stepped)
    assert seen.index(True) == STRATEGY.accumulate - 1 and sum(seen) == 1


def targets(job: distrib.Job) -> None:
    """Broadcast a frozen model, such as a target network, from rank 0."""
    torch.manual_seed(job.rank)
    target = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    target[1].running_mean.fill_(job.rank)  # type: ignore[operator,union-attr]
    assert_alike(job.prepare(target))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=seeded(10 * step + rank))).square().mean().backward()
        optimizer.step()


def unfrozen(job: distrib.Job) -> None:
    """Report a layer that is unfrozen later, or train it after its model is prepared again."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(6, 16).requires_grad_(False), nn.Linear(16, 3))
    inner = model
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    model, optimizer = job.prepare(model, optimizer)
    train(model, optimizer, job.rank, 2)
    before = inner[0].weight.detach().clone()
    inner[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(inner[0].parameters())})
    if STRATEGY.mode == "sync":
        raises("0.weight was unfrozen after job.prepare", lambda: train(model, optimizer, job.rank, 1))
        assert torch.equal(inner[0].weight, before)
        model = job.prepare(job.unwrap(model))
    if STRATEGY.backend == "torch":
        train(model, optimizer, job.rank, 5)
        job.settle()
        assert not torch.equal(inner[0].weight, before)
        assert_alike(inner)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        optimizer.param_groups[-1]["params"][0].grad = torch.ones(2)
        raises(r"a parameter \[2\] of the optimizer belongs to no prepared model", optimizer.step)


def frozen(job: distrib.Job) -> None:
    """Report a layer that is frozen later before other ranks wait for it, or prepare its model again."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, job.rank, 2)
    job.unwrap(model)[0].requires_grad_(False)  # type: ignore[index,operator]
    model = job.prepare(job.unwrap(model))
    train(model, optimizer, job.rank, 3)
    assert_alike(job.unwrap(model))
    job.unwrap(model)[1].bias.requires_grad_(False)  # type: ignore[index,union-attr,operator]
    raises("1.bias of Sequential was frozen after job.prepare", lambda: train(model, optimizer, job.rank, 1))


def refrozen(job: distrib.Job) -> None:
    """Report an unfrozen layer that was frozen when its model was prepared again, as it is not averaged."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
    inner = model
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, job.rank, 2)
    inner[0].requires_grad_(False)
    model = job.prepare(inner)
    train(model, optimizer, job.rank, 2)
    inner[0].requires_grad_(True)
    raises("0.weight was unfrozen after job.prepare", lambda: train(model, optimizer, job.rank, 1))


class Pair(nn.Module):
    """Two networks in one module, with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 300), nn.Linear(6, 300)

    def forward(self, x: torch.Tensor, both: bool = True, first: bool = True) -> torch.Tensor:
        if both:
            return self.one(x) + self.two(x)  # type: ignore[no-any-return]
        return (self.one if first else self.two)(x)  # type: ignore[no-any-return]


def in_turn(job: distrib.Job) -> None:
    """Step two optimizers of a model after one backward; each clears all gradients."""
    torch.manual_seed(3)
    model = Pair()
    first = torch.optim.SGD(model.one.parameters(), lr=0.1)
    second = torch.optim.SGD(model.two.parameters(), lr=0.1)
    model, first, second = job.prepare(model, first, second)
    for step in range(4):
        model(torch.full((4, 6), step + job.rank + 1.0)).square().mean().backward()
        first.step()
        job.unwrap(model).one.zero_grad()  # type: ignore[union-attr,operator]
        second.step()
        second.zero_grad()
    assert_alike(job.unwrap(model))


def one_model(job: distrib.Job) -> None:
    """Accumulate with two optimizers of one model, with a backward each; each step uses the mean of all ranks."""
    torch.manual_seed(3)
    model = Pair()
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.01) for half in (model.one, model.two)]
    model, *optimizers = job.prepare(model, *optimizers, find_unused_parameters=True)
    before = parameters_of(job.unwrap(model))
    for batch in range(6):
        for number, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            model(torch.full((4, 6), batch + job.rank + 1.0), False, number == 0).square().mean().backward()
            optimizer.step()
    assert not torch.equal(parameters_of(job.unwrap(model)), before)
    assert_alike(job.unwrap(model))


def closures(job: distrib.Job) -> None:
    """Check a closure's gradients before the step. A line search takes identical decisions on all ranks."""
    model = make_plain_model()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), on_nan="skip")
    bad = 0

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    for step in range(1, 7):
        batch = torch.full((4, 6), float("nan") if step == 2 else job.rank + 1.0)
        before = parameters_of(model)
        optimizer.step(closure)
        assert torch.isfinite(parameters_of(model)).all()
        bad += torch.equal(parameters_of(model), before)
    assert STRATEGY.mode != "sync" or bad == 1  # in other modes, updates of other ranks change parameters, too
    job.settle()
    assert_alike(job.unwrap(model))

    torch.manual_seed(3)
    model = make_plain_model()
    search = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=15, line_search_fn="strong_wolfe")
    if STRATEGY.mode == "local":
        raises("LBFGS cannot be used in mode local", lambda: job.prepare(model, search))
        return
    model, search = job.prepare(model, search)
    generator = seeded(job.rank)
    inputs, targets = torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)
    losses = []

    def searched() -> torch.Tensor:
        search.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    for _ in range(4):
        losses.append(float(search.step(searched)))
    job.settle()
    assert_alike(job.unwrap(model))
    assert losses[-1] < 0.5 * losses[0]
    assert len(set(gathered(losses[-1]))) == 1


def handed_out(job: distrib.Job) -> None:
    """Broadcast the state of an optimizer, schedule and GradScaler that only rank 0 loaded."""
    torch.manual_seed(3)
    model = make_plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=16.0)
    if job.is_main:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 6)).sum()).backward()
            scaler.step(optimizer)
            scaler.update(32.0)
            schedule.step()
    model, optimizer, schedule, scaler = job.prepare(model, optimizer, schedule, scaler)
    first = optimizer.state[next(model.parameters())]
    assert first["step"].item() == 3 and len(set(gathered(first["exp_avg"].sum().item()))) == 1
    assert (
        gathered([schedule.last_epoch, optimizer.param_groups[0]["lr"], scaler.get_scale()])
        == [[3, 0.1 * 0.1, 32.0]] * job.world_size
    )
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((4, 6), job.rank + 1.0)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    job.settle()
    assert_alike(job.unwrap(model))


def two_optimizers(job: distrib.Job) -> None:
    """Give a parameter to the optimizer prepared last, and refuse the other, where it can have only one."""
    torch.manual_seed(3)
    plain = make_plain_model()
    model, first = job.prepare(plain, torch.optim.Adam(plain.parameters(), lr=0.01))
    train(model, first, job.rank, 6)
    middle = parameters_of(job.unwrap(model))
    second = job.prepare(torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    if STRATEGY.mode != "async":
        assert_alike(job.unwrap(model))  # the result of the first optimizer
    train(model, second, job.rank, 6)
    raises("Adam takes a step, and SGD, which was prepared after it, has its parameters: ", first.step)
    job.settle()
    model.eval()
    with torch.no_grad():
        found = job.all_reduce(model(torch.ones(1, 6)), "max"), job.all_reduce(model(torch.ones(1, 6)), "min")
    assert torch.equal(*found), found
    assert not torch.equal(parameters_of(job.unwrap(model)), middle)


def released(job: distrib.Job) -> None:
    """Free released models and their optimizers, for models trained one after the other."""
    kept = []
    for _ in range(3):
        torch.manual_seed(3)
        model = make_plain_model()
        model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        train(model, optimizer, job.rank, 12)  # beyond the tenth backward pass
        raises("is to be released, and an optimizer that is prepared trains it", lambda model=model: job.release(model))
        job.release(model, optimizer)
        assert_alike(job.unwrap(model))
        raises("Adam takes a step after job.release", optimizer.step)
        kept.append([weakref.ref(thing) for thing in (model, optimizer, next(model.parameters()))])
    model = make_plain_model()
    model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    gc.collect()
    assert [one() for before in kept for one in before] == [None] * 9
    train(model, optimizer, job.rank, 6)
    job.settle()
    assert_alike(job.unwrap(model))


def evaluated_settled(job: distrib.Job) -> None:
    """Evaluate identical models on all ranks after `job.settle()` within a round."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loaders = [DataLoader(make_data(8 * job.world_size), 2) for _ in range(2)]
    model, optimizer, training, validation = job.prepare(model, optimizer, *loaders)
    for number, (inputs, targets) in enumerate(training):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if number == 1:
            job.settle()
            model.eval()
            with torch.no_grad():
                job.all_reduce(sum(model(inputs).sum().item() for inputs, _ in validation), "sum")
            model.train()
            assert_alike(job.unwrap(model))


def saved_within(job: distrib.Job) -> None:
    """Save the main rank's model between two averages, with a warning, and the mean after `job.settle()`."""
    model = make_plain_model()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    path = Path(sys.argv[1]) / "within.pt"
    train(model, optimizer, job.rank, 2)
    for _ in range(2):
        job.save(path, model=model)
    job.settle()
    job.save(path, model=model)


class ScheduleFree(torch.optim.SGD):
    """Stores evaluation values beside the parameters, as schedule-free optimizers do."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


def schedule_free(job: distrib.Job) -> None:
    model = job.prepare(make_plain_model())
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    raises(r"ScheduleFree cannot be used in mode local: its eval\(\)", lambda: job.prepare(optimizer))


def named_twice(job: distrib.Job) -> None:
    """Count rounds correctly for an optimizer that has a parameter twice, as with tied weights."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of duplicates
        optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    model, optimizer = job.prepare(model, optimizer)
    steps = STRATEGY.inner_steps or 0
    train(model, optimizer, job.rank, steps - 1)
    first, *others = gathered(parameters_of(model))
    assert not any(torch.equal(first, other) for other in others)
    train(model, optimizer, job.rank, 1)
    assert_alike(model)


def half_frozen(job: distrib.Job) -> None:
    """Keep a layer unchanged after it is frozen, for any momentum."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
    model, optimizer = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))
    train(model, optimizer, job.rank, 3)
    model[0].requires_grad_(False)
    first, second = (layer.weight.detach().clone() for layer in model)
    train(model, optimizer, job.rank, 3)
    assert torch.equal(model[0].weight, first) and not torch.equal(model[1].weight, second)
    assert_alike(model)


def complex_ones(job: distrib.Job) -> None:
    """Raise an error for complex parameters, which Horovod only reports for each tensor."""
    model = nn.Linear(2, 2, dtype=torch.complex64)
    raises("weight is complex, which Horovod does not average", lambda: job.prepare(model))


def hooks(job: distrib.Job) -> None:
    """Call state-dict hooks with the original model, also if registered after `prepare`."""
    model = job.prepare(make_plain_model())
    seen: list[type] = []
    model.register_state_dict_pre_hook(lambda module, *_: seen.append(type(module)))
    model.register_load_state_dict_post_hook(lambda module, _: seen.append(type(module)))
    model.load_state_dict(model.state_dict())
    assert seen == [nn.Sequential] * 2, seen


def masks(job: distrib.Job) -> None:
    """Keep the largest finite numbers in averaged buffers."""
    model = make_plain_model()
    model.register_buffer("mask", torch.full((3,), torch.finfo(torch.float32).min))
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, job.rank, 4)
    assert torch.isfinite(model.mask).all()


def one_outer_step(job: distrib.Job) -> None:
    """Take a single outer step if the epoch ends after the exchange was sent."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    loader = DataLoader(TensorDataset(torch.ones(4 * job.world_size, 1)), 1)
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    way = 0.4
    torch.testing.assert_close(model.weight.item(), -0.7 * (1 + 0.9) * way)


def ported(job: distrib.Job) -> None:
    """Accept a model that the script wrapped in DistributedDataParallel in mode sync only."""
    own = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    if STRATEGY.mode != "sync":
        raises("is wrapped in DistributedDataParallel", lambda: job.prepare(own, optimizer))
        return
    model, optimizer = job.prepare(own, optimizer)
    assert model is own
    train(model, optimizer, job.rank, 3)
    assert_alike(job.unwrap(model))
    if job.is_main:  # synchronized buffers would hang here
        with torch.no_grad():
            model(torch.ones(4, 6))


class Net(nn.Module):
    """A model with attributes and methods that scripts use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.scale, self.dim, self.logger = 2.0, 6, "its own"
        self._shift = 0.0

    def gather(self) -> str:
        return "its own"

    @property
    def device(self) -> str:
        return "its own"

    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        shift = self._shift + getattr(self, "noise", 0.0) + getattr(self, "_more", 0.0)
        return self.scale * self.layers(inputs) + shift  # type: ignore[no-any-return]


def itself(job: distrib.Job) -> None:
    """Keep the model's attributes, names and files in the prepared model, for scripts written for one GPU."""
    plain = Net()
    names, size = list(plain.state_dict()), plain.size()
    model = job.prepare(plain)
    assert list(model.state_dict()) == names and model.size() == size and model.layers is plain.layers
    raises("'Net' object has no attribute 'layer'", lambda: model.layer, AttributeError)
    inputs = torch.ones(4, 6)
    before = model(inputs)
    model.scale = 4.0
    assert plain.scale == 4.0 and torch.equal(model(inputs), 2 * before)
    model._shift, model.noise, model._more = 1.0, 2.0, 3.0
    torch.testing.assert_close(model(inputs), 2 * before + 6.0)
    del model.noise
    torch.testing.assert_close(model(inputs), 2 * before + 4.0)
    model.register_buffer("seen", torch.ones(1))
    model.extra = nn.Linear(1, 1)
    names = list(plain.state_dict())
    assert {"seen", "extra.weight"} < {*names} == {*model.state_dict()}
    pair = nn.ModuleDict({"one": model})
    kept = {name: torch.full_like(value, 3) for name, value in model.state_dict().items()}
    prefixes = ("", "module.") if STRATEGY.mode == "sync" else ("",)  # DistributedDataParallel's prefix, too
    for (target, place), prefix in itertools.product(((model, ""), (pair, "one.")), prefixes):
        with torch.no_grad():
            plain.layers[0].weight.zero_()  # type: ignore[operator,union-attr]
        target.load_state_dict({f"{place}{prefix}{name}": value for name, value in kept.items()})
        assert plain.layers[0].weight.unique().item() == 3  # type: ignore[operator,union-attr]
    assert list(pair.state_dict()) == [f"one.{name}" for name in names]
    missing = r"loading state_dict for Net:\s+Missing key.*layers\.0\.weight"
    raises(missing, lambda: model.load_state_dict({}), RuntimeError)
    sequence = job.prepare(make_model())
    assert type(sequence[3]) is nn.Linear and len(sequence) == len(list(sequence)) == 4 and model
    choice = job.prepare(nn.ModuleDict({"one": nn.Linear(1, 1)}))
    assert "one" in choice and list(choice) == ["one"]
    raises("'Net' object is not iterable", lambda: iter(model), TypeError)
    copied = copy.deepcopy(model)
    again = copy.deepcopy(copied.requires_grad_(False))  # as YOLOv5 saves its averaged model
    assert torch.equal(again.half().extra.weight, plain.extra.weight.half())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    whole = torch.load(file, weights_only=False)
    assert type(whole) is Net and torch.equal(parameters_of(whole), parameters_of(plain))
    file.seek(0)
    with torch.serialization.safe_globals([*map(type, plain.modules())]):  # types of the original model's file
        assert type(torch.load(file, weights_only=True)) is Net


def compiled(job: distrib.Job) -> None:
    """Compile a model before or after it is prepared."""
    for before in (True, False):
        torch.manual_seed(5)
        plain = nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 300))  # large enough for distrib's buckets
        model = torch.compile(plain, backend="eager") if before else plain
        model, optimizer = job.prepare(model, torch.optim.SGD(plain.parameters(), lr=0.1))
        if not before:
            model = torch.compile(model, backend="eager")
        train(model, optimizer, job.rank, 6)
        job.settle()
        assert_alike(plain)


class Agent(nn.Module):
    """An agent of reinforcement learning, without `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 1)

    def evaluate(self, seen: torch.Tensor) -> torch.Tensor:
        return self.value(self.body(seen)).mean()

    def act(self, seen: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        hidden = self.body(seen)
        return torch.distributions.Categorical(logits=self.policy(hidden)), self.value(hidden)

    def choices(self, seen: torch.Tensor) -> torch.Tensor:
        return self.policy(self.body(seen))  # type: ignore[no-any-return]


class Caller(Agent):
    """An agent with `forward`."""

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        choices, value = self.act(seen)
        return choices.logits.square().mean() + value.mean()


def methods(job: distrib.Job) -> None:
    """Average gradients of declared methods, and report a declared method that the model does not have."""
    raises(
        "Linear has no method loss", lambda: job.prepare(nn.Linear(2, 2), methods=["loss"])
    ) if STRATEGY.mode == "sync" else None
    for kind, unused in ((Agent, False), (Agent, True), (Caller, False)):
        torch.manual_seed(1)
        plain = kind()
        alone = copy.deepcopy(plain)
        model, optimizer = job.prepare(
            plain,
            torch.optim.SGD(plain.parameters(), lr=0.1),
            find_unused_parameters=unused,
            methods=["act", "choices", "evaluate"],
        )
        of_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(8):
            optimizer.zero_grad()
            seen = [torch.randn(4, 6, generator=seeded(10 * step + r)) for r in range(job.world_size)]

            def loss(
                of: Any, seen: torch.Tensor, step: int = step, kind: type = kind, unused: bool = unused
            ) -> torch.Tensor:
                if kind is Caller and step % 2:
                    return of(seen)
                if unused:
                    return of.choices(seen).square().mean()
                choices, value = of.act(seen)
                return choices.entropy().mean() + value.square().mean() + of.evaluate(seen)

            with torch.no_grad():
                model.act(seen[0])
            loss(model, seen[job.rank]).backward()
            optimizer.step()
            of_alone.zero_grad()
            torch.stack([loss(alone, one) for one in seen]).mean().backward()
            of_alone.step()
        job.settle()
        assert_alike(plain)
        if STRATEGY.mode == "sync":
            torch.testing.assert_close(parameters_of(plain), parameters_of(alone), rtol=1e-5, atol=1e-6)
            assert model.act.__name__ == "act"


def apart(job: distrib.Job, before: int = 5, after: int = 6) -> None:
    """Report that one rank changed a parameter after training began."""
    model = make_model()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, job.rank, before)
    if job.rank == 1:
        with torch.no_grad():
            job.unwrap(model)[3].weight += 0.01  # type: ignore[index,operator]
    train(model, optimizer, job.rank, after)


def apart_later(job: distrib.Job) -> None:
    """Report a change between two of the steps with a divergence check."""
    apart(job, 12, 20)


def by_hand(job: distrib.Job) -> None:
    """Update parameters without an optimizer. Replicas are identical only if backward averages gradients."""
    torch.manual_seed(3)
    model = job.prepare(make_plain_model())
    for _ in range(3):
        model.zero_grad()
        model(torch.full((4, 6), job.rank + 1.0)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    if STRATEGY.mode == "sync":
        assert_alike(job.unwrap(model))


def unequal(job: distrib.Job) -> None:
    """Skip steps on rank 1."""
    plain = nn.Sequential(nn.Linear(6, 3))
    model, optimizer = job.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for step in range(8):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        if job.rank == 0 or step < 5:
            optimizer.step()


def averaged(job: distrib.Job) -> None:
    """Copy a prepared model, and save its averaged model under the original names."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 300))  # large enough for distrib's all-reduce
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    train(model, optimizer, job.rank, 2)
    twin, mean = copy.deepcopy(model), swa_utils.AveragedModel(model)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    for _ in range(3):
        train(model, optimizer, job.rank, 3)
        train(twin, twin_optimizer, job.rank, 3)
        mean.update_parameters(model)
    if STRATEGY.mode == "sync":
        torch.testing.assert_close(parameters_of(twin), parameters_of(model))
    job.settle()
    path = Path(sys.argv[1]) / "mean.pt"
    job.save(path, mean=mean)
    job.barrier()
    alone = swa_utils.AveragedModel(nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 300)))
    job.restore(path, mean=alone)
    if job.is_main:
        assert torch.equal(parameters_of(alone), parameters_of(mean))
    again = swa_utils.AveragedModel(model)
    job.restore(path, mean=again)
    assert torch.equal(parameters_of(again), parameters_of(alone))


def normalized(job: distrib.Job) -> None:
    """Evaluate on rank 0 only without running means, and accept layers that torch's function converted."""
    layer = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1))
    converted = job.prepare(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layer)))
    model, _ = job.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1), sync_batchnorm=True)
    if job.is_main:
        model.eval()
        with torch.no_grad():
            model(torch.randn(3, 4))
        model.train()
    inputs = torch.arange(12.0).reshape(3, 4) * (job.rank + 1)
    job.unwrap(converted).load_state_dict(job.unwrap(model).state_dict())
    assert torch.equal(converted(inputs), model(inputs))
    job.barrier()


def sparse(job: distrib.Job) -> None:
    """Average sparse gradients as sparse, for any rows on each rank."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True, padding_idx=0), nn.Linear(3, 1)).double()
    reference, ranks = copy.deepcopy(model), job.world_size
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(60):
        read = [torch.arange(step + rank + 1) % (rank + 2) * (step % 4 > rank) for rank in range(ranks)]
        model(read[job.rank]).square().mean().backward()
        sum(reference(rows).square().mean() / ranks for rows in read).backward()
        for one in optimizer, alone:
            one.step()
            one.zero_grad()
    assert_alike(job.unwrap(model))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def momentum(job: distrib.Job) -> None:
    """Keep the outer momentum after a layer is unfrozen, and after a restart with other fragments."""
    path = Path(sys.argv[1]) / "momentum.pt"
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(6, 16).requires_grad_(False), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = job.prepare(model, optimizer)
    if path.exists():
        job.restore(path, model=model, optimizer=optimizer)
    else:
        train(model, optimizer, job.rank, STRATEGY.inner_steps or 0)
        job.settle()
        job.save(path, model=model, optimizer=optimizer)
        model[0].requires_grad_(True)
    optimizer.param_groups[0]["lr"] = 0.0
    first, second = (layer.weight.detach().clone() for layer in model)
    train(model, optimizer, job.rank, STRATEGY.inner_steps or 0)
    job.settle()
    assert torch.equal(model[0].weight, first) and not torch.allclose(model[1].weight, second, rtol=0, atol=1e-5)
    model[0].requires_grad_(True)
    raises("the outer momentum of 2 parameter", lambda: job.restore(path, model=model, optimizer=optimizer))


if __name__ == "__main__":
    lessons = [globals()[name] for name in sys.argv[2:]]
    with distrib.init(divergence_check_steps=10) as job:
        for lesson in lessons:
            job.print("lesson:", lesson.__name__, file=sys.stderr)
            lesson(job)
            job.print(f"{lesson.__name__}: learnt")
