"""Messages about a running job: measured against predicted performance, link rates of the kernel, the report."""

from __future__ import annotations

import socket
import time
from html.parser import HTMLParser

import msgspec
import pytest
import torch
from msgspec.structs import replace

from distrib.bandwidth_model.prediction import Bottleneck, Prediction
from distrib.strategy import Strategy
from distrib.training.telemetry import tcp_stats
from distrib.training.telemetry.step_timer import Meter, MeterSettings
from distrib_launch import html_report, runner, status_lines
from distrib_launch.arguments import launch_arguments
from distrib_launch.results import Attempt, Failure, ForecastRecord, RankResult, Result
from distrib_launch.supervisor.performance_monitor import PerformanceMonitor
from tests.conftest import SCRIPTS

HOSTS = ("n1", "n2", "n3")
CAP = Bottleneck(link="n1-n2, 10 GbE", source="n1", target="n2", bandwidth_bytes_per_second=1.1e9)
FORETOLD = Prediction(
    hosts=3, ranks_per_host=1, ranks=3, strategy=Strategy(), step_seconds=0.1, compute_seconds=0.09, communication_seconds=0.05,
    exposed_seconds=0.01, samples_per_second=120.0, efficiency=0.9, cap=CAP, expected_error=0.05,
)  # fmt: skip


@pytest.fixture
def plan(tmp_path):
    options = launch_arguments.parse(["-H", ",".join(HOSTS), "--run-dir", str(tmp_path), str(SCRIPTS / "where.py")])
    outlook = ForecastRecord(workload="w", source="w.json", predicted=FORETOLD, expected_error=0.05)
    return replace(runner.plan_launch(options), forecast=outlook)


def hear(plan, step=0.1, compute=0.09, links=None, computes=(), sizes=None, queued=0.0):
    """Add one report of every rank. Return the messages and the measurements."""
    said: list[str] = []
    watch = PerformanceMonitor(plan, said.append, {f"10.0.0.{n}": f"n{n}" for n in range(1, 6)}.get)
    links = links or {}
    for rank, host in enumerate(HOSTS):
        own = {f"10.0.0.{b[1]}": rate for (a, b), rate in links.items() if a == host}
        mine = computes[rank] if computes else compute
        watch.add_report(
            rank,
            {
                "steps": 20,
                "step_seconds": step,
                "compute_seconds": mine,
                "exposed_seconds": step - mine,
                "queued_seconds": queued,
                "sent_bytes_per_second": own,
                "sent_bytes_per_step": {f"10.0.0.{b[1]}": size for (a, b), size in (sizes or {}).items() if a == host},
            },
        )
    return said, watch.measured


def test_a_lost_rank_does_not_silence_the_others(plan):
    said: list[str] = []
    watch = PerformanceMonitor(plan, said.append, lambda _: None)
    for _ in range(3):
        for rank in range(len(HOSTS) - 1):
            watch.add_report(rank, {"steps": 20, "step_seconds": 0.3, "compute_seconds": 0.09, "exposed_seconds": 0.21})
    assert watch.measured and watch.measured.step_seconds == 0.3
    assert any("network-bound" in line for line in said)


RING = {("n1", "n2"): 1.1e9, ("n2", "n3"): 1.1e9, ("n3", "n1"): 1.1e9}


def test_a_job_that_does_as_predicted_is_left_alone(plan):
    said, measured = hear(plan, step=0.11, links=RING)
    assert not said
    assert measured.prediction_error == pytest.approx(0.1) and measured.efficiency == pytest.approx(0.09 / 0.11)
    assert [(link.source, link.target) for link in measured.links] == sorted(RING)


def test_the_wire_that_holds_a_job_is_named(plan):
    said, _ = hear(plan, step=0.3, links=RING)
    assert len(said) == 2 and said[0].startswith("network-bound: 30% scaling efficiency (predicted 90%), ")
    assert "step 300 ms, 210 ms of it waiting for gradients\n  slowest link: n1-n2, 8.8 Gb/s" in said[0]
    assert not hear(replace(plan, warn_below=0.0), step=0.11, links=RING)[0]


def test_the_wire_is_not_blamed_for_what_it_does_not_explain(plan):
    """Many ranks may share few CPUs, and a step may send only a few bytes."""
    said, seen = hear(plan, step=0.3, links=RING, sizes=dict.fromkeys(RING, 1.1e7))
    assert seen.network_seconds == pytest.approx(0.01)
    assert said[0].startswith("ranks wait for each other: 30% scaling efficiency (predicted 90%), step 300 ms, ")
    assert "210 ms of it waiting for gradients\n  the network needs 10 ms of it: look for latency" in said[0]
    said, seen = hear(plan, step=0.3, sizes=dict.fromkeys(RING, 440.0))
    assert "the network needs 3.52 us of it" in said[0], said
    said, _ = hear(plan, step=0.3, links=RING, sizes=dict.fromkeys(RING, 2.2e8))
    assert said[0].startswith("network-bound: 30%")
    # 0.09 million parameters on busy CPUs: few bytes at 9.7 MB/s on links of unknown rate
    said, _ = hear(
        replace(plan, forecast=None),
        step=0.1,
        compute=0.07,
        links=dict.fromkeys(RING, 9.7e6),
        sizes=dict.fromkeys(RING, 3.6e5),
    )
    assert len(said) == 1 and said[0].startswith("ranks wait for each other: ") and "needs 2.88 ms of it" in said[0]


def test_what_the_wire_has_not_cost_is_told_of_too(plan):
    said, _ = hear(plan, step=0.2, computes=(0.09, 0.12, 0.09), links=RING)
    assert "(predicted 90%), step 200 ms, 80 ms of it waiting for gradients\n  slowest link" in said[0]


def test_the_end_line_names_what_the_efficiency_compares_with(plan, tmp_path):
    _, measured = hear(plan, step=0.3)
    result = Result(
        status="succeeded", exit_code=0, world_size=3, hosts=HOSTS, seconds=1.5, restarts=0, ranks=(), first_failure=None,
        warnings=(), measured=measured,
    )  # fmt: skip
    assert "efficiency 30% of the speed without waiting" in status_lines.end_line(result, tmp_path)
    predicted = replace(result, predicted=FORETOLD)
    assert "efficiency 30% of one rank's profiled speed" in status_lines.end_line(predicted, tmp_path)


def test_without_a_forecast_the_wire_is_warned_of_and_nothing_else(plan):
    said, measured = hear(replace(plan, forecast=None), step=0.3, links=RING)
    assert len(said) == 1 and "predicted" not in said[0] and measured.prediction_error is None


def test_the_slow_link_is_named(plan):
    said, _ = hear(plan, step=0.3, links={**RING, ("n2", "n3"): 0.1e9})
    assert "a step takes 300 ms, predicted 100 ms\n  link n2-n3 carries 800 Mb/s while the others carry more" in said[1]


def test_a_host_all_of_whose_links_are_slow_is_named(plan):
    links = {("n1", "n2"): 1e9, ("n2", "n1"): 1e9, ("n1", "n3"): 0.1e9, ("n3", "n2"): 0.12e9, ("n2", "n4"): 1e9}
    said, _ = hear(plan, step=0.3, links=links)
    assert "the links of n3 (n1-n3, n3-n2) carry 800 Mb/s" in said[1]
    others = {("n1", "n4"): 1e9, ("n1", "n5"): 1e9, ("n2", "n1"): 0.6e9}  # the last is a little slow, as on a busy host
    said, _ = hear(plan, step=0.3, links={**links, **others})
    assert "the links of n3 (n1-n3, n3-n2) carry 800 Mb/s" in said[1]


def test_a_rank_that_computes_slowly_is_named(plan):
    said, _ = hear(plan, step=0.2, computes=(0.09, 0.19, 0.09), links=RING)
    assert said == [
        "a step takes 200 ms, predicted 100 ms\n  rank 1 on n2 computes 190 ms, predicted 90 ms; "
        "check the clocks of its GPU, its CPUs and the size of its batches"
    ]


def test_the_wire_is_not_blamed_for_what_data_costs(plan):
    """The loader takes 80 of 110 ms lost. The network is blamed only if it accounts for the difference."""
    assert not [line for line in hear(plan, step=0.2, compute=0.17, links=RING)[0] if line.startswith("network-bound")]
    assert [line for line in hear(plan, step=0.2, compute=0.12, links=RING)[0] if line.startswith("network-bound")]


def test_busy_cpus_are_named_although_they_slow_all_ranks_alike(plan):
    said, _ = hear(replace(plan, forecast=None), step=0.2, compute=0.19, queued=0.08, links=RING)
    assert said == [
        "busy CPUs: rank 0 on n1 waits 80 ms of a step of 200 ms for a CPU\n"
        "  look for other processes on n1, or give its ranks more cores"
    ]


def test_without_a_forecast_a_straggler_is_compared_with_the_others(plan):
    said, _ = hear(replace(plan, forecast=None), step=0.2, computes=(0.09, 0.19, 0.09), links=RING)
    assert len(said) == 1 and said[0].startswith("straggler: rank 1 on n2 computes 190 ms, the others 90 ms")


def test_each_warning_comes_once_and_all_looks_count(plan):
    said: list[str] = []
    watch = PerformanceMonitor(plan, said.append, lambda _: None)
    for step in (0.3, 0.3, 0.4):
        for rank in (2, 0, 1):
            watch.add_report(
                rank, {"steps": 20, "step_seconds": step, "compute_seconds": 0.09, "exposed_seconds": step - 0.09}
            )
    assert len(said) == 2 and watch.measured.steps == 60 and watch.measured.step_seconds == 0.3


@pytest.mark.parametrize(
    "told",
    [
        None,
        {},
        {"steps": 20, "step_seconds": "x", "compute_seconds": 0, "exposed_seconds": 0},
        {"steps": 20, "step_seconds": float("nan"), "compute_seconds": 0, "exposed_seconds": 0},
        {"steps": 20, "step_seconds": float("inf"), "compute_seconds": 0, "exposed_seconds": 0},
        {"steps": 20, "step_seconds": 1, "compute_seconds": 0, "exposed_seconds": 0, "samples": float("nan")},
        {"steps": 0, "step_seconds": 0.1, "compute_seconds": 0, "exposed_seconds": 0},
        {
            "steps": 2,
            "step_seconds": 0.1,
            "compute_seconds": 0,
            "exposed_seconds": 0,
            "sent_bytes_per_second": {"a": -1},
        },
    ],
)
def test_what_a_script_may_write_into_its_pipe(plan, told):
    watch = PerformanceMonitor(plan, pytest.fail, lambda _: None)
    with pytest.raises(ValueError):
        watch.add_report(0, told)
    assert watch.measured is None


def test_the_kernel_counts_what_goes_to_another_address():
    with socket.create_server(("127.0.0.2", 0)) as server:
        begin = tcp_stats.sent()
        with socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0)) as out:
            received, _ = server.accept()
            with received:
                before = tcp_stats.sent()
                for _ in range(64):
                    out.sendall(b"x" * (1 << 16))
                    assert received.recv(1 << 16, socket.MSG_WAITALL)
                after = tcp_stats.sent()
    assert "127.0.0.2" not in begin
    assert after["127.0.0.2"].size_bytes - before["127.0.0.2"].size_bytes == pytest.approx(1 << 22, rel=0.05)


def test_a_rate_is_of_the_time_in_which_there_was_something_to_send():
    before = {"a": tcp_stats.Sent(1 << 20, 1.0), "b": tcp_stats.Sent(5, 0.5), "c": tcp_stats.Sent(0, 0.0)}
    after = {
        "a": tcp_stats.Sent(5 << 20, 1.5),
        "b": tcp_stats.Sent(5000, 0.6),
        "c": tcp_stats.Sent(1 << 30, 0.0),
        "d": tcp_stats.Sent(2 << 20, 2.0),
    }
    assert tcp_stats.rates(before, after) == {"a": 8 << 20, "d": 1 << 20}
    assert tcp_stats.sizes(before, {**after, "e": tcp_stats.Sent()}) == {
        "a": 4 << 20,
        "b": 4995,
        "c": 1 << 30,
        "d": 2 << 20,
    }


@pytest.mark.parametrize(
    ("device", "cards", "disabled", "counted"),
    [("cuda", ["mlx5_0"], None, False), ("cuda", ["mlx5_0"], "1", True), ("cuda", [], None, True), ("cpu", ["mlx5_0"], None, True)],
)  # fmt: skip
def test_what_may_go_by_rdma_is_not_counted(monkeypatch, device, cards, disabled, counted):
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    if disabled:
        monkeypatch.setenv("NCCL_IB_DISABLE", disabled)
    monkeypatch.setattr("os.listdir", lambda path: cards)
    assert tcp_stats.are_all(torch.device(device)) is counted


class Page(HTMLParser):
    """Parser that collects the text of a page and checks that its tags match."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        assert all(not (value or "").startswith("http") for name, value in attrs if name in ("src", "href"))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_report_says_what_ran_and_how_it_went(plan, tmp_path):
    _, measured = hear(plan, step=0.3, links=RING)
    failure = Failure(
        rank=1,
        host="n2",
        time=1.0,
        exit_code=1,
        signal=None,
        message="ValueError: <b>",
        traceback="Traceback\n<x>",
        log="log",
    )
    no_message = msgspec.structs.replace(failure, message="")
    rank = RankResult(rank=1, host="n2", local_rank=0, role="worker", device="cpu", exit_code=None, signal=9)
    result = Result(
        status="failed", exit_code=1, world_size=3, hosts=HOSTS, seconds=1.5, restarts=0, ranks=(rank,), first_failure=failure,
        warnings=("the wire & more",), predicted=FORETOLD, measured=measured,
        attempts=(Attempt(world_size=3, hosts=HOSTS, seconds=1.0, first_failure=no_message, folder="attempt0"),),
    )  # fmt: skip
    metrics = '{"metrics": {"n": 1%s}}\ntrue\n' % ("0" * 400)  # too large for a float; no object
    (tmp_path / "metrics.jsonl").write_text(metrics)
    html_report.write_report(plan, result, tmp_path, 0.0)
    (tmp_path / "metrics.jsonl").write_text('{"metrics": {"loss": 2.0, "name": "x"}}\n{"metrics": {"loss": 1.0}}\n')
    html_report.write_report(plan, result, tmp_path, 0.0)
    page = Page()
    page.feed((tmp_path / "report.html").read_text())
    assert not page.open
    text = " ".join(page.words)
    for words in (
        "where.py", "failed", "rank 1 on n2: ValueError: <b>", "Traceback\n<x>", "the wire & more", "300 ms", "100 ms", "+200.0%",
        "n1-n2, 10 GbE", "loss: 2 to 1, 2 values", "SIGKILL",
    ):  # fmt: skip
        assert words in text, words


def test_steps_in_few_of_which_a_rank_waits_are_told_with_their_share(monkeypatch, tmp_path):
    """In modes local and async, a rank waits for an exchange or for parameters, not between backward and optimizer."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # the first optimizer would set it
    told: list[dict[str, float]] = []
    waits = [0.0]
    meter = Meter(torch.device("cpu"), told.append, lambda: sum(waits))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter.watch(model)
    meter.watch(optimizer)
    for step in range(MeterSettings.warmup_steps + MeterSettings.window_steps + 1):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step % 5 == 4:
            begun = time.monotonic()
            time.sleep(0.05)
            waits.append(time.monotonic() - begun)
    (seen,) = told
    assert 0.8 * min(waits[1:]) / 5 < seen["exposed_seconds"] < 1.2 * max(waits) / 5
    assert seen["step_seconds"] == pytest.approx(seen["compute_seconds"] + seen["exposed_seconds"])
    assert seen["compute_seconds"] < 0.03


def test_steps_in_which_ways_are_tried_are_not_measured(monkeypatch, tmp_path):
    """Autotuning steps are slower, and would cause a warning that the job is slower than predicted."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    told: list[dict[str, float]] = []
    tried, steps = MeterSettings.warmup_steps + 10, 0
    meter = Meter(torch.device("cpu"), told.append, steady=lambda: steps >= tried)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter.watch(model)
    meter.watch(optimizer)
    for step in range(tried + MeterSettings.window_steps + 1):
        steps = step
        model(torch.ones(1, 2)).sum().backward()
        time.sleep(0.01 if step < tried else 0.0)
        optimizer.step()
    assert len(told) == 1 and told[0]["step_seconds"] < 0.01
