"""Link specifications: `HDR`, `100Gb/s`, `10 GbE`, `NVLink3 x12`, `PCIe4 x16`, resolved with the hardware catalogue."""

from __future__ import annotations

import difflib
import functools
import re

import msgspec

from distrib import units
from distrib.cluster.hardware_catalog import CatalogLink, LinkKind, catalog_links, hardware_catalog

_BUS = re.compile(
    r"""(?: (?P<nvlink> nv[ -]?link) | pci[ -]?(?:express|e) )
    (?: [ -]* (?:gen|v)? [ .]* (?P<generation>[0-9]) (?:\.0)? (?: [ ,]* x [ ]* (?P<lanes>[0-9]{1,3}) )? \Z )?""",
    re.IGNORECASE | re.VERBOSE,
)
_INFINIBAND = re.compile(r"(?:(?:ib|infiniband)[ -]*)?([a-z]{3})([ -]*[0-9]{3})?(?:[ -]*(?:4x|x4))?", re.IGNORECASE)
_KINDS: dict[str, LinkKind] = {
    "infiniband": "infiniband",
    "ib": "infiniband",
    "roce": "roce",
    "rocev2": "roce",
    "ethernet": "ethernet",
    "eth": "ethernet",
    "tcp": "ethernet",
}
KIND_NAMES: dict[LinkKind, str] = {
    "infiniband": "InfiniBand",
    "roce": "RoCE",
    "ethernet": "Ethernet",
    "nvlink": "NVLink",
    "pcie": "PCIe",
}


class LinkSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A specified link, one direction. `rate` is nominal; usable bandwidth and latency are from the catalogue."""

    text: str
    """As written."""
    kind: LinkKind
    model: CatalogLink
    """The catalogue entry, or the nearest of its kind for an unusual rate."""
    lanes: int
    """PCIe lanes or NVLinks; 1 for a port."""
    rate_bytes_per_second: float

    @property
    def usable_bytes_per_second(self) -> float:
        """The rate that large transfers reach."""
        own = self.rate_bytes_per_second * self.model.usable.value
        if self.rate_bytes_per_second == self.lanes * self.model.rate_bytes_per_second.value:
            return own
        # An unusual rate: at most that of the next faster port.
        faster = [spec for spec in _ports(self.kind) if spec.rate_bytes_per_second.value > self.rate_bytes_per_second]
        return min([own, *(spec.rate_bytes_per_second.value * spec.usable.value for spec in faster)])

    @property
    def latency_seconds(self) -> float:
        """The latency of the catalogue entry."""
        return self.model.latency_seconds.value

    def with_lanes(self, lanes: int) -> LinkSpec:
        """Change the width.

        Args:
            lanes: The new number of lanes or links.
        """
        return msgspec.structs.replace(
            self,
            text=f"{self.model.name} x{lanes}",
            lanes=lanes,
            rate_bytes_per_second=self.rate_bytes_per_second * lanes / self.lanes,
        )


def parse_network_kind(text: str) -> LinkKind:
    """Parse InfiniBand, RoCE or Ethernet, in any case.

    Args:
        text: The kind.

    Raises:
        ValueError: The text is not a kind of network.
    """
    kind = _KINDS.get(re.sub(r"[ _-]", "", text.lower()))
    if kind is None:
        near = difflib.get_close_matches(text.lower(), list(_KINDS), n=1, cutoff=0.5)
        hint = f"did you mean {KIND_NAMES[_KINDS[near[0]]]}?" if near else "write InfiniBand, RoCE or Ethernet"
        raise ValueError(f"{_shown(text)} is not a kind of network; {hint}")
    return kind


@functools.lru_cache(maxsize=1024)
def parse_bus_link(text: str) -> LinkSpec:
    """Parse an intra-node link: `NVLink3 x12`, `NVLink 3.0`, `PCIe4 x16`, `PCIe Gen5 x8`.

    Args:
        text: The link.

    Raises:
        ValueError: The text is not such a link.
    """
    stripped = text.strip()
    match = _BUS.match(stripped)
    if not match or not match["generation"]:
        raise ValueError(f"{_shown(text)} is not an intra-node link; write such as NVLink3 x12 or PCIe4 x16")
    nvlink = bool(match["nvlink"])
    name = f"{'NVLink' if nvlink else 'PCIe'}{match['generation']}"
    spec = catalog_links().get(name.lower())
    if spec is None:
        known = [link.name for link in hardware_catalog().links if link.kind == ("nvlink" if nvlink else "pcie")]
        raise ValueError(f"{name} is not in the catalogue; it has {known[0]} to {known[-1]}")
    lanes = int(match["lanes"]) if match["lanes"] else spec.lanes
    widths = range(1, 37) if nvlink else (1, 2, 4, 8, 16, 32)
    if lanes not in widths:
        what = "1 to 36 links" if nvlink else "1, 2, 4, 8, 16 or 32 lanes"
        raise ValueError(f"{_shown(text)}: {KIND_NAMES[spec.kind]} has {what}, not {lanes}")
    return LinkSpec(
        text=stripped, kind=spec.kind, model=spec, lanes=lanes,
        rate_bytes_per_second=spec.rate_bytes_per_second.value * lanes,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def parse_network_link(text: str, kind: LinkKind | None = None) -> LinkSpec:
    """Parse a network port: `HDR`, `IB NDR`, `10 GbE`, `100Gb/s`.

    Args:
        text: The port.
        kind: Required if the text is a bare rate.

    Raises:
        ValueError: The text is not a port, its rate is 0, or contradicts the kind.
    """
    stripped = text.strip()
    if split_multiple(stripped)[1] != stripped:
        raise ValueError(f"{_shown(text)} is several ports; write each as a NIC of its own, or a range: mlx5_[0-3]")
    if _BUS.match(stripped):
        raise ValueError(f"{_shown(text)} is an intra-node link; a NIC's rate is such as 100Gb/s, 10 GbE or HDR")
    match = _INFINIBAND.fullmatch(stripped)
    if match:
        name = (match[1] + re.sub(r"[ -]", "", match[2] or "")).lower()
        spec = catalog_links().get(name)
        if spec is None:
            known = [link.name for link in hardware_catalog().links if link.kind == "infiniband"]
            near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "write its rate of data, such as 32Gb/s for QDR"
            raise ValueError(f"{_shown(text)} is not an InfiniBand rate of the catalogue; {hint}")
        if kind not in (None, "infiniband"):
            raise ValueError(f"{spec.name} is a rate of InfiniBand, not of {KIND_NAMES[kind]}; write one or the other")
        return LinkSpec(
            text=stripped,
            kind="infiniband",
            model=spec,
            lanes=1,
            rate_bytes_per_second=spec.rate_bytes_per_second.value,
        )
    rate = units.parse_rate(stripped)
    if rate <= 0:
        raise ValueError(f"{_shown(text)}: expected a rate above 0")
    if re.search(r"bE$", stripped):
        if kind == "infiniband":
            raise ValueError(f"{_shown(text)} is a rate of Ethernet, not of InfiniBand; write one or the other")
        kind = kind or "ethernet"
    if kind is None:
        raise ValueError(f"{_shown(text)} is ambiguous; say `kind: InfiniBand`, RoCE or Ethernet")
    return LinkSpec(text=stripped, kind=kind, model=_nearest(kind, rate), lanes=1, rate_bytes_per_second=rate)


def split_multiple(text: str) -> tuple[int, str]:
    """Split `4 x HDR` into a count and a port.

    Args:
        text: Several ports, or one.

    Returns:
        The count, 1 without one, and the rest.
    """
    match = re.match(r"([0-9]{1,3}) *[x×*] *(?=[A-Za-z0-9])", text)
    return (int(match[1]), text[match.end() :]) if match else (1, text)


def parse_uplink_rate(text: str) -> float:
    """Parse the uplink of a switch to bytes per second: `800Gb/s`, `4 x HDR`, `2x 100GbE`.

    Args:
        text: The uplink.

    Raises:
        ValueError: The text is not a rate or a port.
    """
    count, rest = split_multiple(text.strip())
    rate = parse_network_link(
        rest, None if re.match(r"[A-Za-z]|.*bE$", rest.strip()) else "ethernet"
    ).rate_bytes_per_second
    if not count:
        raise ValueError(f"{_shown(text)}: 0 uplinks; leave `uplink` out")
    return count * rate


def _nearest(kind: LinkKind, rate: float) -> CatalogLink:
    """Find the catalogue entry of this rate, else the next slower, else the slowest."""
    known = _ports(kind)
    slower = [link for link in known if link.rate_bytes_per_second.value <= rate * 1.01]
    return slower[-1] if slower else known[0]


def _ports(kind: LinkKind) -> list[CatalogLink]:
    """List the network ports of a kind, slowest first."""
    ports = (link for link in hardware_catalog().links if link.kind == kind and kind in _KINDS.values())
    return sorted(ports, key=lambda link: link.rate_bytes_per_second.value)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
