"""Differences between ranks: checksums, weights, samples and orders."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from distrib.training import checksums
from distrib.training.checks import divergence
from tests.conftest import SCRIPTS
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


def test_checksums_cover_all_elements_in_any_layout(monkeypatch):
    monkeypatch.setattr(checksums.split_for_sum, "__kwdefaults__", {"max_elements": 7})
    values = torch.arange(60.0).view(3, 4, 5)
    for same in (values, values.permute(2, 0, 1), values.double(), values[None, None]):
        (digest,) = divergence.compute_checksums([nn.ParameterDict({"weight": nn.Parameter(same)})])
        assert (digest.sum, digest.norm) == (pytest.approx(1770), pytest.approx(values.norm().item()))
        assert all(part.numel() <= 12 for part in checksums.split_for_sum(same))
    own = divergence.parameter_checksum("weight", values)
    assert own.differs((1770.0 + own.norm, own.norm))
    unknown = divergence.parameter_checksum("weight", torch.eye(3).to_sparse())
    assert not own.differs((unknown.sum, unknown.norm)) and not unknown.differs((own.sum, own.norm))


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
def test_a_stream_that_shards_itself_is_reported_in_mode_local(tmp_path, mode, how, times):
    script = tmp_path / "streams.py"
    script.write_text(STREAMS)
    result = run_ranks(2, script, how, DISTRIB_STRATEGY=json.dumps({"mode": mode}))
    told = result.stderr.count("begins with different samples")
    assert (result.returncode, told) == (0, times), result.stderr


def test_weights_loaded_by_a_single_rank_are_refused(tmp_path):
    script = tmp_path / "streams.py"
    script.write_text(STREAMS)
    result = run_ranks(2, script, "loaded", DISTRIB_STRATEGY=json.dumps({"mode": "sync"}))
    assert result.returncode == 1
    assert result.stderr.count("training begins with other values in 0.bias on rank 1 than on rank 0") == 2


def test_samples_or_orders_that_differ_between_ranks_are_reported(tmp_path):
    """The script asserts that each sample is read once; the test asserts the messages of rank 0."""
    result = run_ranks(2, SCRIPTS / "samples.py")
    assert result.returncode == 0, result.stderr
    (sampler,) = [line for line in result.stderr.splitlines() if line.startswith("distrib: warning")]
    assert "begins with different samples" in sampler
    refused = result.stdout.splitlines()
    assert len(refused) == 2
    for line in refused:
        assert "rank 1 prepares something else" in line and "Subset.indices" in line and "manual_seed" in line
