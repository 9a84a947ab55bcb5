"""Checkpoints of a job: saved, restored, refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from distrib.errors import TrainingError
from distrib.training.checkpoint import checkpoint_format

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
    with pytest.raises(TrainingError, match="no checkpoint"):
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
