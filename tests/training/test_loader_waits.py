"""Waits for data: measured with real loaders, and hidden by the recommended number of processes."""

from __future__ import annotations

import html
import re
import threading
import time

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from distrib.training.telemetry.step_timer import Meter, MeterSettings
from distrib_launch.supervisor.loading_check import SETTINGS, LoadingCheck, LoadingReport, recommend_workers
from tests.conftest import SCRIPTS
from tests.support.sharded_loaders import sharded

COMPUTE_SECONDS = 0.06


class Remote(TensorDataset):
    """A data set on a slow storage: 40 ms per sample without CPU time."""

    def __getitem__(self, index):
        time.sleep(0.04)
        return super().__getitem__(index)


def measured(workers: int, kind: type[TensorDataset] = Remote, passes: int = 1) -> LoadingReport:
    """Train with batches of four samples and return the report of one window."""
    reports: list[dict] = []
    meter = Meter(torch.device("cpu"), reports.append)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    needed = MeterSettings.warmup_steps + max(MeterSettings.window_steps, MeterSettings.window_bursts * workers)
    samples = 4 * (-(-needed // passes) + passes)
    loader = sharded(DataLoader(kind(torch.randn(samples, 2)), 4, num_workers=workers), 0, 1)
    for thing in (model, optimizer, loader):
        meter.watch(thing)
    while not reports:
        for (x,) in loader:
            model(x).sum().backward()
            time.sleep(COMPUTE_SECONDS)
            optimizer.step()
    return msgspec.convert(reports[0]["loading"], LoadingReport)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # the first optimizer would set it


@pytest.mark.parametrize("workers", [0, 1])
def test_the_recommended_processes_hide_the_wait(workers):
    before = measured(workers)
    assert before.workers == workers and before.batch_seconds >= 0.16
    assert before.loader_seconds >= (0.16 if not workers else 0.16 - 3 * COMPUTE_SECONDS / 2)
    warning = LoadingCheck().update({0: before}, {0: 0.0})
    assert warning.startswith("rank 0 waits ") and f"(now {workers})" in warning
    advised = int(re.search(r"num_workers=(\d+)", warning)[1])
    assert 3 <= advised <= 5, before  # 160 ms of loading in steps of 60 ms
    after = measured(advised)
    assert after.loader_seconds < before.loader_seconds / 4, (before, after)
    assert not LoadingCheck().update({0: after}, {0: 0.0}), after


def test_a_loader_that_keeps_up_is_not_reported():
    seen = measured(0, TensorDataset)
    assert seen.loader_seconds < 0.005 and not recommend_workers(seen)


def test_starts_of_passes_do_not_count():
    seen = measured(1, TensorDataset, passes=4)
    assert seen.steps <= MeterSettings.window_steps - 2
    assert seen.loader_seconds < 0.3 * seen.step_seconds, seen  # a start of processes takes longer than a step


def test_a_thread_that_reads_ahead_does_not_wait():
    reports: list[dict] = []
    meter = Meter(torch.device("cpu"), reports.append)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loader = sharded(DataLoader(TensorDataset(torch.randn(200, 2)), 4), 0, 1)
    for thing in (model, optimizer, loader):
        meter.watch(thing)
    batches: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: batches.extend(x for (x,) in loader))
    thread.start()
    thread.join()
    for x in batches:
        model(x).sum().backward()
        optimizer.step()
    assert reports[0]["loading"] is None


REPORT = LoadingReport(
    steps=40, step_seconds=0.31, loader_seconds=0.12, batch_seconds=0.62, loading_processor_seconds=0.3,
    processor_seconds=0.1, queued_seconds=0.0, cores=8, workers=2,
)  # fmt: skip


def test_the_warning_names_wait_and_number():
    assert LoadingCheck().update({0: REPORT}, {0: 0.0}) == (
        "rank 0 waits 39% of each step for data (120 ms of 310 ms)\n  DataLoader(num_workers=4) would hide it (now 2)"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"cores": 1.0},
        {"cores": 2.0, "processor_seconds": 0.4},
        {"queued_seconds": 0.3},
    ],
)
def test_cores_that_cannot_hide_the_wait_are_named(changes):
    assert "cannot hide it: loading takes 300 ms" in recommend_workers(msgspec.structs.replace(REPORT, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"loader_seconds": 0.03},
        {"is_regular": False},
        {"is_stream": True, "workers": 0},
        {"step_seconds": 0.01, "loader_seconds": 0.004},
    ],
)
def test_uncertain_and_short_waits_are_not_reported(changes):
    assert not recommend_workers(msgspec.structs.replace(REPORT, **changes))


def test_a_decision_needs_enough_steps_and_takes_the_rank_that_waits_longest():
    check = LoadingCheck()
    short = msgspec.structs.replace(REPORT, steps=8)
    less = msgspec.structs.replace(short, loader_seconds=0.05)
    assert not check.update({0: less, 3: short}, {0: 0.0, 3: 0.0})
    assert check.update({0: less, 3: short}, {0: 0.0, 3: 0.0}).startswith("rank 3 waits 39% ")
    other = msgspec.structs.replace(short, workers=3)
    assert not check.update({0: short}, {}) and not check.update({0: other}, {})  # another loader begins again


def test_waiting_for_ranks_that_wait_for_data_is_no_computing():
    alone = recommend_workers(REPORT)
    with_others = recommend_workers(REPORT, for_others_seconds=0.095)
    assert "num_workers=4" in alone and "num_workers=8" in with_others


@given(
    step=st.floats(1e-4, 1e3), wait=st.floats(0, 1), workers=st.integers(0, 100), cores=st.floats(0, 512), own=st.floats(0, 10),
    loading=st.floats(0, 10), queued=st.floats(0, 1), others=st.floats(-1, 10),
)  # fmt: skip
def test_a_recommendation_is_more_than_now_and_bounded(step, wait, workers, cores, own, loading, queued, others):
    seen = LoadingReport(
        steps=400, step_seconds=step, loader_seconds=wait * step, batch_seconds=max(1, workers) * step, workers=workers, cores=cores,
        processor_seconds=own, loading_processor_seconds=loading, queued_seconds=queued,
    )  # fmt: skip
    text = recommend_workers(seen, for_others_seconds=others)
    assert bool(text) == (wait * step > max(SETTINGS.min_wait_seconds, SETTINGS.min_wait_fraction * step))
    if found := re.search(r"num_workers=(\d+)", text):
        assert workers < int(found[1]) <= max(SETTINGS.max_workers, workers + 1)


@pytest.mark.parametrize("name", ["steps", "step_seconds", "cores", "workers"])
def test_impossible_reports_are_refused(name):
    assert REPORT.is_valid
    assert not msgspec.structs.replace(REPORT, **{name: -1}).is_valid
    if name == "step_seconds":
        assert not msgspec.structs.replace(REPORT, step_seconds=float("nan")).is_valid


@pytest.mark.forked
def test_a_job_that_waits_is_warned_and_its_result_has_the_wait(launch):
    run = launch("-np", 1, SCRIPTS / "steps.py", 27, 0.03, 160, "far:0.02:0")
    assert run.code == 0, run
    assert re.search(r"warning: rank 0 waits \d\d% of each step for data", run.err), run.err
    assert re.search(r"\(num_workers=\d+\) would hide it \(now 0\)", run.err), run.err
    seen = run.result["measured"]
    assert 0.08 <= seen["loader_seconds"] < seen["step_seconds"]
    assert any("for data" in warning for warning in run.result["warnings"])
    assert re.search(r"succeeded after .* \d\d% of a step waiting for data", run.err), run.err
    page = html.unescape((run.run_dir / "report.html").read_text())
    assert "waiting for data" in page and "num_workers" in page
