"""Complete jobs with parameter servers, in which the test kills workers and servers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.conftest import LAUNCH, SCRIPTS

pytestmark = pytest.mark.forked

SCRIPT = SCRIPTS / "asynchronous.py"


OWN_HANDS = SCRIPT.with_name("own_hands.py")


def launcher_warnings(result: dict[str, Any]) -> list[str]:
    """Return the warnings of a result without those of the library about the script."""
    return [warning for warning in result["warnings"] if "job.prepare" not in warning]


def test_updates_by_hand_are_told_of_before_the_end(launch):
    run = launch("-np", "2", "--mode", "async", OWN_HANDS.with_name("modes.py"), ".", "by_hand")
    assert run.code != 0 and "0.weight was trained" in run.err, run
    assert "AssertionError" not in run.err, run.err  # error of the tenth backward pass


@pytest.mark.parametrize("options", [(), ("--staleness", "0")], ids=["unbounded", "in step"])
def test_an_optimizer_that_is_prepared_later_takes_over(launch, options):
    run = launch("-np", "2", "--mode", "async", *options, OWN_HANDS.with_name("modes.py"), ".", "two_optimizers")
    assert run.code == 0 and "two_optimizers: learnt" in run.out, run


SAVES = """
import signal, sys, time, distrib, torch
signal.signal(signal.SIGTERM, signal.default_int_handler)
job = distrib.init()
model = torch.nn.Linear(2000, 100)
model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9))
step = 0
try:
    while True:
        optimizer.zero_grad()
        model(torch.ones(1, 2000)).sum().backward()
        optimizer.step()
        step += 1
        time.sleep(0.05)
except KeyboardInterrupt:
    job.save(sys.argv[1], model=model, optimizer=optimizer, step=step)
"""


def test_a_job_that_is_stopped_may_still_save(launch, tmp_path):
    script, saved = tmp_path / "saves.py", tmp_path / "last.pt"
    script.write_text(SAVES)
    run = launch("-np", "2", "--mode", "async", "--timeout", "12s", script, saved)
    assert run.code == 124 and torch.load(saved, weights_only=True)["values"]["step"] > 0, run


DELAYED = """
import torch, distrib
from torch import nn
job = distrib.init()
torch.manual_seed(0)
inputs = torch.randn(2048, 32)
labels = inputs[:, :8].argmax(1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), 32, shuffle=True)
model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), 0.3, momentum=0.9), loader)
for _ in range(6):
    for batch, truth in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), truth).backward()
        optimizer.step()
job.barrier()
model.eval()
job.print(f"accuracy {float((model(inputs).argmax(1) == labels).float().mean()):.3f}")
"""


def test_a_learning_rate_that_mode_sync_bears_is_borne(launch, tmp_path):
    """The script reached 0.95 in mode sync, and 0.35 to 0.52 where a late gradient counted in full."""
    script = tmp_path / "delayed.py"
    script.write_text(DELAYED)
    run = launch("-np", "4", "--mode", "async", script)
    told = re.search(r"accuracy ([0-9.]+)", run.out)
    assert run.code == 0 and told and float(told[1]) > 0.8, run


def test_what_scripts_do_with_their_own_hands(launch):
    """With bound 0, scripts with manual updates give the results of mode sync, or the job warns."""
    names = ["norm", "functional", "clamp", "clamp by data", "clip", "init"]
    found = {}
    for mode in ("sync", "async"):
        run = launch("-np", "2", "--mode", mode, *(["--staleness", "0"] if mode == "async" else []), OWN_HANDS, *names)
        assert run.code == 0, run
        found[mode] = {
            name: float(loss) for name, loss in re.findall(r"^\[0@localhost\] (.+) ([0-9.]+)$", run.out, re.MULTILINE)
        }
        assert run.err.count("warning: the script changed") == (2 if mode == "async" else 0), run.err
    assert found["async"]["norm"] == pytest.approx(found["sync"]["norm"], rel=1e-5)
    assert found["async"]["functional"] == pytest.approx(
        found["sync"]["functional"], rel=0.01
    )  # one step uses stale values
    assert found["async"]["clamp by data"] == pytest.approx(found["async"]["clamp"], rel=1e-5)


def launched(folder: Path, lesson: list[str], *words: str) -> subprocess.Popen[str]:
    """Launch a job of two workers that runs a lesson."""
    command = [str(LAUNCH), "--no-preflight", "--run-dir", str(folder / "run"), "-np", "2", "--mode", "async", *words]
    command.append("--no-stale-rate")  # apply every update in full
    return subprocess.Popen(
        [*command, str(SCRIPT), *lesson], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def started(folder: Path, *words: str, until: str = "") -> subprocess.Popen[str]:
    """Start a job of two workers that count their steps. Return when both have begun."""
    job = launched(folder, ["counting", str(folder), "40", "0.05", until], *words)
    reaches(job, lambda: noted(folder).keys() == {0, 1})
    return job


def reaches(job: subprocess.Popen[str], what: Callable[[], bool]) -> None:
    """Wait until a condition is true of a running job."""
    deadline = time.monotonic() + 150
    while not what():
        if job.poll() is not None or time.monotonic() > deadline:
            job.terminate()
            pytest.fail(job.communicate(timeout=200)[0])
        time.sleep(0.05)


def noted(folder: Path) -> dict[int, int]:
    return {int(path.suffix[1:]): int(path.read_text()) for path in folder.glob("acknowledged.*")}


def processes_of(folder: Path, rank: int) -> list[int]:
    """Return the processes of a rank's script, found by the launcher's process tag."""
    mark = f"DISTRIB_PROCESS_TAG={json.loads((folder / 'run/plan.json').read_text())['job']}.{rank}".encode()
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def killed(folder: Path, rank: int) -> None:
    """Kill the script of a rank."""
    for pid in processes_of(folder, rank):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def ended(folder: Path, job: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, _ = job.communicate(timeout=200)
    return json.loads((folder / "run/result.json").read_text()), out


def counts(folder: Path) -> list[tuple[float, float]]:
    """Return for each worker the minimum and maximum number of its updates in any element."""
    values = torch.cat(list(torch.load(next(folder.glob("held.*.pt")), weights_only=True).values()))
    return [(values[rank::2].min().item(), values[rank::2].max().item()) for rank in (0, 1)]


def test_a_worker_dies_and_the_other_goes_on_to_the_end(tmp_path):
    job = started(tmp_path)
    killed(tmp_path, 0)
    result, out = ended(tmp_path, job)  # before or soon after the restart
    assert result["status"] == "succeeded" and result["first_failure"] is None, out
    assert "worker rank 0" in result["warnings"][-1]
    low, high = counts(tmp_path)[0]
    before, after = json.loads((tmp_path / "noted.1").read_text())
    assert before["0"] <= low <= high <= after["0"] + len((tmp_path / "lives.0").read_text())
    assert counts(tmp_path)[1] == (40, 40)


def test_a_worker_that_died_is_started_again_and_trains_with_the_others(tmp_path):
    job = started(tmp_path, until="enough")
    for pid in processes_of(tmp_path, 2):  # Slurm signals all processes of a step
        os.kill(pid, signal.SIGUSR1)
    killed(tmp_path, 1)
    dead = noted(tmp_path)[1]
    reaches(job, lambda: noted(tmp_path)[1] >= dead + 10)
    before = noted(tmp_path)[0]
    reaches(job, lambda: noted(tmp_path)[0] >= before + 10)
    (tmp_path / "enough").touch()
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded" and result["exit_code"] == 0 and result["first_failure"] is None, out
    name = result["ranks"][1]["host"]
    assert launcher_warnings(result) == [f"worker rank 1 on {name} died (SIGKILL) and was restarted"]
    assert (result["ranks"][1]["signal"], result["ranks"][1]["stopped_by"]) == (signal.SIGTERM, "launcher")
    first, second = json.loads((tmp_path / "noted.0").read_text())
    low, high = counts(tmp_path)[1]
    assert dead + 10 <= first["1"] <= low <= high <= second["1"] + 2  # each incarnation may have missed one note
    assert counts(tmp_path)[0] == (first["0"], first["0"])


def test_the_process_around_a_worker_is_killed_and_the_other_goes_on(tmp_path):
    """Open MPI would abort all ranks after one that exits without MPI_Finalize."""
    job = started(tmp_path, until="enough")
    (around,) = {psutil.Process(pid).parent() for pid in processes_of(tmp_path, 1)}
    assert around and "distrib_launch.rank_agent" in around.cmdline()
    around.kill()
    before = noted(tmp_path)[0]
    reaches(job, lambda: noted(tmp_path)[0] > before + 40)
    (tmp_path / "enough").touch()
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded" and result["exit_code"] == 0, out
    assert [warning.partition(" on ")[0] for warning in launcher_warnings(result)] == ["worker rank 1"], out


def test_the_job_fails_when_every_worker_has_failed_though_one_was_started_again(tmp_path):
    job = started(tmp_path, until="never")
    killed(tmp_path, 1)
    dead = noted(tmp_path)[1]
    reaches(job, lambda: noted(tmp_path)[1] > dead + 1)
    killed(tmp_path, 0)
    result, out = ended(tmp_path, job)
    assert (result["status"], result["exit_code"]) == ("failed", 128 + signal.SIGKILL), out
    first = result["first_failure"]
    assert (first["rank"], first["message"]) == (1, "killed by SIGKILL")
    (warning,) = launcher_warnings(result)
    assert "was restarted" in warning
    assert [rank["signal"] for rank in result["ranks"][:2]] == [signal.SIGKILL, signal.SIGTERM]


def test_another_worker_prints_and_saves_when_rank_0_dies(tmp_path):
    job = launched(tmp_path, ["telling", str(tmp_path), "enough"])
    reaches(job, lambda: all((tmp_path / f"steps.{rank}").exists() for rank in (0, 1)))
    killed(tmp_path, 0)
    reaches(job, lambda: (tmp_path / "steps.0 again").exists())
    (tmp_path / "saved.pt").unlink()
    reaches(job, (tmp_path / "saved.pt").exists)
    (tmp_path / "enough").touch()
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded", out
    assert launcher_warnings(result)[0].endswith(
        "died (SIGKILL) and was restarted; the next worker prints and saves now"
    )
    assert torch.load(tmp_path / "saved.pt", weights_only=True)["values"]["who"] == "1"
    assert "told by 0" in out and "told by 1" in out and "by 0 again" not in out
    assert out.count("the end by 1") == 1 and "the end by 0" not in out
    said = [json.loads(line)["metrics"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    tellers = [told["who"] for told in said if "who" in told]
    assert tellers == sorted(tellers) and set(tellers) == {"0", "1"}


def test_a_job_can_be_stopped_while_a_worker_waits_to_be_started_again(tmp_path):
    job = started(tmp_path, until="never")
    killed(tmp_path, 1)
    time.sleep(0.7)
    job.send_signal(signal.SIGINT)
    result, out = ended(tmp_path, job)
    assert (result["status"], result["exit_code"], launcher_warnings(result)) == ("stopped", 130, []), out
    assert result["ranks"][1]["signal"] == signal.SIGKILL and (tmp_path / "lives.1").read_text() == "."


def test_a_bug_of_all_workers_does_not_run_twice(tmp_path):
    result, out = ended(tmp_path, launched(tmp_path, ["failing"]))
    assert result["status"] == "failed" and result["exit_code"] == 1, out
    assert result["first_failure"]["message"] == "ValueError: a bug" and launcher_warnings(result) == []
    for rank in (0, 1):
        assert (tmp_path / f"run/ranks/{rank}.err").read_text().count("ValueError: a bug") == 1
        assert result["ranks"][rank]["exit_code"] == 1


def test_a_server_dies_and_its_replica_has_every_update(tmp_path):
    job = started(tmp_path, "--servers", "2", "--replicas", "1")
    killed(tmp_path, 2)
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded", out
    assert "takes over shard 0" in out
    assert counts(tmp_path) == [(40, 40), (40, 40)]


def test_all_servers_die_at_once_with_their_replicas(tmp_path):
    job = started(tmp_path, "--servers", "2", "--replicas", "1")
    for rank in (2, 3):
        killed(tmp_path, rank)
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded", out
    assert "of which no replica is left" in out
    for low, high in counts(tmp_path):  # updates that no worker had received, or whose reply was lost, are lost
        assert 20 < low <= high <= 40


def test_a_server_without_replica_is_started_again(tmp_path):
    job = started(tmp_path, "--servers", "2")
    killed(tmp_path, 3)
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded", out
    assert "was restarted" in result["warnings"][-1] and "its shard is restored from" in out
    for low, high in counts(tmp_path):
        assert 30 < low <= high == 40


def test_what_main_has_read_is_there_for_a_worker_that_is_started_again_after_its_server_was(tmp_path):
    job = started(tmp_path, "--servers", "1", until="enough")
    reaches(job, lambda: any((tmp_path / "run").glob("server-*/result-*[0-9]")))
    killed(tmp_path, 2)
    before = noted(tmp_path)
    reaches(job, lambda: all(noted(tmp_path)[rank] > before[rank] + 10 for rank in (0, 1)))
    killed(tmp_path, 1)
    dead = noted(tmp_path)[1]
    reaches(job, lambda: noted(tmp_path)[1] >= dead + 10)
    (tmp_path / "enough").touch()
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded" and result["restarts"] == 2, out
    assert not any((tmp_path / "run").glob("server-*"))


@pytest.mark.parametrize("words", [("-np", "1"), ("-np", "2", "--staleness", "0")])
def test_only_the_gradients_of_the_step_count(tmp_path, words):
    command = [LAUNCH, "--no-preflight", "--run-dir", tmp_path / "run", *words, "--mode", "async", SCRIPT, "left_out"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["failed", "well"])
def test_nobody_waits_long_for_a_rank_that_ended_before_it_began(tmp_path, how):
    command = [LAUNCH, "--no-preflight", "--run-dir", tmp_path / "run", "-np", "2", "--mode", "async", SCRIPT]
    begun = time.monotonic()
    done = subprocess.run(
        [*command, "one_leaves_at_once", how],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ("worker rank 0 on localhost" in done.stderr) == (how == "failed")
    assert time.monotonic() - begun < 60  # servers without a launcher would wait for half an hour


def test_the_log_is_that_of_the_rank_which_is_main_for_the_others(tmp_path):
    """Servers may elect another main rank before the launcher gives up rank 0."""
    script = tmp_path / "log.py"
    script.write_text(
        "import os, distrib\nfrom distrib.training.telemetry.status_pipe import StatusPipe\njob = distrib.init()\n"
        "pipe = StatusPipe(int(os.environ['DISTRIB_STATUS_FD']))\n"
        "pipe.metrics({'rank': job.rank}, is_main=job.rank == 1)\njob.log(of=job.rank)\n"
    )
    command = [LAUNCH, "--no-preflight", "--run-dir", tmp_path / "run", "-np", "2", script]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line)["metrics"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sorted(map(str, said)) == ["{'of': 0}", "{'rank': 1}"]


SPLIT = """
import torch, distrib
from torch.utils.data import DataLoader, TensorDataset, random_split
job = distrib.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mine, alike = (torch.Generator().manual_seed(seed) for seed in (job.rank, 0))
data = TensorDataset(torch.arange(20.0)[:, None])
loaders = [DataLoader(random_split(data, [16, 4], generator)[0], 2) for generator in (mine, alike)]
model, optimizer, *loaders = job.prepare(model, optimizer, *loaders)
for loader in loaders:
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
"""


def test_a_worker_with_other_samples_than_main_says_so(launch, tmp_path):
    (tmp_path / "split.py").write_text(SPLIT)
    run = launch("-np", "2", "--mode", "async", tmp_path / "split.py")
    assert run.code == 0, run
    told = [line for line in run.err.splitlines() if "chose other samples" in line]
    assert [line.partition("]")[0] for line in told[:-1]] == ["[1@localhost"]  # the last line repeats it
    assert told[0].startswith("[1@localhost] distrib: warning: rank 1 chose other samples"), run
