"""Output of ranks on the terminal and in files."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib_launch import console
from distrib_launch.console import LineDeduplicator
from tests.conftest import LAUNCH, SCRIPTS

PRINTER = """
import os, sys
rank = os.environ["RANK"]
for start in range(0, 20000, 50):
    sys.stdout.write("".join(f"out {n} of {rank}\\n" for n in range(start, start + 50)))
    sys.stderr.write("".join(f"err {n} of {rank}\\n" for n in range(start, start + 50)))
"""


def test_a_flood_from_eight_ranks_arrives_without_loss_or_tearing(launch, tmp_path):
    script = tmp_path / "flood.py"
    script.write_text(PRINTER)
    run = launch("-np", "8", script)
    assert run.code == 0, run.err[-2000:]
    for name, text in (("out", run.out), ("err", run.err)):
        for rank in range(8):
            expected = [f"{name} {n} of {rank}" for n in range(20000)]
            assert (run.run_dir / f"ranks/{rank}.{name}").read_text().splitlines() == expected
            tag = f"[{rank}@localhost] "
            assert [line[len(tag) :] for line in text.splitlines() if line.startswith(tag)] == expected


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.processes
def test_a_terminal_that_stands_still_does_not_hold_up_the_job(tmp_path, blocks):
    script = tmp_path / "flood.py"
    script.write_text(PRINTER + "open(f'done-{rank}', 'w').close()\n")
    process = subprocess.Popen(
        [str(LAUNCH), "-np", "2", "--run-dir", "run", str(script)], cwd=tmp_path, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=lambda: os.set_blocking(1, blocks),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 20  # the pipe is not read and holds 64 KiB
        while not all((tmp_path / f"done-{r}").exists() for r in range(2)):
            assert time.monotonic() < deadline, "the ranks wait for the terminal"
            time.sleep(0.05)
    finally:
        out, _ = process.communicate(timeout=50)
    assert process.returncode == 0
    assert out.count(b"\n") == 40000


@pytest.mark.processes
def test_a_launcher_that_is_stopped_for_a_while_does_not_end_the_job(tmp_path):
    """Ctrl-Z or a hanging disk stops the launcher while the rank prints more than the sockets hold."""
    script = tmp_path / "flood.py"
    script.write_text("for n in range(500_000):\n    print(f'{n:099}')\nopen('done', 'w').close()\n")
    process = subprocess.Popen(
        [str(LAUNCH), "-np", "1", "-q", "--run-dir", "run", str(script)], cwd=tmp_path, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    log = tmp_path / "run/ranks/0.out"
    try:
        deadline = time.monotonic() + 20
        while not log.exists() or not log.stat().st_size:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        time.sleep(9)
        assert not (tmp_path / "done").exists(), "what is printed should have had to wait"
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=50)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert log.read_text().splitlines() == [f"{n:099}" for n in range(500_000)]


@pytest.mark.processes
def test_who_reads_slowly_is_shown_the_end(tmp_path):
    script = tmp_path / "flood.py"
    script.write_text("for n in range(300_000):\n    print(f'{n:099}')\nraise ValueError('at the end')\n")
    process = subprocess.Popen(
        [str(LAUNCH), "-np", "1", "--run-dir", "run", str(script)], cwd=tmp_path, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout
    shown = []
    try:
        while part := process.stdout.read(4 << 20):  # 33 MB
            shown.append(part)
            time.sleep(1.0)
    finally:
        process.kill()
        process.communicate()
    text = b"".join(shown).decode()
    assert text.count("[0@localhost] 0") == 300_000
    assert "rank 0 on localhost failed first: ValueError: at the end" in text


@pytest.mark.processes
def test_a_terminal_gets_coloured_tags_one_line_per_progress_bar_and_no_control_sequences(tmp_path):
    script = tmp_path / "bar.py"
    printed = b"10 %\r50 %\r100 %\n\x1b]0;title\x07\x1b[31mred\x1b[0m\x1b[2;1H\x1b]52;c;eA==\x1b\\\xc2\x9b2J\x9b2J \xe7\x9b\x9b\xe9\nno newline"
    script.write_text(f"import sys\nsys.stdout.buffer.write({printed})\n")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [str(LAUNCH), "-np", "1", "--run-dir", "run", str(script)], cwd=tmp_path, stdin=subprocess.DEVNULL,
        stdout=slave, stderr=subprocess.DEVNULL, env={k: v for k, v in os.environ.items() if k != "NO_COLOR"},
    )  # fmt: skip
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 1000):
            shown += part
    except OSError:  # Linux: the last writer closed the terminal
        pass
    os.close(master)
    assert process.wait(timeout=10) == 0
    tag = b"\x1b[36m[0@localhost] \x1b[0m"
    red = b"\x1b[31mred\x1b[0m2J2J \xe7\x9b\x9b\xe9"
    assert shown == b"%s100 %%\r\n%s%s\r\n%sno newline\r\n" % (tag, tag, red, tag)
    assert Path(tmp_path / "run/ranks/0.out").read_bytes() == printed


def test_how_far_a_progress_bar_is_is_shown_now_and_then():
    streams = io.StringIO(), io.StringIO()
    terminal = console.Console(["n1", "n1"], streams=streams, settings=console.ConsoleSettings(bar_seconds=0.0))
    for drawn in (b"\r 10%", b"\r 20%", b"\r 20%"):
        terminal.rank_output(1, 2, b"\r  0%")
        terminal.rank_output(0, 2, drawn)
        time.sleep(0.01)
        terminal.tick()
    terminal.settings = console.SETTINGS
    terminal.rank_output(0, 2, b"\r100%\n")
    terminal.close()
    assert streams[1].getvalue().splitlines() == ["[0@n1]  10%", "[0@n1]  20%", "[0@n1] 100%"]
    assert streams[0].getvalue() == ""


def test_only_the_bar_of_the_lowest_rank_is_shown():
    terminal = console.Console(["n1", "n1"], streams=(io.StringIO(), shown := io.StringIO()))
    for rank in (0, 1):
        terminal.rank_output(rank, 2, b"\r 10%%\r%d00%%\nrank %d\n" % (rank + 1, rank))
    terminal.rank_output(1, 2, b"\r 20%")
    terminal.finish_rank(1)
    terminal.close()
    assert shown.getvalue().splitlines() == ["[0@n1] 100%", "[0@n1] rank 0", "[1@n1] rank 1"]


def test_messages_begin_on_their_own_line_after_a_progress_bar():
    terminal = console.Console(["n1", "n1"], streams=(io.StringIO(), shown := io.StringIO()))
    terminal.rank_output(0, 2, b"\r 10%")
    terminal.say("note: of the launcher")
    terminal.rank_output(0, 2, b"distrib: warning: of rank 0\n")
    terminal.rank_output(1, 2, b"\r 10%Traceback (most recent call last):\nKeyError: 1\n")
    terminal.close()
    assert shown.getvalue().splitlines() == [
        "distrib-launch: note: of the launcher", "[0@n1] distrib: warning: of rank 0",
        "[1@n1] Traceback (most recent call last):", "[1@n1] KeyError: 1",
    ]  # fmt: skip


def test_a_progress_bar_within_another_is_drawn_on_no_line_of_its_own():
    """tqdm moves one line down, draws the inner bar and moves up again, with a terminal or without."""
    terminal = console.Console(["n1", "n1"], streams=(io.StringIO(), shown := io.StringIO()))
    for epoch in range(2):
        terminal.rank_output(0, 2, b"\repoch %d" % epoch)
        for batch in range(50):
            terminal.rank_output(0, 2, b"\n\rbatch %d\x1b[A" % batch)
        terminal.rank_output(0, 2, b"\n\r        \r\x1b[A")
    terminal.rank_output(0, 2, b"\repoch 2\nthe end\n\n\rbatch 7\x1b[A")
    terminal.finish_rank(0)
    terminal.close()
    lines = shown.getvalue().splitlines()
    assert "\x1b" not in shown.getvalue() and len(lines) < 9, lines
    assert [line for line in lines if "batch" in line] == ["[0@n1] batch 7"]
    assert lines[-4:-1] == ["[0@n1] epoch 2", "[0@n1] the end", "[0@n1] "]


def test_of_a_progress_bar_one_state_is_kept():
    terminal = console.Console(["n1", "n1"], streams=(io.StringIO(), shown := io.StringIO()))
    tracemalloc.start()
    for n in range(5_000):
        terminal.rank_output(0, 2, b"\r%100d" % n)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    terminal.finish_rank(0)
    terminal.close()
    assert peak_bytes < 100_000 and shown.getvalue().split() == ["[0@n1]", "4999"]


def test_quiet_shows_nothing_of_the_ranks_and_keeps_all(launch):
    run = launch("-np", "2", "--quiet", SCRIPTS / "job.py")
    assert run.out == ""
    assert (run.run_dir / "ranks/1.out").read_text() == "rank 1 done\n"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([b"a", b"b", b"c"])), max_size=60))
def test_folding_keeps_every_line_and_each_ranks_order(said):
    lines = LineDeduplicator()
    for rank, text in said:
        lines.add(rank, text)
    shown = lines.take(all_of_them=True, among=4)
    for rank in range(4):
        assert [line.text for line in shown if rank in line.ranks] == [text for r, text in said if r == rank]


def test_a_flood_of_one_line_is_folded_in_no_time():
    """Folding is not quadratic: a long chunk of one rank blocks all other output."""
    lines = LineDeduplicator()
    for _ in range(100_000):
        lines.add(0, b"waiting")
    for _ in range(50_000):
        lines.add(1, b"waiting")
    shown = lines.take(all_of_them=True, among=2)
    assert [line.ranks for line in shown] == [[0, 1]] * 50_000 + [[0]] * 50_000


@pytest.mark.parametrize("day", [b"W1122", b"W122"])  # torch does not pad the month
def test_the_time_in_torchs_own_lines_does_not_keep_them_apart(day):
    lines = LineDeduplicator()
    for rank in range(3):
        lines.add(rank, b"[%b 07:38:15.66412387%d socket.cpp:207] [c10d] no hostname" % (day, rank))
        lines.add(rank, b"[%b 07:38:16.1 socket.cpp:207] [c10d] port %d" % (day, rank))
    shown = lines.take(all_of_them=True, among=3)
    assert [line.ranks for line in shown] == [[0, 1, 2], [0], [1], [2]]
    assert shown[0].text.startswith(b"[%b 07:38:15.664123870 " % day)


def test_a_traceback_of_all_ranks_is_shown_once_though_torch_writes_the_rank_into_it():
    lines = LineDeduplicator()
    for rank in range(3):
        lines.add(rank, b"[rank%d]: Traceback (most recent call last):" % rank)
        lines.add(rank, b"[rank%d]:[W1122 07:38:15.6 pg.cpp:1] destroy was not called" % rank)
        lines.add(rank, b"[rank0]: as rank 0 said")
    shown = lines.take(all_of_them=True, among=3)
    assert [(line.ranks, line.text.partition(b" ")[0]) for line in shown] == [
        ([0, 1, 2], b"Traceback"), ([0, 1, 2], b"[W1122"), ([0], b"as"), ([1, 2], b"[rank0]:"),
    ]  # fmt: skip


def test_ranks_that_say_the_same_fold_into_one_line_each():
    lines = LineDeduplicator()
    for rank in range(4):
        for text in (b"one", b"two", b"two"):
            lines.add(rank, text)
    assert [(line.ranks, line.text) for line in lines.take(all_of_them=False, among=4)] == [
        ([0, 1, 2, 3], b"one"), ([0, 1, 2, 3], b"two"), ([0, 1, 2, 3], b"two"),
    ]  # fmt: skip
