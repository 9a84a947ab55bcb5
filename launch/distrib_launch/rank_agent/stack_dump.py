"""Reads the stack of a rank's script with py-spy, without stopping the script. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PR_SET_PTRACER = 0x59616D61
"""prctl(2) option that lets py-spy, a child of the agent, read the script's memory where the kernel's Yama forbids it (linux/prctl.h)."""
LIMIT_BYTES = 1 << 18
_ACCELERATORS = "/dev/nvidia", "/dev/dri", "/dev/kfd", "/dev/dxg", "/dev/accel", "/dev/habanalabs"


class Spies:
    """The py-spys that run; `told` is given what each has printed, or why there is none."""

    def __init__(self, selector: selectors.BaseSelector, told: Callable[[bytes], None]) -> None:
        self._selector, self._told = selector, told
        self._running: dict[int, tuple[subprocess.Popen[bytes], int, bytearray]] = {}

    def take(self, pid: int) -> None:
        beside = Path(sys.executable).with_name("py-spy")
        command = [str(beside) if beside.exists() else "py-spy", "dump", "--json", "--nonblocking", "--pid", str(pid)]
        try:
            spy = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError as error:
            self._told(f"cannot run py-spy: {error.strerror}".encode())
            return
        assert spy.stdout
        descriptor = spy.stdout.fileno()
        self._running[descriptor] = (spy, pid, bytearray())
        self._selector.register(descriptor, selectors.EVENT_READ, self._hear)

    def _hear(self, descriptor: int) -> None:
        spy, pid, printed = self._running[descriptor]
        data = os.read(descriptor, LIMIT_BYTES)
        printed += data
        if not data:
            self._selector.unregister(descriptor)
            del self._running[descriptor]
            spy.communicate()
            self._told(with_state(bytes(printed), pid)[:LIMIT_BYTES])


def with_state(dump: bytes, pid: int) -> bytes:
    """py-spy's stacks, with what the kernel says of the main thread: `state` where it is stopped (T) or waits for a disk (D); `gpu`
    is false where its process can use none; and whether it is active where py-spy does not know
    which of the kernel's threads it is.

    That is so before Python 3.11, unless the script is stopped for it; py-spy then says of every thread that it is active.
    """
    # What py-spy complains of is no JSON, and another py-spy's may be of another form.
    with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
        threads = json.loads(dump)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]  # proc(5): the third field
        for thread in threads:
            # A script that has not imported threading has one thread, and no name for it.
            if thread["thread_name"] not in ("MainThread", None):
                continue
            told: dict[str, object] = {}
            if thread["os_thread_id"] is None:
                told["active"] = state == "R"
            if state in "TtD":
                told["state"] = state
            files = _open_files(pid)
            if files and not any(file.startswith(_ACCELERATORS) for file in files):
                told["gpu"] = False
            if told:
                thread.update(told)
                dump = json.dumps(threads).encode()
    return dump


def _open_files(pid: int) -> set[str]:
    """What a process has open, as the kernel names it; nothing where that cannot be seen."""
    files = set()
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                files.add(str(file.readlink()))
    return files
