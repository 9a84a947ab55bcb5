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
FIRST_QUERY_TIMEOUT_SECONDS = 240.0
"""Longer than the launcher waits for the inventory of the slowest host."""
NEXT_QUERY_TIMEOUT_SECONDS = 6.0
"""Longer than a connection takes to fail. The engine may use the ssh connection meanwhile."""

EXTRA_LISTENERS = 8

FULL_PACKET_TIMEOUT_SECONDS = 2.0
"""Lost packets are sent again after 0.2, 0.6 and 1.4 s (RFC 6298; Linux waits 0.2 s at least)."""
SMALLER_PACKET_TIMEOUT_SECONDS = 1.0
COMMON_MTUS = (8900, 4092, 2044, 1500, 1450, 1400, 1280, 576)
"""Jumbo frames in a tunnel, InfiniBand datagrams, Ethernet, tunnels and VPNs."""
POLL_SECONDS = 0.005


def serve_queries(facts: dict[str, Any]) -> None:
    """Report the inventory, then serve connectivity queries, one line each, until the input ends or a timeout.

    Args:
        facts: The inventory.
    """
    send_reply({"inventory": facts, "ports": [port_number(listener) for listener in open_listeners()]})
    seconds = FIRST_QUERY_TIMEOUT_SECONDS
    while select.select([0], [], [], seconds)[0]:
        line = sys.stdin.readline()
        if not line:
            break
        query = json.loads(line)
        send_reply(test_targets(query["targets"], query["seconds"]))
        seconds = NEXT_QUERY_TIMEOUT_SECONDS


def send_reply(reply: Any) -> None:
    """Print a reply between markers on one line: a login shell may print around it.

    Args:
        reply: Anything that JSON can hold.
    """
    sys.stdout.write("\n" + BEGIN + json.dumps(reply) + END + "\n")
    sys.stdout.flush()


def open_listeners() -> list[socket.socket]:
    """Listen on an ephemeral port of the kernel's choice and on others all over its range: a firewall may let some of them in.

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
    step = max(1, (last - first + 1) // EXTRA_LISTENERS)
    listeners = [listen(0), *(listen(first + number * step + step // 2) for number in range(EXTRA_LISTENERS))]
    opened = [listener for listener in listeners if listener]
    for listener in opened:
        threading.Thread(target=accept_connections, args=(listener,), daemon=True).start()
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


def accept_connections(listener: socket.socket) -> None:
    """Accept and close connections: a full queue would refuse further ones.

    Args:
        listener: The listener, until it is closed.
    """
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

    Returns:
        The port.
    """
    return int(listener.getsockname()[1])


def test_targets(targets: list[tuple[str, int]], seconds: float) -> list[tuple[str, int, int]]:
    """Connect to all targets at once and send full packets.

    Args:
        targets: Addresses and ports.
        seconds: The time for connecting.

    Returns:
        For each target the error, empty for none, and if packets are lost for their size, the lost and the passing size in bytes, else
        0 and 0.
    """
    outcomes = open_connections(
        [(address, port, None) for address, port in targets], seconds, FULL_PACKET_TIMEOUT_SECONDS
    )
    told = [(reason, 0, 0) for reason, _ in outcomes]
    lost = {number: mtu for number, (_, mtu) in enumerate(outcomes) if mtu}
    # The size is the cause if large packets are lost again while smaller ones arrive.
    sizes = [
        (number, size) for number, mtu in lost.items() for size in (None, *COMMON_MTUS) if size is None or size < mtu
    ]
    again = [(*targets[number], size) for number, size in sizes]
    outcomes = open_connections(again, seconds, SMALLER_PACKET_TIMEOUT_SECONDS)
    arrived = {size: outcome == ("", 0) for size, outcome in zip(sizes, outcomes)}  # noqa: B905 - hosts may have a Python that has no `strict`
    for number, mtu in lost.items():
        passed = [size for size in COMMON_MTUS if arrived.get((number, size))]
        if passed and not arrived[number, None]:
            told[number] = f"packets of {mtu} bytes are lost, packets of {passed[0]} bytes arrive", mtu, passed[0]
    return told


def open_connections(
    targets: list[tuple[str, int, int | None]], seconds: float, ack_seconds: float
) -> list[tuple[str, int]]:
    """Connect to targets and send full packets.

    Kernels acknowledge data even if no program reads it.

    Args:
        targets: Addresses, ports and the largest packet in bytes; None for the path's MTU.
        seconds: The time for connecting.
        ack_seconds: The time for acknowledgements.

    Returns:
        For each target the error, empty for none, and the size of packets that were not acknowledged, else 0.
    """
    told = [("timed out", 0)] * len(targets)
    poll = select.poll()
    connecting: dict[int, tuple[int, socket.socket]] = {}
    awaiting_ack: dict[int, tuple[int, socket.socket, int, int]] = {}
    for number, (address, port, packet) in enumerate(targets):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        connection = socket.socket(family)
        connection.setblocking(False)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # nothing is sent after the end
        if packet:
            headers = 60 if family == socket.AF_INET6 else 40
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, packet - headers)
        code = connection.connect_ex((address, port))
        if code in (0, errno.EINPROGRESS):
            connecting[connection.fileno()] = number, connection
            poll.register(connection, select.POLLOUT)
        else:
            told[number] = os.strerror(code), 0
            connection.close()
    deadline = ack_deadline = time.monotonic() + seconds
    while connecting or awaiting_ack:
        left = (deadline if connecting else ack_deadline) - time.monotonic()
        if left <= 0:
            break
        for descriptor, _ in poll.poll(1000 * min(left, POLL_SECONDS if awaiting_ack else left)):
            if descriptor in awaiting_ack:  # closed by the peer: the data has arrived
                number, connection, _, _ = awaiting_ack.pop(descriptor)
                poll.unregister(descriptor)
                connection.close()
                continue
            number, connection = connecting.pop(descriptor)
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            told[number] = os.strerror(code) if code else "", 0
            sent = 0 if code else send_full_packets(connection)
            if sent:
                awaiting_ack[descriptor] = number, connection, sent, path_mtu(connection)
                poll.modify(connection, 0)
                ack_deadline = time.monotonic() + ack_seconds
            else:
                poll.unregister(descriptor)
                connection.close()
        for descriptor, (_, connection, sent, _) in list(awaiting_ack.items()):
            if unacknowledged_bytes(connection) < sent:
                del awaiting_ack[descriptor]
                poll.unregister(descriptor)
                connection.close()
    for number, connection, _, mtu in awaiting_ack.values():
        told[number] = "", mtu
        connection.close()
    for _, connection in connecting.values():
        connection.close()
    return told


def send_full_packets(connection: socket.socket) -> int:
    """Send two full packets and no shorter one, which would arrive where full ones are lost.

    Args:
        connection: A connected socket.

    Returns:
        Bytes that the kernel accepted; 0 if the peer has closed.
    """
    try:
        return connection.send(bytes(2 * connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)))
    except OSError:
        return 0


def unacknowledged_bytes(connection: socket.socket) -> int:
    """Count the sent bytes that the peer's kernel has not acknowledged (tcp(7), SIOCOUTQ).

    Args:
        connection: A connected socket.

    Returns:
        Bytes.
    """
    told: int = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    return told


def path_mtu(connection: socket.socket) -> int:
    """Read the path MTU that the kernel assumes for a connection (ip(7), IP_MTU).

    Args:
        connection: A connected socket.

    Returns:
        Bytes.
    """
    level, option = (socket.IPPROTO_IPV6, 24) if connection.family == socket.AF_INET6 else (socket.IPPROTO_IP, 14)
    return connection.getsockopt(level, option)
