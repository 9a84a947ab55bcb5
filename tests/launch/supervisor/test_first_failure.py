"""First failure of a job: its rank, message and exit code, and the end of the other ranks."""

from __future__ import annotations

import json
import signal
import time

import psutil
import pytest

from distrib_launch.supervisor import root_cause
from distrib_launch.supervisor.rank_exit import parse_error_record
from tests.conftest import JOB, LAUNCH
from tests.support.launched_jobs import live_children, rank_process, start_job

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("orders", "code", "rank", "message"),
    [
        (["1:raise"], 1, 1, "RuntimeError: boom in rank 1"),
        (["1:exit=7", "*:sleep=60"], 7, 1, "exit code 7"),
        (["0:signal=9", "*:sleep=60"], 137, 0, "killed by SIGKILL"),
        (["1:signal=11", "*:sleep=60"], 139, 1, "killed by SIGSEGV"),
        (["1:kill-parent", "*:sleep=60"], 1, 1, "lost without an exit record"),
        (["--mpi", "1:raise", "*:sleep=60"], 1, 1, "RuntimeError: boom in rank 1"),
        (["--mpi", "0:signal=9", "*:sleep=60"], 137, 0, "killed by SIGKILL"),
    ],
)
def test_the_first_failure_is_named_and_ends_the_job(launch, orders, code, rank, message):
    run = launch("-np", "2", JOB, *orders, timeout=60)
    assert run.code == code, run
    failure = run.result["first_failure"]
    assert failure["rank"] == rank
    assert message in failure["message"]
    assert f"rank {rank} on localhost failed first: " in run.err
    assert message in run.err
    assert run.result["status"] == "failed"
    assert run.seconds < 50


NAN = """
import distrib, torch
job = distrib.init()
model = torch.nn.Linear(1, 1)
model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 1e-4))
for step in range(3):
    (model(torch.ones(1, 1)) * (float("nan") if job.rank == 1 and step else 1.0)).sum().backward()
    optimizer.step()
"""


@pytest.mark.forked
def test_the_rank_with_the_nan_failed_first_though_all_ranks_report_it(launch, tmp_path):
    (tmp_path / "nan.py").write_text(NAN)
    run = launch("-np", "3", tmp_path / "nan.py", timeout=150)
    assert run.code == 1 and "rank 1 on localhost failed first: " in run.err and "ranks 0,2: failed too" in run.err, run
    assert run.result["first_failure"]["rank"] == 1


def test_a_killed_rank_is_the_first_failure_and_not_the_engine_that_ended_with_it(tmp_path):
    process = start_job(tmp_path / "run", "-np", "2", str(JOB), "*:sleep=60")
    task = psutil.Process(rank_process()).parent()
    assert task
    engine = next(process for process in task.parents() if process.name() == "prterun")
    process.send_signal(signal.SIGSTOP)  # Ctrl-Z
    task.kill()  # as the OOM killer does
    deadline = time.monotonic() + 30
    while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "failed first: lost without an exit record" in err, err


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(launch):
    run = launch("-np", "2", "--grace", "1s", JOB, "0:ignore", "1:raise-then", timeout=200)
    assert run.code == 1, run
    assert run.result["first_failure"]["rank"] == 1
    assert [r["signal"] for r in run.result["ranks"]] == [signal.SIGKILL, None]
    assert "rank 0 " in run.result["warnings"][0] and "1 s after SIGTERM" in run.err and "--grace" in run.err


def test_all_descendants_of_the_ranks_end_after_a_failure(launch):
    run = launch("-np", "2", JOB, "0:children", "1:raise", timeout=50)
    assert run.code == 1, run
    assert not live_children()


def test_a_missing_python_module_is_named_with_the_interpreter(launch, tmp_path):
    script = tmp_path / "imports.py"
    script.write_text("import no_such_module_at_all\n")
    run = launch("-np", "2", script)
    assert run.code == 1
    assert "install no_such_module_at_all" in run.err
    assert str(LAUNCH.parent / "python") in run.err


TRAINING = """
import sys, torch, distrib
job = distrib.init()
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))  # over 256 KiB: hierarchical all-reduce
model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
for step in range(30):
    if step == 12 and job.rank == 1:
        {end}
    optimizer.zero_grad()
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
"""


@pytest.mark.forked
@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("raise ValueError('image 17 is corrupt')", "ValueError: image 17 is corrupt"),
        ("raise SystemExit('no more data')", "no more data"),
        ("import os; os._exit(7)", "exit code 7"),
    ],
)
def test_a_rank_that_waits_in_backward_is_never_the_first_failure(launch, tmp_path, end, message):
    script = tmp_path / "train.py"
    script.write_text(TRAINING.format(end=end))
    run = launch("-np", "2", script)
    failure = run.result["first_failure"]
    assert failure["rank"] == 1 and message in failure["message"], run
    assert "rank 0: lost the connection" in run.err and "Unable to cast" not in run.err
    waiting = (run.run_dir / "ranks" / "0.err").read_text()
    assert "local rank 1 of this host exited in the middle of a step" in waiting


def test_a_rank_that_recorded_a_secondary_failure_is_not_first_even_if_it_ended_first():
    record = json.dumps({"message": {"message": "E: any text", "extraInfo": {"py_callstack": "", "secondary": True}}})
    error = parse_error_record(record)
    assert error and root_cause.is_consequence(error, "")
    assert not root_cause.is_consequence(parse_error_record(record.replace("true", "false")), "")
