"""Hangs: the ranks that a hung job waits for, through the command, the detector and the report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import msgspec
import pytest

from distrib_launch.rank_agent.stack_dump import with_state
from distrib_launch.supervisor import hang_detector, hang_report
from distrib_launch.supervisor.attempts import CompletedAttempt
from tests.conftest import LAUNCH, ROOT, SCRIPTS

GLOO = SCRIPTS / "gloo.py"

ENDS_EARLY = """
import distrib, torch
job = distrib.init()
model = torch.nn.Linear(1, 1)
model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 1e-4))
for step in range(20):
    if job.is_main and step == 10:
        break
    if step == 10:
        print("the mean is", job.all_reduce(1.0))
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
"""


def frames(*calls: tuple[str, str, int]) -> tuple[hang_report.StackFrame, ...]:
    return tuple(hang_report.StackFrame(name=name, filename=filename, line=line) for name, filename, line in calls)


TORCH = "/venv/lib/python3.11/site-packages/torch"


IN_BACKWARD = frames(("_engine_run_backward", f"{TORCH}/autograd/graph.py", 9), ("train", "/home/me/train.py", 50))


IN_ALL_REDUCE = frames(
    ("all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 9),
    ("wrapper", f"{TORCH}/distributed/c10d_logger.py", 8),
    ("validate", "/home/me/train.py", 70),
)


CLOSING = frames(
    ("wait_for_all_ranks", "/home/me/distrib/distrib/training/rendezvous.py", 117),
    ("JobShutdown.close", "/home/me/distrib/distrib/training/shutdown.py", 73),
    ("_ExitWatch._at_exit", "/home/me/distrib/distrib/training/shutdown.py", 234),
)


IN_LOADER = frames(("__next__", f"{TORCH}/utils/data/dataloader.py", 9), ("train", "/home/me/train.py", 41))


def stack(rank: int, calls: tuple[hang_report.StackFrame, ...], **changes: object) -> hang_report.Stack:
    values = {"rank": rank, "host": f"n{rank // 2}", "step": 7, "frames": calls}
    return hang_report.Stack(**{**values, **changes})


def test_ranks_that_wait_for_one_at_its_end_are_told_of_soon(launch, tmp_path):
    """A rank in job.close takes no part in the collectives of other ranks."""
    script = tmp_path / "early.py"
    script.write_text(ENDS_EARLY)
    run = launch("-np", "2", "--hang-timeout", "12s", script, timeout=150)
    ended = "s: rank 0 on localhost is in job.close or MPI_Finalize, at the end of its script; 1 rank waits for it in "
    assert f"no progress for 10 {ended}" in run.err and "for 12 s" in run.err, run
    assert run.code == 1 and f"no progress for 12 {ended}" in run.result["first_failure"]["message"]
    assert "the mean is" not in run.out


class Detected:
    """A detector of two ranks on a fake clock."""

    def __init__(self, monkeypatch, timeout_seconds: float | None, *, closing: bool) -> None:
        self.now = 0.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(hang_detector, "time", clock)
        self.said: list[str] = []
        console = types.SimpleNamespace(say=self.said.append)
        self.detector = hang_detector.HangDetector(timeout_seconds, lambda *_: None, console, [])
        self._ranks = [
            types.SimpleNamespace(plan=types.SimpleNamespace(rank=rank, host="n1"), exit=None, step=5,
                                  closing=closing and rank == 1, is_worker=True, error_log="log")
            for rank in range(2)
        ]  # fmt: skip

    def seconds_until(self, words: str, *stacks: tuple[hang_report.StackFrame, ...]) -> float:
        """Return the time at which a message with `words` is printed."""
        while not any(words in said for said in self.said):
            if self.run(self.now + 0.1, *stacks):
                self.now += 0.1
            assert self.now < 1000
        return self.now

    def run(self, until: float, *stacks: tuple[hang_report.StackFrame, ...]) -> object:
        while self.now < until:
            if failure := self.detector.check(self.now, self._ranks):
                return failure
            for state, frames in zip(self._ranks if stacks else (), stacks, strict=True):
                thread = {"thread_name": "MainThread", "active": False, "frames": frames}
                self.detector.add_stack(state, msgspec.json.encode([thread]))
            self.now += 0.1
        return None


def test_a_job_whose_ranks_wait_for_a_closed_rank_continues(monkeypatch):
    """The report comes once, after ten seconds; without a hang timeout the job does not end."""
    job = Detected(monkeypatch, None, closing=True)
    assert job.run(14, IN_ALL_REDUCE, CLOSING) is None
    assert "no progress for 10 s: rank 1 on n1 is in job.close" in job.said[0] and "job continues" in job.said[0]
    job.detector.on_progress()
    assert job.run(100, IN_ALL_REDUCE, CLOSING) is None and len(job.said) == 1


def test_a_hang_that_ends_the_job_is_reported_once_with_a_remedy(monkeypatch):
    job = Detected(monkeypatch, 5.0, closing=False)
    job.detector.on_progress()
    failure = job.run(9, IN_ALL_REDUCE, IN_LOADER)
    (report,) = job.said
    assert report.startswith(f"error: {failure.message}\n") and "every rank make the same collective calls" in report
    ended = CompletedAttempt(None, types.SimpleNamespace(first_failure=failure), [], 0.0, stepped=True)
    ended.report_failure(types.SimpleNamespace(say=job.said.append))
    assert job.said == [report]


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        ([("JobCollectives.all_reduce", "/w/distrib/training/collectives.py"), ("Job.barrier", "/w/distrib/training/job.py")], "job.barrier"),
        ([("Job.all_reduce", "/w/distrib/training/job.py")], "job.all_reduce"),
        ([("broadcast_object_list", f"{TORCH}/distributed/distributed_c10d.py")], "broadcast_object_list"),
        ([("barrier", f"{TORCH}/distributed/distributed_c10d.py")], "barrier"),
        ([], "all_reduce"),
    ],
)  # fmt: skip
def test_a_collective_is_named_as_the_script_calls_it(calls, named):
    outer = frames(*((name, file, 5) for name, file in calls))
    waits = stack(0, (*IN_ALL_REDUCE[:2], *outer, IN_ALL_REDUCE[2]))
    assert hang_report.place_of(waits).what == named


def test_a_job_without_output_has_a_minute_to_start(monkeypatch):
    job = Detected(monkeypatch, 5.0, closing=False)
    job.detector.on_progress(to_stderr=True)
    assert job.run(59, IN_ALL_REDUCE, IN_LOADER) is None and not job.said
    assert job.run(64, IN_ALL_REDUCE, IN_LOADER).message.startswith("no progress for 60 s: rank 1 on n1")
    job = Detected(monkeypatch, 5.0, closing=False)
    job.detector.on_progress()
    assert job.run(9, IN_ALL_REDUCE, IN_LOADER).message.startswith("no progress for 5 s: rank 1 on n1")


def test_a_hang_is_announced_and_reported_at_its_times(monkeypatch):
    """Hint after a minute, report after ten; ten seconds where a rank has ended; without a stack three seconds later."""
    stacks = IN_ALL_REDUCE, IN_LOADER
    job = Detected(monkeypatch, None, closing=False)
    job.detector.on_progress()
    assert 60 < job.seconds_until("note: no rank has printed", *stacks) < 61
    assert 600 < job.seconds_until("warning: no progress for 600 s", *stacks) < 601 and len(job.said) == 2
    job = Detected(monkeypatch, 5.0, closing=False)
    job.detector.on_progress()
    assert 5 < job.seconds_until("error: no progress for 5 s", *stacks) < 6
    job = Detected(monkeypatch, None, closing=True)
    assert 10 < job.seconds_until("no progress for 10 s", IN_ALL_REDUCE, CLOSING) < 11
    job = Detected(monkeypatch, 5.0, closing=False)
    job.detector.on_progress()
    assert 8 < job.seconds_until("no stack came") < 8.5


ONE_BACKWARD_MORE = """
import distrib, torch
with distrib.init() as job:
    model = torch.nn.Linear(4, 1)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 1e-4))
    for _ in range(3 + (job.rank == 1)):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_rank_that_goes_one_backward_further_waits_for_the_one_at_its_end(launch, tmp_path, monkeypatch):
    """The report comes after ten seconds, as one rank is at its end; between two collectives the line of a minute comes first."""
    script = tmp_path / "further.py"
    script.write_text(ONE_BACKWARD_MORE)
    run = launch("-np", "2", "--hang-timeout", "20s", script, timeout=100)
    assert run.code == 1, run
    assert (
        "no progress for 10 s: rank 0 on localhost is in job.close" in run.err and "1 rank waits for it in" in run.err
    )
    assert run.result["first_failure"]["rank"] == 0 and "further.py:7" in run.err
    job = Detected(monkeypatch, None, closing=False)
    job.detector.on_progress()
    assert (
        60
        < job.seconds_until("no rank has printed a line or finished a step for 60 s", IN_BACKWARD, IN_ALL_REDUCE)
        < 61
    )
    job.seconds_until("warning: no progress for 600 s: ", IN_BACKWARD, IN_ALL_REDUCE)
    assert "rank 0 on n1 is in the backward pass, for gradients (train.py:50 in train); 1 rank wa" in job.said[1]


def test_an_mpi_rank_that_ended_early_is_named_in_a_hang(launch, tmp_path):
    script = tmp_path / "leaves.py"
    script.write_text(
        "from mpi4py import MPI\nworld = MPI.COMM_WORLD\nprint('up', flush=True)\nif world.rank == 0:\n    world.Barrier()\n"
    )
    run = launch("-np", "2", "--hang-timeout", "2s", script, timeout=150)
    assert run.code == 1, run
    assert "rank 1 on localhost is in job.close" in run.err
    assert "1 rank waits for it in Barrier" in run.err


def test_a_stopped_rank_and_the_call_that_waits_for_it_are_named(launch, tmp_path):
    script = tmp_path / "stopped.py"
    script.write_text(
        "import os, signal\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\nprint('up', flush=True)\n"
        "if world.rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\nworld.Barrier()\n"
    )
    run = launch("-np", "3", "--grace", "1s", "--hang-timeout", "2s", script, timeout=150)
    assert run.code == 1, run
    assert "kill -CONT" in run.err
    assert "(stopped.py:6 in <module>); 2 ranks wait for it in Barrier" in run.err


@pytest.mark.parametrize(("code", "state"), [("while True: pass", True), ("import time; time.sleep(60)", False)])
@pytest.mark.processes
def test_what_py_spy_cannot_know_before_python_3_11_the_kernel_is_asked(code, state):
    unknown = {"thread_name": "MainThread", "os_thread_id": None, "active": not state, "frames": []}
    with subprocess.Popen([sys.executable, "-c", f"print(flush=True)\n{code}"], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            deadline = time.monotonic() + 10
            for named in (unknown, unknown | {"thread_name": None}):
                while json.loads(with_state(json.dumps([named]).encode(), process.pid))[0]["active"] is not state:
                    assert time.monotonic() < deadline
            known = json.dumps([unknown | {"os_thread_id": process.pid}]).encode()
            assert json.loads(with_state(known, process.pid)) == [{**json.loads(known)[0], "gpu": False}]
            for other in (b"Error: no such process", b"null", b"[{}]"):
                assert with_state(other, process.pid) == other
        finally:
            process.kill()


def test_a_script_that_computes_silently_at_its_start_is_left_alone(launch, tmp_path):
    script = tmp_path / "busy.py"
    script.write_text("import time\nend = time.monotonic() + 3\nwhile time.monotonic() < end:\n    pass\nprint('up')\n")
    run = launch("--hang-timeout", "1s", script, timeout=150)
    assert run.code == 0, run


@pytest.mark.cluster
def test_a_hang_across_hosts_is_found_in_time_and_named(make_cluster, launch):
    cluster = make_cluster(2)
    run = launch("-H", cluster.hostfile, "--hang-timeout", "5s", GLOO, "1:loader", cluster=cluster, timeout=150)
    assert run.code == 1, run
    assert "no progress for 5 s: rank 1 on n2 is in the data loader (gloo.py:" in run.err
    assert "1 rank waits for it in the backward pass" in run.err
    failure = run.result["first_failure"]
    assert (failure["rank"], failure["host"]) == (1, "n2") and "gloo.py" in failure["traceback"]
    printed = (run.run_dir / "ranks/0.out").stat().st_mtime  # its last line is its last progress
    assert failure["time"] - printed < 20  # other ranks would wait for minutes
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.cluster
def test_ranks_that_no_longer_reach_each_other_wait_for_all(make_cluster, tmp_path):
    cluster = make_cluster(3)
    script = tmp_path / "sums.py"
    script.write_text(
        "import torch, torch.distributed as dist, time\ndist.init_process_group('gloo')\n"  # without DDP, which imports dynamo
        "for step in range(10**9):\n    dist.all_reduce(torch.ones(1))\n"
        "    if step == 2:\n        print('three steps done', flush=True)\n    time.sleep(0.01)\n"
    )
    words = ["-H", "n2,n3", "--run-dir", tmp_path / "run", "--hang-timeout", "5s", script]
    process = cluster.popen("n1", [LAUNCH, *words], env={"OMP_NUM_THREADS": "1"})
    assert "three steps done" in process.stdout.readline()
    cluster.part("n2", "n3")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1, err
    assert re.search(r"all 2 ranks wait in all_reduce; check the network", err), err
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert "distrib-topo check" in err
    assert result["first_failure"]["message"].startswith("no progress for 5 s: all 2 ranks wait")
    assert cluster.left_over(within_seconds=6) == {}


def test_the_one_that_is_elsewhere_is_named():
    stacks = [stack(r, IN_BACKWARD) for r in (0, 1, 2, 4, 5, 6, 7)] + [stack(3, IN_LOADER)]
    assert [s.rank for s in hang_report.HangReport(stacks).culprits] == [3]
    assert hang_report.HangReport(stacks).lines(60)[0] == (
        "no progress for 60 s: rank 3 on n1 is in the data loader (train.py:41 in train); "
        "7 ranks wait for it in the backward pass, for gradients"
    )


def test_the_one_that_is_stopped_is_named_wherever_it_is():
    stacks = [stack(r, IN_ALL_REDUCE) for r in range(3)] + [stack(3, IN_ALL_REDUCE, state="T")]
    assert "rank 3 on n1 is in a stop by a signal" in hang_report.HangReport(stacks).lines(5)[0]
    stacks[3] = stack(3, IN_LOADER, state="D")
    assert "rank 3 on n1 is in the data loader" in hang_report.HangReport(stacks).lines(5)[0]
    stacks[3] = stack(3, frames(("load", "/home/me/train.py", 3)), state="D")
    assert (
        "rank 3 on n1 is in a wait for a disk or a file system (train.py:3 in load)"
        in hang_report.HangReport(stacks).lines(5)[0]
    )


def test_ranks_in_different_collectives_wait_for_each_other():
    stacks = [stack(r, IN_BACKWARD) for r in range(3)] + [stack(3, IN_ALL_REDUCE)]
    assert [s.rank for s in hang_report.HangReport(stacks).culprits] == [3]
    assert (
        "rank 3 on n1 is in all_reduce (train.py:70 in validate); 3 ranks wait"
        in hang_report.HangReport(stacks).lines(5)[0]
    )


def test_all_in_the_same_collective_point_at_the_network_or_the_one_behind():
    stacks = [stack(r, IN_ALL_REDUCE) for r in range(4)]
    assert hang_report.HangReport(stacks).culprits == []
    assert "all 4 ranks wait in all_reduce; check the network" in hang_report.HangReport(stacks).lines(5)[0]
    behind = [*stacks[:3], stack(3, IN_ALL_REDUCE, step=5)]
    assert [s.rank for s in hang_report.HangReport(behind).culprits] == [3]


def test_a_rank_that_has_left_its_script_is_the_one_that_is_waited_for():
    stacks = [stack(0, IN_BACKWARD), stack(1, CLOSING, closing=True), stack(2, CLOSING, closing=True)]
    assert [s.rank for s in hang_report.HangReport(stacks).culprits] == [1, 2]
    assert hang_report.HangReport(stacks).lines(6)[0] == (
        "no progress for 6 s: ranks 1-2 are in job.close or MPI_Finalize, at the end of its script; "
        "1 rank waits for them in the backward pass, for gradients"
    )
    assert [s.rank for s in hang_report.HangReport([*stacks, stack(3, IN_LOADER)]).culprits] == [3]
    assert hang_report.HangReport([stack(rank, CLOSING, closing=True) for rank in range(2)]).culprits == []


def test_a_rank_that_waits_for_its_gpu_may_wait_for_others(tmp_path):
    """A rank on a GPU runs past its collectives and waits where it reads their results."""
    script = tmp_path / "train.py"
    script.write_text("loss = 1\nprint(loss.item())\n")
    reads = frames(("train", str(script), 2))
    late = frames(
        ("Event.synchronize", f"{TORCH}/cuda/streams.py", 9),
        ("_CheckedStep.is_finite", "/home/me/distrib/distrib/training/nan_guard.py", 36),
        ("train", "/home/me/train.py", 50),
    )
    evaluates = stack(0, frames(("evaluate", "/home/me/train.py", 90)), running=True)
    stacks = [evaluates, *(stack(rank, calls, running=True) for rank, calls in ((1, reads), (2, late), (3, reads)))]
    assert [s.rank for s in hang_report.HangReport(stacks).culprits] == [0]
    assert "3 ranks wait for it in a call that waits for its GPU" in hang_report.HangReport(stacks).lines(9)[0]
    ended = [stack(0, CLOSING, closing=True), *stacks[1:]]
    assert [s.rank for s in hang_report.HangReport(ended).culprits] == [0]
    assert not hang_report.HangReport(ended).waits_for_closed  # their GPUs may still compute
    further = [ended[0], *(msgspec.structs.replace(one, step=8) for one in ended[1:])]
    assert hang_report.HangReport(further).waits_for_closed
    on_cpu = stack(1, reads, running=True, gpu=False)
    assert not hang_report.place_of(on_cpu).waits


def test_a_rank_that_copies_to_its_gpu_waits_for_it(tmp_path):
    """A copy from unpinned memory waits for the GPU. With pinned memory, ranks stop anywhere: the slowest is named."""
    script = tmp_path / "train.py"
    script.write_text("images = images.to(device)\n")
    moving = frames(("move_to_device", "/venv/distrib/training/to_device.py", 30), ("train", "/home/me/train.py", 50))
    copies = [stack(1, moving, step=8), stack(2, frames(("train", str(script), 1)), step=8)]
    elsewhere = frames(("forward", "/home/me/train.py", 90))
    stacks = [stack(0, elsewhere), *copies]
    assert [s.rank for s in hang_report.HangReport(stacks).culprits] == [0]
    assert "2 ranks wait for it in a call that waits for its GPU" in hang_report.HangReport(stacks).lines(9)[0]
    anywhere = [stack(rank, elsewhere, step=7 if rank == 2 else 9) for rank in range(4)]
    assert [s.rank for s in hang_report.HangReport(anywhere).culprits] == [2]
    assert "3 ranks wait for it in kernels on their GPUs" in hang_report.HangReport(anywhere).lines(9)[0]
    on_cpus = [stack(rank, elsewhere, step=7 if rank == 2 else 9, gpu=False) for rank in range(4)]
    assert len(hang_report.HangReport(on_cpus).culprits) == 4


def test_a_rank_without_a_stack_is_still_told_of():
    stacks = [stack(0, IN_BACKWARD), stack(1, (), problem="Error: Permission denied")]
    assert "Permission denied" in "\n".join(hang_report.HangReport(stacks).lines(5))


def test_where_no_stack_can_be_read_nobody_is_blamed():
    stacks = [stack(rank, (), problem="Error: Permission denied") for rank in range(2)]
    assert hang_report.HangReport(stacks).culprits == []
    assert (
        hang_report.HangReport(stacks).lines(9)[0]
        == "no progress for 9 s, and no stack can be read: Error: Permission denied"
    )


def test_files_of_distrib_and_torch_that_the_report_names_exist():
    import torch.autograd.graph

    assert callable(torch.autograd.graph._engine_run_backward)
    named = {name: value for name, value in vars(hang_report).items() if name.endswith(("_FILE", "_FILES"))}
    files = [file for value in named.values() for file in ([value] if isinstance(value, str) else value)]
    for file in files:
        root = ROOT if file.startswith("/distrib/") else Path(torch.__file__).parent.parent
        if file.startswith(("/distrib/", "/torch/")):
            assert (root / file.lstrip("/")).exists(), file
