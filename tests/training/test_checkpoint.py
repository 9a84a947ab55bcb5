"""Checkpoints of a job: saved, restored, refused."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from torch import nn

from distrib.errors import TrainingError
from distrib.training.checkpoint import checkpoint_format
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("inductor_cache")


def test_a_checkpoint_restores_model_optimizer_schedule_and_values(job, tmp_path):
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
def test_values_are_restored_on_their_devices(job, tmp_path, monkeypatch):
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


def test_missing_and_foreign_checkpoints_and_unsupported_values_are_refused(job, tmp_path, capfd):
    path = tmp_path / "last.pt"
    assert job.restore(path, model=nn.Linear(1, 1), epoch=0) == {"epoch": 0}
    assert capfd.readouterr().err == f"distrib: note: no file {path}: nothing is restored\n"
    torch.save({"model": nn.Linear(1, 1).state_dict(), "epoch": 3}, path)
    with pytest.raises(TrainingError, match="was not written by") as told:
        job.restore(path)
    assert "before job.prepare(model)" in told.value.hint
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(TrainingError, match="not a checkpoint"):
        job.restore(path)
    with pytest.raises(TrainingError, match="path, a PosixPath"):
        job.save(path, path=path)
    with pytest.raises(TrainingError, match=r"config\['paths'\]\[1\], a PosixPath"):
        job.save(path, config={"lr": 0.1, "paths": ["here", path]})
    assert path.read_bytes() == b"not a checkpoint"
    job.save(path, model=nn.Linear(1, 1))
    with pytest.raises(TrainingError, match="no state of optimizer"):
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
    with pytest.raises(TrainingError, match=r"optimizer\['param_groups'\]\[0\]\['history'\]: a ndarray"):
        job.save(tmp_path / "last.pt", optimizer=optimizer)
    assert (tmp_path / "last.pt").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir() if not entry.is_dir()] == ["last.pt"]


SCHEDULES = """
import sys, torch, distrib
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
with distrib.init() as job:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(24, 2)), 2))
    steps = 3 * len(loader)
    by_step = {
        "cosine": lr_scheduler.CosineAnnealingLR(optimizer, steps),
        "cycle": lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps, cycle_momentum=False),
        "chain": lr_scheduler.ChainedScheduler([lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)]),
    }
    by_epoch = {"epochs": lr_scheduler.StepLR(optimizer, 1)}
    things = dict(model=model, optimizer=optimizer, loader=loader, **by_step, **by_epoch)
    job.restore(sys.argv[1], **things)
    for (batch,) in loader if "train" in sys.argv else ():
        model(batch).sum().backward()
        optimizer.step()
        for schedule in by_step.values():
            schedule.step()
    by_epoch["epochs"].step()
    job.save(sys.argv[1], **things)
"""


@pytest.mark.processes
def test_schedules_that_count_steps_are_warned_of_on_another_number_of_ranks(tmp_path):
    """The warning comes after an earlier restart, too, but neither for a schedule by epochs nor for as many ranks."""
    script = tmp_path / "schedules.py"
    script.write_text(SCHEDULES)
    said = []
    for ranks, *words in (2, "train"), (2, "train"), (1,), (2,):
        result = run_ranks(ranks, script, tmp_path / "last.pt", *words)
        assert result.returncode == 0, result.stderr
        said.append([line for line in result.stderr.splitlines() if line.startswith("distrib: warning")])
    assert said[:2] == [[], []]
    (fewer,), (more,) = said[2:]
    assert (
        "is of 2 ranks, this job has 1: " in fewer
        and "cosine, cycle, chain was made for, which ends too early" in fewer
    )
    assert "is of 1 rank, this job has 2: " in more and "does not reach its end" in more


RESUMES = """
import os, random, sys, numpy, torch, distrib
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
folder, epochs, restored = sys.argv[1:]
with distrib.init() as job:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(47, 8), torch.randn(47, 1))
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 1))
    if os.path.exists(f"{folder}/{restored}"):
        torch.seed()  # the order of the samples is another one until it is restored
    model, optimizer, loader = job.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), DataLoader(data, 4, shuffle=True)
    )
    noise = torch.Generator().manual_seed(job.rank)
    for seed in torch.manual_seed, random.seed, numpy.random.seed:
        seed(100 + job.rank)
    things = dict(model=model, optimizer=optimizer, loader=loader)
    back = job.restore(f"{folder}/{restored}", **things, epoch=0, per_rank={"seen": 0, "noise": noise.get_state()})
    seen = back["per_rank"]["seen"]
    noise.set_state(back["per_rank"]["noise"])
    for epoch in range(back["epoch"], int(epochs)):
        for x, y in loader:
            x = x * numpy.random.rand() + random.random()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += len(x) + float(torch.rand(1, generator=noise))
        job.save(f"{folder}/own.pt", **things, epoch=epoch + 1, per_rank={"seen": seen, "noise": noise.get_state()})
        job.save(f"{folder}/plain.pt", **things, epoch=epoch + 1, seen=seen)
    weights = [value.hex() for p in model.parameters() for value in p.flatten().tolist()]
    drawn = torch.rand(1).item(), random.random(), numpy.random.rand()
    print(job.rank, *drawn, *weights, seen if restored == "own.pt" else "", flush=True)
"""


@pytest.mark.processes
def test_a_resumed_training_is_identical_bit_by_bit(tmp_path):
    """Ranks have different seeds, dropout and uneven last batches; half of the checkpoints have values per rank."""
    script, whole, parts = tmp_path / "resumes.py", tmp_path / "whole", tmp_path / "parts"
    script.write_text(RESUMES)

    def lines(folder, epochs, restored):
        result = run_ranks(3, script, folder, epochs, restored)
        assert result.returncode == 0 and "warning" not in result.stderr, result.stderr
        return sorted(result.stdout.splitlines())

    expected = lines(whole, 3, "own.pt")
    assert len({line.split()[1] for line in expected}) == 3  # each rank has its own numbers
    lines(parts, 1, "own.pt")
    shutil.copytree(parts, tmp_path / "copy")
    assert lines(parts, 3, "own.pt") == expected
    plain = lines(tmp_path / "copy", 3, "plain.pt")
    assert [line.split()[:165] for line in plain] == [line.split()[:165] for line in expected]


OTHER_RANKS = """
import sys, torch, distrib
from distrib.training.checkpoint import rank_states
rank_states.SETTINGS = rank_states.StateExchangeSettings(wait_seconds=1.0)
what, path = sys.argv[1:]
with distrib.init() as job:
    model = torch.nn.Linear(2, 1)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    torch.manual_seed(100 + job.rank)
    before = torch.get_rng_state()
    if what == "alone" and job.is_main:
        for _ in range(2):
            job.save(path, model=model, optimizer=optimizer)
    if what == "alone":
        job.barrier()
        torch.rand(1)
        before = torch.get_rng_state()
        assert "per_rank" not in job.restore(path, model=model, optimizer=optimizer)
    elif what == "two":
        job.save(path, model=model, per_rank={"x": job.rank})
    else:
        assert job.restore(path, model=model, per_rank={"x": 5})["per_rank"] == {"x": 5}
    assert torch.equal(torch.get_rng_state(), before)
"""


@pytest.mark.processes
def test_states_of_ranks_are_left_alone_if_some_are_missing(tmp_path):
    """A script may save on the main rank only, or restore on another number of ranks."""
    script = tmp_path / "other.py"
    script.write_text(OTHER_RANKS)
    said = []
    for ranks, what, name in (2, "alone", "a.pt"), (2, "two", "b.pt"), (1, "one", "b.pt"):
        result = run_ranks(ranks, script, what, tmp_path / name)
        assert result.returncode == 0, result.stderr
        said.append([line for line in result.stderr.splitlines() if line.startswith("distrib: warning")])
    (alone,), nothing, (fewer,) = said
    assert "the checkpoint has no random state of rank 1, which did not call job.save" in alone and not nothing
    assert "b.pt is of 2 ranks, this job has 1: per_rank keeps" in fewer
