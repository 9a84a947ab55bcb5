"""Every way of training together, on several ranks: what `tests/scripts/modes.py` asserts there."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest

from tests.conftest import SCRIPTS
from tests.test_training import run_ranks

horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None and os.environ.get("DISTRIB_TEST_HOROVOD") != "required",
    reason="Horovod is not installed: scripts/build-horovod builds it",
)

HOROVOD = {"backend": "horovod"}
AVERAGE = {"mode": "local", "outer": {"lr": 1.0, "momentum": 0.0}}


@pytest.fixture(autouse=True)
def no_variable_of_torch(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("strategy", "ranks", "lessons"),
    [
        pytest.param({}, 3, "exact wrapped several scaled nan mistakes unused", id="sync"),
        pytest.param({"accumulate": 3}, 2, "exact scaled", id="accumulate"),
        pytest.param({"balance": True}, 3, "exact", id="balance"),
        pytest.param({"balance": True, "accumulate": 2}, 2, "exact", id="balance and accumulate"),
        pytest.param(HOROVOD, 2, "exact wrapped several scaled nan", id="horovod", marks=horovod),
        pytest.param({**HOROVOD, "accumulate": 3}, 2, "exact", id="horovod, accumulate", marks=horovod),
        pytest.param({**HOROVOD, "gradients": {"format": "fp16"}}, 2, "several", id="horovod, fp16", marks=horovod),
        pytest.param({**AVERAGE, "inner_steps": 4}, 2, "wrapped several scaled nan streamed", id="local"),
        pytest.param({"mode": "local", "inner_steps": 3}, 2, "outer", id="diloco"),
        pytest.param(
            {"mode": "local", "inner_steps": 8, "gradients": {"format": "bf16"},
             "outer": {"lr": 0.7, "momentum": 0.5, "fragments": 3, "overlap_steps": 2}}, 2, "streamed scaled",
            id="streaming diloco",
        ),
    ],
)  # fmt: skip
def test_lessons(strategy, ranks, lessons, tmp_path):
    words = json.dumps(strategy)
    result = run_ranks(ranks, SCRIPTS / "modes.py", tmp_path, *lessons.split(), DISTRIB_STRATEGY=words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split("\n")[:-1] == [f"{lesson}: learnt" for lesson in lessons.split()]
