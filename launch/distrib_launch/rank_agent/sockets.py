"""The sockets of the process around a rank: to the launcher, and for its script's rendezvous. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time

from distrib.utils.mpi_env import BY_MPIRUN
from distrib_launch.rank_agent.control_channel import Channel

CALL_BACK_SECONDS = 20.0
SIOCGIFADDR = 0x8915


def call_back(addresses: str, token: str) -> Channel:
    """Connect to the first of the launcher's addresses that answers."""
    deadline = time.monotonic() + CALL_BACK_SECONDS
    last: OSError | None = None
    while time.monotonic() < deadline:
        for address in addresses.split(","):
            host, _, port = address.rpartition(":")
            try:
                sock = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
            except OSError as error:
                last = error
                continue
            return Channel(sock, token, listener=False)
        time.sleep(0.2)
    others = " --interface chooses another network" if BY_MPIRUN in os.environ else ""  # of hosts that were asked
    raise SystemExit(
        f"distrib: {socket.gethostname()} cannot reach the launcher at {addresses} ({last}); "
        f"is a firewall between them?{others}"
    )


def interface_with(address: str) -> str | None:
    """The network interface that has an IPv4 address, as its primary one."""
    if ":" in address:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                told = fcntl.ioctl(sock, SIOCGIFADDR, name.encode().ljust(40, b"\0"))
                if told[20:24] == socket.inet_aton(address):
                    return name
    return None


def hold_port() -> socket.socket:
    """Bind a free port for the script's rendezvous.

    It is held, not listened on: with SO_REUSEADDR on both sides the script can bind it, while the kernel hands it to
    nobody who asks for any free port.
    """
    sock = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(("", 0))
    return sock
