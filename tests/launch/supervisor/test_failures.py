"""Failure attribution: the first failure, its cause, and the ranks that wait, through the command and by module."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib_launch.rank_agent import oom
from distrib_launch.supervisor import root_cause
from distrib_launch.supervisor.rank_exit import ErrorRecord, RankExit, parse_error_record
from tests.conftest import SCRIPTS

GLOO = SCRIPTS / "gloo.py"


@pytest.mark.forked
def test_ranks_that_lose_their_peer_are_named_as_consequences(launch):
    run = launch("-np", "3", GLOO, "1:raise", timeout=150)
    assert run.code in (1, 134), run  # torch's Gloo threads sometimes abort a Python that exits
    assert run.result["first_failure"]["rank"] == 1
    assert "ValueError: a bad batch" in run.result["first_failure"]["message"]
    report = run.err[run.err.index("distrib-launch: error:") :]
    assert "rank 1 on localhost failed first: ValueError: a bad batch" in report
    assert "[rank1]" not in report
    assert "ranks 0,2: lost the connection to it" in report or "stopped" in report


@pytest.mark.forked
def test_a_killed_rank_is_the_cause_and_not_the_peers_that_notice(launch):
    run = launch("-np", "3", GLOO, "2:kill", timeout=150)
    assert run.code == 137, run
    assert run.result["first_failure"]["rank"] == 2
    assert "killed by SIGKILL" in run.result["first_failure"]["message"]


EXITS_EARLY = """
import os
import distrib, torch
job = distrib.init()
model = torch.nn.Linear(1, 1)
model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 1e-4))
for step in range(20):
    if job.is_main and step == 10:
        os._exit(0)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
"""


@pytest.mark.forked
def test_a_rank_that_left_without_a_word_is_named(launch, tmp_path):
    script = tmp_path / "early.py"
    script.write_text(EXITS_EARLY)
    run = launch("-np", "2", script, timeout=150)
    failure = run.result["first_failure"]
    assert run.code in (1, 134) and failure["code"] == "connection-lost", run
    assert "rank 0 had finished its script" in failure["message"]


@pytest.mark.parametrize("finished_seconds", [0.5, 1.5])
def test_a_rank_that_finished_is_named_by_one_that_cannot_connect(tmp_path, finished_seconds):
    """Its connections close before its process ends."""
    error = raised(
        "torch.distributed.DistNetworkError: The client socket has timed out after 5000ms while trying to connect"
    )
    assert root_cause.is_consequence(error, "")
    exits = [ending(0, exit_code=0, time=finished_seconds), ending(1, error=error, consequence=True)]
    failure = root_cause.describe_failure(exits[1], exits, tmp_path / "1.err", "/py")
    assert failure.code == "connection-lost" and "rank 0 had finished" in failure.message


@pytest.mark.forked
def test_a_rank_that_is_gone_at_the_end_is_not_waited_for(launch, tmp_path):
    script = tmp_path / "gone.py"
    script.write_text("import os, distrib\njob = distrib.init()\njob.barrier()\nif job.rank:\n    os._exit(0)\n")
    run = launch("-np", "2", script, timeout=150)
    assert run.code == 0 and "rank 0 could not wait" in run.err, run


ALL_UP = """
import os, pathlib, time
rank, folder = os.environ["RANK"], pathlib.Path(os.environ["DISTRIB_RUN_DIR"])
(folder / f"up-{rank}").touch()
while len(up := list(folder.glob("up-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
"""
TOGETHER = f"""{ALL_UP}
begin = max(path.stat().st_mtime for path in up) + 0.5
for turn in range(16):
    time.sleep(max(0, begin + turn / 4 - time.time()))
    print("all the same", turn, flush=True)
time.sleep(2)
print("own", rank)
"""


def test_ranks_that_die_alike_have_failed_alike(launch, tmp_path):
    script = tmp_path / "missing.py"
    script.write_text(ALL_UP + "import module_that_is_nowhere\n")
    run = launch("-np", "3", script, timeout=150)
    assert run.code == 1 and "failed too" in run.err and "stopped" not in run.err, run


def test_an_mpi_rank_that_died_and_waits_for_the_others_ends_the_job(launch, tmp_path):
    """mpi4py finalizes MPI at exit. A rank that raised waits there for the ranks that wait for it."""
    script = tmp_path / "raises.py"
    script.write_text(
        "from mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
        "if world.rank == 1:\n    raise RuntimeError('boom')\nworld.Barrier()\n"
    )
    run = launch("-np", "2", script, timeout=60)
    assert run.code == 1, run
    assert "rank 1 on localhost failed first: RuntimeError: boom" in run.err
    assert run.result["first_failure"]["exit_code"] == 1


def test_ranks_that_print_a_traceback_and_succeed_do_not_end_the_job(launch, tmp_path):
    """Rank 1 survives its error, rank 2 has one at its end. Both wait for rank 0 in MPI_Finalize."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, time, traceback\nfrom mpi4py import MPI\nos.nice(10)  # MPI polls\nrank = MPI.COMM_WORLD.rank\n"
        "class Last:\n    def __del__(self):\n        1 / 0\n"
        "if rank == 0:\n    time.sleep(4)\n"
        "elif rank == 1:\n    try:\n        1 / 0\n    except ZeroDivisionError:\n        traceback.print_exc()\n"
        "    time.sleep(2)\n    print('went on')\n"
        "else:\n    last = Last()\n"
    )
    run = launch("-np", "3", script, timeout=60)
    assert run.code == 0 and "went on" in run.out and "Traceback" in run.err, run
    for rank in (1, 2):
        assert "Traceback" in (run.run_dir / f"ranks/{rank}.err").read_text(), run


def test_an_mpi_rank_that_left_by_sys_exit_ends_the_job(launch, tmp_path):
    script = tmp_path / "leaves.py"
    script.write_text(
        "import sys\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\nif world.rank == 1:\n    sys.exit(3)\nworld.Barrier()\n"
    )
    run = launch("-np", "2", script, timeout=60)
    assert run.code == 3 and "rank 1 on localhost failed first: exit code 3" in run.err, run


@pytest.mark.cluster
def test_a_rank_killed_for_want_of_memory_is_told_so(launch, tmp_path):
    cgroup = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")
    group = cgroup / f"distrib-test-{os.getpid()}"
    group.mkdir()
    try:
        limit = group / ("memory.limit_in_bytes" if cgroup.name == "memory" else "memory.max")
        limit.write_text(str(256 << 20))
        joined = group / "cgroup.procs"
        wrapper = tmp_path / "in-cgroup"
        wrapper.write_text(f'#!/bin/sh\necho $$ > {joined}\nexec "$@"\n')
        wrapper.chmod(0o755)
        script = tmp_path / "hoards.py"
        script.write_text(
            "import os, time\nhoard = []\nwhile os.environ['RANK'] == '1':\n    hoard.append(b'x' * (16 << 20))\ntime.sleep(60)\n"
        )
        run = launch("-np", "2", script, timeout=200, wrapper=[str(wrapper)])
    finally:
        group.rmdir()
    assert run.code == 137, run
    failure = run.result["first_failure"]
    assert failure["rank"] == 1
    assert "killed by SIGKILL: out of memory, its job or container reached its memory limit" in failure["message"]
    assert "out of memory" in run.err


def test_the_end_of_the_memory_of_a_host_is_told_from_that_of_a_limit(tmp_path, monkeypatch):
    """`oom_kill` counts all kills in the cgroup. `oom` counts reached limits in the cgroup and its ancestors."""
    events = [tmp_path / "job/memory.events", tmp_path / "job/rank/memory.events"]
    events[1].parent.mkdir(parents=True)

    def count(job: int, kills: int) -> None:
        events[0].write_text(f"low 0\noom {job}\noom_kill {kills}\noom_group_kill 0\n")
        events[1].write_text(f"low 0\noom 0\noom_kill {kills}\noom_group_kill 0\n")

    (tmp_path / "own").write_text("0::/job/rank\n")
    monkeypatch.setattr(oom, "CGROUPS", tmp_path)
    monkeypatch.setattr(oom, "OWN", tmp_path / "own")
    count(3, 5)
    counted = oom.OutOfMemory()
    assert counted.why_killed() == "" or "probably" in counted.why_killed()  # of another process on this machine
    count(3, 6)
    assert "had none left" in counted.why_killed()
    count(4, 6)
    assert "reached its memory limit" in counted.why_killed()


def test_many_ranks_saying_the_same_are_folded(launch, tmp_path):
    script = tmp_path / "same.py"
    script.write_text(TOGETHER)
    run = launch("-np", "4", script)
    assert run.code == 0, run
    # On a busy machine ranks may wake at different times, but not in every turn.
    assert any(f"[0-3] all the same {turn}\n" in run.out for turn in range(16)), run
    assert sorted(run.out.splitlines()[-4:]) == [f"[{r}@localhost] own {r}" for r in range(4)]
    shown = launch("-np", "4", "--no-dedup", script).out
    assert shown.count("all the same") == 64


def ending(rank: int, **changes: object) -> RankExit:
    values = {
        "rank": rank, "local_rank": rank, "host": f"n{rank}", "time": float(rank), "exit_code": 1, "signal": None,
        "stopped_by": "", "message": "",
    }  # fmt: skip
    return RankExit(**{**values, **changes})


def raised(headline: str, *frames: str) -> ErrorRecord:
    """Return the error of a script that raised `headline`."""
    lines = frames or ('  File "a.py", line 1, in <module>', "    f()")
    return ErrorRecord(message=headline, traceback="\n".join(["Traceback (most recent call last):", *lines, headline]))


def test_ranks_that_were_stopped_and_ended_well_have_not_finished(tmp_path):
    server = ending(2, exit_code=0, stopped_by="launcher")
    failure = root_cause.describe_failure(ending(1), [ending(1)], tmp_path / "1.err", "/py")
    report = root_cause.failure_report(failure, [ending(0, exit_code=0), ending(1), server], started=0.0)
    assert "rank 0: had finished" in report and "rank 2: was stopped" in report
    of_no_log = msgspec.structs.replace(failure, log="")
    assert root_cause.failure_report(of_no_log, [], started=0.0).startswith("rank 1")


def test_the_earliest_failure_that_is_no_consequence_and_was_not_asked_for_is_first():
    stopped = ending(0, exit_code=0, signal=15, stopped_by="launcher")
    consequence = ending(1, consequence=True)
    cause = ending(5)
    later = ending(7)
    assert root_cause.first_failure([stopped, later, consequence, cause]) is cause
    assert root_cause.first_failure([stopped, consequence]) is consequence
    assert root_cause.first_failure([stopped]) is stopped
    assert root_cause.first_failure([ending(0, exit_code=0)]) is None


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [198.18.0.1]:5",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error, ncclRemoteError",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
        "mpi4py.MPI.Exception: MPI_ERR_PROC_FAILED: Process Failure",
        "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down.",
    ],
)
def test_what_libraries_say_when_a_peer_is_gone_is_a_consequence(text):
    assert root_cause.is_consequence(raised(text), "")
    assert root_cause.is_consequence(None, f"before\n{text}\n")
    assert not root_cause.is_consequence(raised("ValueError: no"), text)
    assert root_cause.is_consequence(raised("ValueError: no"), text, 9)


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out of GPU memory"),
        ("OSError: [Errno 28] No space left on device", "a disk or /dev/shm of the host is full"),
        ("ModuleNotFoundError: No module named 'torch'", "(install torch for /py on n1)"),
        ("EOFError: EOF when reading a line", "ranks have no standard input"),
    ],
)
def test_well_known_ends_are_explained(tmp_path, words, meaning):
    log, first = tmp_path / "1.err", ending(1, error=raised(words))
    failure = root_cause.describe_failure(first, [first], log, "/py")
    assert words in failure.message and meaning in failure.message
    assert failure.traceback == raised(words).traceback


def test_a_rank_that_lost_a_process_of_its_own_lost_no_other_rank(tmp_path):
    """Python 3.14 ends this way if a loader process runs a script without a main guard again."""
    log = tmp_path / "0.err"
    log.write_text(
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "/usr/lib/python3.14/multiprocessing/forkserver.py", line 230, in main\n[rank0]:     f()\n'
        "[rank0]: TrainingError: it would begin again\n"
    )
    frame = '  File "/usr/lib/python3.14/multiprocessing/connection.py", line 416, in _recv'
    error = raised("ConnectionResetError: [Errno 104] Connection reset by peer", frame)
    assert not root_cause.is_consequence(error, log.read_text())
    assert root_cause.describe_failure(ending(0, error=error), [], log, "/py").message == (
        "ConnectionResetError: [Errno 104] Connection reset by peer "
        "(a process that it had started ended before: TrainingError: it would begin again)"
    )


def test_what_a_process_of_a_rank_says_after_it_is_not_what_it_lost(tmp_path):
    log = tmp_path / "0.err"
    log.write_text(
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3.11/multiprocessing/process.py", line 314, in _bootstrap\n    self.run()\n'
        '  File "/usr/lib/python3.11/multiprocessing/connection.py", line 411, in _send_bytes\n    self._send(buf)\n'
        "BrokenPipeError: [Errno 32] Broken pipe\n"
    )
    error = raised("RuntimeError: Connection closed by peer [198.18.0.1]:5")
    assert root_cause.is_consequence(error, log.read_text())
    assert "had started" not in root_cause.describe_failure(ending(0, error=error), [], log, "/py").message


def test_a_rank_that_was_stopped_is_not_blamed_for_what_it_said(tmp_path):
    log = tmp_path / "0.err"
    first = ending(0, consequence=True, time=1.0, error=raised("KeyError: 1"))
    stopped = [
        ending(1, stopped_by="launcher", exit_code=1, error=raised("KeyError: 1"), time=2.0),
        ending(2, stopped_by="launcher", exit_code=1, error=raised("Stopped: asked to end"), time=2.0),
        ending(3, stopped_by="launcher", exit_code=0, time=2.0),
    ]
    assert root_cause.first_failure([first, *stopped]) is first
    told = root_cause.describe_failure(first, [first, *stopped], log, "/py")
    assert told.message.startswith("KeyError: 1") and "no rank failed before" in told.message
    said = root_cause.failure_report(told, [first, *stopped], started=0.0)
    assert "rank 1: failed too" in said and "ranks 2-3: were stopped" in said


@pytest.mark.forked
def test_a_script_that_its_own_loader_begins_anew_is_told_to_guard_itself(launch, tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import distrib\nfrom torch.utils.data import DataLoader\njob = distrib.init()\n"
        "loader = DataLoader(range(8), num_workers=1, multiprocessing_context='forkserver')\nprint(sum(map(int, loader)))\n"
    )
    run = launch("-np", "2", script, timeout=150)
    assert run.code == 1, run
    message = run.result["first_failure"]["message"]
    assert (
        "exited unexpectedly (a process that it had started ended before: " in message or "ConnectionReset" in message
    )
    assert (
        "imports this script, and would join the job a second time; put the script's work under `if __name__ =="
        in message
    )


def test_a_rank_at_its_end_is_told_of_where_collectives_differ(tmp_path):
    log = tmp_path / "1.err"
    log.write_text("terminate called after throwing an instance of 'gloo::EnforceNotMet'\n")
    first = ending(1, exit_code=None, signal=6)
    told = root_cause.describe_failure(
        first, [ending(0, stopped_by="launcher", closing=True), first], log, "/py"
    ).message
    assert told.startswith("killed by SIGABRT (the ranks called different collectives: ")
    assert told.endswith("; rank 0 had come to the end of its script)")


def test_the_last_words_of_one_that_aborts_are_told(tmp_path):
    log = tmp_path / "1.err"
    log.write_text("terminate called without an active exception\nframe #0: abort\n\n")
    told = root_cause.describe_failure(ending(1, exit_code=None, signal=6), [], log, "/py").message
    assert told == "killed by SIGABRT; last line: terminate called without an active exception"


def test_an_abort_by_the_watchdog_of_nccl_is_a_consequence(tmp_path):
    """torch logs the cause and after it a C++ stack, twice (pytorch issue 126544)."""
    caught = (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
        "Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
    )
    stack = [
        f"frame #{number}: c10d::ProcessGroupNCCL::ncclCommWatchdog() + 0x210 (0x7f2a in /torch/lib/x.so)"
        for number in range(9)
    ]
    raised = "Exception raised from checkTimeout at ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:565 (most recent call first):"
    ended = f"[PG 0 Rank 0] Process group watchdog thread terminated with exception: {caught}"
    log = tmp_path / "0.err"
    log.write_text(
        "\n".join([
            f"[rank0]:[E518 03:21:12.4 ProcessGroupNCCL.cpp:563] {caught}",
            f"[rank0]:[E518 03:21:12.5 ProcessGroupNCCL.cpp:1414] {ended}", raised, *stack, "",
            "terminate called after throwing an instance of 'c10::DistBackendError'", f"  what():  {ended}", raised, *stack, "", "",
        ])
    )  # fmt: skip
    assert root_cause.is_consequence(None, log.read_text(), 6)
    told = root_cause.describe_failure(ending(0, exit_code=None, signal=6), [], log, "/py").message
    assert told.startswith(f"killed by SIGABRT; last line: what():  {ended} (not all ranks called this collective")


def test_of_a_time_out_those_are_told_who_were_not_there(tmp_path):
    caught = (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600029 ms before timing out."
    )
    log = tmp_path / "0.err"
    log.write_text(f"  what():  {caught}\n")
    first, other = (ending(rank, exit_code=None, signal=6, consequence=True) for rank in (0, 1))
    endings = [first, other, ending(2, exit_code=None, signal=15, stopped_by="launcher")]
    failure = root_cause.describe_failure(first, endings, log, "/py")
    assert failure.message.endswith(
        "or the network failed) (still running, so perhaps elsewhere in the script: rank 2)"
    )
    assert "rank 1: timed out, too" in root_cause.failure_report(failure, endings, started=0)


def test_what_ends_a_gpu_is_told_and_not_what_torch_advises_after_it(tmp_path):
    log = tmp_path / "3.err"
    log.write_text(
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [PG 0 Rank 3] Process group watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call.\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\nframe #0: c10::Error\n"
    )
    told = root_cause.describe_failure(ending(3, exit_code=None, signal=6), [], log, "/py").message
    assert "terminated with exception: CUDA error: uncorrectable ECC error encountered (" in told, told


def test_what_nccl_says_of_an_error_is_explained(tmp_path):
    error = raised(
        "torch.distributed.DistBackendError: NCCL error: Error while creating /dev/shm/nccl-x: No space left on device"
    )
    failure = root_cause.describe_failure(ending(3, error=error), [], tmp_path / "3.err", "/py")
    assert failure.message == f"{error.message} (a disk or /dev/shm of the host is full)"


@pytest.mark.parametrize(
    ("record", "message", "traceback"),
    [
        ('{"message": {"message": "ValueError: a\\nb", "extraInfo": {"py_callstack": "Trace\\n", "timestamp": "1"}}}', "ValueError: a", "Trace"),
        ('{"message": "a plain text"}', "a plain text", ""),
        ("", None, ""),
        ("{}", None, ""),
        ('{"message": null}', None, ""),
        ('{"message": ""}', None, ""),
        ("[1]", None, ""),
    ],
)  # fmt: skip
def test_error_files_of_torchrun_are_read(record, message, traceback):
    error = parse_error_record(record)
    assert error == (ErrorRecord(message=message, traceback=traceback) if message else None)


@pytest.mark.forked
def test_an_exception_that_a_decorated_function_recorded_is_told(launch, tmp_path):
    """torch's `record` wrote the exception before another call ended the process."""
    script = tmp_path / "records.py"
    script.write_text(
        "import os\nfrom torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('a bad batch')\n"
        "try:\n    main()\nfinally:\n    os._exit(5)\n"
    )
    run = launch("-np", "2", script, timeout=150)
    assert run.code == 5 and run.result["first_failure"]["message"] == "ValueError: a bad batch", run


def test_the_traceback_of_a_process_without_a_record_is_told(tmp_path):
    log = tmp_path / "3.err"
    log.write_text(f"before\n{raised('KeyError: 1').traceback}\n")
    failure = root_cause.describe_failure(ending(3), [], log, "/py")
    assert (failure.message, failure.traceback) == ("KeyError: 1", raised("KeyError: 1").traceback)
    log.write_text(f"Exception in thread Thread-3 (_pin_memory_loop):\n{raised('KeyError: 1').traceback}\n")
    assert root_cause.describe_failure(ending(3), [], log, "/py").message == "exit code 1; last line: KeyError: 1"


@pytest.mark.parametrize("day", ["W1122", "W122"])
def test_what_torch_logs_by_itself_is_no_last_word(tmp_path, day):
    log = tmp_path / "1.err"
    log.write_text(
        f"[{day} 07:38:15.6 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3\n"
    )
    assert root_cause.describe_failure(ending(1, exit_code=9), [], log, "/py").message == "exit code 9"
    log.write_text(
        f"no licence\n[rank1]:[{day} 07:38:15.6 ProcessGroup.cpp:1] destroy_process_group() was not called\n"
    )
    assert (
        root_cause.describe_failure(ending(1, exit_code=9), [], log, "/py").message
        == "exit code 9; last line: no licence"
    )


def test_a_script_that_python_cannot_read_is_told_with_its_line(launch, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("import os\n\nprint((os.sep)\n")
    run = launch("-np", "1", script, timeout=150)
    assert run.code == 1, run
    assert run.result["first_failure"]["message"] == "SyntaxError: '(' was never closed (broken.py:3)"


@pytest.mark.forked
def test_ranks_that_call_different_collectives_are_told_so(launch, tmp_path):
    script = tmp_path / "different.py"
    script.write_text(
        "import distrib, torch\n"
        "with distrib.init() as job:\n"
        "    if job.is_main:\n"
        "        job.all_reduce(torch.ones(1000))\n"
        "    else:\n"
        "        job.all_reduce(torch.ones(1))\n"
    )
    run = launch("-np", "2", script, timeout=150)
    assert run.code == 134, run
    assert "different collectives" in run.err


def test_hosts_that_vanish_together_point_at_what_they_share(tmp_path):
    vanished = [ending(rank, host=f"n{rank}", lost="silence", exit_code=None) for rank in (2, 3)]
    told = root_cause.describe_failure(vanished[0], [ending(1, host="n1"), *vanished], tmp_path / "2.err", "/py")
    assert told.message.startswith("2 of 3 hosts were lost at once (n2, n3)")
    others = [ending(1, host="n1"), ending(4, host="n4")]
    told = root_cause.describe_failure(vanished[0], [*others, vanished[0]], tmp_path / "2.err", "/py")
    assert told.message.startswith("host n2 was lost")


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (
            "[n1:80] *** Process received signal ***\n[n1:80] Signal: Segmentation fault (11)\n[n1:80] [ 0] /libc.so.6\n",
            11,
        ),
        ("[a-b.c:80] Signal: Bus error (7)\n", 7),
        ("Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n", 11),
        ("[n1:80] Signal: Aborted (6)\n", None),  # often a consequence of another rank's failure
        ("my Signal: strong (11)\n", None),
        ("", None),
    ],
)
def test_a_fault_is_told_by_the_last_words(words, number):
    assert root_cause.fault_in("before\n" + words) == number


def test_of_ranks_that_were_lost_at_once_the_one_that_made_a_fault_is_first(tmp_path):
    lost = [ending(rank, host=f"n{rank // 2}", lost="closed", exit_code=None, time=rank / 10) for rank in range(4)]
    assert root_cause.first_failure(lost) is lost[0]
    told = root_cause.describe_failure(lost[0], lost, tmp_path / "0.err", "/py").message
    assert told.startswith("all ranks were lost at once")
    told = root_cause.describe_failure(lost[0], [*lost[:2], ending(2, host="n1")], tmp_path / "0.err", "/py").message
    assert told.startswith("host n0 was lost, with ranks 0-1: their connections closed at once")
    later = [lost[0], ending(1, host="n0", lost="closed", exit_code=None, time=lost[0].time + 1), ending(2, host="n1")]
    told = root_cause.describe_failure(lost[0], later, tmp_path / "0.err", "/py").message
    assert told.startswith("lost without an exit record")  # Open MPI killed the other one
    faulty = [*lost[:3], ending(3, host="n1", lost="closed", exit_code=None, signal=11)]
    first = root_cause.first_failure(faulty)
    assert first is faulty[3] and first.code == 139
    assert root_cause.describe_failure(first, faulty, tmp_path / "3.err", "/py").message.startswith("killed by SIGSEGV")
    crash = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x7f (most recent call first):\n"
    (tmp_path / "3.err").write_text(f'{crash}  File "/x/training/world.py", line 192 in _start_mpi\n')
    assert "in MPI_Init" in root_cause.describe_failure(first, faulty, tmp_path / "3.err", "/py").message


@given(st.text())
def test_any_text_may_be_searched_for_a_traceback(text):
    root_cause.error_in(text)
    root_cause.error_in(f"Traceback (most recent call last):\n{text}\n")
    parse_error_record(text)
