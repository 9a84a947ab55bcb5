"""Network inventory of a host: interfaces, RDMA ports, port range, from netlink and /sys."""

from __future__ import annotations

import os
import re
import socket
import struct

from distrib.cluster.remote.sysfs import list_entries, numa_node, pcie_link, read_proc_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def network_identity() -> str:
    """Return a text that is equal for two names of one network stack."""
    try:
        return f"{read_proc_text('/proc/sys/kernel/random/boot_id')}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def read_port_range() -> list[int] | None:
    """Read the range of ephemeral ports; None if unknown."""
    words = read_proc_text("/proc/sys/net/ipv4/ip_local_port_range").split()
    return [int(word) for word in words] if len(words) == 2 and all(word.isdecimal() for word in words) else None


def _dump_netlink(kind: int) -> Iterator[bytes]:
    """Request a dump from the kernel (rtnetlink(7)); the program `ip` may be missing."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        sock.settimeout(2)
        sock.bind((0, 0))
        sock.send(struct.pack("=IHHII", 32, kind, 0x301, 1, 0) + bytes(16))
        while True:
            data = sock.recv(1 << 17)
            while data:
                length, answered = struct.unpack("=IH", data[:6])
                if answered in (2, 3) or length < 16:  # an error, or done
                    return
                yield data[16:length]
                data = data[(length + 3) & ~3 :]


def _parse_attributes(data: bytes) -> dict[int, bytes]:
    """Parse netlink attributes."""
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack("=HH", data[:4])
        if length < 4:
            break
        found[kind & 0x3FFF] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return found


def read_interfaces() -> list[dict[str, Any]]:
    """Read the network interfaces with addresses such as `198.18.0.1/16`."""
    rdma: dict[str, list[str]] = {}
    for device in list_entries("/sys/class/infiniband"):
        for name in list_entries(f"/sys/class/infiniband/{device}/device/net"):
            rdma.setdefault(name, []).append(device)
    found: dict[int, dict[str, Any]] = {}
    below: dict[int, list[int]] = {}
    try:
        for body in _dump_netlink(18):  # RTM_GETLINK
            _, kind, index, flags = struct.unpack("=BxHiI", body[:12])
            fields = _parse_attributes(body[16:])
            name = fields.get(3, b"").rstrip(b"\0").decode()
            linked = _parse_attributes(fields.get(18, b"")).get(1, b"").rstrip(b"\0").decode()
            here = f"/sys/class/net/{name}/"
            interface_kind = linked or ("physical" if os.path.exists(here + "device") else "unknown")
            speed, changes = read_proc_text(here + "speed"), read_proc_text(here + "carrier_changes")
            found[index] = {"name": name, "kind": "loopback" if flags & 8 else interface_kind, "infiniband": kind == 32, "addresses": [],
                            "up": bool(flags & 1 and flags & 0x40),
                            "mtu": struct.unpack("=I", fields[4])[0] if 4 in fields else None,
                            "speed_bytes_per_second": int(speed) * 125000 if speed.isdecimal() else None,
                            "carrier_changes": int(changes) if changes.isdecimal() else None,
                            "rdma": rdma.get(name, []), "numa_node": numa_node(here + "device"),
                            "pcie": pcie_link(here + "device")}  # fmt: skip
            if 10 in fields:  # IFLA_MASTER
                below.setdefault(struct.unpack("=I", fields[10])[0], []).append(index)
            if interface_kind == "vlan" and 5 in fields and 37 not in fields:  # IFLA_LINK, and not IFLA_LINK_NETNSID
                below.setdefault(index, []).append(struct.unpack("=I", fields[5])[0])
        kinds = {index: each["kind"] for index, each in found.items()}
        for index, each in found.items():
            cards = [found[card] for card in nics_below(index, kinds, below)]
            each["cards"] = sorted(card["name"] for card in cards)
            if cards and each["kind"] == "bridge":  # it reports its fastest port, perhaps that of a virtual machine
                speeds = [card["speed_bytes_per_second"] or 0 for card in cards]
                each["speed_bytes_per_second"] = max(speeds) or None
        for body in _dump_netlink(22):  # RTM_GETADDR
            family, prefix, flags, _, index = struct.unpack("=BBBBI", body[:8])
            fields = _parse_attributes(body[8:])
            packed = fields.get(2) or fields.get(1)
            # Secondary and temporary addresses change.
            if packed and not flags & 1 and index in found and family in (socket.AF_INET, socket.AF_INET6):
                found[index]["addresses"].append(f"{socket.inet_ntop(family, packed)}/{prefix}")
    except OSError:
        pass
    return [found[index] for index in sorted(found)]


def nics_below(index: int, kinds: dict[int, str], below: dict[int, list[int]]) -> list[int]:
    """Find the physical NICs below a bridge, bond or VLAN.

    Args:
        index: The interface.
        kinds: Kinds by interface.
        below: Lower interfaces by interface.

    Returns:
        The NICs; none for a physical interface itself.
    """
    if kinds.get(index) not in ("bridge", "bond", "team", "vlan"):
        return []
    found = []
    for lower in below.get(index, []):
        found += [lower] if kinds.get(lower) == "physical" else nics_below(lower, kinds, below)
    return found


def read_rdma_ports() -> list[dict[str, Any]]:
    """Read the ports of RDMA devices: `{device: mlx5_0, port: 1, active: true, link_layer: InfiniBand, ...}`.

    A port is active if it is up, may be opened by this process (not in a container without /dev/infiniband), and its link layer is
    InfiniBand or Ethernet: NCCL's own transport and UCX do not use others, such as Amazon's EFA.

    Returns:
        The fields of `inventory.RdmaPort` for each port.
    """
    found = []
    verbs = {
        read_proc_text(f"/sys/class/infiniband_verbs/{name}/ibdev"): name
        for name in list_entries("/sys/class/infiniband_verbs")
    }
    for device in list_entries("/sys/class/infiniband"):
        base = f"/sys/class/infiniband/{device}/ports"
        usable = device in verbs and os.access(f"/dev/infiniband/{verbs[device]}", os.R_OK | os.W_OK)
        for port in list_entries(base):
            fields = read_proc_text(f"{base}/{port}/rate")
            rate = re.match(r"([\d.]+) *Gb", fields)
            layer = read_proc_text(f"{base}/{port}/link_layer")
            # Up to QDR, 8 of 10 bits of InfiniBand are data, and the kernel reports all bits.
            data = 0.8 if layer == "InfiniBand" and re.search(r"\b[SDQ]DR\b", fields) else 1.0
            up = "ACTIVE" in read_proc_text(f"{base}/{port}/state") and layer in ("InfiniBand", "Ethernet")
            names = (
                read_proc_text(f"{base}/{port}/gid_attrs/ndevs/{index}") for index in range(16)
            )  # addresses that name interfaces
            found.append({"device": device, "port": int(port), "link_layer": layer, "up": up, "active": up and usable,
                          "netdevs": sorted(set(filter(None, names))),
                          "rate_bytes_per_second": data * float(rate.group(1)) * 1.25e8 if rate else None,
                          "numa_node": numa_node(f"/sys/class/infiniband/{device}/device"),
                          "pcie": pcie_link(f"/sys/class/infiniband/{device}/device")})  # fmt: skip
    return found
