"""Computations of the probe without a network: schedule, statistics, findings and records."""

from __future__ import annotations

import io
import random
import re
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from distrib.cluster import shared_links
from distrib.cluster.inventory import Interface, RdmaPort
from distrib.cluster.links import link_between
from distrib.cluster.measurements import Collective, IntraNodeLinkMeasurement, LinkMeasurement, Measurements, Point
from distrib.cluster.node import Nic, NodeGroup
from distrib.cluster.shared_links import groups_of
from distrib.cluster.topology import Topology
from distrib.probe import schedule, stages
from distrib.probe.bench import statistics as samples
from distrib.probe.diagnosis import remeasure
from distrib.probe.diagnosis.check_inputs import collect_inputs
from distrib.probe.diagnosis.checks import check_records
from distrib.probe.diagnosis.regressions import describe_comparison, find_regressions
from distrib.probe.host_facts import ports_of_job, used_ports
from distrib.probe.probe_report import bus_bandwidth, curve_table, describe_ranks, heat_map, links_table, scale_maximum
from distrib.probe.records import (
    CollectiveMeasurement,
    GpuLinkStates,
    GpuPcieLink,
    HostFacts,
    IntraNodeMeasurement,
    PairMeasurement,
    ProbeEnded,
    ProbeStarted,
    SharedLinkSides,
    StageDone,
    build_measured,
    decode_record,
    encode_record,
    fastest_measurements,
)
from distrib.probe.second_pass import MAX_SIDES_ATTEMPTS
from distrib.probe.secondary_networks import other_networks
from distrib.probe.settings import DEFAULT, FULL, MODES, QUICK

MB = 1e6


# -- schedule -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", range(2, 130))
def test_every_pair_meets_exactly_once_in_rounds_of_disjoint_pairs(hosts):
    rounds = schedule.round_robin(hosts)
    assert len(rounds) == (hosts - 1 if hosts % 2 == 0 else hosts)
    pairs = [pair for round_ in rounds for pair in round_]
    assert len(pairs) == len(set(pairs)) == hosts * (hosts - 1) // 2
    assert all(a < b for a, b in pairs)
    for round_ in rounds:
        members = [host for pair in round_ for host in pair]
        assert len(members) == len(set(members)) == hosts - hosts % 2


@pytest.mark.parametrize("hosts", range(4, 130))
def test_the_bisection_pairs_one_half_with_the_other(hosts):
    round_ = schedule.bisection_round(hosts)
    assert len(round_) == hosts // 2
    assert {a for a, _ in round_} == set(range(hosts // 2))
    assert {b for _, b in round_} == set(range(hosts - hosts // 2, hosts))


def test_counts_of_hosts_for_collectives():
    assert schedule.collective_host_counts(1) == ()
    assert schedule.collective_host_counts(2) == (2,)
    assert schedule.collective_host_counts(8) == (2, 4, 8)
    assert schedule.collective_host_counts(13) == (2, 4, 8, 13)


def test_a_full_probe_covers_the_sizes_asked_for():
    streamed = {size for step in stages.plan_stages(8, FULL, "tcp") for size in step.sizes}
    assert streamed == {8 * 2**n for n in range(24)}  # 8 B to 64 MiB
    assert FULL.collective_sizes == tuple(1024 * 2**n for n in range(19))  # 1 KiB to 256 MiB


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hosts", [2, 3, 8, 33, 128])
def test_every_pair_is_measured_and_the_time_alone_is_bounded(mode, hosts):
    found = stages.plan_stages(hosts, MODES[mode], "tcp")
    assert len({step.key for step in found}) == len(found)
    # A round with one pair measures it alone.
    load = "together" if hosts > 3 else "alone"
    rounds = [step for step in found if step.load == load and step.key.startswith("together/tcp")]
    assert {pair for step in rounds for phase in step.phases for pair in phase} == {
        (a, b) for a in range(hosts) for b in range(hosts) if a != b
    }
    for way in ("tcp", "mpi"):
        alone = [step for step in found if step.key.startswith(f"alone/{way}")]
        spent = sum(step.estimate_seconds for step in alone)
        least = hosts * (MODES[mode].alone_seconds[0] + stages.OVERHEAD_SECONDS)
        assert spent <= max(MODES[mode].alone_budget_seconds, least) * 1.01


# -- statistics -----------------------------------------------------------------------------------------------------------


def test_outliers_are_counted_and_do_not_move_the_median():
    summary = samples.summarize([1.0, 1.001, 0.999, 1.0005, 0.9995, 3.0])
    assert summary.median == pytest.approx(1.0, rel=1e-3)
    assert (summary.outliers, summary.repetitions) == (1, 6)
    assert summary.variation < 0.001


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=40))
def test_any_repetitions_can_be_summed_up(values):
    summary = samples.summarize(values)
    assert min(values) <= summary.median <= max(values)
    assert 0 <= summary.outliers < len(values)
    assert summary.variation >= 0 <= summary.median_variation


@given(st.floats(1e5, 1e10), st.integers(0, 1 << 20), st.integers(1, 16), st.integers(20, 400))
def test_the_rate_of_a_steady_stream_is_found_after_its_burst(rate, burst, windows, count):
    stamps = [(n * 0.001, burst + int(rate * n * 0.001)) for n in range(count)]
    found = samples.stream_rates(stamps, skip_bytes=0, skip_seconds=0.002, windows=windows)
    assert 1 <= len(found) <= windows
    assert statistics.median(found) == pytest.approx(rate, rel=0.02)


def test_a_stream_that_is_too_short_has_no_rate():
    assert samples.stream_rates([(0.0, 100), (0.1, 200)], skip_bytes=0, skip_seconds=0, windows=4) == []
    assert samples.stream_rates([(0.0, 1), (0.1, 2), (0.2, 3)], skip_bytes=1000, skip_seconds=0, windows=4) == []


# -- simulated network ----------------------------------------------------------------------------------------------------


class Network:
    """Simulated hosts with equal links, in racks with shared uplinks; measures as the probe's coordinator does."""

    def __init__(
        self, hosts, *, noise=0.0, slow=None, racks=None, uplink=float("inf"), one_way=None, seed=0, rate=119.5 * MB
    ):
        self.names = [f"n{number + 1}" for number in range(hosts)]
        self.rate = rate
        self.slow = slow or {}
        self.racks = racks or [0] * hosts
        self.uplink = uplink
        self.one_way = one_way or {}
        self.random = random.Random(seed)
        self.noise = noise

    def uplink_of(self, rack):
        return self.uplink.get(rack, float("inf")) if isinstance(self.uplink, dict) else self.uplink

    def rates(self, phase):
        """Return each pair's rate when all pairs of the phase send at once and share the uplinks evenly."""
        crossing = {}
        for a, b in phase:
            if self.racks[a] != self.racks[b]:
                crossing.setdefault((self.racks[a], "up"), []).append((a, b))
                crossing.setdefault((self.racks[b], "down"), []).append((a, b))
        found = {}
        for a, b in phase:
            own = self.rate * min(self.slow.get(a, 1.0), self.slow.get(b, 1.0)) * self.one_way.get((a, b), 1.0)
            shares = [self.uplink_of(rack) / len(pairs) for (rack, _), pairs in crossing.items() if (a, b) in pairs]
            # Other load only slows a stream down; noise is symmetric.
            found[a, b] = min([own, *shares]) * (1 - abs(self.random.gauss(0, self.noise)))
        return found

    def records(self, mode=QUICK, facts=()):
        seen = [
            ProbeStarted(
                when="2026-01-01T00:00:00+00:00", mode=mode.mode, hosts=tuple(self.names), primary="tcp", facts=facts
            )
        ]
        for step in stages.plan_stages(len(self.names), mode, "tcp"):
            if step.kind == "transfer" and step.transport == "tcp" and not step.both_ways:
                for number, phase in enumerate(step.phases):
                    seen += self.measure(step.key, step.load, phase, number)
        for a, b in remeasure.links_to_remeasure(collect_inputs(seen), mode.max_remeasured):
            seen += self.measure("again", "alone", [(self.names.index(a), self.names.index(b))])
        inputs = collect_inputs(seen)
        base = inputs.alone
        for phase in remeasure.concurrent_pairs_slowed(inputs)[:1]:
            load = tuple((self.names.index(a), self.names.index(b)) for a, b in phase)

            def run(key, phase, base=base):
                made = self.measure(f"sharing/{key}", "sharing", phase)
                seen.extend(made)
                return {
                    pair: r.bandwidth_bytes_per_second / base.expected(r.source, r.target)
                    for pair, r in zip(phase, made, strict=True)
                }

            for _ in range(MAX_SIDES_ATTEMPTS):
                full = tuple(shared_links.slowed_pairs(run("repeat", load)))
                used = {host for pair in full for host in pair}
                others = tuple(host for host in range(len(self.names)) if host not in used)
                if found := shared_links.find_sides(full, run, others):
                    sides = (
                        tuple(self.names[host] for host in found.left),
                        tuple(self.names[host] for host in found.right),
                    )
                    seen.append(SharedLinkSides(sides=sides))
                    break
        return seen

    def measure(self, key, load, phase, number=0):
        return [
            PairMeasurement(stage=key, phase=number, source=self.names[a], target=self.names[b], transport="tcp", load=load,
                     bandwidth_bytes_per_second=rate, variation=0.01, repetitions=10, seconds=0.1,
                     streams=4)
            for (a, b), rate in self.rates(phase).items()
        ]  # fmt: skip


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
def test_a_slow_host_is_named_with_its_ratio_and_nobody_else(hosts, seed, part, mode, data):
    which = data.draw(st.integers(0, hosts - 1))
    found = check_records(Network(hosts, noise=0.005, seed=seed, slow={which: part}).records(mode))
    assert [(finding.kind, finding.hosts) for finding in found] == [("slow_host", (f"n{which + 1}",))]
    assert found[0].ratio == pytest.approx(part, abs=0.03)
    assert found[0].severity == ("warning" if part == 0.9 else "error")


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(0, 10_000), st.sampled_from([2.0, 4.0]))
def test_an_oversubscribed_uplink_is_found_with_both_sides_and_its_ratio(half, seed, ratio):
    if half / ratio < 2 and ratio > 2:
        return  # so few hosts do not saturate the uplink
    network = Network(2 * half, noise=0.005, seed=seed, racks=[0] * half + [1] * half, uplink=119.5 * MB * half / ratio)
    records = network.records()
    found = check_records(records)
    if half == 3:  # too few streams to compare the sides while the uplink is saturated
        assert all(finding.kind == "oversubscribed_uplink" for finding in found)
        return
    assert [finding.kind for finding in found] == ["oversubscribed_uplink"]
    assert f"n[1-{half}]" in found[0].what and f"n[{half + 1}-{2 * half}]" in found[0].what
    assert found[0].ratio == pytest.approx(ratio, rel=0.05)
    groups = next(record for record in records if isinstance(record, SharedLinkSides))
    assert {frozenset(side) for side in groups.sides} == {
        frozenset(network.names[:half]),
        frozenset(network.names[half:]),
    }


def test_sides_are_not_made_up_where_the_processors_are_what_all_share():
    load = ((0, 4), (1, 5), (2, 6), (3, 7))
    assert shared_links.find_sides(load, lambda key, phase: {pair: 2.0 / len(phase) / 2 for pair in phase}) is None


@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("slow", [(0, 1), (1, 0)])
def test_one_slow_direction_of_few_hosts_is_seen_in_the_shortest_probe(hosts, slow):
    found = check_records(Network(hosts, noise=0.002, one_way={slow: 0.2}).records(QUICK))
    assert [(f.kind, f.source, f.target) for f in found] == [("asymmetric_link", f"n{slow[0] + 1}", f"n{slow[1] + 1}")]


def test_a_card_has_shown_what_it_can_beside_others():
    """A quick probe may never measure the pairs behind an uplink alone. The matrix shows the rate of each NIC."""
    own = tuple(facts(f"n{number}") for number in range(1, 5))
    records = Network(4, noise=0.002, racks=[0, 0, 1, 1], uplink=60 * MB).records(QUICK, own)
    assert {finding.kind for finding in check_records(records)} == {"oversubscribed_uplink"}


def test_one_slow_direction_is_an_asymmetric_link():
    records = Network(6, noise=0.002, one_way={(1, 4): 0.5}).records(DEFAULT)
    found = check_records(records)
    assert [(f.kind, f.source, f.target) for f in found] == [("asymmetric_link", "n2", "n5")]
    assert found[0].ratio == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("hosts", [4, 5, 8])
def test_a_host_that_is_slow_one_way_is_told_of_once(hosts):
    """One finding remains also where too few other links were measured alone for a reference rate."""
    network = Network(hosts, one_way={(1, other): 0.25 for other in range(hosts) if other != 1})
    assert [(f.kind, f.hosts) for f in check_records(network.records(QUICK))] == [("slow_host", ("n2",))]


def test_a_slow_way_between_two_good_hosts_is_a_slow_link():
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


def test_many_bad_links_do_not_pass_for_what_is_usual():
    bad = [(0, 2), (2, 4), (4, 6), (1, 3), (3, 5)]  # not in the first round: the probe repeats only these
    network = Network(8, noise=0.005, one_way={way: 0.3 for a, b in bad for way in ((a, b), (b, a))})
    found = check_records(network.records(QUICK))
    assert {(f.kind, frozenset(f.hosts)) for f in found} == {
        ("slow_link", frozenset({f"n{a + 1}", f"n{b + 1}"})) for a, b in bad
    }


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(2, 8), min_size=2, max_size=4),
    st.sampled_from([1.5, 2.0, 4.0]),
    st.booleans(),
    st.sampled_from([QUICK, DEFAULT]),
    st.integers(0, 10_000),
)
def test_no_host_or_link_is_blamed_for_what_it_shares(sizes, ratio, all_narrow, mode, seed):
    racks = [rack for rack, size in enumerate(sizes) for _ in range(size)]
    random.Random(seed).shuffle(racks)
    uplinks = {rack: 119.5 * MB * size / ratio for rack, size in enumerate(sizes) if all_narrow or not rack}
    # It does not slow a single pair.
    uplinks = {rack: max(rate, 119.5 * MB) for rack, rate in uplinks.items()}
    found = check_records(Network(len(racks), noise=0.005, racks=racks, uplink=uplinks, seed=seed).records(mode))
    assert {f.kind for f in found} <= {"oversubscribed_uplink"}


@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 4, 4, 4), (8, 8, 8), (4, 8, 4)])
@pytest.mark.parametrize("mode", [QUICK, DEFAULT])
def test_the_narrow_uplinks_of_several_racks_are_found_with_their_hosts(sizes, mode):
    racks = [rack for rack, size in enumerate(sizes) for _ in range(size)]
    uplinks = {rack: 119.5 * MB * size / 2 for rack, size in enumerate(sizes)}
    (found,) = check_records(Network(len(racks), noise=0.005, racks=racks, uplink=uplinks).records(mode))
    assert (found.kind, found.severity) == ("oversubscribed_uplink", "warning")
    assert found.ratio == pytest.approx(2.0, abs=0.1)
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    names = [f"n[{end - size + 1}-{end}]" for end, size in zip(ends, sizes, strict=True)]
    assert found.what.startswith(f"the uplinks of {', '.join(names[:-1])} and {names[-1]} are oversubscribed")


def test_the_ratio_of_an_uplink_is_that_of_what_its_hosts_could_send():
    """An uplink narrower than one host's link slows even a single pair."""
    network = Network(8, noise=0.005, racks=[0] * 4 + [1] * 4, uplink=119.5 * MB * 0.1)
    (found,) = check_records(network.records(DEFAULT))
    assert found.kind == "oversubscribed_uplink" and found.ratio == pytest.approx(40, rel=0.05)
    assert "4 concurrent pairs" in found.evidence


def test_a_host_that_freezes_after_it_was_measured_is_blamed():
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


def test_pairs_that_slow_each_other_down_are_told_of_where_nobody_knows_who_shares():
    racks = [0, 2, 1, 1, 0, 2, 2, 0, 1, 0, 1, 2]  # not in rack order
    records = Network(12, noise=0.005, racks=racks, uplink=119.5 * MB * 2).records()
    assert not any(isinstance(record, SharedLinkSides) for record in records)
    (found,) = check_records(records)
    assert (found.kind, found.severity) == ("oversubscribed_uplink", "warning")
    assert "share seem to be oversubscribed" in found.what
    busy = [structs.replace(r, busy=0.95) if isinstance(r, PairMeasurement) else r for r in records]
    assert check_records(busy) == ()  # the pairs may share the CPUs
    assert " to " in found.evidence and "%" in found.evidence


@pytest.mark.parametrize(
    ("sizes", "rate", "mode"), [((4, 8, 8, 8), 2, QUICK), ((6, 8, 8, 8), 1, DEFAULT), ((8, 8), 2, QUICK)]
)
def test_hosts_behind_a_narrow_uplink_are_not_slow_themselves(sizes, rate, mode):
    racks = [rack for rack, size in enumerate(sizes) for _ in range(size)]
    network = Network(len(racks), noise=0.005, racks=racks, uplink={0: 119.5 * MB * rate})
    assert {f.kind for f in check_records(network.records(mode))} == {"oversubscribed_uplink"}
    network.slow[1] = 0.5
    found = check_records(network.records(mode))
    assert [f.hosts for f in found if f.kind == "slow_host"] == [("n2",)]


@pytest.mark.parametrize("mode", [QUICK, DEFAULT, FULL])
@pytest.mark.parametrize(
    ("sizes", "uplink", "alone"),
    [
        ((4, 4), 1.0, 1.0),
        ((4, 5), 1.5, 1.0),
        ((5, 5), 0.4, 0.4),
        ((6, 10), 2.0, 1.0),
        ((8, 8, 8), 2.0, 1.0),
        ((4, 4, 4), 1.0, 1.0),
        ((8, 8), 0.4, 0.4),
    ],
)
def test_what_a_ring_gets_through_a_shared_uplink_is_what_one_stream_gets(sizes, uplink, alone, mode):
    racks = [rack for rack, size in enumerate(sizes) for _ in range(size)]
    network = Network(len(racks), noise=0.005, racks=racks, uplink=119.5 * MB * uplink)
    nodes = (NodeGroup(hosts=f"n[1-{len(racks)}]"),)
    topology = Topology(nodes=nodes, measured=build_measured(network.records(mode)))
    for count in range(2, len(racks) + 1):
        ring = zip(network.names[:count], [*network.names[1:count], network.names[0]], strict=True)
        for a, b in ring:
            crosses = racks[int(a[1:]) - 1] != racks[int(b[1:]) - 1]
            expected = 119.5 * MB * (alone if crosses else 1.0)
            assert link_between(topology, a, b).bandwidth_bytes_per_second == pytest.approx(expected, rel=0.05), (a, b)


def test_a_pair_that_something_else_slowed_parts_no_group():
    hosts = [f"n{n}" for n in range(12)]
    slowed = {frozenset((a, b)) for a in hosts for b in hosts if hosts.index(a) // 4 != hosts.index(b) // 4}
    slowed -= {frozenset(("n4", "n9"))}  # no other pair crossed their uplinks in that round
    slowed |= {frozenset(("n4", "n5")), frozenset(("n8", "n9"))}
    assert groups_of(hosts, slowed) == [tuple(hosts[:4]), tuple(hosts[4:8]), tuple(hosts[8:])]


def test_hosts_of_one_machine_do_not_make_others_look_slow():
    """Containers reach each other through memory, and the third host over the network."""
    machines = ["a", "a", "a", "b", "b", "b", "c"]
    network = Network(7, noise=0.005, rate=1000 * MB, racks=[0, 0, 0, 1, 1, 1, 2], uplink=119.5 * MB)
    said = tuple(facts(f"n{n + 1}", machine=machine, interfaces=()) for n, machine in enumerate(machines))
    found = check_records(network.records(DEFAULT, said))
    assert {f.kind for f in found} <= {"oversubscribed_uplink"}, found  # three hosts share one uplink
    assert any(f.kind == "slow_host" for f in check_records(network.records(DEFAULT)))


def test_a_link_of_a_bond_is_not_called_broken():
    """Its streams may have shared one of the two NICs."""
    bond = Interface(name="eth0", mtu=1500, speed_bytes_per_second=250 * MB, kind="bond")
    said = tuple(facts(f"n{n}", interfaces=(bond,)) for n in range(1, 9))
    network = Network(8, noise=0.005, rate=239 * MB, one_way={(0, 3): 0.5})
    (found,) = check_records(network.records(DEFAULT, said))
    assert (found.kind, found.severity) == ("asymmetric_link", "note") and "bond" in found.evidence
    (found,) = check_records(network.records(DEFAULT))
    assert (found.kind, found.severity) == ("asymmetric_link", "error")


def test_segments_that_were_lost_are_told_of_by_host():
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


def test_pairs_that_failed_are_told_of_with_the_reason():
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


def test_a_host_that_froze_on_the_way_is_named_however_few_waited_for_it():
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
def test_what_fails_over_the_way_that_judges_is_an_error_whatever_the_other_does(primary):
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


def two_nics(number, net, name="eth1"):
    """Return the facts of a host with a second NIC of unknown rate."""
    own = Interface(name="eth0", mtu=1500, speed_bytes_per_second=125 * MB)
    second = Interface(name=name, addresses=(address(number, net),))
    return facts(f"n{number}", interfaces=(own, second))


def test_a_further_network_that_passes_nothing_is_no_finding():
    records = Network(4).records(DEFAULT, tuple(two_nics(n, 9, "eth9") for n in range(1, 5)))
    names = [f"n{number}" for number in range(1, 5)]
    other = [
        PairMeasurement(stage="other/0", source=a, target=b, transport="tcp", load="together", network="10.9.0.0/16", interface="eth9",
                 failed=f"{b}: no connection in 2 s")
        for a in names for b in names if a != b
    ]  # fmt: skip
    assert check_records([*records, *other]) == ()
    some = [structs.replace(other[0], failed=None, bandwidth_bytes_per_second=119.5 * MB), *other[1:2]]
    assert [(f.kind, f.severity) for f in check_records([*records, *some])] == [("not_measured", "warning")]


def facts(host, **changed):
    own = {
        "interfaces": (Interface(name="eth0", mtu=1500, speed_bytes_per_second=125 * MB),),
        **changed,
    }
    return HostFacts(host=host, address="198.18.0.1", interface="eth0", cpus=8, **own)


def test_a_faster_network_that_some_hosts_are_not_on_is_told_of_with_them():
    own = two_nics(1, 1), two_nics(2, 1), facts("n3")
    faster = [
        PairMeasurement(stage="alone/10.1.0.0/16/0", source=a, target=b, transport="tcp", load="alone", network="10.1.0.0/16", interface="eth1",
                 bandwidth_bytes_per_second=240 * MB, variation=0.01, repetitions=10, seconds=0.1)
        for a, b in (("n1", "n2"), ("n2", "n1"))
    ]  # fmt: skip
    (found,) = check_records([*Network(3, noise=0.002).records(QUICK, own), *faster])
    assert found.kind == "wrong_interface" and found.advice.startswith("bring up the NICs of n3 on it, or leave")


def test_a_different_mtu_and_a_narrow_slot_are_found():
    jumbo = Interface(name="eth0", mtu=9000, speed_bytes_per_second=125 * MB)
    gpu = GpuPcieLink(
        index=3, name="H100", pcie_generation=5, pcie_generation_possible=5, pcie_width=4, pcie_width_possible=16
    )
    said = (facts("n1"), facts("n2", interfaces=(jumbo,)), facts("n3", gpus=(gpu,)), facts("n4"))
    found = check_records(Network(4).records(facts=said))
    assert {(f.kind, f.hosts) for f in found} == {("mtu", ("n2",)), ("narrow_pcie", ("n3",))}


@pytest.mark.parametrize(("mtus", "told"), [
    ((1500, 9000), {"n1: MTU 1500, other hosts have 9000"}),
    ((9000, 9000, 1500, 1500), {"n3: MTU 1500, other hosts have 9000", "n4: MTU 1500, other hosts have 9000"}),
    ((9000, 1500, 1500), {"n1: MTU 9000, most hosts have 1500"}),
])  # fmt: skip
def test_of_two_equally_common_mtus_none_is_usual(mtus, told):
    said = tuple(facts(f"n{n + 1}", interfaces=(Interface(name="eth0", mtu=mtu),)) for n, mtu in enumerate(mtus))
    found = check_records(Network(len(mtus)).records(facts=said))
    assert {f.what for f in found} == told
    assert all(f.advice.startswith("ip link set" if "most" in f.what else "set one MTU on all hosts") for f in found)


@pytest.mark.parametrize(("gain", "told"), [(1.9, False), (1.2, False), (1.0, True), (0.9, True)])
def test_gpudirect_that_does_nothing_is_told_of(gain, told):
    def curve(gpudirect, seconds, hosts=2):
        points = (Point(1 << 20, 1.0), Point(64 << 20, seconds))
        names = tuple(f"n{n + 1}" for n in range(hosts))
        return Collective(
            name="all_reduce", backend="nccl", hosts=names, ranks=8 * hosts, gpudirect=gpudirect, curve=points
        )

    def gain_findings(collectives):
        records = [*Network(2).records(), *(CollectiveMeasurement(collective=each) for each in collectives)]
        return [finding for finding in check_records(records) if finding.kind == "gpudirect_off"]

    few = [curve(True, 1.0), curve(False, 1.0)]  # fewer hosts than the job has
    found = gain_findings([*few, curve(True, 1.0, 4), curve(False, gain, 4)])
    # GPUDirect may bring no gain: host memory keeps up with a single NIC.
    assert [(f.kind, f.severity, f.ratio) for f in found] == ([("gpudirect_off", "note", gain)] if told else [])
    assert gain_findings([curve(None, 1.0)]) == gain_findings([]) == []


def copies(host, rates, path="PCIe"):
    return [
        IntraNodeMeasurement(link=IntraNodeLinkMeasurement(host=host, source="memory", target=f"gpu{n}", path=path,
                                                  bandwidth_bytes_per_second=rate, variation=0.01))
        for n, rate in enumerate(rates)
    ]  # fmt: skip


def test_a_gpu_whose_copies_are_slow_is_told_of():
    h100, t4 = (tuple(GpuPcieLink(index=n, name=name) for n in range(4)) for name in ("H100", "T4"))
    said = (facts("n1", gpus=h100), facts("n2", gpus=h100), facts("n3", gpus=t4))
    records = Network(3).records(facts=said)
    assert (
        check_records([*records, *copies("n1", [54e9] * 4), *copies("n2", [54e9] * 4), *copies("n3", [12e9] * 4)]) == ()
    )
    found = check_records([*records, *copies("n1", [54e9] * 4), *copies("n2", [54e9, 54e9, 13e9, 54e9])])
    assert [(f.kind, f.severity, f.hosts) for f in found] == [("slow_copies", "warning", ("n2",))]
    assert "n2: memory to gpu2 (PCIe) at 24%" in found[0].what
    assert "8 comparable copies on n[1-2]" in found[0].evidence


def test_pairs_with_fewer_nvlinks_than_others_are_not_slow():
    mesh = {(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)}  # pairs with two links in a DGX-1
    said = tuple(facts(f"n{n}", gpus=tuple(GpuPcieLink(index=g, name="V100") for g in range(8))) for n in range(1, 5))

    def between(host, slow=None):
        return [
            IntraNodeMeasurement(link=IntraNodeLinkMeasurement(
                host=host, source=f"gpu{a}", target=f"gpu{b}", path="NVLink", variation=0.01,
                bandwidth_bytes_per_second=(48e9 if (a, b) in mesh else 24e9) * (0.5 if (a, b) == slow else 1.0)))
            for a in range(8) for b in range(a + 1, 8)
        ]  # fmt: skip

    records = [*Network(4).records(facts=said), *between("n1"), *between("n2"), *between("n3")]
    assert check_records([*records, *between("n4")]) == ()
    (found,) = check_records([*records, *between("n4", slow=(2, 3))])
    assert (found.kind, found.hosts) == ("slow_copies", ("n4",)) and "gpu2 to gpu3 (NVLink)" in found.what


def test_a_narrow_slot_is_known_once_the_gpu_was_used():
    """An idle GPU reduces the speed of its PCIe link."""
    idle = GpuPcieLink(
        index=0, name="RTX 4090", pcie_generation=1, pcie_generation_possible=4, pcie_width=8, pcie_width_possible=16
    )
    records = Network(2).records(facts=(facts("n1", gpus=(idle,)), facts("n2")))
    assert check_records(records) == ()
    used = structs.replace(idle, pcie_generation=4)
    assert [f.kind for f in check_records([*records, GpuLinkStates(host="n1", gpus=(used,))])] == ["narrow_pcie"]
    assert check_records([*records, GpuLinkStates(host="n1", gpus=(structs.replace(used, pcie_width=16),))]) == ()


def test_mpi_that_goes_beside_infiniband_is_told_of():
    """MPI may lack the RDMA libraries. The finding prevents a comparison of its rate with that of the ports."""
    said = tuple(facts(f"n{n}", rdma_bytes_per_second=25e9, mpi_over_rdma=n != 2) for n in (1, 2, 3))
    (found,) = check_records(Network(3).records(facts=said))
    assert (found.kind, found.severity, found.hosts) == ("wrong_interface", "warning", ("n2",))
    assert found.what.startswith("n2: MPI uses TCP")


def address(n, net):
    return f"10.{net}.0.{n}/16"


def test_other_networks_are_found_by_their_subnets():
    def card(name, text, **said):
        return Interface(**{"name": name, "up": True, "kind": "physical", "addresses": (text,), **said})

    hosts = [
        facts(
            f"n{n}",
            interfaces=(
                card("eth0", address(n, 0)),
                card("ib0" if n < 3 else "ib9", address(n, 1)),  # names differ, the subnet is the same
                card("docker0", "172.17.0.1/16", kind="bridge"),
                card("eth8", "192.168.0.7/24"),  # same address on every host: these NICs do not reach each other
                card("eth9", address(n, 2), up=False),
                card("own", address(n, 10 + n)),
            ),
        )
        for n in (1, 2, 3)
    ]
    (network,) = other_networks(hosts)
    assert network.name == "10.1.0.0/16"
    assert network.nics == {"n1": ("ib0", "10.1.0.1"), "n2": ("ib0", "10.1.0.2"), "n3": ("ib9", "10.1.0.3")}
    planned = stages.plan_stages(3, DEFAULT, "tcp", (network.name,))
    pairs = sorted(pair for step in planned if step.network == network.name for phase in step.phases for pair in phase)
    assert pairs == [(a, b) for a in range(3) for b in range(3) if a != b]


def two_networks(rates, hosts=4, gbits=10):
    """Return records of hosts with a second NIC, whose pairs have these rates in one direction."""
    said = tuple(
        facts(
            f"n{n}",
            interfaces=tuple(
                Interface(name=f"eth{net}", kind="physical", mtu=1500, addresses=(address(n, net),),
                          speed_bytes_per_second=(gbits if net else 1) * 125 * MB)
                for net in (0, 1)
            ),
        )
        for n in range(1, hosts + 1)
    )  # fmt: skip
    further = [
        PairMeasurement(stage="alone/10.1.0.0/16/0", source=f"n{a}", target=f"n{b}", transport="tcp", load="alone", network="10.1.0.0/16",
                 interface="eth1", bandwidth_bytes_per_second=rates(a, b), variation=0.01, repetitions=10, seconds=0.1)
        for a in range(1, hosts + 1) for b in range(a + 1, hosts + 1)
    ]  # fmt: skip
    return [*Network(hosts, noise=0.002).records(QUICK, said), *further]


@pytest.mark.parametrize("slow", [1, 2, 3, 4])
def test_a_slow_card_of_a_further_network_is_found_by_the_shortest_probe(slow):
    found = check_records(two_networks(lambda a, b: (60 if slow in (a, b) else 118) * MB, gbits=1))
    assert [(f.kind, f.hosts) for f in found] == [("slow_host", (f"n{slow}",))]
    assert found[0].what.startswith(f"n{slow}: slow link: runs at 51%")
    assert found[0].what.endswith(f"(on 10.1.0.0/16, n{slow}'s eth1)")


def test_a_card_that_was_measured_as_a_target_alone_was_tried():
    found = check_records(two_networks(lambda a, b: 1100 * MB))
    assert [f.what for f in found] == ["10.1.0.0/16 is faster than the network that is used"]


def card(gbits):
    interface = Interface(name="eth0", mtu=1500, speed_bytes_per_second=gbits * 125 * MB)
    return (interface,)


def test_a_card_that_does_not_reach_its_rate():
    said = tuple(facts(f"n{n}", interfaces=card(10)) for n in (1, 2, 3))
    found = check_records(Network(3).records(facts=said))
    assert [(f.kind, f.hosts) for f in found] == [("below_nominal", ("n1", "n2", "n3"))]  # a limit common to all hosts
    assert "of 10 Gb/s" in found[0].evidence and "provider" in found[0].advice
    unequal = Network(3, slow={0: 0.8}).records(facts=said)
    assert {f.hosts for f in check_records(unequal) if f.kind == "below_nominal"} == {(f"n{n}",) for n in (1, 2, 3)}
    said = (said[0], *(facts(f"n{n}", interfaces=card(1)) for n in (2, 3)))  # the other hosts' NICs have this limit
    assert check_records(Network(3).records(facts=said)) == ()


@pytest.mark.parametrize(
    ("gbits", "part", "told"),
    [(25, 0.85, False), (50, 0.55, False), (100, 0.4, False), (100, 0.2, True), (400, 0.1, False)],
)
def test_a_card_is_compared_with_what_tcp_gets_out_of_its_kind(gbits, part, told):
    said = tuple(facts(f"n{n}", interfaces=card(gbits)) for n in (1, 2, 3, 4))
    network = Network(4, rate=part * gbits * 125 * MB)
    assert {f.kind for f in check_records(network.records(DEFAULT, facts=said))} == (
        {"below_nominal"} if told else set()
    )


def test_rdma_is_compared_with_one_of_the_fastest_ports_of_one_kind():
    def port(gbits, layer, active=True):
        return RdmaPort(device="mlx5", port=1, link_layer=layer, active=active, rate_bytes_per_second=gbits * 125 * MB)

    hdr, login = [port(200, "InfiniBand")] * 8, [port(100, "Ethernet"), port(25, "Ethernet")]
    assert used_ports([*login, *hdr, port(400, "InfiniBand", active=False)]) == tuple(hdr)
    assert used_ports(login) == (login[0],)
    assert ports_of_job(hdr, {}) == tuple(hdr)
    named = {"NCCL_IB_HCA": f"={hdr[0].device}:1"}
    assert ports_of_job(hdr, named) == tuple(port for port in hdr if port.device == hdr[0].device)
    assert ports_of_job(hdr, {"NCCL_IB_DISABLE": "1", **named}) == ()
    said = tuple(
        facts(f"n{n}", rdma_bytes_per_second=8 * 25e9, rdma_ports=8, rdma_kind="infiniband") for n in range(1, 5)
    )
    for rate, kinds in ((23e9, set()), (46e9, set()), (12e9, {"below_nominal"})):
        records = Network(4, rate=rate).records(DEFAULT, facts=said)
        over_mpi = [structs.replace(r, primary="mpi") if isinstance(r, ProbeStarted) else structs.replace(r, transport="mpi") if
                    isinstance(r, PairMeasurement) else r for r in records]  # fmt: skip
        assert {f.kind for f in check_records(over_mpi)} == kinds


@pytest.mark.parametrize("mode", [QUICK, DEFAULT])
def test_slower_cards_are_no_faults_but_a_slow_one_among_them_is(mode):
    slow = dict.fromkeys((0, 2, 7), 0.25)
    said = tuple(facts(f"n{n + 1}", interfaces=card(0.25 if n in slow else 1)) for n in range(8))
    (found,) = check_records(Network(8, noise=0.005, slow=slow).records(mode, facts=said))
    assert (found.kind, found.severity, found.hosts) == ("mixed_nics", "note", ("n1", "n3", "n8"))
    for worse, ratio in ((2, 0.5), (1, 0.6)):  # the slow NICs, then the fast NICs
        found = check_records(
            Network(8, noise=0.005, slow={**slow, worse: slow.get(worse, 1.0) * ratio}).records(mode, facts=said)
        )
        (host,) = [f for f in found if f.kind == "slow_host"]
        assert (host.hosts, host.severity) == ((f"n{worse + 1}",), "error")
        assert host.ratio == pytest.approx(ratio, abs=0.03)
    unknown = (*said[:1], facts("n2", interfaces=()), *said[2:])  # then all hosts are in one class
    found = check_records(Network(8, noise=0.005, slow=slow).records(mode, facts=unknown))
    assert {f.hosts for f in found if f.kind == "slow_host"} == {("n1",), ("n3",), ("n8",)}


def test_one_card_that_agreed_on_a_lower_rate_is_a_warning():
    said = tuple(facts(f"n{n}", interfaces=card(0.1 if n == 3 else 1)) for n in range(1, 6))
    found = check_records(Network(5, slow={2: 0.1}).records(facts=said))
    assert [(f.kind, f.severity, f.hosts) for f in found] == [("mixed_nics", "warning", ("n3",))]


@pytest.mark.parametrize("gbits", [(25, 10), (10, 25)])
def test_of_two_cards_the_slower_one_is_told_of(gbits):
    said = tuple(facts(f"n{n + 1}", interfaces=card(rate)) for n, rate in enumerate(gbits))
    found = [f for f in check_records(Network(2).records(facts=said)) if f.kind == "mixed_nics"]
    slower = gbits.index(10) + 1
    assert [f.what for f in found] == [f"n{slower}: NIC rate 10 Gb/s, other hosts have 25 Gb/s"]


def test_a_noisy_link_is_noted():
    records = Network(4).records(DEFAULT)
    shaken = [
        PairMeasurement(**{**{k: getattr(r, k) for k in r.__struct_fields__}, "variation": 0.4})
        if isinstance(r, PairMeasurement) and (r.source, r.target) == ("n1", "n2")
        else r
        for r in records
    ]
    assert [(f.kind, f.severity, f.source) for f in check_records(shaken)] == [("noisy_link", "note", "n1")]


# -- rates from the topology file ----------------------------------------------------------------------------------------


def described_network(nics, name="eth0"):
    facts = tuple(
        HostFacts(
            host=f"n{i}",
            address=f"10.0.0.{i}",
            interface=name,
            cpus=2,
            interfaces=(Interface(name=name, kind="veth"),),
        )
        for i in (1, 2, 3)
    )
    (nic,) = (Nic(**nics),)
    records = Network(3).records(facts=facts)
    return check_records(records, {f"n{i}": (nic,) for i in (1, 2, 3)})


def test_links_are_measured_against_the_rate_that_the_topology_gives_them():
    """A virtual NIC reports no rate, or a wrong one. 955 Mb/s is full 1 GbE, and a tenth of 10 GbE."""
    assert described_network({"name": "eth0", "rate": "1GbE"}) == ()
    found = described_network({"name": "eth0", "rate": "10GbE"})
    assert [(f.kind, f.hosts) for f in found] == [("below_nominal", ("n1", "n2", "n3"))]
    assert all(f.ratio == pytest.approx(0.1, abs=0.02) for f in found)


def test_a_card_that_is_only_in_the_file_is_told_of():
    (found,) = described_network({"name": "ens5", "rate": "1GbE"})
    assert (found.kind, found.severity, found.hosts) == ("unknown_nic", "note", ("n1", "n2", "n3"))
    assert "ens5" in found.what and "eth0" in found.evidence


@pytest.mark.parametrize(("nic", "told"), [
    ({"name": "mlx5_0", "kind": "InfiniBand", "rate": "100Gb/s"}, set()),  # behind a switch slower than the NIC
    ({"name": "mlx5_0", "kind": "InfiniBand", "rate": "200Gb/s"}, {"below_nominal"}),
    ({"name": "ens1", "kind": "Ethernet", "rate": "10Gb/s"}, {"below_nominal", "unknown_nic"}),
    ({"name": "eth0", "kind": "Ethernet", "rate": "1GbE"}, {"below_nominal"}),
])  # fmt: skip
def test_links_over_rdma_are_measured_against_the_rate_that_the_topology_gives_them(nic, told):
    said = tuple(facts(f"n{n}", rdma_bytes_per_second=25e9, rdma_kind="infiniband") for n in (1, 2, 3))
    records = [
        structs.replace(record, primary="mpi")
        if isinstance(record, ProbeStarted)
        else structs.replace(record, transport="mpi")
        for record in Network(3, rate=11.5e9).records(DEFAULT, facts=said)
        if isinstance(record, (ProbeStarted, PairMeasurement))
    ]
    found = check_records(records, {f"n{n}": (Nic(**nic),) for n in (1, 2, 3)})
    assert {finding.kind for finding in found} == told


@pytest.mark.parametrize(("name", "kind", "told"), [
    ("mlx5_0", "RoCE", False), ("mlx5_0:1", "RoCE", False), ("eth0", "RoCE", False), ("mlx5_1", "RoCE", True), ("ens9", "RoCE", True),
    ("mlx5_1", "InfiniBand", False),
])  # fmt: skip
def test_a_roce_card_that_is_only_in_the_file_is_told_of(name, kind, told):
    said = tuple(facts(f"n{n}", rdma_devices=("mlx5_0",)) for n in (1, 2, 3))
    nic = Nic(name=name, kind=kind, rate="100Gb/s")
    found = check_records(Network(3).records(facts=said), {f"n{n}": (nic,) for n in (1, 2, 3)})
    assert ("unknown_nic" in {finding.kind for finding in found}) == told


def test_one_repetition_is_not_said_to_vary_by_nothing():
    records = [
        structs.replace(r, repetitions=1, variation=0.0) if isinstance(r, PairMeasurement) else r
        for r in Network(3).records()
    ]
    assert "0.0%" not in drawn(links_table(build_measured(records), records))
    records = Network(3).records()
    assert "1.0%" in drawn(links_table(build_measured(records), records))


def test_the_links_fit_a_terminal_of_80_columns():
    records = Network(12).records(FULL)
    records += [
        structs.replace(r, both_ways=True, latency_seconds=1.2e-4) for r in records if isinstance(r, PairMeasurement)
    ]
    table = links_table(build_measured(records), records)
    text = drawn(table, width=80)
    rows = [line for line in text.splitlines() if re.search(r"tcp .* to n\d.* [\d.]+%  +0 of \d+ *$", line)]
    assert len(rows) == table.row_count and "…" not in text, text


def drawn(table, width=200):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


# -- baseline -------------------------------------------------------------------------------------------------------------


def test_the_baseline_shows_what_became_worse():
    before = build_measured(Network(6).records(DEFAULT))
    same = build_measured(Network(6, noise=0.01, seed=3).records(DEFAULT))
    assert find_regressions(before, same) == ()
    found = find_regressions(before, build_measured(Network(6, slow={2: 0.6}).records(DEFAULT)))
    assert [(f.kind, f.hosts, f.severity) for f in found] == [("worse_than_baseline", ("n3",), "error")]
    found = find_regressions(before, build_measured(Network(6, one_way={(0, 1): 0.8}).records(DEFAULT)))
    assert [(f.source, f.target, f.severity) for f in found] == [("n1", "n2", "warning")]
    assert find_regressions(build_measured(Network(6, slow={2: 0.6}).records(DEFAULT)), before) == ()


def test_links_that_were_measured_beside_others_are_compared_where_the_others_are_the_same():
    a, b = schedule.round_robin(32)[-1][3]
    before = build_measured(Network(32, noise=0.005).records(QUICK))
    now = build_measured(Network(32, noise=0.005, seed=1, one_way={(a, b): 0.5}).records(QUICK))
    assert [(f.source, f.target) for f in find_regressions(before, now)] == [(f"n{a + 1}", f"n{b + 1}")]
    others = build_measured(Network(31, noise=0.005).records(QUICK))  # other rounds
    assert find_regressions(others, now) == ()
    directions = len({(p.source, p.target) for p in now.pairs})
    assert f": {directions} of {directions} directions" in describe_comparison(before, now)
    assert f": {directions} of {directions} directions" not in describe_comparison(others, now)


def test_shares_of_a_narrow_uplink_are_not_compared():
    before = build_measured(Network(8, racks=[0] * 4 + [1] * 4, uplink=119.5 * MB * 2).records(QUICK))
    shares = iter([1.3, 0.7] * 100)  # the share of each pair is random
    other = structs.replace(
        before,
        pairs=tuple(
            structs.replace(p, bandwidth_bytes_per_second=p.bandwidth_bytes_per_second * next(shares))
            if p.bandwidth_bytes_per_second < 100 * MB
            else p
            for p in before.pairs
        ),
    )
    assert find_regressions(before, other) == ()


def further(network, hosts=("n1", "n2", "n3", "n4"), rate=1200 * MB):
    """Return measurements on a network that the job does not use."""
    return tuple(
        LinkMeasurement(source=a, target=b, transport="tcp", load="alone", network=network, bandwidth_bytes_per_second=rate, variation=0.0,
                 streams=4)
        for a in hosts for b in hosts if a != b
    )  # fmt: skip


def test_networks_are_compared_by_themselves():
    own = build_measured(Network(4).records(DEFAULT))
    before, now = (
        structs.replace(own, pairs=(*own.pairs, *further("10.9.0.0/24", ("n1", "n2"), rate))) for rate in (1e9, 5e8)
    )
    found = find_regressions(before, now)
    assert [(f.source, f.target) for f in found] == [("n1", "n2"), ("n2", "n1")]
    assert found[0].what == "n1 to n2: 50% of the earlier bandwidth (tcp on 10.9.0.0/24)"
    slow = structs.replace(own, pairs=(*own.pairs, *further("10.9.0.0/24", rate=4e8), *further("10.8.0.0/24")))
    fast = structs.replace(own, pairs=(*own.pairs, *further("10.9.0.0/24"), *further("10.8.0.0/24")))
    (found,) = find_regressions(fast, slow)  # no single host has the fault
    assert found.what == "nearly all links on 10.9.0.0/24 have 33% of the earlier bandwidth"


def test_where_nearly_all_links_became_worse_that_is_one_finding():
    before = build_measured(Network(6).records(DEFAULT))
    (found,) = find_regressions(before, build_measured(Network(6, rate=60 * MB).records(DEFAULT)))
    assert (found.severity, sorted(found.hosts)) == ("error", sorted(before.hosts))
    assert found.what == "nearly all links have 50% of the earlier bandwidth"
    few = build_measured(Network(3).records(DEFAULT))
    assert len(find_regressions(few, build_measured(Network(3, rate=60 * MB).records(DEFAULT)))) > 1


def with_gpus(nvlink=270e9, memory=25e9, seconds=0.01, own=10e9):
    ways = {("memory", "memory"): own, ("gpu0", "gpu1"): nvlink, ("memory", "gpu0"): memory}
    return Measurements(
        when="2026-11-01", software={}, hosts=("n1", "n2"),
        inside=tuple(
            IntraNodeLinkMeasurement(host=host, source=a, target=b, path="NVLink" if a != "memory" else "PCIe", variation=0.0,
                       bandwidth_bytes_per_second=rate if host == "n1" else ways[a, b])
            for host in ("n1", "n2") for (a, b), rate in ways.items()
        ),
        collectives=(
            Collective(name="all_reduce", backend="nccl", hosts=("n1", "n2"), ranks=4,
                       curve=(Point(1 << 20, 1e-3), Point(64 << 20, seconds))),
        ),
    )  # fmt: skip


def test_copies_of_gpus_and_all_reduces_are_compared():
    before = with_gpus()
    assert find_regressions(before, with_gpus(nvlink=250e9, seconds=0.0105, own=1e9)) == ()  # host memory varies
    said = describe_comparison(before, before)
    assert said.endswith("0 of 0 directions, 4 copies inside hosts, 1 all-reduce(s)")
    (found,) = find_regressions(before, with_gpus(seconds=0.0125))
    assert (found.severity, found.hosts) == ("warning", ("n1", "n2"))
    assert found.what == "all-reduce over 2 hosts, 4 ranks: 80% of the earlier speed"
    assert found.evidence == "64 MiB took 10 ms on 2026-11-01, 12.5 ms now"
    found = find_regressions(before, with_gpus(nvlink=24e9))
    assert {f.what for f in found} == {
        f"{host}: gpu0 to gpu1 (NVLink) has 9% of the earlier bandwidth" for host in ("n1", "n2")
    }
    assert "24 GB/s now (NVLink), 270 GB/s (NVLink) on 2026-11-01" in found[0].evidence


# -- records --------------------------------------------------------------------------------------------------------------


def test_records_survive_their_lines_and_other_lines_are_told_apart():
    for record in [
        *Network(3).records(),
        StageDone(stage="a", title="b", done_seconds=1.0, remaining_seconds=2.0),
        ProbeEnded(seconds=1.0),
    ]:
        assert decode_record(encode_record(record)) == record
    for line in ("", "hello", '{"type": "pair"', '{"type": "unknown"}', "[1]"):
        assert decode_record(line) is None


def test_of_several_measurements_the_fastest_counts_and_curves_are_kept():
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


def test_what_is_measured_is_what_the_topology_keeps():
    kept = build_measured(Network(4).records(DEFAULT))
    assert isinstance(kept, Measurements)
    assert kept.hosts == ("n1", "n2", "n3", "n4")
    assert len({(p.source, p.target) for p in kept.pairs if p.load == "alone"}) == 12
    assert all(isinstance(pair, LinkMeasurement) for pair in kept.pairs)
    assert build_measured([]) is None


def test_pairs_that_were_mixed_to_find_a_shared_link_are_none_of_the_bisection():
    records = Network(8, racks=[0] * 4 + [1] * 4, uplink=119.5 * MB).records()
    kept = {(p.source, p.target): p for p in build_measured(records).pairs if p.load not in ("alone", "together")}
    planned = [r for r in records if isinstance(r, PairMeasurement) and r.stage == "bisection"]
    assert {p: seen.bandwidth_bytes_per_second for p, seen in kept.items()} == {
        (r.source, r.target): r.bandwidth_bytes_per_second for r in planned
    }
    table = drawn(links_table(build_measured(records), records))
    assert f"0 of {10 * len(planned)}" in next(line for line in table.splitlines() if "bisection" in line)


def test_hosts_that_are_one_machine_are_kept_as_one():
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


@pytest.mark.parametrize(("hosts", "width"), [(20, 100), (8, 40), (8, 100)])
def test_the_heat_map_can_be_read_without_colours(hosts, width):
    kept = build_measured(Network(hosts, slow={1: 0.5}).records())
    console = Console(width=width, file=io.StringIO())
    console.print(heat_map(kept, "tcp", width))
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    cells = {row[0]: row[1:] for row in rows if row and row[0] in kept.hosts and len(row) > hosts}
    slow, fast = ("478", "956") if (hosts, width) == (8, 100) else ("5", "9")
    assert cells["n3"] == [fast, slow, "-"] + [fast] * (hosts - 3)
    assert cells["n2"] == [slow, "-"] + [slow] * (hosts - 2)


def test_the_heat_map_does_not_take_a_further_network_for_the_links_alone():
    beside = tuple(structs.replace(pair, network=None, load="together") for pair in further("10.9.0.0/24"))
    kept = Measurements(when="", software={}, hosts=("n1", "n2", "n3", "n4"), pairs=(*beside, *further("10.9.0.0/24")))
    assert "12 of 12 beside other traffic" in heat_map(kept, "tcp", 100).plain


@pytest.mark.parametrize(
    ("megabits", "shown"), [(999.4, "999"), (999.7, "999.7"), (999.96, "1000"), (95.73, "95.7"), (9.5, "9.5")]
)
def test_a_rate_in_the_heat_map_is_no_power_of_ten(megabits, shown):
    pairs = tuple(structs.replace(pair, network=None) for pair in further("x", ("n1", "n2"), megabits * 1e6 / 8))
    text = heat_map(Measurements(when="", software={}, hosts=("n1", "n2"), pairs=pairs), "tcp", 100).plain
    assert text.splitlines()[2].split() == ["n1", "-", shown]


@pytest.mark.parametrize("ending", ["", ".cluster.local"])
def test_columns_of_the_heat_map_are_told_apart(ending):
    names = [f"gpu{n}{ending}" for n in range(1, 5)]
    pairs = tuple(
        LinkMeasurement(
            source=a, target=b, transport="tcp", load="alone", bandwidth_bytes_per_second=1e8, variation=0.0
        )
        for a in names
        for b in names
        if a != b
    )
    kept = Measurements(when="", software={}, hosts=tuple(names), pairs=pairs)
    head = heat_map(kept, "tcp", 120).plain.splitlines()[1]
    assert head.split() == ["gpu1", "gpu2", "gpu3", "gpu4"]


def test_a_heat_map_whose_columns_cannot_be_told_apart_says_their_order():
    names = ("n1-storage", "n2-storage")
    pair = LinkMeasurement(
        source=names[0], target=names[1], transport="tcp", load="alone", bandwidth_bytes_per_second=1e8, variation=0.0
    )
    text = heat_map(Measurements(when="", software={}, hosts=names, pairs=(pair,)), "tcp", 120).plain
    assert "same order" in text.splitlines()[0] and text.splitlines()[1].startswith("n1-storage")


def test_large_messages_that_were_measured_beside_others_only_are_shown():
    def pair(load, *points, **more):
        return LinkMeasurement(source="a", target="b", transport="mpi", load=load, bandwidth_bytes_per_second=1e8, variation=0.0,
                        curve=points, **more)  # fmt: skip

    pairs = (
        pair("alone", Point(8, 1e-5), Point(4 << 20, 0.01)),
        pair("together", Point(4 << 20, 0.5), Point(64 << 20, 0.2)),
        pair("together", Point(4 << 20, 0.9), both_ways=True),
    )
    table = curve_table(Measurements(when="", software={}, hosts=("a", "b"), pairs=pairs))
    sizes, loads, medians, *_ = ([*column.cells] for column in table.columns)
    assert list(zip(sizes, loads, medians, strict=True)) == [
        ("8 B", "alone", "10 us"), ("4 MiB", "alone", "10 ms"), ("64 MiB", "together", "200 ms"),
    ]  # fmt: skip


def test_columns_of_all_reduce_say_how_many_hosts_and_ranks():
    over = Collective(name="all_reduce", backend="nccl", hosts=("a", "b"), ranks=2, gpudirect=None, curve=())
    assert describe_ranks(over) == "2 hosts"
    assert describe_ranks(structs.replace(over, ranks=16, gpudirect=False)) == "2 hosts, 16 ranks, no GPUDirect"


def test_bus_bandwidth_is_that_of_nccl_tests():
    one = Collective(name="all_reduce", backend="gloo", hosts=("a",) * 4, ranks=4, curve=(Point(1 << 20, 0.01),))
    assert bus_bandwidth(one.curve[0].size_bytes, one.curve[0].seconds, one.ranks) == pytest.approx(
        (1 << 20) / 0.01 * 1.5
    )


def test_a_few_fast_pairs_do_not_leave_the_others_in_the_dark():
    assert scale_maximum([1.0] * 100) == (1.0, False)
    assert scale_maximum([1.0] * 99 + [60.0]) == (1.0, True)
    assert scale_maximum([0.5] * 50 + [1.0] * 50) == (1.0, False)
    assert scale_maximum([2.0]) == (2.0, False)


@pytest.mark.parametrize(("hosts", "bad"), [(2, "n2"), (3, "n2"), (4, "n2")])
def test_a_host_that_loses_packets_is_told_of_however_few_there_are(hosts, bad):
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


def test_a_link_that_came_and_went_often_is_told_of():
    def card(changes):
        return (Interface(name="eth0", mtu=1500, carrier_changes=changes),)

    said = tuple(facts(f"n{n}", interfaces=card(400 if n == 2 else 3)) for n in (1, 2, 3, 4))
    (found,) = check_records(Network(4).records(facts=said))
    assert (found.kind, found.severity, found.hosts) == ("noisy_link", "note", ("n2",))
    assert "400 times" in found.what
    often = tuple(facts(f"n{n}", interfaces=card(300 + n)) for n in (1, 2, 3, 4))  # each host boots several times
    assert check_records(Network(4).records(facts=often)) == ()


@pytest.mark.parametrize(
    ("worst", "failed", "told"),
    [(300 * MB, None, True), (1 * MB, None, False), (0.0, "n2: no connection in 2 s", False)],
)
def test_a_network_is_recommended_where_its_worst_pair_is_better(worst, failed, told):
    names = ("n1", "n2", "n3")
    further = [
        PairMeasurement(stage="alone/10.1.0.0/16/0", source=a, target=b, transport="tcp", load="alone", network="10.1.0.0/16", interface="eth1",
                 bandwidth_bytes_per_second=worst if "n2" in (a, b) else 400 * MB, variation=0.01, repetitions=10, seconds=0.1,
                 failed=failed if "n2" in (a, b) else None)
        for a in names for b in names if a != b
    ]  # fmt: skip
    said = tuple(two_nics(number, 1) for number in (1, 2, 3))
    kinds = {finding.kind for finding in check_records([*Network(3, noise=0.002).records(QUICK, said), *further])}
    assert ("wrong_interface" in kinds) == told, kinds
