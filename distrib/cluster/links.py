"""The ways that bytes can take: between two hosts, and between two ends inside one. Measured beats catalogued.

Rates are of one direction, in bytes per second. `rate` is nominal; `bandwidth` is what large transfers get: measured where probe
has been, else what the catalogue expects of such a link.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeVar, cast

import msgspec

from distrib import units
from distrib.cluster.hardware_catalog import LinkKind
from distrib.cluster.link_spec import parse_bus, parse_uplink
from distrib.cluster.measurements import InsideLink, PairLink
from distrib.cluster.node import Nic, NodeGroup
from distrib.cluster.shared_links import rates_alone
from distrib.cluster.topology import Switch, Topology

T = TypeVar("T")
Origin = Literal["measured", "catalogued"]

_FABRIC: dict[LinkKind, str] = {"infiniband": "InfiniBand", "roce": "Ethernet", "ethernet": "Ethernet"}
UPLINK_USABLE = 0.95
"""Of its rate, what an uplink carries: what the catalogue has for InfiniBand, and for Ethernet that one host can fill."""
_GPU = re.compile(r"gpu([0-9]+)")


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """From one host to another.

    `nics` are the source's that carry it, all at once. `oversubscription`: what the hosts under the switches passed could
    send up against what those let through, 1 where they let all through; it says how much is left when every host sends.
    """

    source: str
    target: str
    kind: LinkKind | None
    text: str
    """Such as `8 x HDR`; empty where the file names no NICs that meet."""
    nics: tuple[str, ...]
    gpudirect: bool | None
    """Whether all of them, on both hosts, read GPU memory themselves; None where nobody said."""
    rate_bytes_per_second: float | None
    bandwidth_bytes_per_second: float
    latency_seconds: float | None
    oversubscription: float
    switches: tuple[str, ...]
    origin: Origin
    measured: tuple[PairLink, ...]
    """Where it was measured: the curves, one for each interface."""

    @property
    def shared_bandwidth_bytes_per_second(self) -> float:
        """What is left of the bandwidth for one host when all under its switches send through them.

        The switches pass a part of what the hosts' cards are rated for; a host that cannot use all of its card may get enough.
        """
        rate = self.rate_bytes_per_second
        share = UPLINK_USABLE * rate if rate else self.bandwidth_bytes_per_second
        return min(self.bandwidth_bytes_per_second, share / self.oversubscription)


class InsideWay(msgspec.Struct, frozen=True, kw_only=True):
    """Between two ends inside a host: `memory` or `gpuN`."""

    host: str
    source: str
    target: str
    text: str
    """Such as `NVLink3 x12` or `PCIe4 x16`; `memory` for copies inside the host's memory; what probe calls it otherwise."""
    rate_bytes_per_second: float | None
    """Nominal; None where nobody knows it."""
    bandwidth_bytes_per_second: float
    latency_seconds: float | None
    origin: Origin
    measured: InsideLink | None


class _Catalogued(msgspec.Struct, frozen=True, kw_only=True):
    """What the file and the catalogue say of the way from a host of one kind to one of another."""

    kind: LinkKind
    text: str
    nics: tuple[str, ...]
    gpudirect: bool | None
    rate_bytes_per_second: float
    usable_bytes_per_second: float
    latency_seconds: float


def link_between(topology: Topology, source: str, target: str) -> Way | None:
    """The way from one host to another; None where neither probe nor the file says anything of it."""
    measured = _measured_between(topology, source, target)
    known = _catalogued_between(topology, source, target)
    if known is None and not measured:
        return None
    text, rate = (known.text, known.rate_bytes_per_second) if known else ("", None)
    if measured and known and all(_is_beside(pair, known) for pair in measured):
        text, rate = f"TCP on {measured[0].interface}", None
    latencies = [pair.latency_seconds for pair in measured if pair.latency_seconds is not None]
    bandwidth = sum(pair.bandwidth_bytes_per_second for pair in measured)
    return Way(
        source=source,
        target=target,
        kind=known.kind if known else None,
        text=text,
        nics=known.nics if known else (),
        gpudirect=known.gpudirect if known else None,
        rate_bytes_per_second=rate,
        bandwidth_bytes_per_second=bandwidth if measured or known is None else known.usable_bytes_per_second,
        latency_seconds=min(latencies) if latencies else known.latency_seconds if known else None,
        oversubscription=_oversubscription(topology, source, target),
        switches=tuple(switch.name for switch in switches_between(topology, source, target)),
        origin="measured" if measured else "catalogued",
        measured=measured,
    )


def data_nics(nics: Iterable[Nic]) -> tuple[Nic, ...]:
    """The NICs of a host that training uses: those of the fabric that carries most, and there the fastest ones.

    A server with eight InfiniBand ports also has an Ethernet port or two, for its owner to log in.
    """
    best: tuple[Nic, ...] = ()
    every = tuple(nics)
    for fabric in set(_FABRIC.values()):
        of_fabric = [nic for nic in every if _FABRIC[nic.link.kind] == fabric]
        top = max((nic.link.rate_bytes_per_second for nic in of_fabric), default=0.0)
        chosen = tuple(nic for nic in of_fabric if nic.link.rate_bytes_per_second == top)
        # By what they can use, not by name: 100 GbE without RDMA carries less than EDR.
        if _usable(chosen) > _usable(best):
            best = chosen
    return best


def common_nics(topology: Topology, source: str, target: str) -> tuple[tuple[Nic, ...], tuple[Nic, ...]]:
    """The NICs of two hosts that can talk to each other, those of one fabric; the best fabric that they share."""
    found: tuple[tuple[Nic, ...], tuple[Nic, ...]] = ((), ())
    for fabric in sorted(set(_FABRIC.values())):
        ends = tuple(
            data_nics(nic for nic in topology.nics_of(host) if _FABRIC[nic.link.kind] == fabric)
            for host in (source, target)
        )
        if all(ends) and min(map(_usable, ends)) > min(map(_usable, found)):
            found = (ends[0], ends[1])
    return found


def switches_between(topology: Topology, source: str, target: str) -> tuple[Switch, ...]:
    """The switches that are passed, up from the source and down to the target; empty where the file does not say."""
    up, down = topology.switches_above(source), topology.switches_above(target)
    shared = {switch.name for switch in down}
    rising = [switch for switch in up if switch.name not in shared]
    top = next((switch for switch in up if switch.name in shared), None)
    falling = [switch for switch in down if switch.name not in {above.name for above in up}]
    return (*rising, *([top] if top else []), *reversed(falling))


def uplinks_between(topology: Topology, source: str, target: str) -> tuple[Switch, ...]:
    """Of those that are passed, the switches whose uplinks are: all but the one that both hosts are below."""
    below = [{switch.name for switch in topology.switches_above(host)} for host in (source, target)]
    return tuple(
        switch
        for switch in switches_between(topology, source, target)
        if not all(switch.name in names for names in below)
    )


def switch_oversubscription(topology: Topology, switch: Switch) -> float:
    """What hosts and switches below can send up against what leads up; 1 where nobody says."""
    return _kept(topology, ("oversubscription", switch.name), lambda: _oversubscription_of(topology, switch))


def _oversubscription_of(topology: Topology, switch: Switch) -> float:
    if switch.oversubscription is not None:
        return units.parse_ratio(switch.oversubscription)
    if switch.uplink is None:
        return 1.0
    return max(1.0, rate_below(topology, switch) / parse_uplink(switch.uplink))


def _is_beside(pair: PairLink, known: _Catalogued) -> bool:
    """Whether a pair was measured by other cards than those that are described: of RDMA cards that MPI could not use."""
    return known.kind == "infiniband" and pair.way == "tcp" and pair.interface not in (None, *known.nics)


def uplink_rate(topology: Topology, switch: Switch) -> float:
    """Bytes per second that what leads up from a switch carries; infinite where nobody says, or it is not narrow."""
    ratio = switch_oversubscription(topology, switch)
    usable = UPLINK_USABLE if ratio > 1 else 1.0  # as wide as what is below, it is not what caps it
    if switch.uplink is not None:
        return usable * parse_uplink(switch.uplink)
    below = rate_below(topology, switch)
    return usable * below / ratio if ratio > 1 and below else float("inf")


def inside_link(topology: Topology, host: str, source: str, target: str) -> InsideWay | None:
    """The way between two ends inside a host, each `memory` or `gpuN`; None where nothing is known of it."""
    measured = _measured_inside(topology, host, source, target)
    group = topology.group_of(host)
    text, rate, usable, latency = _catalogued_inside(group, source, target) if group else ("", None, None, None)
    if measured is None and usable is None:
        return None
    if measured and measured.path:
        nvlink = measured.path == "NVLink"
        if nvlink != text.startswith("NVLink"):  # not the link that somebody described
            rate = None
        text = text if nvlink and rate else measured.path  # probe does not tell how many there are
    return InsideWay(
        host=host,
        source=source,
        target=target,
        text=text or "memory",
        rate_bytes_per_second=rate,
        bandwidth_bytes_per_second=measured.bandwidth_bytes_per_second if measured else usable or 0.0,
        latency_seconds=latency,
        origin="measured" if measured else "catalogued",
        measured=measured,
    )


def nics_text(nics: Iterable[Nic]) -> str:
    """`8 x HDR`, `RoCE 100Gb/s`, `10 GbE`."""
    every = tuple(nics)
    if not every:
        return ""
    link = every[0].link
    text = link.text if link.kind != "roce" else f"RoCE {link.text}"
    if link.kind != "roce" and re.match(r"[0-9].*/s$", link.text):
        text = f"{'InfiniBand' if link.kind == 'infiniband' else 'Ethernet'} {link.text}"
    return f"{len(every)} x {text}" if len(every) > 1 else text


def _catalogued_inside(
    group: NodeGroup, source: str, target: str
) -> tuple[str, float | None, float | None, float | None]:
    first, second = _GPU.fullmatch(source), _GPU.fullmatch(target)
    if any(gpu and int(gpu[1]) >= (group.gpus.count if group.gpus else 0) for gpu in (first, second)):
        return "", None, None, None
    links = group.links
    if first and second and group.gpus and first[1] != second[1]:
        if links and links.nvlink:
            count = links.links_of_pair(int(first[1]), int(second[1]), group.gpus.count)
            nvlink = parse_bus(links.nvlink).with_lanes(count) if count else None
        else:  # nobody says: as the catalogue has it
            usual = group.gpus.spec.nvlink if links is None and group.gpus.spec else None
            nvlink = parse_bus(usual) if usual else None
        if nvlink:
            return nvlink.text, nvlink.rate_bytes_per_second, nvlink.usable_bytes_per_second, nvlink.latency_seconds
    pcie = (links.pcie if links else None) or (group.gpus.spec.pcie if group.gpus and group.gpus.spec else None)
    if not pcie or not (first or second):
        return "", None, None, None
    link = parse_bus(pcie)
    return link.text, link.rate_bytes_per_second, link.usable_bytes_per_second, link.latency_seconds


def _kept(topology: Topology, key: object, make: Callable[[], T]) -> T:
    """What `make` gives, made once and kept with the topology: the same is asked for each pair of hosts."""
    kept: dict[object, object] = topology.__dict__.setdefault("_ways", {})
    if key not in kept:
        kept[key] = make()
    return cast(T, kept[key])


def _catalogued_between(topology: Topology, source: str, target: str) -> _Catalogued | None:
    """None where the file names no NICs that meet."""

    def make() -> _Catalogued | None:
        nics, other = common_nics(topology, source, target)
        if not nics:
            return None
        # RoCE talks to plain Ethernet as plain Ethernet does.
        plain = [end for end in (nics, other) if end[0].link.kind == "ethernet"]
        slower = min(plain or [nics, other], key=_total)
        said = [nic.gpudirect for nic in (*nics, *other)]
        return _Catalogued(
            kind=slower[0].link.kind,
            text=nics_text(slower),
            nics=tuple(nic.name for nic in nics),
            gpudirect=None if None in said else all(said),
            rate_bytes_per_second=min(_total(nics), _total(other)),
            usable_bytes_per_second=min(_usable(nics), _usable(other)),
            latency_seconds=slower[0].link.latency_seconds,
        )

    return _kept(topology, ("catalogued", *(id(topology.group_of(host)) for host in (source, target))), make)


def _measured_inside(topology: Topology, host: str, source: str, target: str) -> InsideLink | None:
    def make() -> dict[tuple[str, str, str], InsideLink]:
        links = topology.measured.inside if topology.measured else ()
        return {(link.host.lower(), link.source, link.target): link for link in reversed(links)}

    links = _kept(topology, "inside", make)
    # The other direction is better than a data sheet.
    return links.get((host.lower(), source, target)) or links.get((host.lower(), target, source))


def _measured_between(topology: Topology, source: str, target: str) -> tuple[PairLink, ...]:
    """The best that was measured from one host to another, of each interface; they carry bytes side by side."""
    for first, second in ((source.lower(), target.lower()), (target.lower(), source.lower())):
        best: dict[str | None, PairLink] = {}
        for pair in _pairs(topology).get((first, second), ()):
            before = best.get(pair.interface)
            if before is None or pair.bandwidth_bytes_per_second > before.bandwidth_bytes_per_second:
                best[pair.interface] = pair
        if best:
            named = [pair for interface, pair in best.items() if interface is not None]
            whole = best.get(None)
            # Without an interface it went as the job's own traffic does, and that counts.
            return (whole,) if whole else tuple(named)
    return ()


def _pairs(topology: Topology) -> dict[tuple[str, str], list[PairLink]]:
    """What was measured one way on the job's own network, by the two hosts; where a pair never was alone, what it may be then."""

    def make() -> dict[tuple[str, str], list[PairLink]]:
        found: dict[tuple[str, str], list[PairLink]] = {}
        for load in ("alone", "together"):
            before = set(found)
            for pair in topology.measured.pairs if topology.measured else ():
                ends = pair.source.lower(), pair.target.lower()
                if (
                    pair.load == load
                    and not pair.both_ways
                    and pair.network is None
                    and not {ends, ends[::-1]} & before
                ):
                    found.setdefault(ends, []).append(pair)
        every = topology.measured.pairs if topology.measured else ()
        rates = rates_alone(pair for pair in every if not pair.both_ways and pair.network is None)
        return {ends: [_faster(pair, rates) for pair in pairs] for ends, pairs in found.items()}

    return _kept(topology, "pairs", make)


def _faster(pair: PairLink, rates: Mapping[tuple[str, str, str], float]) -> PairLink:
    rate = rates.get((pair.source, pair.target, pair.way), 0.0)
    if rate <= pair.bandwidth_bytes_per_second:
        return pair
    return msgspec.structs.replace(pair, bandwidth_bytes_per_second=rate, curve=())


def _oversubscription(topology: Topology, source: str, target: str) -> float:
    """The product over the switches that are left upwards; the way down is as narrow, so the worse of the two."""
    worst = 1.0
    for first, second in ((source, target), (target, source)):
        shared = {switch.name for switch in topology.switches_above(second)}
        product = 1.0
        for switch in topology.switches_above(first):
            if switch.name in shared:
                break
            product *= switch_oversubscription(topology, switch)
        worst = max(worst, product)
    return worst


def rate_below(topology: Topology, switch: Switch) -> float:
    """The nominal rate, in bytes per second, at which the hosts and switches below could send up."""
    by_name = {each.name: each for each in topology.switches}
    total = sum(_total(data_nics(topology.nics_of(host))) for host in switch.host_names)
    for name in switch.switches:
        below = by_name[name]
        rate = rate_below(topology, below)
        if below.uplink is not None:  # it may be wider than what its hosts can send, where that is known
            total += min(parse_uplink(below.uplink), rate or float("inf"))
        else:
            total += rate / switch_oversubscription(topology, below)
    return total


def _total(nics: Iterable[Nic]) -> float:
    return sum(nic.link.rate_bytes_per_second for nic in nics)


def _usable(nics: Iterable[Nic]) -> float:
    """What the NICs carry together, none more than its own slot lets through."""
    total = 0.0
    for nic in nics:
        slot = parse_bus(nic.pcie).usable_bytes_per_second if nic.pcie else float("inf")
        total += min(nic.link.usable_bytes_per_second, slot)
    return total
