"""The rank agent under early termination by the engine and loss of the launcher; the test acts as the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distrib.environment import DISTRIB_CONTROL, DISTRIB_TOKEN
from distrib.utils.framing import new_token
from distrib_launch.rank_agent.control_channel import Channel, Kind
from distrib_launch.rank_agent.forwarding import encode_environment

pytestmark = pytest.mark.processes


def comes_true(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def order(*command: str, may_return: bool = False) -> dict[str, Any]:
    return {
        "command": command, "is_python": False, "directory": "/", "environment": {}, "device": "cpu", "tag": "test.0",
        "host_timeout_seconds": 5.0, "may_return": may_return, "gpus": None, "bind": "none", "cpu_sharers": 1,
        "keep_result": False, "grace_seconds": 1.0,
    }  # fmt: skip


class Launcher:
    """The launcher's end of the connection."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        self.channel = Channel(sock, token, listener=True)
        self.got: dict[Kind, bytes] = {}

    def hears(self, kind: Kind) -> dict[str, Any]:
        """Wait for a message of the agent and return it."""

        def is_told() -> bool:
            with contextlib.suppress(ConnectionResetError):
                self.channel.flush()
                self.got.update(self.channel.receive())
            return kind in self.got

        comes_true(is_told)
        return json.loads(self.got[kind])

    def says(self, kind: Kind, payload: dict[str, Any]) -> None:
        self.channel.send(kind, payload)
        self.channel.flush()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def called_back(listener) -> Iterator[tuple[subprocess.Popen[str], socket.socket, str]]:
    """Yield the process of an agent with installed signal handlers, its connection and its token."""
    token = new_token()
    place = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("SIZE", "LOCAL_SIZE"), "1")
    environment = os.environ | {f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()}
    # An agent reads the table of all processes only if another one was killed: here that raises TypeError.
    program = "from distrib_launch.rank_agent import agent, reaper as r; r.tagged = r.in_session = None; agent.main()"
    with contextlib.ExitStack() as stack:
        environment |= {DISTRIB_CONTROL: f"127.0.0.1:{listener.getsockname()[1]}", DISTRIB_TOKEN: token}
        environment |= encode_environment(os.environ, {}, sys.executable)
        process = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True)
        )
        stack.callback(process.kill)
        sock = stack.enter_context(listener.accept()[0])
        caught = 1 << signal.SIGUSR2 - 1  # the last handler that the agent installs
        status = Path(f"/proc/{process.pid}/status")
        comes_true(lambda: int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & caught != 0)
        yield process, sock, token


def test_it_goes_without_a_word_before_the_launcher_has_greeted_it(called_back):
    process, _, _ = called_back
    process.terminate()
    _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (0, "")


def test_it_calls_again_if_the_launcher_hung_up_before_their_handshake(called_back, listener):
    process, sock, token = called_back
    for _ in range(2):
        sock.close()
        sock, _ = listener.accept()
    with sock:
        launcher = Launcher(sock, token)
        assert not launcher.hears(Kind.HELLO)["returns"]
        launcher.says(Kind.ASSIGN, order("sh", "-c", "exit 7"))
        assert launcher.hears(Kind.EXIT)["exit_code"] == 7
        launcher.says(Kind.END, {})
        _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (0, "")


def test_it_ends_if_the_launcher_is_gone_before_their_handshake(called_back, listener):
    process, sock, _ = called_back
    listener.close()
    sock.close()
    _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("assigned", [False, True])
def test_it_tells_that_the_engine_ended_it_and_leaves_no_script(called_back, assigned):
    process, sock, token = called_back
    launcher = Launcher(sock, token)
    launcher.hears(Kind.HELLO)
    process.send_signal(signal.SIGSTOP)
    if assigned:  # the agent finds both when it resumes
        launcher.says(Kind.ASSIGN, order("sleep", "60"))
    process.terminate()
    process.send_signal(signal.SIGCONT)
    told = launcher.hears(Kind.EXIT)
    assert (told["exit_code"], told["signal"], told["stopped_by"]) == (143, signal.SIGTERM, "engine")
    if process.poll() is None:
        with contextlib.suppress(OSError):
            launcher.says(Kind.END, {})
    _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (0, "")


def test_orphans_of_the_script_end_with_it_in_any_session_and_environment(called_back, tmp_path):
    process, sock, token = called_back
    launcher = Launcher(sock, token)
    launcher.hears(Kind.HELLO)
    sleeper = f"env -i setsid sleep 600 & echo $! >> {tmp_path / 'pids'};"
    ended = f"(true & echo $! > {tmp_path / 'ended'}); while test ! -e {tmp_path / 'go'}; do sleep 0.01; done;"
    launcher.says(Kind.ASSIGN, order("sh", "-c", f"({sleeper} {sleeper}) & wait; {ended} exit 5"))
    comes_true(lambda: (tmp_path / "ended").exists() and (tmp_path / "ended").read_text() != "")
    comes_true(lambda: not Path(f"/proc/{(tmp_path / 'ended').read_text().strip()}").exists())  # no zombie
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    (tmp_path / "go").touch()
    assert launcher.hears(Kind.EXIT)["exit_code"] == 5
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    launcher.says(Kind.END, {})
    _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (0, "")


def test_who_was_cut_off_ends_its_script_and_returns(called_back, listener):
    process, sock, token = called_back
    launcher = Launcher(sock, token)
    first = launcher.hears(Kind.HELLO)
    launcher.says(Kind.ASSIGN, order("sleep", "600", may_return=True))
    comes_true(lambda: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text() != "")
    script = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    sock.close()
    with listener.accept()[0] as broken:
        broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends a reset
    with listener.accept()[0] as again:
        comes_true(lambda: not Path(f"/proc/{script}").exists())
        launcher = Launcher(again, token)
        hello = launcher.hears(Kind.HELLO)
        assert (first["returns"], hello["returns"]) == (False, True) and hello["port"] == first["port"]
        launcher.says(Kind.ASSIGN, order("sh", "-c", "echo back; exit 3", may_return=True))
        told = launcher.hears(Kind.EXIT)
        assert (told["exit_code"], told["stopped_by"], launcher.got[Kind.OUT]) == (3, "", b"back\n")
        launcher.says(Kind.END, {})
        _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("how", ["the launcher is gone", "it is turned away", "the engine ends it"])
def test_who_was_cut_off_ends_where_nobody_waits_for_it(called_back, listener, how):
    process, sock, token = called_back
    launcher = Launcher(sock, token)
    launcher.hears(Kind.HELLO)
    launcher.says(Kind.ASSIGN, order("true", may_return=True))
    launcher.hears(Kind.EXIT)
    if how == "the launcher is gone":
        listener.close()
    sock.close()
    if how != "the launcher is gone":
        again = listener.accept()[0]
        if how == "the engine ends it":
            process.terminate()
        else:
            Launcher(again, token).hears(Kind.HELLO)
            again.shutdown(socket.SHUT_WR)
        process.wait(timeout=50)
        again.close()
    _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (0, "")
