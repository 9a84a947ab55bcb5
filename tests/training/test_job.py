"""Job of a single rank: collectives, status lines, refusals."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrib
from distrib.errors import TrainingError
from distrib.training import ShardedLoader
from distrib.training import job as job_module
from tests.conftest import ROOT

pytestmark = pytest.mark.usefixtures("inductor_cache")


@pytest.mark.processes
def test_importing_distrib_loads_neither_torch_nor_mpi():
    code = "import distrib, sys; print(*(m for m in ('torch', 'mpi4py', 'numpy') if m in sys.modules), dir(distrib))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert out.startswith("[") and "'init'" in out
    with pytest.raises(AttributeError):
        _ = distrib.nothing


def test_the_job_of_a_single_rank_changes_nothing(job, capsys):
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


def test_a_closed_job_is_refused(job):
    job.close()
    job.close()
    for use in (job.barrier, distrib.init, lambda: job.prepare(nn.Linear(1, 1))):
        with pytest.raises(TrainingError, match="closed"):
            use()


def test_mode_async_without_servers_is_refused(monkeypatch):
    monkeypatch.setattr(job_module, "current_job", None)
    monkeypatch.setenv("DISTRIB_STRATEGY", '{"mode":"async"}')
    with pytest.raises(TrainingError, match="--mode async") as caught:
        distrib.init()
    assert caught.value.code == "no-parameter-server"


def test_steps_and_metrics_are_status_lines(monkeypatch):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    monkeypatch.setenv("DISTRIB_STATUS_FD", str(writing))
    monkeypatch.setenv("DISTRIB_DEVICE", "cpu")
    monkeypatch.setattr(job_module, "current_job", None)
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


@pytest.mark.processes
def test_a_single_rank_runs_without_a_launcher(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(
        "import distrib, torch\n"
        "with distrib.init() as job:\n"
        "    print(sum(len(batch) for batch in job.prepare(torch.utils.data.DataLoader(torch.ones(8, 2), 2))), 'samples')\n"
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200)
    assert (result.returncode, result.stdout) == (0, "8 samples\n"), result.stderr
