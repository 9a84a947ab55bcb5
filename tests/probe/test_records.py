"""Records of the probe, and the measurements that a topology file keeps."""

from __future__ import annotations

from distrib.cluster.measurements import LinkMeasurement, Measurements, Point
from distrib.probe.probe_report import links_table
from distrib.probe.records import (
    PairMeasurement,
    ProbeEnded,
    StageDone,
    build_measured,
    decode_record,
    encode_record,
    fastest_measurements,
)
from distrib.probe.settings import DEFAULT
from tests.support.simulated_network import MB, Network, drawn, facts


def test_records_are_decoded_from_their_lines_and_other_lines_are_not():
    for record in [
        *Network(3).records(),
        StageDone(stage="a", title="b", done_seconds=1.0, remaining_seconds=2.0),
        ProbeEnded(seconds=1.0),
    ]:
        assert decode_record(encode_record(record)) == record
    for line in (
        "",
        "hello",
        '{"type": "pair"',
        '{"type": "unknown"}',
        "[1]",
        '{"type": "groups", "sides": ' + "[" * 5000,
    ):
        assert decode_record(line) is None


def test_the_fastest_of_several_measurements_counts_and_curves_are_merged():
    def seen(rate, **more):
        return PairMeasurement(
            stage="x", source="a", target="b", transport="mpi", load="alone", bandwidth_bytes_per_second=rate, **more
        )

    slow, fast = (Point(8, 1e-5), Point(64, 2e-5)), (Point(64, 1e-5), Point(512, 1e-4))
    found = fastest_measurements(
        [seen(1.0, curve=slow, latency_seconds=2.0), seen(2.0, curve=fast), seen(5.0, failed="no")]
    )
    (only,) = found.values()
    assert (only.bandwidth_bytes_per_second, only.latency_seconds) == (2.0, 2.0)
    assert only.curve == (slow[0], *fast)


def test_the_measurements_of_a_topology_file_hold_every_direction():
    kept = build_measured(Network(4).records(DEFAULT))
    assert isinstance(kept, Measurements)
    assert kept.hosts == ("n1", "n2", "n3", "n4")
    assert len({(p.source, p.target) for p in kept.pairs if p.load == "alone"}) == 12
    assert all(isinstance(pair, LinkMeasurement) for pair in kept.pairs)
    assert build_measured([]) is None


def test_pairs_mixed_to_find_a_shared_link_do_not_count_as_bisection():
    records = Network(8, racks=[0] * 4 + [1] * 4, uplink=119.5 * MB).records()
    kept = {(p.source, p.target): p for p in build_measured(records).pairs if p.load not in ("alone", "together")}
    planned = [r for r in records if isinstance(r, PairMeasurement) and r.stage == "bisection"]
    assert {p: seen.bandwidth_bytes_per_second for p, seen in kept.items()} == {
        (r.source, r.target): r.bandwidth_bytes_per_second for r in planned
    }
    table = drawn(links_table(build_measured(records), records))
    assert f"0 of {10 * len(planned)}" in next(line for line in table.splitlines() if "bisection" in line)


def test_hosts_on_one_machine_are_grouped_with_its_processors():
    said = (
        facts("n1", machine="a", cores=(0, 1, 2)),
        facts("n2", machine="b", cores=(0, 1)),
        facts("n3", machine="a", cores=(2, 3)),
        facts("n4"),  # has unknown facts
        facts("n5", machine="c", cores=(0, 1, 2, 3), cpu_quota=1.5),
        facts("n6", machine="c", cores=(0, 1, 2, 3), cpu_quota=1.5),
    )
    kept = build_measured(Network(6).records(facts=said))
    assert [(one.hosts, one.processors) for one in kept.machines] == [
        (("n1", "n3"), 4), (("n2",), 2), (("n4",), 8), (("n5", "n6"), 3),
    ]  # fmt: skip
