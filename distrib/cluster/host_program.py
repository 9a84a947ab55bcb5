"""The program's other half: says a host's facts, and then, while it is held, whom the host reaches.

Like `inventory_program` it runs in the Python of any host, with the standard library alone. While it runs it listens on a
port of the kernel's choice, as every rank will, so that others can try whether they get through to this host.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BEGIN, END = "<<distrib-host ", " distrib-host>>"
HOLD_SECONDS = 240.0
"""So long a host waits for the first question: longer than the slowest answers of other hosts are waited for."""
AFTERWARDS_SECONDS = 6.0
"""And so long for the next: longer than a call takes to fail. The connection is of use to the engine, if it comes soon."""


def converse(facts: dict[str, Any]) -> None:
    """Say the facts, then answer what is asked, a line each, until the connection is closed or of no more use."""
    door = listen()
    if door:
        threading.Thread(target=welcome, args=(door,), daemon=True).start()
    say({"inventory": facts, "port": port_of(door)})
    seconds = HOLD_SECONDS
    while select.select([0], [], [], seconds)[0]:
        line = sys.stdin.readline()
        if not line:
            break
        asked = json.loads(line)
        say(reach(asked["targets"], asked["seconds"]))
        seconds = AFTERWARDS_SECONDS


def say(told: Any) -> None:
    """Print it between the marks, on one line: a login shell may print around it."""
    sys.stdout.write("\n" + BEGIN + json.dumps(told) + END + "\n")
    sys.stdout.flush()


def listen() -> socket.socket | None:
    """A socket that listens at every address of the host; None where it may not."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            door = socket.socket(family)
            if family == socket.AF_INET6:
                door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            door.bind((address, 0))
            door.listen(1024)
            return door
        except OSError:  # a kernel without IPv6
            continue
    return None


def welcome(door: socket.socket) -> None:
    """Take calls, and speak with nobody, until the door is shut: a queue that was full would let nobody through."""
    while True:
        try:
            door.accept()[0].close()
        except OSError as problem:
            if problem.errno in (errno.EBADF, errno.EINVAL):
                return
            time.sleep(0.01)  # too many files are open, for a moment


def port_of(door: socket.socket | None) -> int | None:
    """Where it listens."""
    return int(door.getsockname()[1]) if door else None


def reach(targets: list[tuple[str, int]], seconds: float) -> list[str]:
    """Why each target, an address and a port, cannot be connected to; empty for those that can. All are tried at once."""
    reasons = ["timed out"] * len(targets)
    poll = select.poll()
    calls: dict[int, tuple[int, socket.socket]] = {}
    for number, (address, port) in enumerate(targets):
        call = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        call.setblocking(False)
        code = call.connect_ex((address, port))
        if code == errno.EINPROGRESS:
            calls[call.fileno()] = number, call
            poll.register(call, select.POLLOUT)
        else:
            reasons[number] = os.strerror(code) if code else ""
            call.close()
    deadline = time.monotonic() + seconds
    while calls and time.monotonic() < deadline:
        for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            poll.unregister(descriptor)
            number, call = calls.pop(descriptor)
            code = call.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            reasons[number] = os.strerror(code) if code else ""
            call.close()
    for _, call in calls.values():
        call.close()
    return reasons
