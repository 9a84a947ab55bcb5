"""Connectivity tests of a host: accept connections on ephemeral ports, and connect to other hosts on request.

Sent as source text behind the inventory, see `distrib.cluster.inventory`. The listeners use ports that the kernel would give to
ranks, so that a firewall between the hosts is found before the job starts.
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


def serve_queries(facts: dict[str, Any]) -> None:
    """Report the inventory, then serve connectivity queries, one line each, until the input ends or a timeout.

    Args:
        facts: The inventory.
    """
    _send_reply({"inventory": facts, "ports": [port_number(listener) for listener in open_listeners()]})
    seconds = 240.0  # longer than the launcher waits for the inventory of the slowest host
    while select.select([0], [], [], seconds)[0]:
        line = sys.stdin.readline()
        if not line:
            break
        query = json.loads(line)
        _send_reply(test_targets(query["targets"], query["seconds"]))
        seconds = 6.0  # longer than a connection takes to fail; the engine may use the ssh connection meanwhile


def _send_reply(reply: Any) -> None:
    """Print a reply between markers on one line: a login shell may print around it."""
    sys.stdout.write("\n" + BEGIN + json.dumps(reply) + END + "\n")
    sys.stdout.flush()


def open_listeners() -> list[socket.socket]:
    """Listen on an ephemeral port of the kernel's choice and on eight others all over its range: a firewall may let some of them in.

    Returns:
        The listeners; none if this process may not listen.
    """
    words = []
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            words = file.read().split()
    except OSError:
        pass
    first, last = (int(words[0]), int(words[1])) if len(words) == 2 else (32768, 60999)
    step = max(1, (last - first + 1) // 8)
    listeners = [listen(0), *(listen(first + number * step + step // 2) for number in range(8))]
    opened = [listener for listener in listeners if listener]
    for listener in opened:
        threading.Thread(target=_accept_connections, args=(listener,), daemon=True).start()
    return opened


def listen(port: int) -> socket.socket | None:
    """Listen on all addresses of the host.

    Args:
        port: The port; 0 for any.

    Returns:
        The listener; None if not allowed or in use.
    """
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            listener = socket.socket(family)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((address, port))
            listener.listen(1024)
            return listener
        except OSError:  # a kernel without IPv6
            continue
    return None


def _accept_connections(listener: socket.socket) -> None:
    """Accept and close connections: a full queue would refuse further ones."""
    while True:
        try:
            listener.accept()[0].close()
        except OSError as problem:
            if problem.errno in (errno.EBADF, errno.EINVAL):
                return
            time.sleep(0.01)  # too many open files; retry


def port_number(listener: socket.socket) -> int:
    """Return the port of a listener.

    Args:
        listener: The listener.
    """
    return int(listener.getsockname()[1])


def test_targets(targets: list[tuple[str, int]], seconds: float) -> list[str]:
    """Connect to all targets at once and send full packets; try those that lose packets again, as a busy host may be late.

    Args:
        targets: Addresses and ports.
        seconds: The time for connecting.

    Returns:
        For each target the error, empty for none.
    """
    reasons = _open_connections(targets, seconds)
    if lost := [number for number, reason in enumerate(reasons) if reason.startswith("packets of")]:
        again = _open_connections([targets[number] for number in lost], seconds)
        for number, reason in zip(lost, again):  # noqa: B905 - hosts may have a Python that has no `strict`
            reasons[number] = reason
    return reasons


def _open_connections(targets: list[tuple[str, int]], seconds: float) -> list[str]:
    """Connect to targets and send full packets.

    Kernels acknowledge data even if no program reads it.
    """
    reasons = ["timed out"] * len(targets)
    poll = select.poll()
    connecting: dict[int, tuple[int, socket.socket]] = {}
    awaiting_ack: dict[int, tuple[int, socket.socket, int, int]] = {}
    for number, (address, port) in enumerate(targets):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        connection = socket.socket(family)
        connection.setblocking(False)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # nothing is sent after the end
        code = connection.connect_ex((address, port))
        if code in (0, errno.EINPROGRESS):
            connecting[connection.fileno()] = number, connection
            poll.register(connection, select.POLLOUT)
        else:
            reasons[number] = os.strerror(code)
            connection.close()
    deadline = ack_deadline = time.monotonic() + seconds
    while connecting or awaiting_ack:
        left = (deadline if connecting else ack_deadline) - time.monotonic()
        if left <= 0:
            break
        for descriptor, _ in poll.poll(1000 * min(left, 0.005 if awaiting_ack else left)):
            if descriptor in awaiting_ack:  # closed by the peer: the data has arrived
                number, connection, _, _ = awaiting_ack.pop(descriptor)
                poll.unregister(descriptor)
                connection.close()
                continue
            number, connection = connecting.pop(descriptor)
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            reasons[number] = os.strerror(code) if code else ""
            sent = 0 if code else _send_full_packets(connection)
            if sent:
                awaiting_ack[descriptor] = number, connection, sent, path_mtu(connection)
                poll.modify(connection, 0)
                # Lost packets are sent again after 0.2, 0.6 and 1.4 s (RFC 6298; Linux waits 0.2 s at least).
                ack_deadline = time.monotonic() + 2.0
            else:
                poll.unregister(descriptor)
                connection.close()
        for descriptor, (_, connection, sent, _) in list(awaiting_ack.items()):
            if _unacknowledged_bytes(connection) < sent:
                del awaiting_ack[descriptor]
                poll.unregister(descriptor)
                connection.close()
    for number, connection, _, mtu in awaiting_ack.values():
        reasons[number] = f"packets of {mtu} bytes are lost on the path"
        connection.close()
    for _, connection in connecting.values():
        connection.close()
    return reasons


def _send_full_packets(connection: socket.socket) -> int:
    """Send two full packets and no shorter one, which would arrive where full ones are lost."""
    try:
        return connection.send(bytes(2 * connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)))
    except OSError:
        return 0


def _unacknowledged_bytes(connection: socket.socket) -> int:
    """Count the sent bytes that the peer's kernel has not acknowledged (tcp(7), SIOCOUTQ)."""
    count: int = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    return count


def path_mtu(connection: socket.socket) -> int:
    """Read the path MTU that the kernel assumes for a connection (ip(7), IP_MTU).

    Args:
        connection: A connected socket.

    Returns:
        Bytes.
    """
    level, option = (socket.IPPROTO_IPV6, 24) if connection.family == socket.AF_INET6 else (socket.IPPROTO_IP, 14)
    return connection.getsockopt(level, option)
