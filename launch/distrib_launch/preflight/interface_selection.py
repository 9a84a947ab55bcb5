"""Network interface of each host for the job, and the variables that make every library use it. Pure.

Names of interfaces differ between hosts, and equal names may mislead: docker0 and virbr0 have the same address on every
host. So the choice is made by subnet: a subnet of all hosts, in which each host has an address that no other host has.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from distrib.cluster.inventory import Address, Interface, Inventory, RdmaPort, fastest_ports, total_rate
from distrib.cluster.node import name_hosts
from distrib.errors import ConfigError, PreflightError
from distrib_launch.rank_environment import socket_interface

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

KINDS_BY_PREFERENCE = (
    {"physical", "bond", "team", "vlan", "ipoib"},
    {"veth", "macvlan", "ipvlan", "unknown"},
    {"tun", "wireguard", "ipip", "gre", "vxlan", "geneve"},
    {"bridge", "openvswitch"},
    {"dummy"},
)
"""Kinds of interfaces, best first. Tunnels and bridges without a NIC may lead to the other hosts, but only if nothing better does."""


class NoNetworkError(PreflightError):
    """Error for hosts without a usable interface; `hosts` has the reason for each."""

    def __init__(self, hosts: Mapping[str, str], *, hint: str) -> None:
        super().__init__("\n".join(f"{host}: network: {reason}" for host, reason in hosts.items()), hint=hint)
        self.hosts = dict(hosts)


class HostNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """Chosen interface of one host, its address, and the variables of the host's ranks."""

    host: str
    interface: str
    address: str
    subnet: str
    mtu: int | None
    speed_bytes_per_second: float | None
    environment: dict[str, str]


class ClusterNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """Chosen network of all hosts: the shared subnet, None if there is none, and the reason of the choice."""

    subnet: str | None
    reason: str
    hosts: tuple[HostNetwork, ...]
    passed_over: tuple[str, ...]
    """Interfaces that were not chosen, with the reason for each."""
    notes: tuple[str, ...]

    def of(self, host: str) -> HostNetwork:
        """Return the network of one host.

        Args:
            host: Name of the host.
        """
        return next(choice for choice in self.hosts if choice.host == host)


class _Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """Interface of a host with one of its addresses."""

    host: str
    interface: Interface
    address: Address

    @property
    def subnet(self) -> Network:
        return self.address.network

    @property
    def merit(self) -> tuple[int, float, bool]:
        """Sort key: InfiniBand first; then the kind of interface, its speed, and RDMA, which slow onboard NICs may have too."""
        kind = "physical" if self.interface.is_bridged_card else self.interface.kind
        place = next(
            (n for n, kinds in enumerate(KINDS_BY_PREFERENCE) if kind in kinds), 2
        )  # other kinds count as tunnels
        return (
            1 if self.interface.infiniband else -place,
            self.interface.speed_bytes_per_second or 0.0,
            bool(self.interface.rdma),
        )

    def __str__(self) -> str:
        return f"{self.interface.name} ({self.address})"


def choose_network(
    inventories: Mapping[str, Inventory],
    *,
    wanted: str | None = None,
    reached_at: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    failed: Mapping[str, str] | None = None,
) -> ClusterNetwork:
    """Choose the interface of each host.

    Args:
        inventories: Inventories by host.
        wanted: Value of `--interface`: names or networks, separated by commas.
        reached_at: Address of each host at which the launcher reached it, if known.
        environ: Variables that the user has set; they are not changed.
        failed: Addresses that do not lead to their host, each with the reason.

    Raises:
        NoNetworkError: Some hosts have no interface to the others, or none of those wanted.
    """
    reached_at = reached_at or {}
    usable, doubles = _candidates(inventories)
    if wanted:
        usable = _only_wanted(usable, inventories, doubles, wanted)
    failed = failed or {}
    shut = {c: failed[str(c.address.ip)] for c in usable if str(c.address.ip) in failed}
    shared, _ = _best_subnet(usable, inventories, reached_at)
    usable = [c for c in usable if c not in shut]
    subnet, why = _best_subnet(usable, inventories, reached_at)
    if shared and not subnet:  # without a shared subnet, a host might choose a bridge that reaches no other host
        raise NoNetworkError(
            {c.host: f"{c}: {why}" for c, why in shut.items()},
            hint="name a network that leads to every host with --interface",
        )
    if subnet is not None:
        chosen = {host: _best([c for c in usable if c.host == host and c.subnet == subnet]) for host in inventories}
    else:
        chosen = {host: _reached(host, [c for c in usable if c.host == host], reached_at) for host in inventories}
        why = "the hosts share no subnet: each uses the address at which ssh reached it"
    taken = {host: choice for host, choice in chosen.items() if choice}
    if missing := [host for host in inventories if host not in taken]:
        raise NoNetworkError(
            {host: f"no interface leads to the others; {_has(inventories[host])}" for host in missing},
            hint="bring one up, or name a network that every host is in with --interface NETWORK/BITS",
        )
    notes: list[str] = []
    rdma = _rdma_choice(inventories, notes)
    hosts = tuple(
        HostNetwork(
            host=host,
            interface=choice.interface.name,
            address=str(choice.address.ip),
            subnet=str(choice.subnet),
            mtu=choice.interface.mtu,
            speed_bytes_per_second=choice.interface.speed_bytes_per_second,
            environment=_environment(choice, inventories[host].ports, subnet, rdma, environ or {}, notes),
        )
        for host, choice in taken.items()
    )
    return ClusterNetwork(
        subnet=str(subnet) if subnet else None,
        reason="chosen with --interface" if wanted else why,
        hosts=hosts,
        passed_over=(
            *(f"{what}: the same address on {hosts_of}" for what, hosts_of in doubles.items()),
            *(f"{c.host}'s {c}: {reason}" for c, reason in shut.items()),
        ),
        notes=tuple(dict.fromkeys(notes)),
    )


def _candidates(inventories: Mapping[str, Inventory]) -> tuple[list[_Candidate], dict[str, str]]:
    """Return interfaces that are up with an address of their host only, and those whose address several hosts have."""
    found: list[_Candidate] = []
    owners: dict[str, dict[str, str]] = {}
    for host, inventory in inventories.items():
        for interface in inventory.interfaces:
            if interface.up and interface.kind != "loopback":
                for address in interface.routable_addresses():
                    found.append(_Candidate(host=host, interface=interface, address=address))
                    owners.setdefault(str(address.ip), {})[inventory.network_identity] = host
    doubles = {
        str(c): ", ".join(owners[str(c.address.ip)].values()) for c in found if len(owners[str(c.address.ip)]) > 1
    }
    return [c for c in found if len(owners[str(c.address.ip)]) == 1], doubles


def parse_interface(wanted: str) -> tuple[set[str], list[Network]]:
    """Return the names and the networks of `--interface`.

    Args:
        wanted: Value of the option.

    Raises:
        ConfigError: An item looks like a network and is not valid.
    """
    names: set[str] = set()
    networks: list[Network] = []
    for item in (part.strip() for part in wanted.split(",")):
        if "/" in item or re.fullmatch(r"[\d.]+|[\da-fA-F:]*:[\da-fA-F:]*", item):
            try:
                networks.append(ipaddress.ip_network(item, strict=False))
            except ValueError:
                raise ConfigError(
                    f"--interface {item}: not a valid network",
                    hint="write one as 10.0.0.0/16, or the name of an interface",
                ) from None
        elif item:
            names.add(item)
    return names, networks


def _only_wanted(
    usable: Sequence[_Candidate], inventories: Mapping[str, Inventory], doubles: Mapping[str, str], wanted: str
) -> list[_Candidate]:
    names, networks = parse_interface(wanted)
    left = [c for c in usable if c.interface.name in names or any(_within(c.address, net) for net in networks)]
    lacking = [host for host in inventories if not any(c.host == host for c in left)]
    if lacking:
        reasons = {}
        for host in lacking:
            double = next((f"{what} is on {who} too" for what, who in doubles.items() if what.split()[0] in names), "")
            reasons[host] = f"no usable interface {wanted}; {double or _has(inventories[host])}"
        raise NoNetworkError(reasons, hint="where names differ, give several, or a network: --interface 10.0.0.0/16")
    return left


def _within(address: Address, network: Network) -> bool:
    return address.version == network.version and address.ip in network


def _has(inventory: Inventory) -> str:
    found = []
    for interface in inventory.interfaces:
        if interface.kind != "loopback" and (interface.addresses or interface.up):
            addresses = " ".join(str(a) for a in interface.routable_addresses()) or "no address"
            found.append(f"{interface.name} ({addresses}{'' if interface.up else ', down'})")
    return "it has " + (", ".join(found) or "none but loopback")


def _best_subnet(
    usable: Iterable[_Candidate], inventories: Mapping[str, Inventory], reached_at: Mapping[str, str]
) -> tuple[Network | None, str]:
    """Return the best subnet of all hosts, and the reason. The slowest member determines its rank: all ranks wait for it."""
    members: dict[Network, dict[str, list[_Candidate]]] = {}
    for candidate in usable:
        members.setdefault(candidate.subnet, {}).setdefault(candidate.host, []).append(candidate)
    shared = {subnet: hosts for subnet, hosts in members.items() if len(hosts) == len(inventories)}
    if not shared:
        return None, ""

    def merit(subnet: Network) -> tuple[tuple[int, float, bool], int, bool]:
        bests = [max(c.merit for c in candidates) for candidates in shared[subnet].values()]
        reached = sum(
            any(str(c.address.ip) == reached_at.get(host) for c in candidates)
            for host, candidates in shared[subnet].items()
        )
        return min(bests), reached, subnet.version == 4

    best = max(shared, key=merit)
    others = [str(subnet) for subnet in shared if subnet != best]
    why = f"every host is in {best}"
    return best, why + (f"; preferred to {', '.join(others)}" if others else "")


def _best(candidates: Sequence[_Candidate]) -> _Candidate | None:
    return max(candidates, key=lambda c: c.merit, default=None)


def _reached(host: str, candidates: Sequence[_Candidate], reached_at: Mapping[str, str]) -> _Candidate | None:
    return next((c for c in candidates if str(c.address.ip) == reached_at.get(host)), None) or _best(candidates)


# -- RDMA -------------------------------------------------------------------------------------------------------------


def _rdma_choice(inventories: Mapping[str, Inventory], notes: list[str]) -> dict[str, tuple[RdmaPort, ...]] | None:
    """Return the RDMA ports of each host: all ports of the fastest kind that every host has. None if no host has any.

    A host with a NIC for each GPU needs all of them. Slower ports and those of another link layer are for storage or management, and NCCL
    cannot connect them.
    """
    active = {host: [port for port in inventory.rdma if port.active] for host, inventory in inventories.items()}
    if not any(active.values()):
        return None
    active = _reachable_ports(active, inventories, notes)
    without = [host for host, ports in active.items() if not ports]
    if without:
        notes.append(f"{name_hosts(without)}: no active InfiniBand or RoCE port, so all hosts use TCP")
        return dict.fromkeys(inventories, ())
    fastest = {
        layer: [fastest_ports(port for port in ports if port.link_layer == layer) for ports in active.values()]
        for layer in sorted({port.link_layer for ports in active.values() for port in ports}, reverse=True)
    }
    everywhere = {layer: chosen for layer, chosen in fastest.items() if all(chosen)}
    layer = max(everywhere, key=lambda layer: min(map(total_rate, everywhere[layer])), default=None)
    if layer is None:
        notes.append("some hosts have InfiniBand and others RoCE: neither is used, because NCCL cannot mix them")
        return dict.fromkeys(inventories, ())
    return dict(zip(active, everywhere[layer], strict=True))


def _reachable_ports(
    active: Mapping[str, list[RdmaPort]], inventories: Mapping[str, Inventory], notes: list[str]
) -> dict[str, list[RdmaPort]]:
    """Return the ports without RoCE ports that have no address, or are outside the networks of all hosts while others are inside.

    NCCL would connect the first port of one host with the first of another, and time out.
    """
    networks: dict[tuple[str, str, int], set[Network]] = {}
    for host, ports in active.items():
        interfaces = {each.name: each for each in inventories[host].interfaces}
        for port in ports:
            names = port.netdevs or tuple(each.name for each in interfaces.values() if port.device in each.rdma)
            known = [interfaces[name] for name in names if name in interfaces]
            if port.link_layer == "Ethernet" and known:
                up = (each for each in known if each.up)
                networks[host, port.device, port.port] = {a.network for each in up for a in each.routable_addresses()}
    of_hosts = Counter(network for _, network in {(host, n) for (host, _, _), found in networks.items() for n in found})
    shared = {network for network, count in of_hosts.items() if count == len(active)}
    left: dict[str, list[RdmaPort]] = {}
    for host, ports in active.items():
        left[host] = []
        for port in ports:
            found = networks.get((host, port.device, port.port))
            if found is None or found & (shared or found):
                left[host].append(port)
            else:
                why = "in no network of all hosts" if found else "without an address"
                notes.append(f"{port.device}:{port.port} of {host} is not used: its interface is {why}")
    return left


# -- variables --------------------------------------------------------------------------------------------------------


def _environment(
    choice: _Candidate,
    ports: tuple[int, int] | None,
    subnet: Network | None,
    rdma: Mapping[str, tuple[RdmaPort, ...]] | None,
    environ: Mapping[str, str],
    notes: list[str],
) -> dict[str, str]:
    """Return the variables of one host's ranks that select its network, without those that the user has set."""
    name = choice.interface.name
    hcas = [f"{port.device}:{port.port}" for port in (rdma or {}).get(choice.host, ())]
    chosen = {
        **socket_interface(name),
        "NCCL_SOCKET_FAMILY": "AF_INET" if choice.address.version == 4 else "AF_INET6",
        # Open MPI accepts only IPv4 subnets.
        "OMPI_MCA_btl_tcp_if_include": str(subnet) if subnet and subnet.version == 4 else name,
        # Open MPI uses all addresses of an interface in the subnet; those of the other family may not reach any host.
        "OMPI_MCA_btl_tcp_disable_family": "6" if choice.address.version == 4 else "4",
        "UCX_NET_DEVICES": ",".join([*hcas, name]),
    }
    if hcas:
        chosen["NCCL_IB_HCA"] = "=" + ",".join(hcas)
    elif rdma is not None:
        chosen["NCCL_IB_DISABLE"] = "1"
    if ports:  # a firewall may open only the kernel's range of free ports, and Open MPI would begin at port 1024
        first, last = ports
        chosen[f"OMPI_MCA_btl_tcp_port_min_v{choice.address.version}"] = str(first)
        chosen[f"OMPI_MCA_btl_tcp_port_range_v{choice.address.version}"] = str(last - first + 1)
    if "OMPI_MCA_btl_tcp_if_exclude" in environ:  # Open MPI refuses both together
        del chosen["OMPI_MCA_btl_tcp_if_include"]
    for variable in list(chosen):
        if (own := environ.get(variable)) is not None:
            ours = chosen.pop(variable)
            kept = f"{variable}={own} of the user is kept"
            if own not in (ours, ours.lstrip("=")) and not any(note.startswith(kept) for note in notes):
                notes.append(f"{kept}; distrib would set {ours} on {choice.host}")
    return chosen


def engine_environment(network: ClusterNetwork, here: Inventory, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep PRRTE's own messages on the chosen network; none if this machine is not in it.

    PRRTE's daemons get the launcher's value on every host, where interfaces may have other names; so the value is a subnet. PRRTE does not
    accept IPv6 subnets: then it gets the name of the interface if all hosts have the same, else nothing.

    Args:
        network: Network of the hosts.
        here: Inventory of this machine.
        environ: Environment of the launcher; settings of the user remain.
    """
    if network.subnet is None or any(
        name.startswith(("PRTE_MCA_prte_if_", "PRTE_MCA_oob_tcp_if_")) for name in environ
    ):
        return {}
    subnet = ipaddress.ip_network(network.subnet)
    inside = {
        i.name for i in here.interfaces if i.up and any(_within(address, subnet) for address in i.routable_addresses())
    }
    if not inside:
        return {}
    if subnet.version == 4:
        # The daemons would also use the IPv6 addresses of an interface in the subnet.
        return {"PRTE_MCA_prte_if_include": network.subnet, "PRTE_MCA_oob_tcp_disable_ipv6_family": "1"}
    names = {host.interface for host in network.hosts} | inside
    return {"PRTE_MCA_prte_if_include": names.pop()} if len(names) == 1 else {}
