"""Findings about hosts and links: slow, asymmetric, lossy, failed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from distrib.cluster.inventory import Interface
from distrib.probe import schedule
from distrib.probe.diagnosis.checks import check_records
from distrib.probe.records import PairMeasurement, ProbeStarted
from distrib.probe.settings import DEFAULT, FULL, QUICK
from tests.support.simulated_network import MB, Network, facts


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 16), st.integers(0, 10_000), st.sampled_from([QUICK, DEFAULT]))
def test_a_clean_network_has_no_findings(hosts, seed, mode):
    assert check_records(Network(hosts, noise=0.01, seed=seed).records(mode)) == ()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(4, 16),
    st.integers(0, 10_000),
    st.sampled_from([0.9, 0.5, 0.1]),
    st.sampled_from([QUICK, DEFAULT]),
    st.data(),
)
def test_a_slow_host_is_the_only_finding_and_has_its_ratio(hosts, seed, part, mode, data):
    which = data.draw(st.integers(0, hosts - 1))
    found = check_records(Network(hosts, noise=0.005, seed=seed, slow={which: part}).records(mode))
    assert [(finding.kind, finding.hosts) for finding in found] == [("slow_host", (f"n{which + 1}",))]
    assert found[0].ratio == pytest.approx(part, abs=0.03)
    assert found[0].severity == ("warning" if part == 0.9 else "error")


@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("slow", [(0, 1), (1, 0)])
def test_a_quick_probe_of_few_hosts_finds_one_slow_direction(hosts, slow):
    found = check_records(Network(hosts, noise=0.002, one_way={slow: 0.2}).records(QUICK))
    assert [(f.kind, f.source, f.target) for f in found] == [("asymmetric_link", f"n{slow[0] + 1}", f"n{slow[1] + 1}")]


def test_short_streams_of_a_quick_probe_may_scatter_more():
    records = {mode.mode: Network(8, noise=0.002, slow={2: 0.94}).records(mode) for mode in (QUICK, DEFAULT)}
    kinds = {mode: {finding.kind for finding in check_records(each)} for mode, each in records.items()}
    assert kinds == {"quick": set(), "default": {"slow_host"}}


def test_one_slow_direction_is_an_asymmetric_link():
    records = Network(6, noise=0.002, one_way={(1, 4): 0.5}).records(DEFAULT)
    found = check_records(records)
    assert [(f.kind, f.source, f.target) for f in found] == [("asymmetric_link", "n2", "n5")]
    assert found[0].ratio == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("hosts", [4, 5, 8])
def test_a_host_slow_in_one_direction_is_one_finding(hosts):
    """One finding remains also where too few other links were measured alone for a reference rate."""
    network = Network(hosts, one_way={(1, other): 0.25 for other in range(hosts) if other != 1})
    assert [(f.kind, f.hosts) for f in check_records(network.records(QUICK))] == [("slow_host", ("n2",))]


def test_a_pair_slow_in_both_directions_is_a_slow_link():
    found = check_records(Network(6, noise=0.002, one_way={(1, 4): 0.8, (4, 1): 0.8}).records(DEFAULT))
    assert [(f.kind, f.hosts) for f in found] == [("slow_link", ("n2", "n5"))]


@pytest.mark.parametrize(("hosts", "mode"), [(8, QUICK), (8, DEFAULT), (9, FULL), (32, QUICK)])
@pytest.mark.parametrize("part", [0.8, 0.1])
@pytest.mark.parametrize("ways", [1, 2])
def test_a_bad_link_is_found_in_whichever_round_its_pair_meets(hosts, mode, part, ways):
    rounds = schedule.round_robin(hosts)
    for round_ in (rounds[0], rounds[len(rounds) // 2], rounds[-1]):
        a, b = round_[-1]
        bad = {(a, b): part, (b, a): part} if ways == 2 else {(b, a): part}
        found = check_records(Network(hosts, noise=0.005, one_way=bad).records(mode))
        told = [(f.kind, {f.source, f.target}) for f in found]
        assert told == [("slow_link" if ways == 2 else "asymmetric_link", {f"n{a + 1}", f"n{b + 1}"})]
        assert found[0].ratio == pytest.approx(part, abs=0.02)


def test_many_slow_links_do_not_become_the_reference_rate():
    bad = [(0, 2), (2, 4), (4, 6), (1, 3), (3, 5)]  # not in the first round: the probe repeats only these
    network = Network(8, noise=0.005, one_way={way: 0.3 for a, b in bad for way in ((a, b), (b, a))})
    found = check_records(network.records(QUICK))
    assert {(f.kind, frozenset(f.hosts)) for f in found} == {
        ("slow_link", frozenset({f"n{a + 1}", f"n{b + 1}"})) for a, b in bad
    }


def test_a_host_that_freezes_after_its_measurement_is_lost():
    hosts = ("a", "b", "c", "d")
    pairs = [(a, b) for a in hosts for b in hosts if a != b]
    together = [
        PairMeasurement(
            stage="together", source=a, target=b, transport="tcp", load="together", bandwidth_bytes_per_second=100 * MB
        )
        for a, b in pairs
    ]
    alone = [
        PairMeasurement(stage="alone", source=a, target=b, transport="tcp", load="alone", failed="d did not reply")
        if "d" in (a, b)
        else PairMeasurement(
            stage="alone", source=a, target=b, transport="tcp", load="alone", bandwidth_bytes_per_second=100 * MB
        )
        for a, b in pairs
    ]
    start = ProbeStarted(when="", mode="quick", hosts=hosts, primary="tcp", facts=())
    (found,) = check_records([start, *together, *alone])
    assert (found.kind, found.hosts) == ("host_lost", ("d",))


def test_hosts_of_one_machine_do_not_make_others_look_slow():
    """Containers reach each other through memory, and the third host over the network."""
    machines = ["a", "a", "a", "b", "b", "b", "c"]
    network = Network(7, noise=0.005, rate=1000 * MB, racks=[0, 0, 0, 1, 1, 1, 2], uplink=119.5 * MB)
    said = tuple(facts(f"n{n + 1}", machine=machine, interfaces=()) for n, machine in enumerate(machines))
    found = check_records(network.records(DEFAULT, said))
    assert {f.kind for f in found} <= {"oversubscribed_uplink"}, found  # three hosts share one uplink
    assert any(f.kind == "slow_host" for f in check_records(network.records(DEFAULT)))


def test_an_asymmetric_link_of_a_bond_is_a_note():
    """Its streams may have shared one of the two NICs."""
    bond = Interface(name="eth0", mtu=1500, speed_bytes_per_second=250 * MB, kind="bond")
    said = tuple(facts(f"n{n}", interfaces=(bond,)) for n in range(1, 9))
    network = Network(8, noise=0.005, rate=239 * MB, one_way={(0, 3): 0.5})
    (found,) = check_records(network.records(DEFAULT, said))
    assert (found.kind, found.severity) == ("asymmetric_link", "note") and "bond" in found.evidence
    (found,) = check_records(network.records(DEFAULT))
    assert (found.kind, found.severity) == ("asymmetric_link", "error")


def test_retransmitted_segments_are_attributed_to_host_or_link():
    def lossy(network, bad, mtu=1500):
        return [
            structs.replace(
                r, path_mtu=mtu, retransmits=int(0.1 * r.bandwidth_bytes_per_second * r.seconds / (mtu - 52))
            )
            if isinstance(r, PairMeasurement) and r.load == "alone" and bad(r)
            else r
            for r in network.records(DEFAULT)
        ]

    for mtu in (1500, 9000):
        (found,) = check_records(lossy(Network(8), lambda r: "n3" in (r.source, r.target), mtu))
        assert (found.kind, found.hosts) == ("noisy_link", ("n3",))
        assert found.what.startswith("n3: 10.0% of all TCP segments")
    (found,) = check_records(lossy(Network(8), lambda r: (r.source, r.target) == ("n3", "n5")))
    assert (found.source, found.target) == ("n3", "n5")
    (across,) = check_records(lossy(Network(8), lambda r: (r.source < "n4") != (r.target < "n4")))
    assert (across.kind, across.hosts) == ("noisy_link", tuple(f"n{n}" for n in range(1, 9)))


def test_failed_pairs_are_findings_by_their_reason():
    records = Network(5).records(DEFAULT)
    kept = [r for r in records if not (isinstance(r, PairMeasurement) and {r.source, r.target} == {"n1", "n2"})]
    lost = PairMeasurement(
        stage="alone/tcp/0", source="n1", target="n2", transport="tcp", load="alone", failed="n2: the stream stalled"
    )
    found = check_records([*kept, lost])
    assert [(f.kind, f.severity) for f in found] == [("mtu", "error")]
    gone = [r for r in records if not (isinstance(r, PairMeasurement) and "n3" in (r.source, r.target))]
    gone += [
        PairMeasurement(
            stage="alone/tcp/0", source=a, target=b, transport="tcp", load="alone", failed="n3 did not reply"
        )
        for name in ("n1", "n2", "n4", "n5")
        for a, b in ((name, "n3"), ("n3", name))
    ]
    assert [(f.kind, f.hosts) for f in check_records(gone)] == [("host_lost", ("n3",))]
    stalled = [
        structs.replace(r, failed="nearly nothing arrived") if isinstance(r, PairMeasurement) and r.failed else r
        for r in gone
    ]
    assert [(f.kind, f.hosts) for f in check_records(stalled)] == [("mtu", ("n3",))]


def test_a_host_that_froze_during_the_probe_is_lost_even_with_few_failed_pairs():
    """Earlier measurements count. A pair with one unresponsive end does not indicate a wrong MTU."""
    records = Network(8).records(DEFAULT)

    def after(peers, why="n3 did not reply"):
        return [
            structs.replace(r, failed=why)
            if isinstance(r, PairMeasurement) and {r.source, r.target} in [{"n3", peer} for peer in peers]
            else r
            for r in records
        ]

    (found,) = check_records(after(["n7", "n8"]))
    assert (found.kind, found.severity, found.hosts) == ("host_lost", "error", ("n3",))
    assert found.what == "n3 could not be measured with 2 other host(s)" and found.evidence.startswith(
        "4 of 14 directions"
    )
    stalled = check_records(after(["n7", "n8"], "n3 did not reply; n7: the stream stalled"))
    assert [(f.kind, f.hosts) for f in stalled] == [("host_lost", ("n3",))]
    (one_way, _) = check_records(after(["n8"]))  # either host may be the cause
    assert one_way.kind == "not_measured" and one_way.advice.startswith("check that both hosts are up")
    assert {f.kind for f in check_records(after(["n7", "n8"], "n3: no connection in 2 s"))} == {"not_measured"}


@pytest.mark.parametrize("primary", ["tcp", "mpi"])
def test_failures_of_the_primary_transport_are_errors_and_of_the_other_warnings(primary):
    start, *seen = Network(4).records(DEFAULT)
    other = "mpi" if primary == "tcp" else "tcp"

    def told(*ways, where=lambda pair: "n3" in pair):
        over = [
            structs.replace(r, transport=way, failed="n3: the stream stalled" if way in ways and where((r.source, r.target)) else None)
            for r in seen if isinstance(r, PairMeasurement) for way in ("tcp", "mpi")
        ]  # fmt: skip
        found = check_records([structs.replace(start, primary=primary), *over])
        return [(f.kind, f.severity, f.hosts, f"over {other}" in f.what) for f in found]

    assert told() == []
    assert told(primary) == told("tcp", "mpi") == [("mtu", "error", ("n3",), False)]
    assert told(other) == [("mtu", "warning", ("n3",), True)]
    assert told(other, where=lambda pair: True) == []  # the probe abandoned this transport, and its notes report that
    assert told(primary, where=lambda pair: pair == ("n1", "n2")) == [("mtu", "error", ("n1", "n2"), False)]


def test_a_link_with_high_variation_is_a_note():
    records = Network(4).records(DEFAULT)
    shaken = [
        PairMeasurement(**{**{k: getattr(r, k) for k in r.__struct_fields__}, "variation": 0.4})
        if isinstance(r, PairMeasurement) and (r.source, r.target) == ("n1", "n2")
        else r
        for r in records
    ]
    assert [(f.kind, f.severity, f.source) for f in check_records(shaken)] == [("noisy_link", "note", "n1")]


@pytest.mark.parametrize(("hosts", "bad"), [(2, "n2"), (3, "n2"), (4, "n2")])
def test_a_host_that_loses_packets_is_found_among_two_to_four_hosts(hosts, bad):
    def lossy(record):
        lost = 0.05 if bad in (record.source, record.target) else 0.0
        segments = record.bandwidth_bytes_per_second * record.seconds / 1448
        return structs.replace(record, path_mtu=1500, retransmits=int(lost * segments))

    records = [
        lossy(r) if isinstance(r, PairMeasurement) and r.transport == "tcp" else r for r in Network(hosts).records()
    ]
    found = [f for f in check_records(records) if f.kind == "noisy_link"]
    assert found and all(bad in f.hosts for f in found)
    assert not [f for f in check_records(Network(hosts).records()) if f.kind == "noisy_link"]
