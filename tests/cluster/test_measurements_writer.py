"""Measurements of a topology file: written, found and read back."""

from __future__ import annotations

import os
import stat
import time

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distrib import units
from distrib.cluster.links import link_between
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
from distrib.cluster.topology import parse_topology, read_topology
from distrib.errors import TopologyError
from tests.support.topologies import measured, pair

CURVE = tuple(Point(8 << step, 1e-5 * (step + 1) / 3, 0.001) for step in range(10))
WRITTEN_BY_USER = """\
# Our cluster. Do not touch!
name:   Lab     # odd   spacing

nodes:
    - hosts: n[1-3]
      # older cards
      gpus: { kind: T4 , count: 2 }
"""
WRITTEN_AFTER_MEASURED = """
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


def test_writing_keeps_the_text_of_the_user_byte_for_byte(tmp_path):
    path = tmp_path / "lab.yaml"
    path.write_text(WRITTEN_BY_USER + WRITTEN_AFTER_MEASURED)
    path.chmod(0o640)
    write_measured(path, FOUND)
    assert path.read_text().startswith(WRITTEN_BY_USER + WRITTEN_AFTER_MEASURED)
    assert read_topology(path).measured == FOUND
    # A user moves the section up and extends it.
    part = encode_measured(FOUND)
    path.write_text(WRITTEN_BY_USER + part.replace("  when", "# a remark\n  when") + WRITTEN_AFTER_MEASURED)
    again = msgspec.structs.replace(FOUND, when="2027-01-01T00:00:00Z", pairs=())
    write_measured(path, again)
    assert path.read_text() == WRITTEN_BY_USER + encode_measured(again) + WRITTEN_AFTER_MEASURED
    assert read_topology(path).measured == again
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["lab.yaml"]


def test_writing_creates_a_missing_file(tmp_path):
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
    [
        WRITTEN_BY_USER.rstrip("\n"),
        WRITTEN_BY_USER.replace("\n", "\r\n"),
        WRITTEN_BY_USER + "\n\n# the end",
        WRITTEN_BY_USER + "...\n",
        "---\n" + WRITTEN_BY_USER,
    ],
    ids=["no line end", "CRLF", "comment last", "end of document", "begin of document"],
)
def test_writing_keeps_line_ends_and_document_marks_or_refuses(tmp_path, text):
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


def test_writing_through_a_symlink_keeps_the_symlink(tmp_path):
    (tmp_path / "real.yaml").write_text(WRITTEN_BY_USER)
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
def test_a_refused_write_leaves_the_file_unchanged(tmp_path, text, what):
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    with pytest.raises(TopologyError, match=what):
        write_measured(path, FOUND)
    assert path.read_text() == text
    assert os.listdir(tmp_path) == ["lab.yaml"]


def test_a_missing_folder_is_refused_with_a_hint(tmp_path):
    with pytest.raises(TopologyError, match=r"no folder .*none"):
        write_measured(tmp_path / "none" / "lab.yaml", FOUND)


def test_written_measurements_are_plain_yaml(tmp_path):
    plain = yaml.safe_load(encode_measured(FOUND))
    assert msgspec.convert(plain["measured"], Measurements) == FOUND  # PyYAML reads YAML 1.1
    edited = encode_measured(FOUND).replace(
        "measured:  # by distrib-topo probe, which replaces this part as a whole", "measured:"
    )
    assert decode_measured(edited) is None
    assert parse_topology(WRITTEN_BY_USER + edited, "t").measured == FOUND


def test_the_measured_section_is_found_at_any_position():
    part = encode_measured(FOUND)
    for before, after in [("", WRITTEN_BY_USER), (WRITTEN_BY_USER, ""), (WRITTEN_BY_USER, WRITTEN_AFTER_MEASURED)]:
        assert split_measured(before + part + after) == (before, part, after)
    assert split_measured(WRITTEN_BY_USER) == (WRITTEN_BY_USER, "", "")
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
def test_any_written_measurement_reads_back_equal(pairs, software):
    found = Measurements(when="now", software=software, hosts=("a", "b"), pairs=tuple(pairs))
    part = encode_measured(found)
    assert decode_measured(part) == found
    if all(text.isprintable() for text in [*software, *software.values(), *(p.interface or "" for p in pairs)]):
        slow = part.replace("measured:  #", "measured: #")  # the format differs, so the reader uses YAML
        assert decode_measured(slow) is None
        assert parse_topology("nodes: [{hosts: 'a,b'}]\n" + slow, "t").measured == found


def test_measurements_of_32_hosts_are_read_within_a_second(tmp_path):
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
