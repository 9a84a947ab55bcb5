"""Selection of the network interface to the other hosts from their inventories."""

from __future__ import annotations

import ipaddress
import json
import shlex
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.cluster.inventory import Interface, RdmaPort
from distrib.cluster.remote import network_inventory
from distrib.errors import ConfigError
from distrib_launch.preflight.interface_selection import NoNetworkError, choose_network, engine_environment
from tests.conftest import ROOT
from tests.support.inventories import interface, inventory

DOCKER = interface("docker0", "172.17.0.1/16", kind="bridge")
VIRBR = interface("virbr0", "192.168.122.1/24", kind="bridge")
LOOPBACK = interface("lo", "127.0.0.1/8", kind="loopback")


def cluster(*hosts: tuple[Interface, ...]):
    return {f"n{i}": inventory(f"n{i}", interfaces=(LOOPBACK, *cards)) for i, cards in enumerate(hosts, 1)}


def chosen(network):
    return {choice.host: (choice.interface, choice.address) for choice in network.hosts}


def test_the_subnet_that_all_share_is_taken_whatever_the_cards_are_called():
    network = choose_network(
        cluster(
            (DOCKER, interface("eth0", "10.0.0.1/24")),
            (DOCKER, VIRBR, interface("ens5", "10.0.0.2/24")),
            (interface("enp3s0f0", "10.0.0.3/24"), DOCKER, VIRBR),
        )
    )
    assert chosen(network) == {"n1": ("eth0", "10.0.0.1"), "n2": ("ens5", "10.0.0.2"), "n3": ("enp3s0f0", "10.0.0.3")}
    assert network.subnet == "10.0.0.0/24"
    assert any("docker0 (172.17.0.1/16): the same address on" in line for line in network.passed_over)


def test_a_bridge_is_taken_where_it_is_the_only_way():
    network = choose_network(
        cluster((interface("br0", "10.0.0.1/24", kind="bridge"), DOCKER), (interface("eth0", "10.0.0.2/24"), DOCKER))
    )
    assert chosen(network) == {"n1": ("br0", "10.0.0.1"), "n2": ("eth0", "10.0.0.2")}


def test_the_faster_network_is_preferred_and_rdma_to_all():
    slow, fast = ("eth0", 1.25e8), ("eth1", 12.5e8)
    hosts = cluster(
        *(
            tuple(interface(name, f"10.{n}.0.{i}/24", speed=speed) for n, (name, speed) in enumerate((slow, fast)))
            for i in (1, 2)
        )
    )
    assert chosen(choose_network(hosts))["n1"] == ("eth1", "10.1.0.1")
    hosts = {
        name: inventory(
            name,
            interfaces=(*facts.interfaces, interface("ib0", f"10.9.0.{i}/24", rdma=("mlx5_0",), infiniband=True)),
        )
        for i, (name, facts) in enumerate(hosts.items(), 1)
    }
    assert chosen(choose_network(hosts))["n2"] == ("ib0", "10.9.0.2")


def test_a_slow_card_with_rdma_is_not_preferred_to_a_fast_bond():
    hosts = cluster(
        *(
            (
                interface("eno1", f"10.0.0.{i}/24", speed=1.25e9, rdma=("bnxt_re0",)),
                interface("bond0", f"10.1.0.{i}/24", kind="bond", speed=25e9),
                interface("eth5", f"10.2.0.{i}/24", speed=12.5e9, rdma=("mlx5_0",)),
                interface("eth6", f"10.3.0.{i}/24", speed=12.5e9),
            )
            for i in (1, 2)
        )
    )
    assert chosen(choose_network(hosts))["n1"] == ("bond0", "10.1.0.1")
    without = {
        name: inventory(name, interfaces=tuple(one for one in facts.interfaces if one.name != "bond0"))
        for name, facts in hosts.items()
    }
    assert chosen(choose_network(without))["n1"] == ("eth5", "10.2.0.1")


def test_interfaces_that_are_down_or_only_local_are_no_candidates():
    with pytest.raises(NoNetworkError, match=r"n2: network: .*down"):
        choose_network(
            cluster(
                (interface("eth0", "10.0.0.1/24"),),
                (interface("eth0", "10.0.0.2/24", up=False), interface("usb0", "169.254.0.2/16")),
            )
        )


def test_hosts_of_routed_subnets_are_taken_at_the_address_that_ssh_reached():
    network = choose_network(
        cluster(
            (interface("eth0", "10.0.1.1/24"), interface("eth1", "192.168.7.1/24")),
            (interface("eth0", "192.168.8.1/24"), interface("eth1", "10.0.2.1/24")),
        ),
        reached_at={"n1": "10.0.1.1", "n2": "10.0.2.1"},
    )
    assert chosen(network) == {"n1": ("eth0", "10.0.1.1"), "n2": ("eth1", "10.0.2.1")}
    assert network.subnet is None
    assert network.hosts[0].environment["OMPI_MCA_btl_tcp_if_include"] == "eth0"


def test_variables_for_every_library():
    network = choose_network(cluster((interface("eth0", "10.0.0.1/24"),), (interface("ens5", "10.0.0.2/24"),)))
    assert network.of("n2").environment == {
        "GLOO_SOCKET_IFNAME": "ens5",
        "NCCL_SOCKET_IFNAME": "=ens5",
        "NCCL_SOCKET_FAMILY": "AF_INET",
        "OMPI_MCA_btl_tcp_if_include": "10.0.0.0/24",
        "OMPI_MCA_btl_tcp_disable_family": "6",
        "OMPI_MCA_btl_tcp_port_min_v4": "32768",
        "OMPI_MCA_btl_tcp_port_range_v4": "28232",
        "UCX_NET_DEVICES": "ens5",
    }


def test_what_the_user_set_is_left_alone_and_a_difference_is_said():
    hosts = cluster((interface("eth0", "10.0.0.1/24"),), (interface("eth0", "10.0.0.2/24"),))
    network = choose_network(hosts, environ={"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0"})
    environment = network.of("n1").environment
    assert "NCCL_SOCKET_IFNAME" not in environment and "GLOO_SOCKET_IFNAME" not in environment
    assert [note.partition(";")[0] for note in network.notes] == [
        "NCCL_SOCKET_IFNAME=ib0 of the user is kept",
    ]
    without = choose_network(hosts, environ={"OMPI_MCA_btl_tcp_if_exclude": "lo"}).of("n1").environment
    assert "OMPI_MCA_btl_tcp_if_include" not in without


@pytest.mark.parametrize("wanted", ["10.7.0.0/16", "eth1,ens6", "10.7.0.1,10.7.0.2"])
def test_the_user_names_interfaces_or_networks(wanted):
    hosts = cluster(
        (interface("eth0", "10.0.0.1/24", speed=1e9), interface("eth1", "10.7.0.1/24")),
        (interface("eth0", "10.0.0.2/24", speed=1e9), interface("ens6", "10.7.0.2/24")),
    )
    assert chosen(choose_network(hosts, wanted=wanted)) == {"n1": ("eth1", "10.7.0.1"), "n2": ("ens6", "10.7.0.2")}


def test_a_host_without_the_wanted_interface_is_named_with_what_it_has():
    hosts = cluster((interface("eth0", "10.0.0.1/24"), DOCKER), (interface("ens5", "10.0.0.2/24"), DOCKER))
    with pytest.raises(NoNetworkError) as caught:
        choose_network(hosts, wanted="eth0")
    assert list(caught.value.hosts) == ["n2"]
    assert "it has ens5 (10.0.0.2/24)" in str(caught.value)
    with pytest.raises(NoNetworkError, match="is on n1, n2 too"):
        choose_network(hosts, wanted="docker0")
    with pytest.raises(ConfigError, match="not a valid network"):
        choose_network(hosts, wanted="10.0.0.0/99")


def port(device: str, rate: float, layer: str = "InfiniBand", active: bool = True) -> RdmaPort:
    return RdmaPort(device=device, port=1, link_layer=layer, active=active, rate_bytes_per_second=rate)


def test_all_of_the_fastest_rdma_ports_are_used_and_others_not():
    ports = (
        port("mlx5_0", 25e9),
        port("mlx5_1", 25e9),
        port("mlx5_2", 3e9, "Ethernet"),
        port("mlx5_3", 25e9, active=False),
    )
    hosts = {
        n: inventory(n, interfaces=(interface("ib0", f"10.0.0.{i}/24"),), rdma=ports) for i, n in enumerate("ab", 1)
    }
    environment = choose_network(hosts).of("a").environment
    assert environment["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
    assert environment["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:1,ib0"


def test_the_kind_of_ports_that_carries_most_is_used():
    """A host has eight RoCE ports for the GPUs and one InfiniBand port for storage."""
    ports = (*(port(f"mlx5_{n}", 50e9, "Ethernet") for n in range(8)), port("mlx5_8", 12.5e9))
    hosts = {
        n: inventory(n, interfaces=(interface("eth0", f"10.0.0.{i}/24"),), rdma=ports) for i, n in enumerate("ab", 1)
    }
    chosen = choose_network(hosts).of("b").environment["NCCL_IB_HCA"]
    assert chosen == "=" + ",".join(f"mlx5_{n}:1" for n in range(8))


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (lambda i: interface("ens2", rdma=("mlx5_1",)), "without an address"),
        (lambda i: interface("ens2", f"10.9.{i}.1/24", rdma=("mlx5_1",)), "in no network of all hosts"),
        (lambda i: interface("ens2", f"10.1.0.{i}/24", rdma=("mlx5_1",), up=False), "without an address"),
        (lambda i: interface("ens2", f"10.1.0.{i}/24", rdma=("mlx5_1",)), ""),
    ],
)
def test_ports_of_roce_that_lead_nowhere_are_left(second, why):
    """NCCL would connect these ports with those of other hosts, and hang."""
    ports = tuple(port(f"mlx5_{n}", 25e9, "Ethernet") for n in range(2))
    hosts = {
        n: inventory(n, interfaces=(interface("ens1", f"10.0.0.{i}/24", rdma=("mlx5_0",)), second(i)), rdma=ports)
        for i, n in enumerate("ab", 1)
    }
    network = choose_network(hosts)
    left = ("mlx5_0:1",) if why else ("mlx5_0:1", "mlx5_1:1")
    assert network.of("b").environment["NCCL_IB_HCA"] == "=" + ",".join(left)
    told = [f"mlx5_1:1 of {host} is not used: its interface is {why}" for host in "ab"] if why else []
    assert [note for note in network.notes if "mlx5_1" in note] == told
    # Only the bond interface of a bond has an address.
    bonded = (interface("ens2", rdma=("mlx5_1",)), interface("bond0", "10.2.0.1/24", kind="bond"))
    both = tuple(
        msgspec.structs.replace(one, netdevs=("ens2", "bond0") if one.device == "mlx5_1" else ()) for one in ports
    )
    hosts = {
        n: inventory(n, interfaces=(interface("ens1", f"10.0.0.{i}/24", rdma=("mlx5_0",)), bonded[0],
                     interface("bond0", f"10.2.0.{i}/24", kind="bond")), rdma=both)
        for i, n in enumerate("ab", 1)
    }  # fmt: skip
    assert choose_network(hosts).of("a").environment["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"


@pytest.mark.parametrize("storage", [False, True])
def test_routed_rails_are_used_if_no_port_is_in_a_network_of_all_hosts(storage):
    ports = (*(port(f"mlx5_{n}", 50e9, "Ethernet") for n in range(2)), *[port("mlx5_9", 25e9, "Ethernet")] * storage)

    def cards(host):
        return (
            interface("eth0", f"10.0.0.{host}/24"),
            interface("ens9", f"10.99.0.{host}/24", rdma=("mlx5_9",)),
            *(interface(f"ens{n}", f"10.{n + 1}.{host}.0/31", rdma=(f"mlx5_{n}",)) for n in range(2)),
        )

    hosts = {f"n{i}": inventory(f"n{i}", interfaces=cards(i), rdma=ports) for i in (1, 2, 3)}
    used = choose_network(hosts).of("n3").environment["NCCL_IB_HCA"]
    assert used == ("=mlx5_9:1" if storage else "=mlx5_0:1,mlx5_1:1")


@pytest.mark.parametrize(("cards", "taken"), [(("ens1",), "br0"), ((), "eno1")])
def test_a_bridge_that_a_fast_card_is_in_goes_by_that_card(cards, taken):
    """Hosts of virtual machines have their address on the bridge. A bridge without a NIC is local."""

    def host(i):
        return (
            interface("eno1", f"10.0.0.{i}/24", speed=1.25e8),
            interface("br0", f"10.1.0.{i}/24", kind="bridge", speed=3.1e9, cards=cards),
        )

    plain = (interface("eno1", "10.0.0.3/24", speed=1.25e8), interface("ens1", "10.1.0.3/24", speed=3.1e9))
    assert chosen(choose_network(cluster(host(1), host(2), plain)))["n1"][0] == taken


INTERFACES = """
import json, socket, sys
sys.path[:0] = [sys.argv[1]]
from distrib.cluster.remote import network_inventory
asked = []
nics_below = network_inventory.nics_below
network_inventory.nics_below = lambda *words: asked.append(words) or nics_below(*words)
cards = {each["name"]: each["cards"] for each in network_inventory.read_interfaces()}
names = dict(socket.if_nameindex())
print(json.dumps([cards, {names[upper]: [names[one] for one in lower] for upper, lower in asked[0][2].items()}]))
"""


@pytest.mark.cluster
def test_what_is_in_a_bridge_is_known(tmp_path):
    commands = "ip link add p0 type veth peer name p1; ip link add br0 type bridge; ip link set p0 master br0"
    (tmp_path / "ask.py").write_text(INTERFACES)
    ask = shlex.join([sys.executable, str(tmp_path / "ask.py"), str(ROOT)])
    done = subprocess.run(
        ["unshare", "--net", "sh", "-ec", f"{commands}; {ask}"], capture_output=True, text=True, check=True
    )
    cards, below = json.loads(done.stdout)
    assert below == {"br0": ["p0"]}
    assert "br0" in cards
    assert set(map(tuple, cards.values())) == {()}  # none contains a NIC


def test_the_cards_behind_a_bridge_a_bond_or_a_vlan():
    kinds = {1: "physical", 2: "physical", 3: "bond", 4: "vlan", 5: "bridge", 6: "tun", 7: "bridge", 8: "vxlan"}
    below = {3: [1, 2], 4: [3], 5: [4, 6], 7: [6, 8], 8: [1]}
    found = {index: sorted(network_inventory.nics_below(index, kinds, below)) for index in kinds}
    assert found == {1: [], 2: [], 3: [1, 2], 4: [1, 2], 5: [1, 2], 6: [], 7: [], 8: []}


def test_rdma_is_left_where_not_every_host_has_it():
    hosts = {
        "a": inventory("a", interfaces=(interface("eth0", "10.0.0.1/24"),), rdma=(port("mlx5_0", 25e9),)),
        "b": inventory("b", interfaces=(interface("eth0", "10.0.0.2/24"),)),
    }
    network = choose_network(hosts)
    assert all(choice.environment["NCCL_IB_DISABLE"] == "1" for choice in network.hosts)
    assert network.notes == ("b: no active InfiniBand or RoCE port, so all hosts use TCP",)


def test_the_engine_keeps_to_the_network_where_this_machine_is_in_it():
    network = choose_network(cluster((interface("eth0", "10.0.0.1/24"),), (interface("eth0", "10.0.0.2/24"),)))
    member = inventory("login", interfaces=(interface("eno1", "10.0.0.9/24"),))
    stranger = inventory("login", interfaces=(interface("eno1", "10.5.0.9/24"),))
    assert engine_environment(network, member, {}) == {
        "PRTE_MCA_prte_if_include": "10.0.0.0/24",
        "PRTE_MCA_oob_tcp_disable_ipv6_family": "1",
    }
    assert engine_environment(network, member, {"PRTE_MCA_prte_if_include": "eno1"}) == {}
    assert engine_environment(network, stranger, {}) == {}


NAMES = st.sampled_from(["eth0", "eth1", "ens5", "enp1s0", "bond0", "br0"])


@given(st.data())
def test_decoys_are_never_taken(data):
    """A bridge that has the same address on every host is not selected, in any order and number."""
    hosts = {}
    for i in range(1, data.draw(st.integers(2, 6)) + 1):
        real = interface(
            data.draw(NAMES), f"10.0.0.{i}/24", kind=data.draw(st.sampled_from(["physical", "veth", "bridge"]))
        )
        decoys = [
            interface(f"br-{n}", f"172.{n}.0.1/16", kind=data.draw(st.sampled_from(["bridge", "physical"])), speed=1e11)
            for n in range(17, 17 + data.draw(st.integers(1 if i < 3 else 0, 3)))
        ]
        cards = data.draw(st.permutations([LOOPBACK, real, *decoys]))
        hosts[f"n{i}"] = inventory(f"n{i}", interfaces=tuple(cards))
    # A single bridge on its own subnet is not such a bridge: at least two hosts have each of those.
    network = choose_network(hosts)
    assert network.subnet == "10.0.0.0/24"
    assert all(ipaddress.ip_address(choice.address) in ipaddress.ip_network("10.0.0.0/24") for choice in network.hosts)


def test_subnets_of_ipv6_are_told_by_the_names_of_cards():
    """Neither Open MPI nor PRRTE parses an IPv6 subnet. An unknown interface name makes PRRTE exit."""
    network = choose_network(cluster((interface("eth0", "fd00::1/64"),), (interface("eth0", "fd00::2/64"),)))
    environment = network.of("n1").environment
    assert (environment["OMPI_MCA_btl_tcp_if_include"], environment["NCCL_SOCKET_FAMILY"]) == ("eth0", "AF_INET6")
    member = inventory("login", interfaces=(interface("eth0", "fd00::9/64"),))
    assert engine_environment(network, member, {}) == {"PRTE_MCA_prte_if_include": "eth0"}
    stranger = inventory("login", interfaces=(interface("eth0", "10.0.0.9/24"), interface("eth1", "fd00::9/64")))
    assert engine_environment(network, stranger, {}) == {}  # its eth0 is on another network
    other = choose_network(cluster((interface("eth0", "fd00::1/64"),), (interface("ens5", "fd00::2/64"),)))
    assert engine_environment(other, member, {}) == {}
