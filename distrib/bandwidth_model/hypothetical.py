"""Hypothetical clusters: `--gpu`, `--network` and `--gpudirect` applied to a topology, or without one."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from distrib.bandwidth_model.fabric import HYPOTHETICAL
from distrib.bandwidth_model.training_cost import Price, parse_price
from distrib.cluster.hardware_catalog import find_gpu, find_named_network, gpu_hint, hardware_catalog
from distrib.cluster.link_spec import split_multiple
from distrib.cluster.node import Gpus, IntraNodeLinks, Nic, NodeGroup
from distrib.cluster.topology import Switch, Topology
from distrib.cluster.uplinks import switch_oversubscription
from distrib.errors import ConfigError

DEFAULT_GPUS_PER_HOST = 8
"""GPUs of a host that is not described."""

REFERENCE_NETWORKS = {
    "V100-SXM2": "4 x EDR",
    "A100-SXM4": "8 x HDR",
    "H100-SXM5": "8 x NDR",
    "H200": "8 x NDR",
    "B200": "8 x NDR",
}
"""Compute networks of DGX-1, DGX A100, DGX H100, DGX H200 and DGX B200, by the beginning of the GPU's name (NVIDIA's user guides)."""

_KIND = re.compile(r"(roce|infiniband|ib|ethernet)(?:v2)?(?:[ -]+|(?=[0-9])|$)", re.IGNORECASE)
_KIND_LAST = re.compile(r" +(roce|infiniband|ib|ethernet)(?:v2)?$", re.IGNORECASE)

_AMBIGUOUS = re.compile(r"[0-9.]+ *([kMGT]?(bit|b|B)([/p]s)?)?$")


class NetworkOption(msgspec.Struct, frozen=True, kw_only=True):
    """A network of `--network` and `--compare`: `100GbE`, `4 x HDR`, `RoCE 100Gb/s`, with `=PRICE` per host."""

    text: str
    nics: tuple[Nic, ...]
    price: Price | None = None


def reference_network(gpu: str) -> str | None:
    """Return the network of NVIDIA's own hosts with a GPU.

    Args:
        gpu: The catalogue's name of the GPU.

    Returns:
        A value of `--network`; None if NVIDIA sells no such host.
    """
    return next((network for prefix, network in REFERENCE_NETWORKS.items() if gpu.startswith(prefix)), None)


def parse_network_option(text: str, gpudirect: bool | None, option: str = "--network") -> NetworkOption:
    """Parse a network.

    Args:
        text: The value of the option.
        gpudirect: True or False to set GPUDirect RDMA, None to leave it open.
        option: The name of the option.

    Raises:
        ConfigError: The text is not a network.
    """
    name, priced, price = text.partition("=")
    name = name.strip()
    try:
        if priced and option != "--compare":
            raise ValueError("a price belongs to --compare")
        amount = parse_price(price) if priced else None
    except ValueError as error:
        raise ConfigError(f"{option} {text or repr(text)}: {error}") from None
    try:
        nic = _nic(name, gpudirect)
    except ValueError as error:
        what, hint = str(error), "write such as 25GbE, HDR, '4 x NDR' or 'RoCE 100Gb/s'"
        alike = [each for each in known_networks() if name.isalpha() and each.lower().startswith(name.lower())]
        if alike:
            hint = f"did you mean {', '.join(alike)}?"
        elif "is not a" in what:
            hint += f"; known are {', '.join(known_networks())}"
        raise ConfigError(f"{option} {text or repr(text)}: {what.partition(';')[0]}", hint=hint) from None
    return NetworkOption(text=name, nics=(nic,), price=amount)


def _nic(name: str, gpudirect: bool | None) -> Nic:
    count, rate = split_multiple(name)
    if not 1 <= count <= 64:
        raise ValueError(f"{count} NICs of a host, expected 1 to 64")
    if "sharp" in rate.lower():
        raise ValueError("reductions in switches (SHARP) are not modelled")
    if named := find_named_network(rate):
        return _nics(named.device, count if rate != name else named.nics, named.rate, named.kind, gpudirect)
    given = _KIND.match(rate) or _KIND_LAST.search(rate)
    kind = None
    if given:
        kind = {"roce": "RoCE", "ethernet": "Ethernet"}.get(given[1].lower(), "InfiniBand")
        rate = rate[: given.start()] + rate[given.end() :]
    if not rate:
        raise ValueError("the rate is missing")
    rate = re.sub(r"(?<=[0-9])( ?)gbe$", r"\1GbE", rate, flags=re.IGNORECASE)
    if re.fullmatch(r"[0-9.]+G?", rate) and kind:
        rate = rate.removesuffix("G") + "Gb/s"
    if _AMBIGUOUS.match(rate) and not kind:
        raise ValueError(f"{rate!r} is ambiguous")
    return _nics("nic", count, rate, kind, gpudirect)


def _nics(device: str, count: int, rate: str, kind: str | None, gpudirect: bool | None) -> Nic:
    name = f"{device}0" if count == 1 else f"{device}[0-{count - 1}]"
    return Nic(name=name, rate=rate, kind=kind, gpudirect=gpudirect)


def known_networks() -> tuple[str, ...]:
    """List the networks that have a name."""
    catalog = hardware_catalog()
    ports = [link.name for link in catalog.links if link.kind in ("infiniband", "ethernet")]
    return (*ports, *(network.name for network in catalog.named_networks))


def catalog_gpu_name(kind: str) -> str:
    """Look up the catalogue's name of a GPU.

    Args:
        kind: The value of `--gpu`.

    Raises:
        ConfigError: The GPU is not in the catalogue.
    """
    spec = find_gpu(kind)
    if spec is None:
        raise ConfigError(f"--gpu {kind or repr(kind)}: not in the catalogue", hint=gpu_hint(kind), code="gpu-unknown")
    return spec.name


def hypothetical_cluster(
    hosts: Sequence[str], ranks_per_node: int, gpu: str | None, network: NetworkOption | None
) -> Topology:
    """Build a cluster of equal hosts with one network that is not oversubscribed.

    Args:
        hosts: Host names.
        ranks_per_node: GPUs of each host.
        gpu: The catalogue's name; None for hosts without GPUs.
        network: The network; None for one host.
    """
    group = NodeGroup(
        hosts=",".join(f"[{host}]" if ":" in host else host for host in hosts),
        gpus=Gpus(count=ranks_per_node, kind=gpu) if gpu else None,
        links=_catalog_links(gpu) if gpu else None,
        nics=network.nics if network else (),
    )
    return Topology(nodes=(group,), name=HYPOTHETICAL, source="the options")


def _catalog_links(gpu: str) -> IntraNodeLinks | None:
    spec = find_gpu(gpu)
    if not spec or not (spec.nvlink or spec.pcie):
        return None
    return IntraNodeLinks(nvlink=spec.nvlink, nvswitch=bool(spec.nvlink), pcie=spec.pcie)


def check_gpudirect(topology: Topology) -> None:
    """Check that GPUDirect RDMA is possible on some host.

    Args:
        topology: The cluster.

    Raises:
        ConfigError: No host has GPUs and an RDMA NIC.
    """
    with_gpus = [group for group in topology.nodes if group.gpus and group.gpus.count]
    if all(nic.link.kind == "ethernet" for group in with_gpus for nic in group.nics):
        raise ConfigError(
            f"--gpudirect on: {topology.source} has no host with GPUs and an InfiniBand or RoCE NIC",
            hint="leave it out, or ask for another network, too: --network HDR",
            code="option-conflict",
        )


def _as_oversubscribed(topology: Topology, switch: Switch) -> Switch:
    ratio = switch_oversubscription(topology, switch)
    return msgspec.structs.replace(switch, uplink=None, oversubscription=f"{ratio:.6g}:1" if ratio > 1 else None)


def changed_cluster(
    topology: Topology, gpu: str | None, network: NetworkOption | None, gpudirect: bool | None
) -> Topology:
    """Change the GPUs, the network or GPUDirect RDMA of a cluster, and drop the measurements of what changed.

    Args:
        topology: The cluster.
        gpu: The new GPU; None to keep it.
        network: The new network; None to keep it.
        gpudirect: The new setting; None to keep it.

    Raises:
        ConfigError: The options contradict the topology.
    """
    groups = []
    staged = False
    for number, group in enumerate(topology.nodes):
        try:
            if gpu and group.gpus and group.gpus.count:
                gpus = Gpus(count=group.gpus.count, kind=gpu)
                group = msgspec.structs.replace(group, gpus=gpus, links=_catalog_links(gpu))
            if network:
                group = msgspec.structs.replace(group, nics=network.nics)
            elif gpudirect is not None and group.gpus and group.gpus.count:
                nics = tuple(
                    nic if nic.link.kind == "ethernet" else msgspec.structs.replace(nic, gpudirect=gpudirect)
                    for nic in group.nics
                )
                staged = staged or nics != group.nics
                group = msgspec.structs.replace(group, nics=nics)
        except ValueError as error:
            raise ConfigError(f"nodes[{number}] with these options: {error}") from None
        groups.append(group)
    measured = topology.measured
    if measured and (network or staged):
        measured = msgspec.structs.replace(measured, pairs=(), collectives=())
    if measured and gpu:
        inside = tuple(link for link in measured.inside if link.source == link.target == "memory")
        measured = msgspec.structs.replace(measured, inside=inside, collectives=())
    switches = topology.switches
    if network:  # the oversubscription stays
        switches = tuple(_as_oversubscribed(topology, switch) for switch in switches)
    return Topology(
        nodes=tuple(groups), name=topology.name, switches=switches, measured=measured, source=topology.source
    )
