"""Topology files, valid and invalid, and their hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distrib.cluster.hostfile import parse_host_list, parse_hostfile, read_hostfile
from distrib.cluster.measurements_io import encode_measured
from distrib.cluster.node import name_hosts
from distrib.cluster.topology import check_hosts, parse_topology, read_topology
from distrib.cluster.uplinks import switch_oversubscription
from distrib.errors import TopologyError
from tests.support.topologies import EXAMPLES, NODE, dgx_and_old_hosts, measured


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_read_and_has_its_hostfile(path):
    topology = read_topology(path)
    hosts = read_hostfile(path.with_suffix(".txt"))
    check_hosts(topology, hosts)
    for host in hosts.hosts:
        gpus = topology.gpus_of(host.name)
        assert gpus and gpus.count == host.slots and gpus.spec
    assert sum(line.lstrip().startswith("#") for line in path.read_text().splitlines()) >= 1


def test_a_topology_has_the_gpus_nics_and_switches_of_its_hosts():
    topology = dgx_and_old_hosts()
    assert topology.hosts == ("dgx01", "dgx02", "dgx03", "dgx04", "old1", "old2")
    assert topology.gpus_of("DGX02").count == 8
    assert topology.gpus_of("nobody") is None and topology.nics_of("nobody") == ()
    assert [nic.name for nic in topology.nics_of("dgx03")] == [*(f"mlx5_{n}" for n in range(8)), "eno1"]
    assert [switch.name for switch in topology.switches_above("old1")] == ["rack2", "spine"]
    assert topology.switches_above("old2") == ()


def test_yaml_with_anchors_ratios_and_crlf_is_read_as_intended():
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


INVALID_FILES = [
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


@pytest.mark.parametrize(("text", "what"), INVALID_FILES)
def test_an_invalid_file_is_refused_with_line_and_path(text, what):
    started = time.process_time()
    with pytest.raises(TopologyError, match=re.escape(what)) as caught:
        parse_topology(text, "t.yaml")
    assert "\n" not in str(caught.value)
    assert time.process_time() - started < 2


def test_unreadable_files_are_refused(tmp_path):
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
def test_line_numbers_after_the_measured_section_include_it(tmp_path, before):
    path = tmp_path / "t.yaml"
    part = encode_measured(measured(hosts=("a",)))
    path.write_text(before + part + NODE)
    line = (before + part).count("\n") + 1
    with pytest.raises(TopologyError, match=re.escape(f"t.yaml:{line}: $.nodes: b is in")):
        check_hosts(read_topology(path), parse_host_list("a,b"))


def test_reading_a_topology_without_ranges_imports_neither_torch_nor_clustershell():
    code = (
        "import sys; from distrib.cluster.topology import parse_topology; "
        "parse_topology('nodes: [{hosts: a}]', 't'); "
        "print(*{'torch', 'mpi4py', 'numpy', 'ClusterShell', 'matplotlib', 'rich'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


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
def test_lists_of_hosts_are_shortened_to_ranges_and_counts(names, told):
    assert name_hosts(names) == told
