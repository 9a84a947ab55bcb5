"""Ranks that train and have never met are told of; such as have are not."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest

from distrib_launch import alone
from distrib_launch.rank_agent.stack_dump import with_state
from distrib_launch.supervisor import hang_report, unmet

IN_BACKWARD = (hang_report.Frame(name="_engine_run_backward", filename="/venv/torch/autograd/graph.py", line=9),)
IN_STEP = (hang_report.Frame(name="step", filename="/venv/site-packages/torch/optim/sgd.py", line=9),)
IN_LOADER = (hang_report.Frame(name="__next__", filename="/venv/torch/utils/data/dataloader.py", line=9),)


def stack(rank: int, frames: tuple[hang_report.Frame, ...] = (), **changes: object) -> hang_report.Stack:
    return hang_report.Stack(**{"rank": rank, "host": "n1", "step": -1, "frames": frames, "met": False, **changes})


def when_found(*seen: hang_report.Stack, ranks: int = 2, notes: tuple[str, ...] = ()) -> float | None:
    """After how many seconds of ten minutes it is said that these are strangers, who are as this at every look."""
    watch, found = unmet.Unmet(types.SimpleNamespace(notes=notes)), []
    for tenths in range(6000):
        if watch.asks(tenths / 10, range(ranks)):
            for one in seen:
                watch.add(one)
        if watch.found(tenths / 10):
            found.append(tenths / 10)
    assert len(found) < 2
    return found[0] if found else None


def test_strangers_are_ranks_that_train_of_which_none_has_met_another():
    assert when_found(stack(0, IN_LOADER), stack(1, IN_BACKWARD)) == unmet.FIRST_SECONDS
    assert when_found(stack(0, IN_STEP), stack(1, IN_LOADER)) == unmet.FIRST_SECONDS
    assert when_found(stack(0, IN_LOADER), stack(1, IN_LOADER)) is None  # they may meet before they train
    assert when_found(stack(0, IN_BACKWARD), stack(1, IN_BACKWARD, met=True)) is None
    assert when_found(stack(0, IN_BACKWARD)) is None  # of the other nothing is known
    assert when_found(stack(0, IN_BACKWARD), stack(1, IN_BACKWARD, problem="no stack")) is None
    assert when_found(stack(0, IN_BACKWARD), ranks=1) is None
    noted = (alone.NOTE.format(script="train.py", copies=2),)
    assert when_found(stack(0, IN_BACKWARD), stack(1, IN_BACKWARD), notes=noted) is None


def test_ranks_that_stand_where_they_meet_are_told_of():
    meets = (
        hang_report.Frame(name="_meet", filename="/venv/distrib/training/rendezvous.py", line=159),
        hang_report.Frame(name="train", filename="/home/me/train.py", line=3),
    )
    assert when_found(stack(0, meets, met=True), stack(1, meets, met=True)) == 2 * unmet.FIRST_SECONDS
    assert when_found(stack(0, meets, met=True), stack(1, IN_LOADER)) is None  # it waits for one that is slow
    assert (
        when_found(*(stack(rank, meets, met=True) for rank in range(9)), ranks=9) is None
    )  # of the ninth nothing is known


@pytest.mark.parametrize("kind", ["none", "a TCP server", "a pair"])
def test_whoever_meets_others_has_a_tcp_socket(kind):
    made = {
        "none": "",
        "a TCP server": "s = socket.create_server(('127.0.0.1', 0))",
        "a pair": "s = socket.socketpair()",
    }
    code = f"import socket, time; {made[kind]}; print(flush=True); time.sleep(60)" if made[kind] else "input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", f"print(flush=True); {code}"], **pipes) as process:
        try:
            process.stdout.readline()
            if made[kind]:
                process.stdout.readline()
            dump = [{"thread_name": "MainThread", "os_thread_id": process.pid, "active": False, "frames": []}]
            told = json.loads(with_state(json.dumps(dump).encode(), process.pid))[0]
            assert told.get("met", True) is (kind == "a TCP server")
        finally:
            process.kill()


TRAINS = """
import sys, time, torch
import torch.distributed as dist
if sys.argv[1:] == ["--distributed"]:
    dist.init_process_group("gloo")
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
end = time.monotonic() + 8
while time.monotonic() < end:
    model(torch.randn(64, 256)).sum().backward()
if dist.is_initialized():
    dist.destroy_process_group()
"""
SOON = "import sys; from distrib_launch.cli.launch import launch as cli; from distrib_launch.supervisor import unmet; unmet.FIRST_SECONDS = 3.0; sys.exit(cli.main())"


@pytest.mark.parametrize("option", ["", "--distributed"])
def test_the_launcher_says_so_while_they_train(option, tmp_path):
    (tmp_path / "train.py").write_text(TRAINS)
    command = [sys.executable, "-c", SOON, "-np", "2", "train.py", *filter(None, [option])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("none has a connection to another: 2 copies of the script train") == (not option)
