"""Performance warnings before and during a run, on clusters that a real probe has measured."""

from __future__ import annotations

import re

import pytest

from distrib.bandwidth_model.workload import read_workload
from tests.conftest import SCRIPTS, TOPO
from tests.virtual_cluster.calm import repeat_if_spoiled

pytestmark = [pytest.mark.cluster, pytest.mark.prioritized, pytest.mark.forked]
ENV = {"OMP_NUM_THREADS": "1"}
STEPS = SCRIPTS / "steps.py"
WORK = (0.12, 400_000)
"""Seconds that a step of a rank sleeps, and number of gradient elements (1.7 MB)."""


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """Latest profile, and the tests that have used it."""
    return tmp_path_factory.mktemp("profiles") / "steps.json", []


@pytest.fixture
def profiled(launch, profiles, request):
    """Profile the script, and profile it again for each retry of a test. A bad profile would fail all retries."""
    path, used_by = profiles

    def measure():
        if path.exists() and request.node.name not in used_by:
            used_by.append(request.node.name)
            return path
        used_by[:] = [request.node.name]
        run = launch("--profile", path, STEPS, 1000, *WORK)
        assert run.code == 0, run
        assert read_workload(path).gradient_bytes == pytest.approx(4 * WORK[1], rel=0.1)
        return path

    return measure


@pytest.fixture
def probed(tmp_path):
    """Run a quick probe on a cluster."""

    def probe(cluster):
        where = ("-H", cluster.hostfile, "--topology", tmp_path / "topology.yaml")
        command = [TOPO, "probe", "--quick", "--no-preflight", *where[:2], "-o", where[3], "--run-dir", tmp_path / "p"]
        cluster.run("n1", command, env=ENV, check=True, cwd=tmp_path)
        return where

    return probe


def warnings_of(run):
    told = re.findall(r"^distrib-launch: warning: (.*(?:\n  .*)*)", run.err, re.MULTILINE)
    assert run.code == 0 and run.result["warnings"] == told, run
    return [warning for warning in told if "trying once more" not in warning]  # occasional message of the engine


@repeat_if_spoiled
def test_on_slow_wires_it_is_said_before_and_during_the_run(make_cluster, probed, launch, profiled):
    profile = profiled()
    cluster = make_cluster(3, rate="200mbit")
    where = probed(cluster)
    run = launch(*where, "--workload", profile, STEPS, 28, *WORK, cluster=cluster)
    before, during = warnings_of(run)[:2]
    assert "on 3 hosts x 1 rank, " in before and re.search(r"(1[7-9]|2[01])\d Mb/s; 90% needs ", before)
    assert during.startswith("network-bound: ") and "(predicted " in during
    predicted, measured = run.result["predicted"], run.result["measured"]
    assert predicted["cap"] and predicted["efficiency"] < 0.8
    assert measured["step_seconds"] == pytest.approx(predicted["step_seconds"], rel=0.15)
    assert measured["prediction_error"] == pytest.approx(measured["step_seconds"] / predicted["step_seconds"] - 1)
    assert {link["source"] for link in measured["links"]} == {"n1", "n2", "n3"}
    for link in measured["links"]:  # the kernel's counters and the probe measure the same link
        assert link["bytes_per_second"] == pytest.approx(link["expected_bytes_per_second"], rel=0.2)
    page = (run.run_dir / "report.html").read_text()
    assert "predicted" in page and before.split(",")[0] in page
    assert cluster.left_over(within_seconds=6) == {}


@repeat_if_spoiled
def test_fast_wires_are_silent_and_one_that_became_slow_is_named(make_cluster, probed, launch, profiled):
    profile = profiled()
    cluster = make_cluster(3, rate="10gbit")
    where = probed(cluster)
    words = (*where, "--workload", profile)
    script = (STEPS, 28, *WORK)
    run = launch(*words, *script, cluster=cluster)
    assert warnings_of(run) == [], run
    assert run.result["predicted"]["efficiency"] > 0.8
    cluster.shape("n3", "200mbit")
    told = warnings_of(launch(*words, *script, cluster=cluster))
    (slower,) = [warning for warning in told if warning.startswith("a step takes ")]
    assert "the links of n3 (" in slower and re.search(r"carry (1[2-9]|2[01])\d Mb/s, expected", slower), slower
    # After another probe, the slow link is named before the launch.
    cluster.shape("n3", "100mbit")
    probed(cluster)
    run = launch(*words, "--mode", "auto", "--dry-run", *script, cluster=cluster)
    (warning,) = [line for line in run.out.splitlines() if line.startswith("warning: ")]
    link = warning.partition("link ")[2].partition(",")[0]
    assert "n3" in link.split("-") and re.search(r"(8[89]|9\d|1[01]\d)[\d.]* Mb/s", warning), run
    assert "note: mode auto: " in run.out
