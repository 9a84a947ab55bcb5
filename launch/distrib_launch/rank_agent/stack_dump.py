"""Stack dumps of a rank's script by py-spy, which does not stop the script. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from distrib_launch.rank_agent.control_channel import PAYLOAD_LIMIT_BYTES

_ACCELERATORS = "/dev/nvidia", "/dev/dri", "/dev/kfd", "/dev/dxg", "/dev/accel", "/dev/habanalabs"


class StackDumper:
    """Dumper of stacks, which runs py-spy in the background."""

    def __init__(self, selector: selectors.BaseSelector, on_dump: Callable[[bytes], None]) -> None:
        self._selector, self._on_dump = selector, on_dump
        self._running: dict[int, tuple[subprocess.Popen[bytes], int, bytearray]] = {}

    def take(self, pid: int) -> None:
        """Begin to read the stacks of a process.

        Args:
            pid: Its process id.
        """
        beside = Path(sys.executable).with_name("py-spy")
        command = [str(beside) if beside.exists() else "py-spy", "dump", "--json", "--nonblocking", "--pid", str(pid)]
        try:
            spy = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError as error:
            self._on_dump(f"cannot run py-spy: {error.strerror}".encode())
            return
        assert spy.stdout
        descriptor = spy.stdout.fileno()
        self._running[descriptor] = (spy, pid, bytearray())
        self._selector.register(descriptor, selectors.EVENT_READ, self._read)

    def _read(self, descriptor: int) -> None:
        spy, pid, printed = self._running[descriptor]
        data = os.read(descriptor, 1 << 18)
        printed += data
        if not data:
            self._selector.unregister(descriptor)
            del self._running[descriptor]
            spy.communicate()
            self._on_dump(with_state(bytes(printed), pid)[:PAYLOAD_LIMIT_BYTES])


def with_state(dump: bytes, pid: int) -> bytes:
    """Add the kernel's state of the main thread to the stacks.

    `state` is set if it is stopped (T, t) or waits for a disk (D); `gpu` is false if no GPU device is open. `active` is corrected if
    py-spy does not know the kernel's thread: before Python 3.11 it reports every thread as active.

    Args:
        dump: Output of py-spy; an error message is returned as it is.
        pid: Process id of the script.
    """
    # An error message is not JSON, and other versions of py-spy may write other fields.
    with contextlib.suppress(ValueError, KeyError, TypeError, OSError, RecursionError):
        threads = json.loads(dump)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]  # proc(5): the third field
        for thread in threads:
            # A script that has not imported threading has one thread without a name.
            if thread["thread_name"] not in ("MainThread", None):
                continue
            facts: dict[str, object] = {}
            if thread["os_thread_id"] is None:
                facts["active"] = state == "R"
            if state in "TtD":
                facts["state"] = state
            files = _open_files(pid)
            if files and not any(file.startswith(_ACCELERATORS) for file in files):
                facts["gpu"] = False
            if facts:
                thread.update(facts)
                dump = json.dumps(threads).encode()
    return dump


def _open_files(pid: int) -> set[str]:
    """Return the names of a process's open files, none if they cannot be read."""
    files = set()
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # the script has closed it meanwhile
                files.add(str(file.readlink()))
    return files
