"""A rank's own process, which the engine ends before its script has begun; this test is its launcher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from distrib_launch.control import Channel, Kind, new_token
from distrib_launch.rank import CONTROL, TOKEN


def comes_true(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def called_back() -> Iterator[tuple[subprocess.Popen[str], socket.socket, str]]:
    """The process of a rank that heeds signals, its connection, and the token."""
    token = new_token()
    place = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("SIZE", "LOCAL_SIZE"), "1")
    environment = os.environ | {f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        environment |= {CONTROL: f"127.0.0.1:{listener.getsockname()[1]}", TOKEN: token}
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "distrib_launch.rank"], env=environment, stderr=subprocess.PIPE, text=True
            )
        )
        stack.callback(process.kill)
        sock = stack.enter_context(listener.accept()[0])
        caught = 1 << signal.SIGUSR2 - 1  # the last that it learns to heed
        status = Path(f"/proc/{process.pid}/status")
        comes_true(lambda: int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & caught != 0)
        yield process, sock, token


def test_it_goes_without_a_word_before_the_launcher_has_greeted_it(called_back):
    process, _, _ = called_back
    process.terminate()
    _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("assigned", [False, True])
def test_it_tells_that_the_engine_ended_it_and_leaves_no_script(called_back, assigned):
    process, sock, token = called_back
    channel = Channel(sock, token, listener=True)
    got: dict[Kind, bytes] = {}

    def hears(kind: Kind) -> bool:
        with contextlib.suppress(ConnectionResetError):
            channel.flush()
            got.update(channel.receive())
        return kind in got

    comes_true(lambda: hears(Kind.HELLO))
    process.send_signal(signal.SIGSTOP)
    if assigned:  # it finds both when it goes on
        order = {
            "command": ["sleep", "60"], "directory": "/", "environment": {}, "device": "cpu", "mark": "test.0",
            "host_timeout_seconds": 5.0, "chosen": None, "bind": "none", "sharers": 1, "keep_value": False,
            "grace_seconds": 1.0,
        }  # fmt: skip
        channel.send(Kind.ASSIGN, order)
        channel.flush()
    process.terminate()
    process.send_signal(signal.SIGCONT)
    comes_true(lambda: hears(Kind.EXIT))
    told = json.loads(got[Kind.EXIT])
    assert (told["exit_code"], told["signal"], told["stopped_by"]) == (143, signal.SIGTERM, "engine")
    if process.poll() is None:
        with contextlib.suppress(OSError):
            channel.send(Kind.END, {})
            channel.flush()
    _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (0, "")
