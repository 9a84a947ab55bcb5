"""Topology files, valid and invalid, and their hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distrib.cluster.hostfile import parse_host_list, parse_hostfile, read_hostfile
from distrib.cluster.measurements_io import encode_measured
from distrib.cluster.node import name_hosts
from distrib.cluster.topology import check_hosts, parse_topology, read_topology
from distrib.cluster.uplinks import switch_oversubscription
from distrib.errors import TopologyError
from tests.conftest import ROOT
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
    assert topology.gpus_of("n9") is None and topology.nics_of("n9") == ()
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


INVALID_FILES = yaml.safe_load((ROOT / "tests" / "data" / "topology_errors.yaml").read_text(encoding="utf-8"))


def topology_error(text: str) -> str:
    try:
        parse_topology(text, "t.yaml")
    except TopologyError as error:
        return str(error)
    pytest.fail(f"accepted: {text}")


@pytest.mark.parametrize("subject", INVALID_FILES)
def test_an_invalid_file_is_refused_with_line_and_path(subject):
    for text, what in INVALID_FILES[subject]:
        error = topology_error(text)
        assert what in error and "\n" not in error, text


def test_deep_nesting_and_merges_of_merges_are_refused_at_once():
    started = time.process_time()
    assert "t.yaml:1: is not valid YAML: nested more than 100 levels" in topology_error("[" * 100_000)
    merges = "".join(f"x{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
    assert "t.yaml:7: is not valid YAML: merged into a mapping of" in topology_error(f"x0: &x0 {{a: 1}}\n{merges}")
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


@pytest.mark.processes
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
