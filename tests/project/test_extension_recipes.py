"""Recipes of CONTRIBUTING.md: each example works after it is added to a copy of the tree."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LAUNCH, ROOT

pytestmark = pytest.mark.processes

GUIDE = ROOT / "CONTRIBUTING.md"
AVERAGE = """
import sys, torch, distrib
with distrib.init() as job:
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.nn.init.constant_(model.weight, float(job.rank))
    model, optimizer = job.prepare(model, optimizer)
    model(torch.full((1, 1), job.rank + 1.0)).sum().backward()
    optimizer.step()
    assert sys.argv[1] in sys.modules
    print(next(model.parameters()).item())  # 0 minus the mean of 1 and 2
"""


def recipe(title: str) -> tuple[str, str, str, list[str]]:
    """Return the new file and its text, and the file of the registry and its changed lines."""
    section = GUIDE.read_text().partition(f"\n### {title}\n")[2].partition("\n### ")[0]
    new = re.search(r"```python\n# (\S+)\n(.*?)```", section, re.DOTALL)
    registry = re.search(r"```diff\n# (\S+)\n(.*?)```", section, re.DOTALL)
    assert new and registry, f"CONTRIBUTING.md has no recipe {title}"
    return new[1], new[2], registry[1], registry[2].splitlines()


def register(text: str, changes: list[str]) -> str:
    """Apply a registration: `+` lines follow the line before them, or replace it if it begins with `-`."""
    for before, change in itertools.pairwise(changes):
        if change.startswith("+"):
            old, new = before[1:] + "\n", change[1:] + "\n"
            assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the registry"
            text = text.replace(old, new if before.startswith("-") else old + new)
    return text


@pytest.fixture
def extended(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Return a function that adds a recipe to a copy of the tree and returns the environment that selects the copy."""

    def extend(title: str) -> dict[str, str]:
        tree = tmp_path / "tree"
        for package in ("distrib", "launch"):
            shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
        path, text, registry, changes = recipe(title)
        assert not (tree / path).exists()
        (tree / path).write_text(text)
        (tree / registry).write_text(register((tree / registry).read_text(), changes))
        folders = [str(tree), str(tree / "launch"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}

    return extend


def run(folder: Path, environ: dict[str, str], *command: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], env=environ, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed(run_dir: Path, ranks: int) -> list[str]:
    return [(run_dir / f"ranks/{rank}.out").read_text() for rank in range(ranks)]


def test_hostfile_dialect(extended, tmp_path):
    environ = extended("Hostfile dialect")
    (tmp_path / "hosts.json").write_text('{"node1": 2, "node2": 3}')
    (tmp_path / "train.py").touch()
    plan = json.loads(run(tmp_path, environ, LAUNCH, "-H", "hosts.json", "--dry-run", "--json", "train.py"))
    assert [rank["host"] for rank in plan["ranks"]] == ["node1"] * 2 + ["node2"] * 3


@pytest.mark.forked
def test_gradient_compression(extended, tmp_path):
    environ = extended("Gradient compression")
    (tmp_path / "train.py").write_text(AVERAGE)
    options = ("--run-dir", "run", "-np", "2", "--gradients", "half_sum", "--all-reduce", "flat")
    run(tmp_path, environ, LAUNCH, *options, "train.py", "distrib.training.gradients.half_sum")
    assert printed(tmp_path / "run", 2) == ["-1.5\n"] * 2
    forecast = (
        "-H",
        str(ROOT / "hostfiles/four-hosts-10gbe.txt"),
        "--workload",
        "BERT-large",
        "--gradients",
        "half_sum",
    )
    assert "scaling efficiency" in run(tmp_path, environ, LAUNCH, "--dry-run", *forecast, "train.py")


def test_probe_finding(extended, tmp_path):
    environ = extended("Probe finding")
    (tmp_path / "check.py").write_text(
        "from distrib.probe.diagnosis.checks import check_records\n"
        "from distrib.probe.records import PairMeasurement, ProbeStarted\n"
        "start = ProbeStarted(when='', mode='quick', hosts=('a', 'b'), primary='tcp', facts=())\n"
        "pairs = [PairMeasurement(stage='alone', source=a, target=b, transport='tcp', load='alone', latency_seconds=0.02,\n"
        "                         bandwidth_bytes_per_second=1e9, repetitions=3) for a, b in ('ab', 'ba')]\n"
        "print(*(finding.kind for finding in check_records([start, *pairs])))\n"
    )
    assert run(tmp_path, environ, sys.executable, "check.py").split() == ["distant_hosts"] * 2


@pytest.mark.forked
def test_training_strategy(extended, tmp_path):
    environ = extended("Training strategy")
    (tmp_path / "train.py").write_text(AVERAGE)
    options = ("--run-dir", "run", "-np", "2", "--mode", "average")
    run(tmp_path, environ, LAUNCH, *options, "train.py", "distrib.training.strategies.parameter_average")
    assert printed(tmp_path / "run", 2) == ["-1.5\n"] * 2


def test_engine(extended, tmp_path):
    environ = extended("Engine")
    (tmp_path / "where.py").write_text("import os\nprint('rank', os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    run(tmp_path, environ, LAUNCH, "--run-dir", "run", "--engine", "local", "-np", "3", "where.py")
    assert printed(tmp_path / "run", 3) == [f"rank {rank} 3\n" for rank in range(3)]
