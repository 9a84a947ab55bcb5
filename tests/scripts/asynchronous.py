"""Run one lesson of asynchronous ranks: `asynchronous.py NAME [ARGS]`. A failed assertion fails the rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrib
from devices import seeded


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 32), nn.ReLU(),
        nn.Linear(32, 4),
    )  # fmt: skip


def samples(count: int = 400) -> TensorDataset:
    made = seeded(5)
    images = torch.randn(count, 1, 8, 8, generator=made)
    return TensorDataset(images, images.mean((1, 2, 3)).mul(20).long().clamp(0, 3))


def fifty(job: distrib.Job, name: str, path: str) -> None:
    """Train 50 steps with a schedule, two parameter groups and weight decay, and save the parameters."""
    torch.manual_seed(1 + job.rank)  # rank 0's parameters must win
    model = network()
    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    if name == "sgd":
        optimizer = torch.optim.SGD(groups, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    else:
        optimizer = torch.optim.AdamW(groups, 0.003, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7)
    loader = DataLoader(samples(), 8, shuffle=True, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    steps = 0
    while steps < 50:
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
            steps += 1
            if steps == 50:
                break
    job.save(path, model=model, optimizer=optimizer)


class Counter(nn.Module):
    """Parameters in which each worker increments its own elements of every chunk: the servers hold the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.ParameterList(nn.Parameter(torch.zeros(60_000)) for _ in range(4))

    def forward(self) -> torch.Tensor:
        return torch.stack([numbers[0] for numbers in self.numbers])


def acknowledged(folder: str) -> dict[int, int]:
    """Return for each worker the number of acknowledged steps, over all its incarnations."""
    return {int(path.suffix[1:]): int(path.read_text()) for path in Path(folder).glob("acknowledged.*")}


def counting(job: distrib.Job, folder: str, steps: str, seconds: str, until: str = "") -> None:
    """Take `steps` steps of `seconds` each, record each acknowledged step, then save the servers' values.

    Steps continue until the folder has a file `until`. A restarted worker continues its predecessor's count until the
    file exists.
    """
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model, optimizer = job.prepare(model, optimizer)
    mine = torch.arange(60_000) % job.world_size == job.rank
    notes = Path(folder, f"acknowledged.{job.rank}")
    with Path(folder, f"lives.{job.rank}").open("a") as lives:
        lives.write(".")
    before = acknowledged(folder).get(job.rank, 0)
    again = "DISTRIB_RESTARTED" in os.environ
    step = 0
    while again or step < int(steps) or (until and not Path(folder, until).exists()):
        step += 1
        for parameter in model.parameters():
            parameter.grad = -mine.float()
        optimizer.step()
        model()
        partial = Path(folder, f"partial.{job.rank}")
        partial.write_text(str(before + step))
        partial.replace(notes)  # atomic: this process may be killed in between
        time.sleep(float(seconds))
    job.all_reduce(0.0)
    noted = [acknowledged(folder)]
    state = model.state_dict()
    noted.append(acknowledged(folder))
    Path(folder, f"noted.{job.rank}").write_text(json.dumps(noted))  # counts before and after the values were read
    torch.save(state, Path(folder, f"held.{job.rank}.pt"))


def telling(job: distrib.Job, folder: str, until: str) -> None:
    """Print, save and log the rank's name in each step, until the folder has a file `until`."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = job.prepare(model, optimizer)
    who = f"{job.rank}{' again' if 'DISTRIB_RESTARTED' in os.environ else ''}"
    while not Path(folder, until).exists():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        job.print("told by", who)
        job.save(Path(folder, "saved.pt"), model=model, who=who)
        job.log(who=who)
        Path(folder, f"steps.{who}").touch()
        time.sleep(0.05)
    job.print("the end by", who)


def failing(job: distrib.Job) -> None:
    """All workers raise the same error."""
    job.all_reduce(0.0)
    raise ValueError("a bug")


def left_out(job: distrib.Job) -> None:
    """Scale, skip and accumulate steps between backward and step. All ranks have the same gradients."""

    def prepared(**options: Any) -> tuple[Any, Any]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 1.0), **options)
        return model, optimizer

    def weight(model: Any) -> float:
        return float(model.state_dict()["weight"])

    bad, one, ten = torch.tensor([[torch.inf]]), torch.ones(1, 1), torch.full((1, 1), 10.0)
    model, optimizer = prepared()
    scaler = job.prepare(torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0))
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(model(bad if step == 3 else one).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert weight(model) == -5, weight(model)

    model, optimizer = prepared()
    for step in range(6):
        optimizer.zero_grad()
        model(bad if step in (0, 3) else one).sum().backward()
        if step not in (0, 3):
            optimizer.step()
    assert weight(model) == -4, weight(model)

    model, optimizer = prepared(on_nan="skip")
    for step in range(6):
        optimizer.zero_grad()
        model(bad if step == 3 else one).sum().backward()
        optimizer.step()
    assert weight(model) == -5, weight(model)

    model, optimizer = prepared(on_nan="skip")
    for step in range(6):
        optimizer.zero_grad()
        model(bad if step == 3 and job.rank == 0 else one).sum().backward()
        optimizer.step()
    steps = 6 if job.world_size > 1 else 5  # the gradients of other ranks count
    assert weight(model) == -steps, weight(model)

    model, optimizer = prepared()
    for step in range(6):
        optimizer.zero_grad()
        for part in (one, ten) if step % 2 else (one, one, ten):
            model(part).sum().backward()
        optimizer.step()
    assert weight(model) == -3 * 11 - 3 * 12, weight(model)


def one_leaves_at_once(job: distrib.Job, how: str) -> None:
    """Let rank 0 leave at once, while all other ranks take some steps."""
    model = nn.Linear(4, 4)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def elsewhere(job: distrib.Job) -> None:
    """Let the last rank wait in an all-reduce while the others train, and kill their host leader meanwhile.

    Print the number of updates that the servers applied.
    """
    if "DISTRIB_RESTARTED" in os.environ:
        return
    last = job.world_size - 1
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 4))
    updates = nn.Parameter(torch.zeros(1))
    model.register_parameter("updates", updates)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer = job.prepare(model, optimizer)
    for step in range(40):
        if step == (3 if job.rank == last else 30):
            job.all_reduce(1.0, "sum")
        if step == 20 and job.rank == last - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (model(torch.ones(8, 64)).square().mean() - updates.sum()).backward()
        time.sleep(0.03)  # the server replies to the pushes of backward meanwhile
        optimizer.step()
    print(f"rank {job.rank} took all steps")
    job.all_reduce(0.0)
    job.print(f"{model.state_dict()['updates'].item() / 0.01:.0f} updates")


def pace(job: distrib.Job, compute: str, slow: str, seconds: str) -> None:
    """Compute by sleeping, on the last rank `slow` times as long; print the start of each step."""
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model, optimizer = job.prepare(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    times: list[float] = []
    job.all_reduce(0.0)
    begun = time.monotonic()
    while time.monotonic() - begun < float(seconds):
        model()
        times.append(time.monotonic())
        time.sleep(float(compute) * (float(slow) if job.rank == job.world_size - 1 else 1.0))
        optimizer.step()
    print(json.dumps({"times": times}), flush=True)


def main() -> None:
    if sys.argv[1] == "one_leaves_at_once" and os.environ["RANK"] == "0":
        sys.exit("as if a package were missing here" if sys.argv[2] == "failed" else 0)
    with distrib.init() as job:
        globals()[sys.argv[1]](job, *sys.argv[2:])


if __name__ == "__main__":
    main()
