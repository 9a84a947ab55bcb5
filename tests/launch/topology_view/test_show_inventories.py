"""`distrib-topo show --ask`: inventories of hosts, displayed and drafted as a topology file."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from distrib.cluster.inventory import Inventory, RdmaPort
from distrib.cluster.remote import sysfs
from distrib.cluster.topology import parse_topology, read_topology
from distrib.cluster.topology_draft import draft_groups, topology_yaml
from distrib.errors import TopologyError
from distrib_launch.cli import show as show_command
from distrib_launch.cli import topo
from tests.conftest import TOPO
from tests.support.inventories import GIB, gpus, interface, inventory


def show(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(TOPO), "show", *map(str, words)], capture_output=True, text=True, timeout=200, cwd=cwd)


def port(number: int, *, layer: str = "InfiniBand", rate: float = 25e9, active: bool = True) -> RdmaPort:
    return RdmaPort(
        device=f"mlx5_{number}", port=1, link_layer=layer, active=active, rate_bytes_per_second=rate,
        numa_node=number // 4, pcie="PCIe4 x16",
    )  # fmt: skip


def dgx(name: str, memory: int = 2015 * GIB, **facts: object) -> Inventory:
    """Return the facts of a DGX: eight A100 on NVSwitch and eight HDR ports."""
    inside = [
        msgspec.structs.replace(g, numa_node=g.index // 4, pcie="PCIe4 x16", nvlink_to=("switch",) * 12)
        for g in gpus(8)
    ]
    return inventory(
        name,
        **{
            "gpus": tuple(inside), "cores": 128, "sockets": 2, "numa": {"0": "0-63", "1": "64-127"}, "memory_bytes": memory,
            "gpudirect": True, "rdma": tuple(map(port, range(8))),
            "interfaces": (
                interface("eth0", "10.0.0.1/24", speed=1.25e9), interface("docker0", "172.17.0.1/16", kind="bridge", speed=1e9),
                interface("ib0", "10.1.0.1/24", infiniband=True, speed=25e9, rdma=("mlx5_0",)),
                interface("eth1", "10.2.0.1/24", speed=1.25e9, up=False), interface("eth2", speed=1.25e9),
            ),
            **facts,
        },
    )  # fmt: skip


def test_hosts_that_are_alike_are_described_together():
    hosts = {"dgx1": dgx("dgx1"), "login": inventory("login"), "dgx2": dgx("dgx2", 2010 * GIB)}
    drafted = topology_yaml(draft_groups(hosts))
    first, second = parse_topology(drafted, "draft").nodes
    assert (first.hosts, second.hosts) == ("dgx[1-2]", "login")
    assert (first.sockets, first.cores, first.memory_bytes) == (2, 128, 2015 * GIB)
    assert first.gpus and (first.gpus.count, first.gpus.kind, first.gpus.memory) == (8, "A100-SXM4-80GB", None)
    assert first.links and (first.links.nvlink, first.links.nvswitch, first.links.pcie) == (
        "NVLink3 x12",
        True,
        "PCIe4 x16",
    )
    assert [(numa.gpus, numa.cpus) for numa in first.numa] == [("0-3", "0-63"), ("4-7", "64-127")]
    assert [(nic.name, nic.kind, nic.rate, nic.gpudirect, nic.gpus, nic.numa) for nic in first.nics] == [
        ("mlx5_[0-3]", "InfiniBand", "200 Gb/s", True, "0-3", 0), ("mlx5_[4-7]", "InfiniBand", "200 Gb/s", True, "4-7", 1),
        ("eth0", "Ethernet", "10 Gb/s", None, None, None),
    ]  # fmt: skip
    assert second.memory == "64GiB" and second.gpus is None and second.nics == ()
    split = draft_groups({"dgx1": dgx("dgx1"), "dgx2": dgx("dgx2", 1007 * GIB), "dgx3": dgx("dgx3", gpudirect=False)})
    assert [group.hosts for group in split] == ["dgx1", "dgx2", "dgx3"]
    assert "gpudirect: false" in topology_yaml(split[2:])


def test_nvlinks_that_lead_to_other_gpus_are_pairs():
    def volta(index: int) -> tuple[str, ...]:
        return tuple(f"0000:{other:02x}:00.0" for other in range(4) if other != index for _ in range(2))

    cards = [
        msgspec.structs.replace(g, nvlink_to=volta(g.index), pcie="PCIe3 x16")
        for g in gpus(4, kind="Tesla V100-SXM2-16GB")
    ]
    roce = port(0, layer="Ethernet", rate=12.5e9)
    facts = inventory("v1", gpus=tuple(cards), rdma=(roce, port(1, active=False)),
                      interfaces=(interface("ens1", "10.0.0.1/24", speed=12.5e9, rdma=("mlx5_0",)),))  # fmt: skip
    (group,) = parse_topology(topology_yaml(draft_groups({"v1": facts})), "draft").nodes
    assert group.links and group.links.nvlink == "NVLink2 x6" and not group.links.nvswitch
    assert group.links.pairs == {f"{one}-{other}": 2 for one, other in itertools.combinations(range(4), 2)}
    assert [(nic.name, nic.kind, nic.rate) for nic in group.nics] == [("ens1", "RoCE", "100 Gb/s")]
    # A bridge to a GPU that this host does not list is not a link.
    alone = msgspec.structs.replace(facts, gpus=tuple(cards[:1]))
    assert (draft_groups({"v1": alone})[0].links or group.links).nvlink is None


def test_old_slots_and_cards_of_two_ports_are_drafted():
    k80 = tuple(msgspec.structs.replace(gpu, pcie="PCIe2 x16") for gpu in gpus(1, kind="Tesla K80"))
    names = ["enp1s0f0", "enp1s0f1", "enp2s0f0", "enp2s0f1"]  # would fold into two ranges, which no NIC has
    cards = tuple(
        msgspec.structs.replace(interface(name, f"10.{n}.0.1/24", speed=1.25e8), pcie="PCIe1 x4") for n, name in enumerate(names)
    )  # fmt: skip
    (group,) = parse_topology(
        topology_yaml(draft_groups({"n1": inventory("n1", gpus=k80, interfaces=cards)})), "draft"
    ).nodes
    assert group.links and group.links.pcie == "PCIe2 x16"
    assert [(nic.name, nic.pcie) for nic in group.nics] == [(name, "PCIe1 x4") for name in names]


def test_ports_of_roce_that_are_bonded_are_one_card():
    """mlx5 has one device for both ports. Its addresses are those of the bond, and its rate that of one port."""
    lag = msgspec.structs.replace(port(0, layer="Ethernet", rate=12.5e9), device="mlx5_bond_0", netdevs=("bond0",))
    cards = (
        interface("bond0", "10.0.0.1/24", kind="bond", speed=25e9), interface("ens1f0", speed=12.5e9, rdma=("mlx5_bond_0",)),
        interface("ens1f1", speed=12.5e9), interface("eno1", "10.1.0.1/24", speed=1.25e9),
        interface("ens1f1.7", "10.7.0.1/24", kind="vlan", cards=("ens1f1",), speed=12.5e9),
    )  # fmt: skip

    def drafted(*ports):
        text = topology_yaml(draft_groups({"n1": inventory("n1", rdma=ports, interfaces=cards)}))
        (group,) = parse_topology(text, "draft").nodes
        return [(nic.name, nic.kind, nic.rate) for nic in group.nics]

    of_vlan = ("ens1f1.7", "Ethernet", "100 Gb/s")
    assert drafted(lag) == [("bond0", "RoCE", "200 Gb/s"), ("eno1", "Ethernet", "10 Gb/s"), of_vlan]
    # If the device's folder has no NIC name, the addresses give it; a VLAN is not a NIC.
    plain = msgspec.structs.replace(lag, device="mlx5_9", netdevs=("ens1f1", "ens1f1.7"))
    assert drafted(plain) == [
        ("ens1f1", "RoCE", "100 Gb/s"),
        ("bond0", "Ethernet", "200 Gb/s"),
        ("eno1", "Ethernet", "10 Gb/s"),
    ]


def test_a_card_is_drafted_where_its_address_is_on_a_vlan_or_a_bridge():
    """A NIC appears once for any number of VLANs and bridges. The launcher uses no NIC without an address."""
    bonded = ("ens1f0", "ens1f1")
    cards = (
        interface("bond0.20", "10.20.0.1/24", kind="vlan", speed=6.25e9, cards=bonded),
        interface("bond0.100", "10.100.0.1/24", kind="vlan", speed=6.25e9, cards=bonded),
        interface("bond0", kind="bond", speed=6.25e9, cards=bonded),
        *(interface(name, speed=3.125e9) for name in bonded),
        interface("br0", "10.0.0.1/24", kind="bridge", speed=1.25e8, cards=("eno1",)), interface("eno1", speed=1.25e8),
        interface("docker0", "172.17.0.1/16", kind="bridge", speed=1.25e9),
        interface("ens2f0", "10.2.0.1/24", speed=12.5e9, rdma=("mlx5_0",)), interface("ens2f1", speed=12.5e9, rdma=("mlx5_1",)),
    )  # fmt: skip
    ports = (port(0, layer="Ethernet", rate=12.5e9), port(1, layer="Ethernet", rate=12.5e9))
    text = topology_yaml(draft_groups({"n1": inventory("n1", rdma=ports, interfaces=cards)}))
    (group,) = parse_topology(text, "draft").nodes
    assert [(nic.name, nic.kind, nic.rate) for nic in group.nics] == [
        ("ens2f0", "RoCE", "100 Gb/s"), ("bond0.20", "Ethernet", "50 Gb/s"), ("br0", "Ethernet", "1 Gb/s"),
    ]  # fmt: skip


@given(
    st.lists(
        st.tuples(st.sampled_from(["NVIDIA A100-SXM4-80GB", "NVIDIA RTX 9999", None]), st.integers(0, 9), st.sampled_from([(), ("switch",)])),
        max_size=5,
    ),
    st.sampled_from([{}, {"0": "0-7"}, {"0": "0-3", "1": "4-7"}, {"0": "0-3", "8": ""}, {"0": "", "1": "0-3", "2": "4-7"}]),
    st.sampled_from([None, 0, 1, 2, 8]),
    st.sampled_from([None, 1 << 20, 503 * GIB + 12345]),
)  # fmt: skip
def test_whatever_hosts_say_makes_a_topology_file(cards, numa, near, memory):
    listed = gpus(len(cards))
    facts = inventory(
        "n1", numa=numa, memory_bytes=memory, rdma=(msgspec.structs.replace(port(0), numa_node=near),),
        gpus=tuple(
            msgspec.structs.replace(gpu, kind=kind, numa_node=node, nvlink_to=ends)
            for gpu, (kind, node, ends) in zip(listed, cards, strict=True)
        ),
    )  # fmt: skip
    (group,) = parse_topology(topology_yaml(draft_groups({"n1": facts})), "draft").nodes
    assert (group.gpus.count if group.gpus else 0) == len(cards)


def test_the_gpus_as_they_are():
    hosts = {
        f"n{i}": inventory(f"n{i}", gpus=gpus(2, temperature_celsius=40 + i, slowdown_celsius=87)) for i in (1, 2, 3)
    }
    hosts["n3"] = inventory("n3", gpus=gpus(2, nvlinks_up=11, temperature_celsius=80))
    table = show_command.gpu_table(hosts)
    assert table is not None
    with (console := Console(width=160)).capture() as captured:
        console.print(table)
    rows = [" ".join(line.split()) for line in captured.get().splitlines()[2:]]
    assert rows == [
        "n1, n2 0-1 NVIDIA A100-SXM4-80GB 0 B 12 of 12 400 W ? 41 to 42 C (slower from 87 C) 0",
        "n3 0-1 NVIDIA A100-SXM4-80GB 0 B 11 of 12 400 W ? 80 C 0",
    ]
    assert show_command.gpu_warnings(hosts)[0].startswith("n3: GPUs 0-1: 11 NVLinks are up, 12")
    narrow, wide = (msgspec.structs.replace(gpus(1)[0], pcie="PCIe4 x16", pcie_width_now=lanes) for lanes in (4, 16))
    with console.capture() as captured:
        console.print(
            show_command.gpu_table({"n1": inventory("n1", gpus=(narrow,)), "n2": inventory("n2", gpus=(wide,))})
        )
    assert re.findall(r"PCIe4 x16 (?:\(now x4\))?", captured.get()) == ["PCIe4 x16 (now x4)", "PCIe4 x16 "]
    assert show_command.gpu_warnings({"n1": inventory("n1", gpus=(narrow, wide))}) == [
        "n1: GPU 0: its PCIe link has 4 lanes, 16 with others of its kind; reseat the card, and look at its riser and the slot's "
        "settings in the BIOS"
    ]
    assert show_command.gpu_table({"n1": inventory("n1")}) is None


def test_the_slot_of_a_device(tmp_path):
    """A PCIe 4 device is limited by a slot with fewer lanes or of an older generation."""
    device = tmp_path / "0000:00:01.0" / "0000:01:00.0"
    device.mkdir(parents=True)
    (tmp_path / "link").symlink_to(device)  # as /sys/class/net/eth0/device
    for folder, speed, width in ((device, "16.0 GT/s PCIe", 16), (device.parent, "8.0 GT/s PCIe", 4)):
        (folder / "max_link_speed").write_text(f"{speed}\n")
        (folder / "max_link_width").write_text(f"{width}\n")
    assert sysfs.pcie_link(str(tmp_path / "link")) == "PCIe3 x4"
    (device.parent / "max_link_width").write_text("255\n")  # value of a bridge without a link
    assert sysfs.pcie_link(str(device)) == "PCIe4 x16"
    assert sysfs.pcie_link(str(tmp_path)) is None
    for said, width in (("4", 4), ("0", None), ("63", None)):  # values in virtual machines
        (device / "current_link_width").write_text(f"{said}\n")
        assert sysfs.current_pcie_width(str(tmp_path / "link")) == width
    assert sysfs.current_pcie_width(str(tmp_path)) is None


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_this_machine_is_asked_where_nothing_is_named(tmp_path):
    done = show("-o", "here.yaml", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done
    assert "1 host  (as the hosts report)" in done.stdout and "memory" in done.stdout
    (group,) = read_topology(tmp_path / "here.yaml").nodes
    assert group.hosts == "localhost" and group.memory and group.cores
    again = show("--topology", "here.yaml", cwd=tmp_path)
    assert again.stdout.splitlines()[1:] == done.stdout.splitlines()[1:-1]
    told = json.loads(show("--json", cwd=tmp_path).stdout)
    assert told["inventories"]["localhost"]["cores"] == group.cores


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ask", "-H", "localhost", "-o", "there.yaml"], "there.yaml: the file exists already; name a new file"),
        (["--ask", "-o", ""], "--output: it is empty; is a variable not set?"),
        (
            ["-H", "localhost", "-o", "new.yaml"],
            "-o new.yaml: only the replies of hosts are written",
        ),
    ],
)
@pytest.mark.processes
def test_mistakes_are_told(tmp_path, words, says):
    (tmp_path / "there.yaml").write_text("nodes: []\n")
    done = show(*words, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr, done
    assert not (tmp_path / "new.yaml").exists()


@pytest.mark.processes
def test_a_picture_of_no_kind_is_refused_before_the_draft_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(show_command, "query_topology", lambda *of: pytest.fail("asked hosts"))
    assert topo.main(["show", "--ask", "-H", "localhost", "-o", "new.yaml", "--plot", "x.jpg"]) == 2
    assert "--plot x.jpg: unsupported file type" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["nodes:\n  - hosts: n1\n    gpus: {count: 4}\n", "nodes: [\n"])
@pytest.mark.processes
def test_a_topology_of_other_days_beside_the_hostfile_does_not_matter_to_hosts_that_are_asked(
    tmp_path, monkeypatch, capsys, text
):
    (tmp_path / "cluster.txt").write_text("n1 slots=8\n")
    (tmp_path / "cluster.yaml").write_text(text)
    given = []

    def ask(hosts, topology, *of):
        given.append(topology)
        drafted = topology_yaml(draft_groups({"n1": dgx("n1")}))
        return show_command.QueriedTopology(
            {"n1": dgx("n1")}, drafted, parse_topology(drafted, show_command.SOURCE), ()
        )

    monkeypatch.setattr(show_command, "query_topology", ask)
    assert topo.main(["show", "--ask", "-H", str(tmp_path / "cluster.txt")]) == 0
    assert given == [None] and "A100" in capsys.readouterr().out
    assert topo.main(["show", "-H", str(tmp_path / "cluster.txt")]) == (2 if "[" in text else 0)


@pytest.mark.processes
def test_that_no_host_answers_is_told(tmp_path):
    done = show("--ask", "-H", "nosuch.invalid", cwd=tmp_path)
    assert done.returncode == 3, done
    assert "nosuch.invalid: ssh: " in done.stderr


def test_a_draft_for_which_there_is_no_room_is_not_begun(tmp_path, monkeypatch):
    def no_room(self, text, encoding):
        self.write_bytes(b"nodes:")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", no_room)
    with pytest.raises(TopologyError, match=r"t\.yaml: .*No space left"):
        show_command.write_new_file(str(tmp_path / "t.yaml"), "nodes: []")
    assert not list(tmp_path.iterdir())


@pytest.mark.cluster
def test_hosts_are_asked_and_those_that_do_not_answer_are_named(make_cluster):
    cluster = make_cluster(3)
    cluster.lose("n3")
    ssh = ["--ssh-command", "ssh -o ConnectTimeout=1"]
    done = cluster.run("n1", [TOPO, "show", "--ask", "-H", cluster.hostfile, *ssh, "-o", cluster.directory / "t.yaml"])
    assert done.returncode == 3, done
    assert "n[1-2], 2 hosts, 1 slot" in done.stdout
    assert "error: n3: ssh: " in done.stderr
    assert read_topology(cluster.directory / "t.yaml").hosts == ("n1", "n2")
