"""Output of a run: phases, failure report, filter. `cli/test_golden.py` has its wording."""

import re
import time
import types

import pytest

from distrib_launch.cli.launch import main
from distrib_launch.output_filter import OutputFilter
from distrib_launch.supervisor import root_cause
from distrib_launch.supervisor.hang_detector import HangDetector
from tests.conftest import call

TRAINS = """
import ctypes, os, sys, time
import torch
import distrib

job = distrib.init()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(400, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = job.prepare(model, optimizer, loader)
for number, (batch,) in enumerate(loader):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    if number == 10 and job.rank == 1:
        print("last words", flush=True)
        {end}
"""


@pytest.fixture
def script(tmp_path):
    """Write a training script whose rank 1 executes a statement after ten steps."""

    def write(end="pass"):
        path = tmp_path / "train.py"
        path.write_text(TRAINS.replace("{end}", end))
        return path

    return write


def own_lines(err):
    """Return the lines of the launcher with their continuation lines, without its prefix."""
    lines = [line for line in err.splitlines() if not line.startswith("[") and "running as root" not in line]
    return [line.removeprefix("distrib-launch: ") for line in lines]


@pytest.mark.forked
def test_quiet_runs_show_neither_start_nor_end(launch, script):
    run = launch("-np", "2", "--quiet", script())
    assert own_lines(run.err) == []
    assert run.result["measured"]["samples_per_second"] > 0


@pytest.mark.forked
@pytest.mark.parametrize(
    ("end", "message", "shown"),
    [
        ("os._exit(7)", "exit code 7", "    last words"),
        ("ctypes.string_at(0)", "killed by SIGSEGV", "  Fatal Python error: Segmentation fault (most recent call first):"),
    ],
)  # fmt: skip
def test_the_failed_rank_comes_first_and_last(launch, script, end, message, shown):
    run = launch("-np", "2", script(end))
    lines = own_lines(run.err)
    report = lines.index(f"error: rank 1 on localhost failed first: {message}")
    assert shown in lines[report:] and lines[-1].startswith("failed after "), run
    assert f": rank 1 on localhost: {message}; see {run.run_dir.name}/report.html" in lines[-1]
    assert "Traceback" not in "".join(line for line in run.err.splitlines() if line.startswith("[0@"))
    assert any(re.match(r"  rank 0: (was stopped|lost the connection to it \(1 traceback)", line) for line in lines)
    assert not any(re.match(rf"  {re.escape(message)}, ", line) for line in lines), "printed twice"
    assert "[ 0]" not in run.err and "client socket" not in run.err


@pytest.mark.forked
def test_a_restart_shows_what_it_restores(launch, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import distrib, torch\njob = distrib.init()\nmodel = job.prepare(torch.nn.Linear(2, 2))\n"
        "epoch = job.restore('last.pt', model=model, epoch=0)['epoch']\n"
        "job.save('last.pt', model=model, epoch=epoch + 1)\n"
        "assert epoch or job.rank, 'first start'\n"
    )
    run = launch("-np", "2", "--max-restarts", "1", path)
    assert run.code == 0 and "distrib: restored last.pt, epoch 1\n" in run.err, run


@pytest.mark.forked
def test_a_checkpoint_that_does_not_fit_is_reported_with_file_object_and_hint(launch, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import distrib, torch\njob = distrib.init()\n"
        "job.save('last.pt', net=torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(40))))\njob.barrier()\n"
        "job.restore('last.pt', net=torch.nn.Sequential(*(torch.nn.Linear(2, 1) for _ in range(40))))\n"
    )
    lines = own_lines(launch("-np", "2", path).err)
    report = next(number for number, line in enumerate(lines) if "failed first" in line)
    first = lines[report]
    assert "last.pt: the state of net does not fit: " in first and "size mismatch for 0.weight" in first
    assert first.endswith("; restore it into the same model or optimizer, or name another file")
    assert not any(line.lstrip().startswith("RuntimeError") or "lines more" in line for line in lines[report:]), lines
    assert "last.pt: the state of net does not fit" in lines[-1]


LOST = b"RuntimeError: Connection closed by peer [10.0.0.1]"
HEAD = b"Traceback (most recent call last):"


def test_a_traceback_of_a_lost_connection_waits_for_the_end_of_its_rank():
    shown = OutputFilter()
    assert shown.add(0, [b"before", HEAD, b'  File "a.py", line 1']) == [b"before"]
    assert shown.add(0, [LOST, b"after"]) == []
    assert shown.release(0, failed_by_other=True) == []
    shown.add(0, [HEAD, LOST])
    assert shown.release(0) == [HEAD, LOST]


def test_other_tracebacks_are_shown_at_once():
    lines = [b"[rank0]: " + HEAD, b"[rank0]:   File", b"[rank0]: ValueError: a", b"after"]
    assert OutputFilter().add(0, lines) == lines


def test_lines_that_help_no_user_are_not_shown():
    noise = [
        b"[W1122 07:38:15.6 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
        b"[vm:06798] *** Process received signal ***", b"[vm:06798] Signal: Segmentation fault (11)",
        b"[vm:06798] [ 0] /lib/x86_64-linux-gnu/libc.so.6(+0x3c050)[0x7f5e8e45a050]",
    ]  # fmt: skip
    assert OutputFilter().add(0, [*noise, b"[vm:1] ready"]) == [b"[vm:1] ready"]


def test_the_stack_of_the_thread_that_crashed_is_found():
    report = (
        'before\nFatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "t.py", line 2 in wait\n\n'
        'Current thread 0x2 (most recent call first):\n  File "a.py", line 3 in step\n  File "a.py", line 9 in <module>\n'
        '  File "/x/distrib_launch/rank_agent/run_script.py", line 1 in main\n\nExtension modules: numpy (total: 1)\n'
    )
    head, *frames = root_cause.python_stack(report)
    assert head == "Fatal Python error: Aborted (most recent call first):"
    assert frames == ['  File "a.py", line 3 in step', '  File "a.py", line 9 in <module>']
    assert root_cause.python_stack("nothing") == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--epochs", "3", "train.py"], "options for your script go after the script"),
        (["train.p"], "no such script; did you mean train.py?"),
        (["exmples/train_cnn.py"], "did you mean examples/train_cnn.py?"),
        (["./exmples/train_cn.py"], "did you mean examples/train_cnn.py?"),
        (["examples/visoin/eval.py"], "did you mean examples/vision/eval.py?"),
        (["elsewhere/eval.py"], "options of distrib-launch stand before the script"),
        (["--bucket", "25", "train.py"], "write 25MiB"),
        (["--bucket", "²", "train.py"], "--bucket ²: "),
        (["--bucket", "9" * 5000, "train.py"], "no unit"),
        (["-H--", "train.py"], "-H/--hosts: -- is not a value"),
        (["--mode=--", "train.py"], "--mode: -- is not a value"),
        (["-np", "99999", "train.py"], "add --oversubscribe"),
    ],
)
def test_typing_errors_are_told_with_a_way_out(tmp_path, words, told):
    (tmp_path / "examples/vision").mkdir(parents=True)
    for name in ("train.py", "examples/train_cnn.py", "examples/vision/eval.py"):
        (tmp_path / name).touch()
    done = call(main, *words, cwd=tmp_path)
    assert done.returncode == 2 and told in done.stderr


def test_without_arguments_three_examples_are_shown():
    done = call(lambda words: main(words))
    assert done.returncode == 2 and done.stderr.count("\n  distrib-launch ") == 3


def test_a_long_silence_is_hinted_at_once():
    said = []
    console = types.SimpleNamespace(say=said.append)
    started = time.monotonic()
    detector = HangDetector(None, lambda *_: None, console, [])
    for seconds in (59, 65, 66):
        detector.check(started + seconds, [])
    assert len(said) == 1 and "for 60 s" in said[0] and "after 600 s" in said[0]


@pytest.mark.forked
def test_messages_begin_on_their_own_line_after_progress_bars(launch, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import sys, time, distrib\nfrom distrib.utils.log import get_logger\njob = distrib.init()\n"
        "print('\\r 10%', end='', file=sys.stderr, flush=True)\n"
        "if job.is_main:\n    get_logger('training').warning('of rank 0')\n"
        "print('\\r 20%', end='', file=sys.stderr, flush=True)\n"
        "job.barrier()\nif job.rank:\n    raise KeyError('batch')\njob.barrier()\n"
    )
    run = launch("-np", "2", path)
    lines = run.err.splitlines()
    assert "[0@localhost] distrib: warning: of rank 0" in lines, run
    assert "distrib-launch: error: rank 1 on localhost failed first: KeyError: 'batch'" in lines, run
    assert not any(line.startswith("[1@localhost]") and "%" in line for line in lines), run


@pytest.mark.forked
def test_warnings_of_the_library_are_repeated_at_the_end(launch, tmp_path):
    script = tmp_path / "forgotten.py"
    script.write_text(
        "import torch, distrib\n"
        "job = distrib.init()\n"
        "model = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model(torch.ones(1, 1)).sum().backward()\n"
        "optimizer.step()\n"
    )
    run = launch("-np", "2", script)
    assert run.code == 0, run
    assert "SGD" in run.result["warnings"][0]
    warning, end = run.err.splitlines()[-2:]
    assert "SGD" in warning and "succeeded" in end


@pytest.mark.forked
def test_one_traceback_is_shown_of_an_error_that_all_ranks_share(launch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import distrib\njob = distrib.init()\njob.barrier()\n\ndef evaluate():\n    job.all_reduce(1.0, 'avg')\n\nevaluate()\n"
    )
    run = launch("-np", "3", script)
    assert run.code == 1 and run.err.count("Traceback") == 1 and run.err.count("in evaluate") == 1, run
    assert re.search(r"ranks [0-2][-,][0-2]: failed too, with the same exception\n", run.err), run
    assert run.err.count("all_reduce has no op") == 2 and "collectives.py" not in run.err, run  # also in the last line
    assert "collectives.py" in (run.run_dir / "ranks/0.err").read_text()


def test_the_traceback_of_an_uncaught_exception_waits_for_the_end_of_its_rank():
    shown = OutputFilter()
    shown.expect_traceback(0)
    lines = [HEAD, b'  File "a.py", line 1', b"ValueError: first line", b"second line", b"", HEAD, b"KeyError: 1"]
    assert shown.add(0, [b"before", *lines]) == [b"before"]
    assert shown.release(0, reported=True) == []
    shown.expect_traceback(0)
    shown.add(0, lines)
    assert shown.release(0) == lines and shown.add(0, lines[:3]) == lines[:3]


def test_a_refused_start_says_why_before_its_last_line(launch, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    run = launch("-H", "no-such-host.invalid:1", script)
    *_, error, end = run.err.splitlines()
    assert run.code == 3 and error.startswith("distrib-launch: error: no-such-host.invalid: ssh: "), run
    assert end.startswith("distrib-launch: failed after "), run
