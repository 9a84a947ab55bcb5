"""The examples as the README runs them, for half the epochs: on one rank, and across the hosts of a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys

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


@pytest.fixture(scope="module")
def single() -> float:
    """Return the accuracy of one rank with the script that does not use distrib."""
    command = [sys.executable, str(EXAMPLES / "train_cnn_single.py"), *SHORT]
    forked = {**fork_server.environment(), **fork_server.ALONE}
    alone = {
        **os.environ,
        **forked,
        "OMP_NUM_THREADS": "1",
    }  # threads that share CPUs with other tests spin for minutes
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=alone)
    assert done.returncode == 0, done.stderr
    return accuracy(done.stdout)


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


def test_the_tutorial_shows_the_difference_as_it_is():
    names = ["train_cnn_single.py", "train_cnn.py"]
    diff = subprocess.run(["diff", "-U0", *names], cwd=EXAMPLES, capture_output=True, text=True).stdout
    changed = [line for line in diff.splitlines()[2:] if line[0] in "+-" and '"""' not in line]
    tutorial = (ROOT / "docs" / "tutorial" / "first-job.md").read_text()
    shown = tutorial.partition("```diff\n")[2].partition("```")[0].splitlines()
    assert [line.rstrip() for line in shown] == [line.rstrip() for line in changed]
