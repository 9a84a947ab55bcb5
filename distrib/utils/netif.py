"""Names, addresses and network interfaces of this machine. Standard library only: rank agents import it."""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
from collections.abc import Collection
from pathlib import Path

LOOPBACK = ("127.", "::1")


def own_names() -> frozenset[str]:
    """Return the names by which this machine is known without a name server."""
    name = socket.gethostname()
    return frozenset({"localhost", "127.0.0.1", "::1", name, name.partition(".")[0]})


def is_here(host: str) -> bool:
    """Return True if a host is this machine.

    Args:
        host: Name or address.
    """
    if host == socket.gethostname():  # which need not resolve
        return True
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind(address)
    except OSError:
        return False
    return True


def resolve(host: str) -> list[str]:
    """Return the addresses that a name stands for here, none for an unknown name.

    Args:
        host: Name or address.
    """
    try:
        return [str(target[0]) for *_, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)]
    except OSError:
        return []


def source_addresses(hosts: Collection[str]) -> set[str]:
    """Return the addresses from which this machine connects to hosts, loopback left out. Sends nothing.

    Args:
        hosts: Names or addresses.
    """
    found = set()
    for host in hosts:
        for target in resolve(host):
            with contextlib.suppress(OSError), socket.socket(_family(target), socket.SOCK_DGRAM) as sock:
                sock.connect((target, 9))
                address = str(sock.getsockname()[0])
                if not address.startswith(LOOPBACK):
                    found.add(address)
                    break
    return found


def own_addresses(hosts: Collection[str], addresses: Collection[str]) -> set[str]:
    """Return the addresses by which hosts reach this machine, none if no network leads there. Sends nothing.

    Args:
        hosts: Names of the hosts.
        addresses: Their addresses, tried if the names lead nowhere.
    """
    found = source_addresses(hosts) or source_addresses(addresses)
    if not found and all(map(is_here, hosts)):
        return {"127.0.0.1"}  # a single machine whose name stands for 127.0.1.1
    return found


def interface_addresses() -> list[tuple[str, str]]:
    """Return the interface and the address of every address of this machine, IPv4 first."""
    buffer = array.array("B", bytes(1 << 16))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # SIOCGIFCONF of linux/sockios.h: all IPv4 addresses, 40 bytes each (struct ifreq on 64-bit Linux)
        reply = fcntl.ioctl(sock, 0x8912, struct.pack("iL", len(buffer), buffer.buffer_info()[0]))
    found = []
    for start in range(0, struct.unpack("iL", reply)[0], 40):
        entry = buffer[start : start + 40].tobytes()
        name = entry[:16].partition(b"\0")[0].decode().partition(":")[0]  # without the label of an alias
        found.append((name, socket.inet_ntoa(entry[20:24])))
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, *_, name = line.split()
            found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))))
    return found


def interface_of(address: str) -> str | None:
    """Return the interface that holds an address, None if none does, as behind NAT.

    Args:
        address: Address or name.
    """
    wanted = {address.partition("%")[0] for address in resolve(address)}
    return next((name for name, own in interface_addresses() if own in wanted), None)


def is_up(interface: str) -> bool:
    """Return True if an interface is up.

    Args:
        interface: Its name.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        reply = fcntl.ioctl(sock, 0x8913, struct.pack("16s24x", interface.encode()))  # SIOCGIFFLAGS
        return bool(struct.unpack_from("=H", reply, 16)[0] & 1)  # IFF_UP
    return False


def reachable_address() -> str | None:
    """Return the address by which other hosts most likely reach this one, None if it has only loopback.

    The address of the host's name comes first, else any address of an interface that is up; IPv4 before IPv6.
    """
    of_interfaces = [address for name, address in interface_addresses() if is_up(name)]
    for addresses in (resolve(socket.gethostname()), of_interfaces):
        # Link-local IPv6 addresses need the name of their interface.
        usable = [one for one in addresses if not one.startswith((*LOOPBACK, "fe80:"))]
        if usable:
            return min(usable, key=lambda one: (one.startswith("169.254."), ":" in one))
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
