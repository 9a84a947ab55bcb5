"""The program's other half: says a host's facts, and then, while it is held, whom the host reaches.

Like `inventory_program` it runs in the Python of any host, with the standard library alone. While it runs it listens on
ports such as the kernel gives to ranks, so that others can try whether they get through to this host.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import socket
import struct
import sys
import termios
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

MORE_DOORS = 8

LARGE_SECONDS = 2.0
"""What is lost is sent again after 0.2, 0.6 and 1.4 s, as the round trip is known from the connection (RFC 6298; Linux waits 0.2 s at least)."""
SMALLER_SECONDS = 1.0
USUAL_MTUS = (8900, 4092, 2044, 1500, 1450, 1400, 1280, 576)
"""Jumbo frames in a tunnel, InfiniBand's datagrams, Ethernet, and what tunnels and VPNs leave of it."""
LOOK_SECONDS = 0.005


def converse(facts: dict[str, Any]) -> None:
    """Say the facts, then answer what is asked, a line each, until the connection is closed or of no more use."""
    say({"inventory": facts, "ports": [port_of(door) for door in open_doors()]})
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


def open_doors() -> list[socket.socket]:
    """Sockets that listen at every address of the host, and take calls: on a port of the kernel's choice, and on others all over the range
    from which it chooses for ranks. A firewall may let some of them in, and the rest not. None where it may not listen."""
    words = []
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:  # noqa: PTH123 - as quick as may be
            words = file.read().split()
    except OSError:
        pass
    first, last = (int(words[0]), int(words[1])) if len(words) == 2 else (32768, 60999)
    step = max(1, (last - first + 1) // MORE_DOORS)
    doors = [listen(0), *(listen(first + number * step + step // 2) for number in range(MORE_DOORS))]
    opened = [door for door in doors if door]
    for door in opened:
        threading.Thread(target=welcome, args=(door,), daemon=True).start()
    return opened


def listen(port: int) -> socket.socket | None:
    """A socket that listens at every address of the host, on any port for 0; None where it may not, or the port is in use."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            door = socket.socket(family)
            if family == socket.AF_INET6:
                door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            door.bind((address, port))
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


def port_of(door: socket.socket) -> int:
    """Where it listens."""
    return int(door.getsockname()[1])


def reach(targets: list[tuple[str, int]], seconds: float) -> list[tuple[str, int, int]]:
    """What comes of calling each target, an address and a port; all are called at once.

    Why it cannot be connected to, or an empty word. Then, where packets get lost for their size, of how many bytes those
    are, and of how many bytes they arrive: an MTU that the way between does not have. Else 0 and 0.
    """
    outcomes = call_all([(address, port, None) for address, port in targets], seconds, LARGE_SECONDS)
    told = [(reason, 0, 0) for reason, _ in outcomes]
    lost = {number: mtu for number, (_, mtu) in enumerate(outcomes) if mtu}
    # Is it the size? Sure is what befalls the large ones once more while smaller ones arrive.
    sizes = [
        (number, size) for number, mtu in lost.items() for size in (None, *USUAL_MTUS) if size is None or size < mtu
    ]
    again = [(*targets[number], size) for number, size in sizes]
    outcomes = call_all(again, seconds, SMALLER_SECONDS)
    arrived = {size: outcome == ("", 0) for size, outcome in zip(sizes, outcomes)}  # noqa: B905 - hosts may have a Python that has no `strict`
    for number, mtu in lost.items():
        passed = [size for size in USUAL_MTUS if arrived.get((number, size))]
        if passed and not arrived[number, None]:
            told[number] = f"packets of {mtu} bytes get lost on the way, those of {passed[0]} arrive", mtu, passed[0]
    return told


def call_all(calls: list[tuple[str, int, int | None]], seconds: float, heard_seconds: float) -> list[tuple[str, int]]:
    """Connect to each address and port and say something, in full packets of at most so many bytes (None: the path's MTU).

    Returns for each why it could not be connected to, and the bytes of a packet of which none was acknowledged in time: 0
    where they were. That nobody reads there, or hangs up, is no matter: kernels acknowledge, or refuse, what arrives.
    """
    told = [("timed out", 0)] * len(calls)
    poll = select.poll()
    connecting: dict[int, tuple[int, socket.socket]] = {}
    speaking: dict[int, tuple[int, socket.socket, int, int]] = {}
    for number, (address, port, packet) in enumerate(calls):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        call = socket.socket(family)
        call.setblocking(False)
        call.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # nothing is sent after the end
        if packet:
            headers = 60 if family == socket.AF_INET6 else 40
            call.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, packet - headers)
        code = call.connect_ex((address, port))
        if code in (0, errno.EINPROGRESS):
            connecting[call.fileno()] = number, call
            poll.register(call, select.POLLOUT)
        else:
            told[number] = os.strerror(code), 0
            call.close()
    deadline = heard_until = time.monotonic() + seconds
    while connecting or speaking:
        left = (deadline if connecting else heard_until) - time.monotonic()
        if left <= 0:
            break
        for descriptor, _ in poll.poll(1000 * min(left, LOOK_SECONDS if speaking else left)):
            if descriptor in speaking:  # hung up: what was said has arrived
                number, call, _, _ = speaking.pop(descriptor)
                poll.unregister(descriptor)
                call.close()
                continue
            number, call = connecting.pop(descriptor)
            code = call.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            told[number] = os.strerror(code) if code else "", 0
            sent = 0 if code else say_much(call)
            if sent:
                speaking[descriptor] = number, call, sent, path_mtu(call)
                poll.modify(call, 0)
                heard_until = time.monotonic() + heard_seconds
            else:
                poll.unregister(descriptor)
                call.close()
        for descriptor, (_, call, sent, _) in list(speaking.items()):
            if unacknowledged(call) < sent:
                del speaking[descriptor]
                poll.unregister(descriptor)
                call.close()
    for number, call, _, mtu in speaking.values():
        told[number] = "", mtu
        call.close()
    for _, call in connecting.values():
        call.close()
    return told


def say_much(call: socket.socket) -> int:
    """Send two full packets; returns how many bytes the kernel took, 0 where the other has hung up already.

    No shorter one follows them: it would arrive, and be answered, where they are lost.
    """
    try:
        return call.send(bytes(2 * call.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)))
    except OSError:
        return 0


def unacknowledged(call: socket.socket) -> int:
    """Bytes that were sent, and of which the other's kernel has not said that they are there (tcp(7), SIOCOUTQ)."""
    told: int = struct.unpack("i", fcntl.ioctl(call, termios.TIOCOUTQ, bytes(4)))[0]
    return told


def path_mtu(call: socket.socket) -> int:
    """Bytes of the largest packet that the kernel believes to pass on the way of a connection (ip(7), IP_MTU)."""
    level, option = (socket.IPPROTO_IPV6, 24) if call.family == socket.AF_INET6 else (socket.IPPROTO_IP, 14)
    return call.getsockopt(level, option)
