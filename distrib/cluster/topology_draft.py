"""Draft of a topology file from the inventories of hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import yaml

from distrib.cluster.hardware_catalog import find_gpu
from distrib.cluster.inventory import Gpu, Interface, Inventory, RdmaPort
from distrib.cluster.link_spec import parse_bus_link
from distrib.cluster.node import Gpus, IntraNodeLinks, Nic, NodeGroup, Numa, fold_hosts
from distrib.units import format_rate, format_size
from distrib.utils.ranges import ranges

NIC_KINDS = ("physical", "bond", "team")
"""Kinds of interfaces that are NICs, or combine several."""

HEADER = """\
# Drafted from the inventories of the hosts. Add racks and uplinks under `switches:` (hostfiles/ has examples), and
# measure the links with `distrib-topo probe -o`.
"""


def draft_groups(inventories: Mapping[str, Inventory]) -> tuple[NodeGroup, ...]:
    """Group hosts by equal hardware.

    Args:
        inventories: Inventories by host.

    Returns:
        The groups, in the order of their first hosts.
    """
    groups: list[tuple[NodeGroup, int, list[str]]] = []
    for host, facts in inventories.items():
        group, memory = _group(host, facts), facts.memory_bytes or 0
        for other, least, names in groups:
            same = msgspec.structs.replace(group, hosts=other.hosts, memory=other.memory) == other
            # Firmware and kernels reserve some memory: up to 5 % between equal hosts.
            if same and abs(memory - least) <= 0.05 * max(memory, least):
                names.append(host)
                break
        else:
            groups.append((group, memory, [host]))
    return tuple(msgspec.structs.replace(group, hosts=fold_hosts(names)) for group, _, names in groups)


def topology_yaml(groups: Sequence[NodeGroup], *, head: str = HEADER) -> str:
    """Format a topology file.

    Args:
        groups: The groups.
        head: Comments at the top.
    """

    def plain(value: object) -> object:
        if isinstance(value, msgspec.Struct):
            fields = {
                field.name: (getattr(value, field.name), field.default) for field in msgspec.structs.fields(value)
            }
            return {name: plain(one) for name, (one, usual) in fields.items() if one != usual and one not in ((), {})}
        if isinstance(value, tuple):
            return [plain(one) for one in value]
        return value

    nodes = {"nodes": [plain(group) for group in groups]}
    return head + "\n" + yaml.safe_dump(nodes, sort_keys=False, default_flow_style=None, width=120)


def _group(host: str, facts: Inventory) -> NodeGroup:
    gpus = facts.gpus
    # A file numbers NUMA nodes by their order, without those that have no CPUs.
    places = {node: place for place, node in enumerate(sorted((n for n, cpus in facts.numa.items() if cpus), key=int))}
    return NodeGroup(
        hosts=host,
        gpus=_gpus(gpus),
        links=_links(gpus),
        sockets=facts.sockets,
        cores=facts.cores,
        memory=f"{max(1, round(facts.memory_bytes / 2**30))}GiB" if facts.memory_bytes else None,
        numa=tuple(
            Numa(gpus=_range(gpu.index for gpu in gpus if gpu.numa_node == int(node)), cpus=facts.numa[node])
            for node in places
        )
        if len(places) > 1
        else (),
        nics=_nics(facts, gpus, places),
    )


def _gpus(gpus: Sequence[Gpu]) -> Gpus | None:
    """Describe the most common kind of GPU: a file has one per host."""
    if not gpus:
        return None
    kind = _kind(gpus)
    spec = find_gpu(kind) if kind else None
    memory = next((gpu.memory_bytes for gpu in gpus if gpu.kind == kind), None)
    known = spec is not None or memory is None
    return Gpus(count=len(gpus), kind=spec.name if spec else kind, memory=None if known else format_size(memory or 0))


def _kind(gpus: Sequence[Gpu]) -> str | None:
    return next((kind for kind, _ in Counter(gpu.kind for gpu in gpus if gpu.kind).most_common(1)), None)


def _links(gpus: Sequence[Gpu]) -> IntraNodeLinks | None:
    pcie = _narrowest(gpu.pcie for gpu in gpus)
    kind = _kind(gpus)
    spec = find_gpu(kind) if kind else None
    ends = [gpu.nvlink_to for gpu in gpus]
    nvlink = None
    pairs: dict[str, int] = {}
    if spec and spec.nvlink and any(ends):
        nvlink = f"{spec.nvlink.partition(' ')[0]} x{max(map(len, ends))}"
        place = {gpu.bus_id: number for number, gpu in enumerate(gpus)}
        joined = Counter((number, place[end]) for number, to in enumerate(ends) for end in to if end in place)
        pairs = {f"{one}-{other}": links for (one, other), links in sorted(joined.items()) if one < other}
    switched = nvlink is not None and any("switch" in to for to in ends)
    if nvlink is not None and not switched and not pairs:
        nvlink = None  # their peers are not on this host
    if pcie is None and nvlink is None:
        return None
    return IntraNodeLinks(nvlink=nvlink, nvswitch=switched, pairs={} if switched else pairs, pcie=pcie)


def _narrowest(buses: Iterable[str | None]) -> str | None:
    return min((bus for bus in buses if bus), key=lambda bus: parse_bus_link(bus).rate_bytes_per_second, default=None)


def _nics(facts: Inventory, gpus: Sequence[Gpu], places: Mapping[str, int]) -> tuple[Nic, ...]:
    """Describe active RDMA ports, RoCE ports with an address, and other Ethernet NICs that are up and have one.

    The address may be on a VLAN or bridge of the NIC; several of one NIC count once.
    """
    found: dict[str, tuple[str, RdmaPort | Interface, float]] = {}
    devices = {port.device for port in facts.rdma if port.active}
    taken = {card.name for card in facts.interfaces if devices & {*card.rdma}}
    addressed = [card for card in facts.interfaces if card.up and card.routable_addresses()]
    for port in facts.rdma:
        if port.active and port.rate_bytes_per_second:
            card = _interface_of_port(port, facts.interfaces)
            if port.link_layer == "InfiniBand":
                found.setdefault(port.device, ("InfiniBand", port, port.rate_bytes_per_second))
            elif card is None:
                found.setdefault(port.device, ("RoCE", port, port.rate_bytes_per_second))
            elif any({card.name, *port.netdevs} & {other.name, *other.cards} for other in addressed):
                taken |= {card.name, *port.netdevs}
                # a port of a bond may report only its own rate
                bond = (card.speed_bytes_per_second or 0.0) if card.kind == "bond" else 0.0
                found.setdefault(card.name, ("RoCE", port, max(port.rate_bytes_per_second, bond)))
    for card in sorted(addressed, key=lambda card: card.kind not in NIC_KINDS):
        behind = {card.name, *card.cards}
        is_card = card.kind in NIC_KINDS or bool(card.cards)
        if is_card and card.speed_bytes_per_second and not card.infiniband and not behind & taken:
            taken |= behind
            found.setdefault(card.name, ("Ethernet", card, card.speed_bytes_per_second))
    several = len(places) > 1
    equal_nics: dict[Nic, list[str]] = {}
    for name, (kind, one, rate) in found.items():
        placed = several and one.numa_node is not None
        nic = Nic(
            name="nic",
            kind=kind,
            rate=format_rate(rate, bits=True),
            gpudirect=facts.gpudirect if gpus and kind != "Ethernet" else None,
            gpus=_range(gpu.index for gpu in gpus if gpu.numa_node == one.numa_node) if placed else None,
            numa=places.get(str(one.numa_node)) if placed else None,
            pcie=one.pcie,
        )
        equal_nics.setdefault(nic, []).append(name)
    return tuple(
        msgspec.structs.replace(nic, name=name) for nic, names in equal_nics.items() for name in _as_range(names)
    )


def _interface_of_port(port: RdmaPort, cards: Sequence[Interface]) -> Interface | None:
    """Find the interface of a RoCE port: the bond that has its addresses, else its own."""
    known = [card for card in cards if card.name in port.netdevs and card.kind in NIC_KINDS]
    known += [card for card in cards if port.device in card.rdma]
    return min(known, key=lambda card: card.kind != "bond", default=None)


def _as_range(names: Sequence[str]) -> Sequence[str]:
    """Fold consecutive names to `mlx5_[0-3]`."""
    folded = fold_hosts(names)
    return [folded] if "," not in folded and folded.count("[") < 2 else names


def _range(indices: Iterable[int]) -> str | None:
    listed = sorted(indices)
    return ranges(listed) if listed else None
