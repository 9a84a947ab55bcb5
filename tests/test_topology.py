"""Topology files, valid and invalid; the catalogue; links between and inside hosts; the probe's output."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from distrib import units
from distrib.cluster import data_nics, uplinks
from distrib.cluster.hardware_catalog import find_gpu, gpu_hint, hardware_catalog
from distrib.cluster.hardware_checks import check_hardware
from distrib.cluster.hostfile import parse_host_list, parse_hostfile, read_hostfile
from distrib.cluster.link_spec import parse_bus_link, parse_network_link, parse_uplink_rate
from distrib.cluster.links import intra_node_link, link_between
from distrib.cluster.measurements import (
    Collective,
    IntraNodeLinkMeasurement,
    LinkMeasurement,
    Measurements,
    Point,
    SharedMachine,
)
from distrib.cluster.measurements_io import decode_measured, encode_measured, split_measured
from distrib.cluster.measurements_writer import write_measured
from distrib.cluster.node import name_hosts
from distrib.cluster.topology import Topology, check_hosts, parse_topology, read_topology
from distrib.cluster.uplinks import switch_oversubscription
from distrib.errors import TopologyError

EXAMPLES = Path(__file__).parents[1] / "hostfiles"
NODE = "nodes:\n  - hosts: a\n"

EIGHT = """\
nodes:
  - hosts: dgx[01-04]
    gpus: {kind: A100-SXM4-80GB, count: 8}
    links: {nvlink: NVLink3 x12, nvswitch: yes, pcie: PCIe4 x16}
    nics:
      - {name: "mlx5_[0-7]", rate: HDR, gpudirect: yes}
      - {name: eno1, rate: 10 GbE}
  - hosts: old1,old2
    gpus: {kind: Tesla V100-PCIE-16GB, count: 2}
    nics: [{name: eth0, rate: 25Gb/s, kind: ethernet}]
switches:
  - {name: rack1, hosts: "dgx[01-02]", oversubscription: 2:1}
  - {name: rack2, hosts: "dgx[03-04],old1", oversubscription: 3:2}
  - {name: spine, switches: [rack1, rack2]}
"""


def eight(extra: str = "") -> Topology:
    return parse_topology(EIGHT + extra, "eight.yaml")


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_read_and_has_its_hostfile(path):
    topology = read_topology(path)
    hosts = read_hostfile(path.with_suffix(".txt"))
    check_hosts(topology, hosts)
    for host in hosts.hosts:
        gpus = topology.gpus_of(host.name)
        assert gpus and gpus.count == host.slots and gpus.spec
    assert sum(line.lstrip().startswith("#") for line in path.read_text().splitlines()) >= 1


def test_what_a_file_says_can_be_asked_for():
    topology = eight()
    assert topology.hosts == ("dgx01", "dgx02", "dgx03", "dgx04", "old1", "old2")
    assert topology.gpus_of("DGX02").count == 8
    assert topology.gpus_of("nobody") is None and topology.nics_of("nobody") == ()
    assert [nic.name for nic in topology.nics_of("dgx03")] == [*(f"mlx5_{n}" for n in range(8)), "eno1"]
    assert [switch.name for switch in topology.switches_above("old1")] == ["rack2", "spine"]
    assert topology.switches_above("old2") == ()


def test_it_reads_yaml_as_people_mean_it():
    topology = parse_topology(
        "defaults: &gpus {count: 2, kind: T4}\nnodes:\n  - {hosts: a, gpus: *gpus}".replace("defaults: &gpus", "name: x #")
        .replace("*gpus", "{count: 2, kind: T4}"),
        "t.yaml",
    )  # fmt: skip
    assert topology.gpus_of("a").kind == "T4"
    merged = "nodes:\n  - &one\n    hosts: a\n    cores: 4\n  - {<<: *one, hosts: b}\n"
    assert [group.cores for group in parse_topology(merged, "t").nodes] == [4, 4]
    ratio = parse_topology(NODE + "switches: [{name: s, hosts: a, oversubscription: 2:1}]", "t")
    assert switch_oversubscription(ratio, ratio.switches[0]) == 2  # YAML 1.1 reads 2:1 as 121
    assert parse_topology("\ufeff" + NODE.replace("\n", "\r\n"), "t").hosts == ("a",)


MEASURED = "measured:\n  when: 2026-01-01\n  software: {}\n  hosts: [a]\n"
PAIR = "{source: a, target: a, way: mpi, load: alone, bandwidth_bytes_per_second: %s, variation: 0}"
ALL = "{name: all_reduce, backend: gloo, hosts: [%s], ranks: %d, curve: []}"

BAD = [
    # Empty files.
    ("", "t.yaml: is empty; see hostfiles/"),
    ("# nothing\n", "t.yaml: is empty"),
    ("- a\n- b", "t.yaml:1: is a list, not a topology; begin with `nodes:`"),
    ("node1 slots=8\n", "t.yaml:1: is text, not a topology"),
    ("nodes: []", "t.yaml:1: $.nodes: is empty; describe"),
    ("nodes:", "t.yaml:1: $.nodes: expected a list, not nothing"),
    ("node: [{hosts: a}]", "t.yaml:1: $.node: unknown field; did you mean nodes?"),
    ("name: x", "t.yaml:1: $: `nodes` is missing"),
    # Invalid YAML.
    ("a: [\n", "is not valid YAML"),
    ("[" * 100_000, "t.yaml:1: is not valid YAML: nested more than 100 levels"),
    ("x: y: z", "t.yaml:1: is not valid YAML: mapping values are not allowed"),
    (NODE + "\tcores: 2", "t.yaml:3: is not valid YAML: found a tab character that violates indentation; indent with spaces"),
    (NODE + "    gpus:\n\tcount: 2", "t.yaml:4: is not valid YAML: found character that cannot start any token; indent with spaces"),
    ("{nodes: [{hosts: n[1-4]}]}", 'inside { } a range needs quotes: {hosts: "gpu[01-16]"}'),
    (NODE + "---\n" + NODE, "t.yaml:3: is not valid YAML: but found another document"),
    ("\x07nodes: a", "is not valid YAML"),
    ("# " + "\u00e9\n" * 20 + "name: x\x07\n" + NODE, "is not valid YAML: control characters are not allowed"),
    ("? [a]\n: b", "t.yaml:1: is not valid YAML: found unhashable key"),
    (NODE + "nodes: []", "t.yaml:3: is not valid YAML: the key `nodes` is duplicate, first on line 1"),
    (NODE + "    hosts: b", "t.yaml:3: is not valid YAML: the key `hosts` is duplicate, first on line 2"),
    # Unsafe and unusual YAML.
    ("!!python/object/apply:os.system [true]", "t.yaml:1: is not valid YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.system'"),
    (NODE + "    gpus: !Gpu {count: 2}", "t.yaml:3: is not valid YAML: could not determine a constructor for the tag '!Gpu'"),
    # Types.
    (NODE + "    gpus: 8", "t.yaml:3: $.nodes[0].gpus: expected a mapping (`key: value`), not a whole number"),
    (NODE + "    gpus: {count: two}", "t.yaml:3: $.nodes[0].gpus.count: expected a whole number, not text"),
    (NODE + "    gpus:\n      kind: A100\n      count: -2", "t.yaml:5: $.nodes[0].gpus.count: count of GPUs is -2"),
    (NODE + "    gpu: {count: 2}", "t.yaml:3: $.nodes[0].gpu: unknown field; did you mean gpus?"),
    (NODE + "    cores: -4", "t.yaml:3: $.nodes[0].cores: expected a whole number from 1 to 100000, not -4"),
    ("nodes:\n  - gpus: {count: 1}", "t.yaml:2: $.nodes[0]: `hosts` is missing"),
    # Hosts.
    ("nodes:\n  - hosts: 12", "t.yaml:2: $.nodes[0].hosts: expected text, not a whole number"),
    ("nodes:\n  - hosts: bob@a:3", "t.yaml:2: $.nodes[0].hosts: 'bob@a:3' has a user or slots"),
    ("nodes:\n  - hosts: n[1-999999999]", "t.yaml:2: $.nodes[0].hosts: '1-999999999' stands for more than 100,000 hosts"),
    ("nodes:\n  - hosts: a,A", "t.yaml:2: $.nodes[0].hosts: A is named twice"),
    ("nodes:\n  - hosts: -oProxyCommand=x", "t.yaml:2: $.nodes[0].hosts: host name"),
    (NODE + "  - hosts: n[1-3],A", "t.yaml:3: $.nodes[1].hosts: A is in nodes[0] already; a host is in one group"),
    # Units.
    (NODE + "    nics: [{name: e, rate: 100}]", "$.nodes[0].nics[0].rate: expected text, not a whole number; write it such as 100Gb/s, 10 GbE or HDR"),
    (NODE + "    nics: [{name: e, rate: 100gb/s}]", "did you mean GB/s (bytes) or Gb/s (bits)?"),
    (NODE + "    nics: [{name: e, rate: 100Gb/s}]", "'100Gb/s' is ambiguous; say `kind: InfiniBand`, RoCE or Ethernet"),
    (NODE + "    nics:\n      - name: e\n        kind: RoCE\n        rate: -5Gb/s", "t.yaml:6: $.nodes[0].nics[0].rate: '-5Gb/s' is negative"),
    (NODE + "    nics: [{name: e, kind: RoCE, rate: 0Gb/s}]", "'0Gb/s': expected a rate above 0"),
    (NODE + "    nics: [{name: e, rate: .inf}]", "expected text, not a number"),
    (NODE + "    nics: [{name: e, rate: HRD}]", "did you mean HDR?"),
    (NODE + "    nics: [{name: e, rate: 8 x HDR}]", "is several ports; write each as a NIC of its own, or a range: mlx5_[0-3]"),
    (NODE + "    nics: [{name: e, rate: HDR, kind: Ethernet}]", "HDR is a rate of InfiniBand, not of Ethernet"),
    (NODE + "    nics: [{name: e, rate: 10GbE, kind: Infiniban}]", "did you mean InfiniBand?"),
    (NODE + "    memory: 512Gb", "t.yaml:3: $.nodes[0].memory: '512Gb' is not a size: Gb counts bits; did you mean GB?"),
    (NODE + "    memory: 512", "t.yaml:3: $.nodes[0].memory: expected text, not a whole number; write it such as 512GiB"),
    (NODE + "    links: {pcie: PCIe4 x7}", "t.yaml:3: $.nodes[0].links.pcie: 'PCIe4 x7': PCIe has 1, 2, 4, 8, 16 or 32 lanes, not 7"),
    (NODE + "    links: {pcie: NVLink3}", "$.nodes[0].links.pcie: 'NVLink3' is a link of another kind"),
    (NODE + "    links: {nvlink: NVLink9 x2}", "NVLink9 is not in the catalogue; it has NVLink1 to NVLink5"),
    # NICs and GPUs.
    (NODE + "    nics:\n      - {name: e, rate: HDR}\n      - {name: e, rate: HDR}", "t.yaml:5: $.nodes[0].nics[1].name: the NIC e is named twice"),
    (NODE + "    nics:\n      - {name: 'e[0-2]', rate: HDR}\n      - {name: e1, rate: HDR}", "t.yaml:5: $.nodes[0].nics[1].name: the NIC e1 is named twice"),
    (NODE + "    nics: [{name: e, rate: 10GbE, gpudirect: yes}]", "GPUDirect RDMA needs InfiniBand or RoCE"),
    (NODE + "    nics: [{name: e, rate: 10GbE, gpus: 0}]", "there is no GPU 0 here; say `gpus: {count: N}`"),
    (NODE + "    gpus: {count: 2}\n    numa: [{gpus: 0-3}]", "t.yaml:4: $.nodes[0].numa[0].gpus: there is no GPU 3 here; there are 2"),
    (NODE + "    gpus: {count: 2}\n    numa: [{gpus: 0}, {gpus: 0-1}]", "GPU 0 is in NUMA node 0 already"),
    (NODE + "    gpus: {count: 5}\n    links: {nvlink: NVLink3 x11}", "cannot be divided evenly by 4"),
    (NODE + "    gpus: {count: 2}\n    links: {nvlink: NVLink2 x2, pairs: {0-1: 3}}", "GPU 0 has 3 links here, but NVLink2 x2 says 2"),
    (NODE + "    gpus: {count: 2}\n    links: {nvlink: NVLink2 x2, pairs: {0-0: 1}}", "'0-0' is not a pair of GPUs"),
    (NODE + "    gpus: {count: 2}\n    links:\n      nvlink: NVLink2 x2\n      pairs:\n        0-9: 1",
     "t.yaml:7: $.nodes[0].links.pairs.0-9: there is no GPU 9 here"),
    (NODE + "    links: {nvswitch: yes}", "t.yaml:3: $.nodes[0].links.nvswitch: say `nvlink` too"),
    # Switches.
    (NODE + "switches:\n  - {name: r, hosts: a, oversubscription: 1:2}", "t.yaml:4: $.switches[0].oversubscription: '1:2' is less than 1:1"),
    (NODE + "switches:\n  - {name: r, hosts: a, uplink: 3}", "write it such as 800Gb/s or 4 x HDR"),
    (NODE + "switches:\n  - {name: r, hosts: b}", "t.yaml:4: $.switches[0].hosts: b is not in `nodes`"),
    (NODE + "switches:\n  - {name: r, hosts: a}\n  - {name: s, hosts: a}", "t.yaml:5: $.switches[1].hosts: a is on r already"),
    (NODE + "switches:\n  - {name: r, switches: [s]}\n  - {name: s, switches: [r]}", "r is below itself"),
    (NODE + "switches:\n  - {name: r, switches: [q]}", "there is no switch q"),
    (NODE + "switches:\n  - {name: r}", "r has no hosts and no switches"),
    # Measurements.
    (NODE + MEASURED.replace("[a]", "[b, c]"), "t.yaml:6: $.measured.hosts: measured on hosts that are not in `nodes`: b, c"),
    (NODE + MEASURED + "  pairs:\n    - " + PAIR % "-3", "t.yaml:8: $.measured.pairs[0].bandwidth_bytes_per_second: -3.0, expected a rate"),
    (NODE + MEASURED + "  pairs:\n    - " + PAIR % ".nan", "$.measured.pairs[0].bandwidth_bytes_per_second: nan, expected a rate"),
    (NODE + MEASURED + "  pairs:\n    - " + (PAIR % "3").replace("target: a", "target: c"), "t.yaml:8: $.measured.pairs[0].target: c is not among"),
    (NODE + MEASURED + "  pairs:\n    - " + PAIR % "3", "t.yaml:8: $.measured.pairs[0].target: a is both source and target"),
    (NODE + MEASURED + "  pairs:\n    - " + PAIR % "1e-300", "pairs[0].bandwidth_bytes_per_second: 1e-300 bytes per second, expected"),
    (NODE + MEASURED + "  pairs:\n    - " + (PAIR % "3").replace("width_bytes", "with_bytes"), "did you mean bandwidth_bytes_per_second?"),
    (NODE + MEASURED + "  pairs:\n    - " + (PAIR % "3").replace("var", "latency_seconds: 1e9, var"), "latency_seconds: 1e+09 seconds, expected"),
    (NODE + MEASURED + "  machines:\n    - {hosts: [a, x], processors: 2}", "machines[0].hosts: x is not among the hosts"),
    (NODE + MEASURED + "  machines:\n    - {hosts: [a], processors: 0}", "machines[0].processors: 0 CPUs, expected"),
    (NODE + MEASURED + "  machines:\n    - {hosts: [a], processors: 2}\n    - {hosts: [A], processors: 2}", "A is machines[0] already"),
    (NODE + MEASURED + "  pairs:\n    - " + (PAIR % "3").replace("0}", "0, curve: [[8, 1e-300]]}"), "curve[0]: 8 bytes in 1e-300 s is impossible"),
    (NODE + MEASURED + "  collectives:\n    - " + ALL % ("a", 0), "t.yaml:8: $.measured.collectives[0].ranks: 0 ranks on 1 hosts"),
    (NODE + MEASURED + "  collectives:\n    - " + ALL % ("a, A", 2), "t.yaml:8: $.measured.collectives[0].hosts: expected one or more hosts, each once"),
    (NODE + "measured: {}", "t.yaml:3: $.measured: `when` is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "what"), BAD)
def test_a_bad_file_is_refused_with_line_and_path(text, what):
    started = time.process_time()
    with pytest.raises(TopologyError, match=re.escape(what)) as caught:
        parse_topology(text, "t.yaml")
    assert "\n" not in str(caught.value)
    assert time.process_time() - started < 2


def test_files_that_cannot_be_read(tmp_path):
    for name, data, what in [
        ("nul", b"nodes:\n\0", "nul:2: contains NUL bytes"),
        ("utf16", "nodes:".encode("utf-16"), "is in UTF-16; save it as UTF-8"),
        ("latin", b"name: caf\xe9\n", "latin:1: byte 0xe9 is not UTF-8"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(TopologyError, match=re.escape(what)):
            read_topology(tmp_path / name)
    for path, what in [
        (tmp_path / "none", "no such topology file"),
        (tmp_path, "a directory"),
        ("/dev/zero", "larger"),
    ]:
        with pytest.raises(TopologyError, match=what):
            read_topology(path)
    os.mkfifo(tmp_path / "pipe")


@given(st.text(alphabet="abn0123:-[]{}&*,'\"#|> \n\t<!%@`~", max_size=60))
@example("nodes: [{hosts: 0}]")
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(text):
    try:
        parse_topology("nodes:\n" + text, "t.yaml")
    except TopologyError as error:
        assert str(error).startswith("t.yaml")


def test_a_hostfile_and_a_topology_must_know_the_same_hosts(tmp_path):
    path = tmp_path / "lab.yaml"
    path.write_text("# a comment\nnodes:\n  - hosts: n[1-2]\n  - hosts: spare\n")
    topology = read_topology(path)
    notes = check_hosts(topology, parse_host_list("n1,n2"))
    assert notes == (f"{path}:4: $.nodes[1].hosts: spare is not in -H",)
    with pytest.raises(TopologyError) as caught:
        check_hosts(topology, parse_hostfile("n1\n\nn3\nn4", "lab.txt"))
    assert str(caught.value).startswith(
        f"{path}:2: $.nodes: n3, n4 are in the hostfile (lab.txt:3) but not in the topology;"
    )
    check_hosts(topology, parse_host_list("N1"))


@pytest.mark.parametrize("before", ["", "name: lab\n"])
def test_a_line_behind_the_measured_part_is_counted_with_it(tmp_path, before):
    path = tmp_path / "t.yaml"
    part = encode_measured(measured(hosts=("a",)))
    path.write_text(before + part + NODE)
    line = (before + part).count("\n") + 1
    with pytest.raises(TopologyError, match=re.escape(f"t.yaml:{line}: $.nodes: b is in")):
        check_hosts(read_topology(path), parse_host_list("a,b"))


def test_reading_topologies_loads_neither_torch_nor_clustershell_where_there_is_no_range():
    code = (
        "import sys; from distrib.cluster.topology import parse_topology; "
        "parse_topology('nodes: [{hosts: a}]', 't'); "
        "print(*{'torch', 'mpi4py', 'numpy', 'ClusterShell', 'matplotlib', 'rich'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# -- the catalogue ----------------------------------------------------------------------------------------------------


def test_every_figure_has_a_source_and_can_be():
    known = hardware_catalog()
    for gpu in known.gpus:
        figures = [*gpu.tflops.values(), gpu.memory_bytes, gpu.memory_bandwidth_bytes_per_second]
        assert all(figure.source and figure.value > 0 for figure in figures), gpu.name
        for bus in (gpu.nvlink, gpu.pcie):
            assert bus is None or parse_bus_link(bus).rate_bytes_per_second > 0
        assert gpu.tflops["fp32"].value <= gpu.tflops.get("fp16", gpu.tflops["fp32"]).value
        assert find_gpu(gpu.name) == gpu
    for link in known.links:
        assert 0 < link.usable.value < 1 and link.rate_bytes_per_second.value > 0 and link.latency_seconds.value < 1e-4
        assert all(figure.source for figure in (link.usable, link.rate_bytes_per_second, link.latency_seconds))
    names = [name.lower() for gpu in known.gpus for name in (gpu.name, *gpu.names)]
    assert len({gpu.name for gpu in known.gpus}) == len(known.gpus)
    assert len(set(names)) >= len(names) - 4  # a name may differ from that of its GPU in case only


@given(st.sampled_from(["ethernet", "roce"]), st.floats(0.5, 900), st.floats(1.0, 2.0))
def test_a_faster_port_never_carries_less(kind, gigabits, times):
    slower, faster = (parse_network_link(f"{rate:.6f}Gb/s", kind) for rate in (gigabits, gigabits * times))
    # A rate up to 1 % below a usual one counts as that one.
    assert slower.usable_bytes_per_second <= faster.usable_bytes_per_second * 1.011


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("A100", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("a100 40 gb", "A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("Tesla K80", "K80"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA L4", "L4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("mi355x", "MI355X"),
        ("A1000", None),
        ("L40", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("H100 NVL", None),
        ("", None),
    ],
)
def test_gpus_are_found_by_what_nvml_and_people_call_them(kind, name):
    found = find_gpu(kind)
    assert (found.name if found else None) == name


def test_figures_that_everybody_knows():
    assert find_gpu("A100").tflops["bf16"].value == 312
    assert find_gpu("H100").nvlink == "NVLink4 x18"
    assert parse_bus_link("NVLink3 x12").rate_bytes_per_second == 300e9
    assert parse_bus_link("PCIe 3.0 x16").rate_bytes_per_second == pytest.approx(15.75e9, rel=1e-3)
    assert parse_bus_link("PCI Express 4.0 x16") == msgspec.structs.replace(
        parse_bus_link("PCIe4 x16"), text="PCI Express 4.0 x16"
    )
    assert (
        parse_bus_link("PCIe2 x16").rate_bytes_per_second
        == 2 * parse_bus_link("PCIe1 x16").rate_bytes_per_second
        == 8e9
    )
    assert parse_bus_link("PCIe Gen5 x8").rate_bytes_per_second == pytest.approx(31.5e9, rel=1e-3)
    for name, rate in [
        ("EDR", 12.5e9),
        ("hdr", 25e9),
        ("IB NDR", 50e9),
        ("HDR 100", 12.5e9),
        ("10 GbE", 1.25e9),
        ("XDR", 1e11),
    ]:
        assert parse_network_link(name).rate_bytes_per_second == rate
    assert parse_uplink_rate("4 x HDR") == parse_uplink_rate("800Gb/s") == 100e9
    assert "bf16" not in find_gpu("V100").tflops
    assert "A100-SXM4-80GB" in gpu_hint("A1000")


# -- links ------------------------------------------------------------------------------------------------------------


def test_the_way_between_hosts_uses_the_fastest_common_nics():
    way = link_between(eight(), "dgx01", "dgx02")
    assert way.text == "8 x HDR" and way.rate_bytes_per_second == 200e9 and way.gpudirect is True
    assert way.kind == "infiniband" and len(way.nics) == 8 and way.switches == ("rack1",)
    assert way.bandwidth_bytes_per_second == pytest.approx(190e9) and way.origin == "catalogued"
    assert way.oversubscription == 1
    across = link_between(eight(), "dgx01", "dgx03")
    assert across.oversubscription == 2 and across.switches == ("rack1", "spine", "rack2")
    assert across.shared_bandwidth_bytes_per_second == pytest.approx(95e9)
    slow = parse_topology(
        "nodes: [{hosts: 'a[1-4]', nics: [{name: e, rate: 100GbE}]}]\nswitches:\n"
        "  - {name: r1, hosts: 'a[1-2]', uplink: 100Gb/s}\n  - {name: r2, hosts: 'a[3-4]'}\n",
        "t",
    )
    way = link_between(slow, "a1", "a3")  # TCP is below half of the NIC rate: two pairs do not fill the uplink
    assert way.oversubscription == 2
    assert way.shared_bandwidth_bytes_per_second == way.bandwidth_bytes_per_second < 6.25e9
    wide = parse_topology(
        "nodes: [{hosts: 'a[1-2]', nics: [{name: e, rate: 10GbE}]}]\nswitches:\n"
        "  - {name: r1, hosts: 'a[1-2]', uplink: 100Gb/s}\n  - {name: up, switches: [r1], uplink: 20Gb/s}\n",
        "t",
    )  # the uplink carries no more than its hosts send
    assert [switch_oversubscription(wide, switch) for switch in wide.switches] == [1, 1]
    mixed = link_between(eight(), "dgx01", "old1")
    assert mixed.kind == "ethernet" and mixed.nics == ("eno1",) and mixed.rate_bytes_per_second == 1.25e9
    assert link_between(parse_topology("nodes: [{hosts: 'n[1-2]'}]", "t"), "n1", "n2") is None


def test_an_uplink_gives_its_oversubscription():
    topology = read_topology(EXAMPLES / "mixed-gpus.yaml")
    found = {switch.name: switch_oversubscription(topology, switch) for switch in topology.switches}
    assert found == {"new rack": pytest.approx(1.2), "old rack": 2.0, "core": 1.0}


def test_ways_between_many_hosts_do_not_take_long(monkeypatch):
    """Hosts of one kind have identical NICs. The model computes their rate once, not for each pair."""
    asked = []
    own = data_nics.data_nics
    for module in (data_nics, uplinks):
        monkeypatch.setattr(module, "data_nics", lambda nics: asked.append(1) or own(nics))
    text = "nodes: [{hosts: 'n[1-40]', nics: [{name: 'm[0-7]', rate: HDR}]}]\nswitches:\n"
    text += "  - {name: a, hosts: 'n[1-20]', uplink: 2 x HDR}\n  - {name: b, hosts: 'n[21-40]', uplink: 4 x HDR}\n"
    topology = parse_topology(text, "t")
    found = {(a, b): link_between(topology, a, b) for a in topology.hosts for b in topology.hosts if a != b}
    assert found["n1", "n2"].oversubscription == 1 and found["n1", "n40"].oversubscription == 80
    assert len(asked) < 100


def test_a_pair_that_was_measured_beside_others_only_is_known_by_that():
    def pair(source: str, target: str, load: str, rate: float) -> str:
        return f"{{source: {source}, target: {target}, way: tcp, load: {load}, bandwidth_bytes_per_second: {rate}, variation: 0.0}}"

    pairs = [pair("a", "b", "together", 1e8), pair("a", "c", "together", 9e7), pair("c", "a", "alone", 1.1e8)]
    text = "nodes: [{hosts: 'a,b,c'}]\nmeasured:\n  when: '2026-01-01T00:00:00Z'\n  software: {}\n  hosts: [a, b, c]\n"
    topology = parse_topology(text + f"  pairs: [{', '.join(pairs)}]\n", "t")
    assert link_between(topology, "b", "a").bandwidth_bytes_per_second == 1e8
    assert link_between(topology, "a", "c").bandwidth_bytes_per_second == 1.1e8
    assert link_between(topology, "b", "c") is None


def test_a_narrow_slot_holds_its_nic_back():
    text = "nodes: [{hosts: 'n[1-2]', nics: [{name: e, rate: HDR, pcie: PCIe3 x4}]}]"
    way = link_between(parse_topology(text, "t"), "n1", "n2")
    assert way.bandwidth_bytes_per_second == parse_bus_link("PCIe3 x4").usable_bytes_per_second


def test_the_ways_inside_a_host():
    switched = intra_node_link(eight(), "dgx01", "gpu0", "gpu7")
    assert switched.text == "NVLink3 x12" and switched.rate_bytes_per_second == 300e9
    assert intra_node_link(eight(), "dgx01", "memory", "gpu0").text == "PCIe4 x16"
    assert intra_node_link(eight(), "dgx01", "gpu0", "gpu8") is None
    assert intra_node_link(eight(), "old1", "gpu0", "gpu1").text == "PCIe3 x16"  # in the catalogue
    mesh = read_topology(EXAMPLES / "dgx1-v100-edr.yaml")
    assert intra_node_link(mesh, "dgx1-01", "gpu0", "gpu3").text == "NVLink2 x2"
    assert intra_node_link(mesh, "dgx1-01", "gpu3", "gpu0").rate_bytes_per_second == 50e9
    assert intra_node_link(mesh, "dgx1-01", "gpu0", "gpu7").text == "PCIe3 x16"
    four = parse_topology(NODE + "    gpus: {count: 4}\n    links: {nvlink: NVLink3 x12}", "t")
    assert intra_node_link(four, "a", "gpu1", "gpu2").text == "NVLink3 x4"


def pair(source: str, target: str, rate: float, **other: object) -> LinkMeasurement:
    settings = {"transport": "mpi", "load": "alone", "variation": 0.01, "latency_seconds": 2e-5, **other}
    return LinkMeasurement(source=source, target=target, bandwidth_bytes_per_second=rate, **settings)


def measured(*pairs: LinkMeasurement, hosts: tuple[str, ...] = ("dgx01", "dgx02"), **other: object) -> Measurements:
    return Measurements(when="2026-11-20T05:00:00Z", software={"distrib": "0.1"}, hosts=hosts, pairs=pairs, **other)


def test_measured_beats_catalogued():
    found = measured(
        pair("dgx01", "dgx02", 11e9),
        pair("dgx01", "dgx02", 12e9, transport="tcp", latency_seconds=3e-5),
        pair("dgx01", "dgx02", 99e9, load="together"),
        pair("dgx01", "dgx02", 99e9, both_ways=True),
        inside=(
            IntraNodeLinkMeasurement(
                host="dgx01", source="gpu0", target="gpu1", bandwidth_bytes_per_second=5e9, variation=0.0
            ),
        ),
    )
    topology = eight(encode_measured(found))
    assert topology.measured == found
    way = link_between(topology, "DGX01", "dgx02")
    assert (way.origin, way.bandwidth_bytes_per_second, way.latency_seconds) == ("measured", 12e9, 3e-5)
    assert way.rate_bytes_per_second == 200e9
    back = link_between(topology, "dgx02", "dgx01")  # a measurement of the other direction is better than a data sheet
    assert back.origin == "measured"
    assert link_between(topology, "dgx01", "dgx03").origin == "catalogued"
    inside = intra_node_link(topology, "dgx01", "gpu0", "gpu1")
    assert (inside.origin, inside.bandwidth_bytes_per_second) == ("measured", 5e9)
    several = eight(encode_measured(measured(*(pair("dgx01", "dgx02", 20e9, interface=f"mlx5_{n}") for n in range(4)))))
    assert link_between(several, "dgx01", "dgx02").bandwidth_bytes_per_second == 80e9


# -- heuristics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "interface", "text", "rate"),
    [
        ("tcp", "eno1", "TCP on eno1", None),  # MPI could not use the NICs of the file
        ("tcp", "mlx5_0", "8 x HDR", 200e9),
        ("tcp", None, "8 x HDR", 200e9),  # a file of an older probe
        ("mpi", "eno1", "8 x HDR", 200e9),  # MPI uses the RDMA NICs
    ],
)
def test_a_way_is_not_named_after_cards_that_did_not_carry_it(transport, interface, text, rate):
    found = measured(pair("dgx01", "dgx02", 1.1e9, transport=transport, interface=interface))
    seen = link_between(eight(encode_measured(found)), "dgx01", "dgx02")
    assert (seen.text, seen.rate_bytes_per_second, seen.bandwidth_bytes_per_second) == (text, rate, 1.1e9)
    ethernet = measured(pair("dgx01", "old1", 1.1e9, transport="tcp", interface="bond0"), hosts=("dgx01", "old1"))
    assert link_between(eight(encode_measured(ethernet)), "dgx01", "old1").text == "10 GbE"


def test_the_rules_of_thumb():
    text = NODE + (
        "    gpus: {kind: RTX 4090, count: 4}\n    memory: 128GiB\n    cores: 2\n    links: {pcie: PCIe4 x4}\n"
        "    nics: [{name: ib0, rate: NDR, gpudirect: no, pcie: PCIe4 x16}]\n"
    )
    rules = {rule.rule: rule for rule in check_hardware(parse_topology(text, "t").nodes[0])}
    assert not any(rule.kept for rule in rules.values())
    assert "PCIe4 x4" in rules["PCIe"].text and "PCIe4 x16" in rules["PCIe"].text
    assert "ib0 supports 50 GB/s" in rules["NIC slots"].text
    assert "nvidia_peermem" in rules["GPUDirect"].text
    assert check_hardware(parse_topology(NODE, "t").nodes[0]) == ()
    assert all(rule.kept for rule in check_hardware(read_topology(EXAMPLES / "h100-ndr.yaml").nodes[0]))


# -- writing ----------------------------------------------------------------------------------------------------------

CURVE = tuple(Point(8 << step, 1e-5 * (step + 1) / 3, 0.001) for step in range(10))
PERSON = """\
# Our cluster. Do not touch!
name:   Lab     # odd   spacing

nodes:
    - hosts: n[1-3]
      # older cards
      gpus: { kind: T4 , count: 2 }
"""
AFTER = """
# The switch in the cellar.
switches:
  - {name: cellar, hosts: "n[1-3]"}
"""
FOUND = measured(
    pair("n1", "n2", 1e8, curve=CURVE),
    hosts=("n1", "n2", "n3"),
    machines=(SharedMachine(hosts=("n1", "n3"), processors=8), SharedMachine(hosts=("n2",), processors=2)),
    inside=(
        IntraNodeLinkMeasurement(
            host="n1", source="memory", target="memory", bandwidth_bytes_per_second=1e10, variation=1e-7
        ),
    ),
    collectives=(Collective(name="all_reduce", backend="gloo", hosts=("n1", "n2"), ranks=2, curve=CURVE),),
)


def test_writing_keeps_what_a_person_wrote_byte_for_byte(tmp_path):
    path = tmp_path / "lab.yaml"
    path.write_text(PERSON + AFTER)
    path.chmod(0o640)
    write_measured(path, FOUND)
    assert path.read_text().startswith(PERSON + AFTER)
    assert read_topology(path).measured == FOUND
    # A user moves the section up and extends it.
    part = encode_measured(FOUND)
    path.write_text(PERSON + part.replace("  when", "# a remark\n  when") + AFTER)
    again = msgspec.structs.replace(FOUND, when="2027-01-01T00:00:00Z", pairs=())
    write_measured(path, again)
    assert path.read_text() == PERSON + encode_measured(again) + AFTER
    assert read_topology(path).measured == again
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["lab.yaml"]


def test_writing_makes_a_file_where_there_is_none(tmp_path):
    path = tmp_path / "new.yaml"
    write_measured(path, FOUND)
    topology = read_topology(path)
    assert topology.hosts == ("n1", "n2", "n3") and topology.measured == FOUND
    (tmp_path / "comments.yaml").write_text("# only this")
    write_measured(tmp_path / "comments.yaml", FOUND)
    assert (tmp_path / "comments.yaml").read_text().startswith("# only this\n")
    assert read_topology(tmp_path / "comments.yaml").measured == FOUND
    odd = measured(hosts=("::1", "10.0.0.7", "x-y.z"))
    write_measured(tmp_path / "odd.yaml", odd)
    assert set(read_topology(tmp_path / "odd.yaml").hosts) == set(odd.hosts)


@pytest.mark.parametrize(
    "text",
    [PERSON.rstrip("\n"), PERSON.replace("\n", "\r\n"), PERSON + "\n\n# the end", PERSON + "...\n", "---\n" + PERSON],
    ids=["no line end", "CRLF", "comment last", "end of document", "begin of document"],
)
def test_writing_into_odd_files(tmp_path, text):
    path = tmp_path / "lab.yaml"
    path.write_bytes(text.encode())
    try:
        write_measured(path, FOUND)
    except TopologyError:
        assert path.read_bytes() == text.encode()
        return
    assert path.read_bytes().startswith(text.encode())
    assert read_topology(path).measured == FOUND
    assert b"\r\n" not in path.read_bytes().replace(b"\r\n", b"") and (b"\r" in path.read_bytes()) == ("\r" in text)


def test_writing_into_a_link_keeps_the_link(tmp_path):
    (tmp_path / "real.yaml").write_text(PERSON)
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    write_measured(tmp_path / "link.yaml", FOUND)
    assert (tmp_path / "link.yaml").is_symlink()
    assert read_topology(tmp_path / "real.yaml").measured == FOUND


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{nodes: [{hosts: 'n[1-3]'}]}\n", "section cannot be inserted; write `nodes:` in block style"),
        ("nodes:\n  - hosts: other\n", "measured on hosts that are not in `nodes`: n1, n2, n3"),
        ("nodes: [\n", "is not valid YAML"),
        ("hello", "is text, not a topology"),
    ],
)
def test_writing_changes_nothing_where_it_cannot(tmp_path, text, what):
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    with pytest.raises(TopologyError, match=what):
        write_measured(path, FOUND)
    assert path.read_text() == text
    assert os.listdir(tmp_path) == ["lab.yaml"]


def test_a_folder_that_cannot_be_written_is_an_error_of_one_line(tmp_path):
    with pytest.raises(TopologyError, match=r"there is no folder .*none; name another file with -o"):
        write_measured(tmp_path / "none" / "lab.yaml", FOUND)


def test_what_is_written_is_yaml_for_everybody(tmp_path):
    plain = yaml.safe_load(encode_measured(FOUND))
    assert msgspec.convert(plain["measured"], Measurements) == FOUND  # PyYAML reads YAML 1.1
    edited = encode_measured(FOUND).replace(
        "measured:  # by distrib-topo probe, which replaces this part as a whole", "measured:"
    )
    assert decode_measured(edited) is None
    assert parse_topology(PERSON + edited, "t").measured == FOUND


def test_the_measured_part_is_found_wherever_it_stands():
    part = encode_measured(FOUND)
    for before, after in [("", PERSON), (PERSON, ""), (PERSON, AFTER)]:
        assert split_measured(before + part + after) == (before, part, after)
    assert split_measured(PERSON) == (PERSON, "", "")
    nested = "nodes:\n  - hosts: a\n    measured: 1\n# measured: no\nmeasured_by: me\n"
    assert split_measured(nested) == (nested, "", "")


finite = st.floats(min_value=1e-9, max_value=1e5)
points = st.builds(Point, st.integers(1, 2**40), finite, finite)
links = st.builds(
    LinkMeasurement,
    source=st.just("a"), target=st.just("b"), transport=st.sampled_from(["mpi", "tcp"]), load=st.sampled_from(["alone", "together"]),
    both_ways=st.booleans(), interface=st.none() | st.text(max_size=5), latency_seconds=st.none() | finite,
    bandwidth_bytes_per_second=st.floats(1, 1e15), variation=finite, curve=st.lists(points, max_size=3).map(tuple),
)  # fmt: skip


@given(st.lists(links, max_size=3), st.dictionaries(st.text(max_size=5), st.text(max_size=8), max_size=3))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_measurement_written_is_the_one_read(pairs, software):
    found = Measurements(when="now", software=software, hosts=("a", "b"), pairs=tuple(pairs))
    part = encode_measured(found)
    assert decode_measured(part) == found
    if all(text.isprintable() for text in [*software, *software.values(), *(p.interface or "" for p in pairs)]):
        slow = part.replace("measured:  #", "measured: #")  # the format differs, so the reader uses YAML
        assert decode_measured(slow) is None
        assert parse_topology("nodes: [{hosts: 'a,b'}]\n" + slow, "t").measured == found


def test_many_hosts_are_read_quickly(tmp_path):
    hosts = tuple(f"n{number}" for number in range(1, 33))
    curve = tuple(Point(8 << step, 1e-5, 0.001) for step in range(24))
    everything = measured(
        *(pair(a, b, 1e8, curve=curve, load=load) for a in hosts for b in hosts if a != b for load in ("alone", "together")),
        hosts=hosts,
    )  # fmt: skip
    write_measured(tmp_path / "t.yaml", everything)
    started = time.process_time()
    topology = read_topology(tmp_path / "t.yaml")
    assert time.process_time() - started < 1
    assert topology.measured == everything
    assert units.format_rate(link_between(topology, "n3", "n30").bandwidth_bytes_per_second) == "100 MB/s"


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["n1"], "n1"),
        (["n1", "n2", "n2", "n3"], "n1, n2, n3"),
        ([f"n{i}" for i in range(1, 101)], "n[1-100]"),
        (["a", "b", "c", "d"], "a,b,c,d"),
        ([f"n{i * i}" for i in range(1, 60)], "n1, n4, n9 and 56 more"),
    ],
)
def test_hosts_are_named_in_few_words(names, told):
    assert name_hosts(names) == told


@pytest.mark.parametrize("kind", ["80GB", "16 GB", "80GB HBM3", "RTX", "GeForce RTX", "PCIe", "Tesla", "NVIDIA SXM4"])
def test_what_many_gpus_have_in_their_names_names_none(kind):
    assert find_gpu(kind) is None
