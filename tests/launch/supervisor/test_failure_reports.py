"""Wording of the reports of failures: tests/golden/failure-reports.txt; `pytest --update-golden` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distrib_launch.supervisor import root_cause
from distrib_launch.supervisor.rank_exit import ErrorRecord, RankExit
from tests.conftest import ROOT

GOLDEN = ROOT / "tests" / "golden" / "failure-reports.txt"
FATAL = 'Fatal Python error: Segmentation fault\n\nThread 0x7e (most recent call first):\n  File "other.py", line 1 in g\n\n'
CURRENT = "Current thread 0x7f (most recent call first):\n{}\nExtension modules: numpy (total: 1)\n"
CALLED = '  File "a.py", line {} in f\n  File "/x/distrib_launch/rank_agent/run_script.py", line 9 in main'
STACK = "".join(f"frame #{number}: c10::Error::Error() + 0x5 (0x7f in /torch/lib/libc10.so)\n" for number in range(3))
NOISE = "[W1122 07:38:15.6 socket.cpp:207] [c10d] a warning\n[rank1]:[E122 07:38:15.6 x.cpp:1] an error\n\n"
CAUGHT = "  what():  Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600029 ms\n"


def end(rank: int, **changes: Any) -> RankExit:
    """Return the exit of a rank, two of which are on each host."""
    values = {
        "rank": rank, "local_rank": rank % 2, "host": f"n{rank // 2}", "time": 100.0 + rank, "exit_code": 1, "signal": None,
        "stopped_by": "", "message": "",
    }  # fmt: skip
    return RankExit(**{**values, **changes})


def killed(rank: int, number: int = 9, **changes: Any) -> RankExit:
    return end(rank, exit_code=None, signal=number, **changes)


def lost(rank: int, how: Any = "closed", **changes: Any) -> RankExit:
    return end(rank, exit_code=None, lost=how, message="connection closed", **changes)


def stopped(rank: int, **changes: Any) -> RankExit:
    return end(rank, **{"exit_code": 0, "stopped_by": "launcher", **changes})


def finished(rank: int) -> RankExit:
    return end(rank, exit_code=0)


def error(headline: str, calls: int = 1, where: str = "a.py", **changes: Any) -> ErrorRecord:
    frames = "".join(f'  File "{where}", line {n}, in f\n    f()\n' for n in range(calls))
    return ErrorRecord(message=headline, traceback=f"Traceback (most recent call last):\n{frames}{headline}", **changes)


KEY = error("KeyError: 1")
RESET = error("ConnectionResetError: reset by peer", where="/usr/lib/python3.11/multiprocessing/connection.py")
CHILD = (
    "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"/multiprocessing/spawn.py\", line 1, in spawn_main\n"
    "[rank0]:     f()\n[rank0]: OSError: of the child\n[rank0]: more\n\nTraceback (most recent call last):\n  File \"b.py\"\nE: other\n"
)  # fmt: skip
GLOO = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"

# Exits, that of the reported rank first; stderr of that rank
CASES: dict[str, tuple[list[RankExit], str]] = {
    "exception": ([end(1, error=KEY), stopped(0), stopped(2), finished(3)], ""),
    "exception without a record": ([end(1)], f"before\n{KEY.traceback}\nafter\n"),
    "exception of many calls": ([end(1, error=error("KeyError: 1", 15))], ""),
    "exception of distrib": ([end(1, error=error("KeyError: 1", own_traceback="Traceback:\n  own"))], ""),
    "exception on all ranks": (
        [end(1, error=KEY), end(2, error=KEY), stopped(0, exit_code=1, error=KEY), end(3, error=error("OSError: 2", 2))],
        "",
    ),
    "exception, then an abort": ([end(1, signal=6, error=KEY)], ""),
    "missing module": ([end(1, error=error("ModuleNotFoundError: No module named 'a.b'"))], ""),
    "known cause": ([end(1, error=error("OSError: [Errno 28] No space left on device"))], ""),
    "message of the rank agent": ([end(1, message="cannot start: no such file")], "some output\n"),
    "exit code and output": ([end(1, exit_code=7), finished(0)], "".join(f"line {n}\n" for n in range(7)) + NOISE),
    "exit code with one line": ([end(1, exit_code=7)], "the only line\n"),
    "exit code without output": ([end(0, exit_code=7)], ""),
    "out of memory": ([killed(1, message="killed by SIGKILL: out of memory, the host had none left")], ""),
    "killed": ([killed(1), stopped(0)], "last words\n"),
    "killed by another signal": ([killed(1, 15)], "terminated\n"),
    "killed by the engine": ([killed(1, 15, stopped_by="engine")], ""),
    "lost child": ([end(1, error=RESET)], CHILD),
    "lost child without output": ([end(1, error=RESET)], ""),
    "segmentation fault": ([killed(1, 11)], "said\n" + FATAL + CURRENT.format(CALLED.format(3))),
    "segmentation fault in many calls": (
        [killed(1, 11)], FATAL + CURRENT.format("\n".join(CALLED.format(n) for n in range(25))),
    ),
    "segmentation fault without a thread": ([killed(1, 11)], FATAL),
    "segmentation fault in MPI_Init": (
        [killed(1, 11)], FATAL + CURRENT.format('  File "/x/training/world.py", line 1 in _start_mpi'),
    ),
    "different collectives": ([killed(1, 6), stopped(0, closing=True), stopped(2, closing=True)], GLOO),
    "different collectives, all in the script": ([killed(1, 6), stopped(0)], "Collective mismatch\n"),
    "different collectives at the end": ([killed(1, 6, closing=True), stopped(0, closing=True)], GLOO),
    "abort": ([killed(1, 6)], f"  what():  first\n  what():  second\nmore\n{STACK}"),
    "abort without what()": ([killed(1, 6)], "terminate called\n" + STACK),
    "abort without output": ([killed(1, 6)], ""),
    "timeout of NCCL": (
        [killed(1, 6, consequence=True), killed(0, 6, consequence=True), stopped(2), stopped(3)], CAUGHT,
    ),
    "timeout of NCCL on all ranks": ([killed(1, 6, consequence=True), killed(0, 6, consequence=True)], CAUGHT),
    "lost connection": (
        [end(1, consequence=True, error=RESET), end(0, consequence=True), end(2, consequence=True)], "",
    ),
    "lost connection to finished ranks": ([end(1, consequence=True, error=KEY), finished(0), finished(2), stopped(3)], ""),
    "stopped after a lost connection": ([stopped(1, consequence=True, exit_code=1)], ""),
    "consequences": (
        [end(1, error=KEY), end(0, consequence=True, error=RESET), end(2, error=KEY, consequence=True), killed(3)], "",
    ),
    "lost by a fault": ([lost(1, signal=11), lost(0), finished(2)], ""),
    "all lost by a fault": ([lost(1, signal=11), lost(0)], ""),
    "silent host": ([lost(1, "silence"), lost(0, "silence"), finished(2), finished(4)], ""),
    "silent host of one rank": ([lost(1, "silence"), stopped(2), stopped(4)], ""),
    "silent hosts": ([lost(2, "silence"), lost(4, "silence"), stopped(0)], ""),
    "silent hosts of many": ([lost(2, "silence"), lost(4, "silence"), stopped(0), stopped(6), stopped(8)], ""),
    "two silent hosts of two": ([lost(0, "silence"), lost(2, "silence")], ""),
    "all lost": ([lost(1), lost(2), lost(3)], ""),
    "all lost on one host": ([lost(0), lost(1)], ""),
    "host lost": ([lost(2), lost(3, time=102.2), stopped(0)], ""),
    "host lost after half a second": ([lost(2), lost(3, time=102.5), stopped(0)], ""),
    "agent lost beside a rank": ([lost(2), stopped(3, time=102.0), stopped(0)], ""),
    "agent lost": ([lost(2), stopped(0)], ""),
}  # fmt: skip


def test_reports_of_failures_have_the_golden_wording(tmp_path: Path, request: pytest.FixtureRequest):
    shown = ""
    for name, (exits, stderr) in CASES.items():
        log = tmp_path / "1.err"
        log.write_text(stderr)
        log.with_suffix(".out").write_text("step 1\nstep 2\n" if "output" in name else "")
        failure = root_cause.describe_failure(exits[0], exits, log, "/py")
        report = root_cause.failure_report(failure, exits, started=90.0)
        report = report.replace(str(tmp_path), "FOLDER").replace(root_cause.short_path(str(log)), "FOLDER/1.err")
        shown += f"=== {name}: {failure.code}\n{failure.message}\n{failure.traceback}\n---\n{report}\n"
    if request.config.getoption("update_golden"):
        GOLDEN.write_text(shown)
    assert shown == GOLDEN.read_text()


def test_the_last_64_kib_of_a_log_are_read_with_any_bytes(tmp_path: Path):
    log = tmp_path / "1.err"
    log.write_bytes(b"x" * 100_000 + b"\xff end")
    assert root_cause.tail(log) == "x" * (65536 - 5) + "\ufffd end"
    assert root_cause.tail(tmp_path / "missing.err") == ""
