"""The examples: train_cnn as the README runs it, for half the epochs, and train_gpt2 and train_resnet50 with `--smoke`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fork_server
from tests.conftest import ROOT

pytestmark = pytest.mark.forked

EXAMPLES = ROOT / "examples"
SHORT = ["--epochs", "3"]


def accuracy(printed: str) -> float:
    found = re.search(r"validation accuracy (\d+\.\d) %\n\Z", printed)
    assert found, printed
    return float(found[1])


def run_alone(script: str, *words: str, cwd: Path | None = None) -> str:
    """Run a script in one process without launcher, and return its output."""
    # Threads that share CPUs with other tests spin for minutes.
    alone = {**os.environ, **fork_server.environment(), **fork_server.ALONE, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=alone, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def single() -> float:
    """Return the accuracy of one rank with the script that does not use distrib."""
    return accuracy(run_alone("train_cnn_single.py", *SHORT))


@pytest.mark.cluster
@pytest.mark.parametrize("example", ["train_cnn.py", "train_plain_ddp.py"])
def test_across_three_hosts(make_cluster, launch, single, example):
    cluster = make_cluster(3, rate="1gbit")
    run = launch("-H", cluster.hostfile, EXAMPLES / example, *SHORT, cluster=cluster)
    assert run.code == 0, run
    reached = accuracy((run.run_dir / "ranks/0.out").read_text())
    assert reached >= 95
    assert abs(reached - single) <= 1.0
    assert run.result["hosts"] == ["n1", "n2", "n3"]
    assert [(r["rank"], r["host"]) for r in run.result["ranks"]] == [(0, "n1"), (1, "n2"), (2, "n3")]
    assert cluster.left_over(within_seconds=6) == {}


def changed_lines(example: str) -> list[str]:
    """Return the lines in which an example differs from its single-process version, without the first docstring."""
    names = [f"{example}_single.py", f"{example}.py"]
    diff = subprocess.run(["diff", "-U0", *names], cwd=EXAMPLES, capture_output=True, text=True).stdout
    return [line for line in diff.splitlines()[2:] if line[0] in "+-" and '"""' not in line]


def test_the_tutorial_shows_the_difference_as_it_is():
    tutorial = (ROOT / "docs" / "tutorial" / "first-job.md").read_text()
    shown = tutorial.partition("```diff\n")[2].partition("```")[0].splitlines()
    assert [line.rstrip() for line in shown] == [line.rstrip() for line in changed_lines("train_cnn")]


@pytest.mark.parametrize(("example", "most"), [("train_cnn", 14), ("train_gpt2", 26), ("train_resnet50", 31)])
def test_the_single_version_differs_in_few_lines(example, most):
    changed = changed_lines(example)
    assert 0 < len(changed) <= most
    # Every line that is added concerns the job, or its way to accumulate gradients.
    own = [line for line in changed if line[0] == "+" and not re.search(r"distrib|job", line)]
    assert {line[1:].strip() for line in own} <= {"", "scaler.scale(loss).backward()", "continue"}


def losses(printed: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"^step (\d+): loss ([\d.]+),", printed, re.MULTILINE)}


@pytest.mark.parametrize(
    ("example", "words"), [("train_gpt2", ["--steps", "10"]), ("train_resnet50", ["--epoch-images", "40"])]
)
def test_the_single_version_and_one_rank_have_the_same_losses(tmp_path, example, words):
    printed = []
    for number, script in enumerate((f"{example}_single.py", f"{example}.py")):
        own = ["--smoke", "--checkpoint", f"{number}.pt"]
        printed.append(losses(run_alone(script, *own, *words, cwd=tmp_path)))
    assert list(printed[0]) == [5, 10]
    assert printed[0] == printed[1]


@pytest.mark.parametrize(
    ("example", "unit", "longer"),
    [("train_gpt2.py", "tokens", ["--steps", "25"]), ("train_resnet50.py", "images", ["--epochs", "3"])],
)
def test_smoke_on_two_ranks_and_its_continuation(launch, example, unit, longer):
    logged = []
    for words in ([], longer):
        run = launch("-np", "2", EXAMPLES / example, "--smoke", *words)
        assert run.code == 0, run
        lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
        logged.append([json.loads(line)["metrics"] for line in lines])
        printed = (run.run_dir / "ranks/0.out").read_text()
        assert re.search(rf"^step \d+: loss \S+, lr \S+, [\d,]+ {unit}/s$", printed, re.MULTILINE), printed
    first, continued = logged
    assert [metrics["step"] for metrics in first] == [5, 10, 15, 20]
    assert continued[0]["step"] == 25
    assert first[-1]["loss"] < 0.9 * first[0]["loss"]
    assert all(metrics[f"{unit}_per_second"] > 0 and "mfu" not in metrics for metrics in first)
