"""The network interfaces of this host."""

from __future__ import annotations

import socket

import psutil


def interface_of(address: str) -> str | None:
    """The interface that holds `address` (a number or a name), or None: behind NAT there is none."""
    try:
        wanted = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
    except OSError:
        return None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] in wanted for entry in entries):
            return name
    return None
