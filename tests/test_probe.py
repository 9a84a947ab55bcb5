"""The pure parts of the probe: who meets whom, statistics, findings, what is kept of it."""

from __future__ import annotations

import io
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from distrib.cluster.measured import Collective, Measured, PairLink, Point
from distrib.probe import baseline, findings, samples, schedule, sharing, steps, suspects
from distrib.probe.networks import other_networks
from distrib.probe.records import (
    Ended,
    Facts,
    Gpu,
    GroupsSeen,
    Interface,
    PairSeen,
    Started,
    StepDone,
    best,
    decode,
    encode,
    measured,
)
from distrib.probe.report import bus_bandwidth, heat_map, ranks_text
from distrib.probe.settings import DEFAULT, FULL, MODES, QUICK

MB = 1e6


# -- schedule -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", range(2, 130))
def test_every_pair_meets_exactly_once_in_rounds_of_disjoint_pairs(hosts):
    rounds = schedule.rounds(hosts)
    assert len(rounds) == (hosts - 1 if hosts % 2 == 0 else hosts)
    pairs = [pair for round_ in rounds for pair in round_]
    assert len(pairs) == len(set(pairs)) == hosts * (hosts - 1) // 2
    assert all(a < b for a, b in pairs)
    for round_ in rounds:
        members = [host for pair in round_ for host in pair]
        assert len(members) == len(set(members)) == hosts - hosts % 2


@pytest.mark.parametrize("hosts", range(4, 130))
def test_the_bisection_pairs_one_half_with_the_other(hosts):
    round_ = schedule.bisection(hosts)
    assert len(round_) == hosts // 2
    assert {a for a, _ in round_} == set(range(hosts // 2))
    assert {b for _, b in round_} == set(range(hosts - hosts // 2, hosts))


def test_counts_of_hosts_for_collectives():
    assert schedule.counts(1) == ()
    assert schedule.counts(2) == (2,)
    assert schedule.counts(8) == (2, 4, 8)
    assert schedule.counts(13) == (2, 4, 8, 13)


def test_a_full_probe_covers_the_sizes_asked_for():
    streamed = {size for step in steps.steps(8, FULL, "tcp") for size in step.sizes}
    assert streamed == {8 * 2**n for n in range(24)}  # 8 B to 64 MiB
    assert FULL.collective_sizes == tuple(1024 * 2**n for n in range(19))  # 1 KiB to 256 MiB


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hosts", [2, 3, 8, 33, 128])
def test_every_pair_is_measured_and_the_time_alone_is_bounded(mode, hosts):
    found = steps.steps(hosts, MODES[mode], "tcp")
    assert len({step.key for step in found}) == len(found)
    together = {pair for step in found if step.load == "together" for phase in step.phases for pair in phase}
    assert together == {(a, b) for a in range(hosts) for b in range(hosts) if a != b}
    for way in ("tcp", "mpi"):
        alone = [step for step in found if step.key.startswith(f"alone/{way}")]
        spent = sum(step.estimate_seconds for step in alone)
        least = hosts * (MODES[mode].alone_seconds[0] + steps.OVERHEAD_SECONDS)
        assert spent <= max(MODES[mode].alone_budget_seconds, least) * 1.01


# -- statistics -----------------------------------------------------------------------------------------------------------


def test_outliers_are_counted_and_do_not_move_the_median():
    summary = samples.summarise([1.0, 1.001, 0.999, 1.0005, 0.9995, 3.0])
    assert summary.median == pytest.approx(1.0, rel=1e-3)
    assert (summary.outliers, summary.repetitions) == (1, 6)
    assert summary.variation < 0.001


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=40))
def test_any_repetitions_can_be_summed_up(values):
    summary = samples.summarise(values)
    assert min(values) <= summary.median <= max(values)
    assert 0 <= summary.outliers < len(values)
    assert summary.variation >= 0 <= summary.median_variation


@given(st.floats(1e5, 1e10), st.integers(0, 1 << 20), st.integers(1, 16), st.integers(20, 400))
def test_the_rate_of_a_steady_stream_is_found_after_its_burst(rate, burst, windows, count):
    stamps = [(n * 0.001, burst + int(rate * n * 0.001)) for n in range(count)]
    found = samples.rates(stamps, skip_bytes=0, skip_seconds=0.002, windows=windows)
    assert 1 <= len(found) <= windows
    assert statistics.median(found) == pytest.approx(rate, rel=0.02)


def test_a_stream_that_is_too_short_has_no_rate():
    assert samples.rates([(0.0, 100), (0.1, 200)], skip_bytes=0, skip_seconds=0, windows=4) == []
    assert samples.rates([(0.0, 1), (0.1, 2), (0.2, 3)], skip_bytes=1000, skip_seconds=0, windows=4) == []


# -- a network made up ----------------------------------------------------------------------------------------------------


class Network:
    """Hosts with links of a rate, in racks that share uplinks; measures as the leader does."""

    def __init__(self, hosts, *, noise=0.0, slow=None, racks=None, uplink=float("inf"), one_way=None, seed=0):
        self.names = [f"n{number + 1}" for number in range(hosts)]
        self.slow = slow or {}
        self.racks = racks or [0] * hosts
        self.uplink = uplink
        self.one_way = one_way or {}
        self.random = random.Random(seed)
        self.noise = noise

    def rates(self, phase):
        """Each pair's rate when all of the phase send at once: the uplinks' rates are shared evenly."""
        crossing = {}
        for a, b in phase:
            if self.racks[a] != self.racks[b]:
                crossing.setdefault((self.racks[a], "up"), []).append((a, b))
                crossing.setdefault((self.racks[b], "down"), []).append((a, b))
        found = {}
        for a, b in phase:
            own = 119.5 * MB * min(self.slow.get(a, 1.0), self.slow.get(b, 1.0)) * self.one_way.get((a, b), 1.0)
            shares = [self.uplink / len(pairs) for pairs in crossing.values() if (a, b) in pairs]
            # Whatever else runs can only slow a stream down; a little is noise either way.
            found[a, b] = min([own, *shares]) * (1 - abs(self.random.gauss(0, self.noise)))
        return found

    def records(self, mode=QUICK, facts=()):
        seen = [
            Started(
                when="2026-01-01T00:00:00+00:00", mode=mode.mode, hosts=tuple(self.names), primary="tcp", facts=facts
            )
        ]
        for step in steps.steps(len(self.names), mode, "tcp"):
            if step.kind == "transfer" and step.way == "tcp" and not step.both_ways:
                for number, phase in enumerate(step.phases):
                    seen += self.measure(step.key, step.load, phase, number)
        pairs = [record for record in seen if isinstance(record, PairSeen)]
        for a, b in suspects.directions(pairs, self.names, "tcp", mode.suspects):
            seen += self.measure("again", "alone", [(self.names.index(a), self.names.index(b))])
        pairs = [record for record in seen if isinstance(record, PairSeen)]
        base = suspects.Baseline(pairs, "tcp")
        for phase in suspects.slowed_phases(pairs, base, "tcp")[:1]:
            load = tuple((self.names.index(a), self.names.index(b)) for a, b in phase)

            def run(key, phase, base=base):
                made = self.measure(f"sharing/{key}", "bisection", phase)
                seen.extend(made)
                return {
                    pair: r.bandwidth_bytes_per_second / base.of(r.source, r.target)
                    for pair, r in zip(phase, made, strict=True)
                }

            used = {host for pair in load for host in pair}
            others = tuple(host for host in range(len(self.names)) if host not in used)
            if found := sharing.find_sides(load, run, others):
                sides = tuple(self.names[host] for host in found.left), tuple(self.names[host] for host in found.right)
                seen.append(GroupsSeen(sides=sides))
        return seen

    def measure(self, key, load, phase, number=0):
        return [
            PairSeen(step=key, phase=number, source=self.names[a], target=self.names[b], way="tcp", load=load,
                     bandwidth_bytes_per_second=rate, variation=0.01, repetitions=10, seconds=0.1)
            for (a, b), rate in self.rates(phase).items()
        ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 16), st.integers(0, 10_000), st.sampled_from([QUICK, DEFAULT]))
def test_a_clean_network_has_no_findings(hosts, seed, mode):
    assert findings.find(Network(hosts, noise=0.01, seed=seed).records(mode)) == ()


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
    found = findings.find(Network(hosts, noise=0.005, seed=seed, slow={which: part}).records(mode))
    assert [(finding.kind, finding.hosts) for finding in found] == [("slow_host", (f"n{which + 1}",))]
    assert found[0].ratio == pytest.approx(part, abs=0.03)
    assert found[0].severity == ("warning" if part == 0.9 else "error")


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(0, 10_000), st.sampled_from([2.0, 4.0]))
def test_an_oversubscribed_uplink_is_found_with_both_sides_and_its_ratio(half, seed, ratio):
    if half / ratio < 2 and ratio > 2:
        return  # so few hosts do not fill it
    network = Network(2 * half, noise=0.005, seed=seed, racks=[0] * half + [1] * half, uplink=119.5 * MB * half / ratio)
    records = network.records()
    found = findings.find(records)
    if half < 4:  # too few streams to tell the sides apart while the uplink is kept full
        assert all(finding.kind == "oversubscribed_uplink" for finding in found)
        return
    assert [finding.kind for finding in found] == ["oversubscribed_uplink"]
    assert found[0].ratio == pytest.approx(ratio, rel=0.05)
    groups = next(record for record in records if isinstance(record, GroupsSeen))
    assert {frozenset(side) for side in groups.sides} == {
        frozenset(network.names[:half]),
        frozenset(network.names[half:]),
    }


def test_sides_are_not_made_up_where_the_processors_are_what_all_share():
    load = ((0, 4), (1, 5), (2, 6), (3, 7))
    assert sharing.find_sides(load, lambda key, phase: {pair: 2.0 / len(phase) / 2 for pair in phase}) is None


def test_one_slow_direction_is_an_asymmetric_link():
    records = Network(6, noise=0.002, one_way={(1, 4): 0.5}).records(DEFAULT)
    found = findings.find(records)
    assert [(f.kind, f.source, f.target) for f in found] == [("asymmetric_link", "n2", "n5")]
    assert found[0].ratio == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("hosts", [4, 5, 8])
def test_a_host_that_is_slow_one_way_is_told_of_once(hosts):
    """Also where too few links of others were measured alone to say what is usual among them."""
    network = Network(hosts, one_way={(1, other): 0.25 for other in range(hosts) if other != 1})
    assert [(f.kind, f.hosts) for f in findings.find(network.records(QUICK))] == [("slow_host", ("n2",))]


def test_a_slow_way_between_two_good_hosts_is_a_slow_link():
    found = findings.find(Network(6, noise=0.002, one_way={(1, 4): 0.8, (4, 1): 0.8}).records(DEFAULT))
    assert [(f.kind, f.hosts) for f in found] == [("slow_link", ("n2", "n5"))]


def both_ways(names, part, load="alone"):
    return [
        PairSeen(step="again/both", source=a, target=b, way="tcp", load=load, both_ways=True,
                 bandwidth_bytes_per_second=119.5 * MB * part)
        for a, b in (names, names[::-1])
    ]  # fmt: skip


def test_half_duplex_shows_when_both_send():
    records = Network(4).records(DEFAULT)
    assert findings.find([*records, *both_ways(("n1", "n2"), 0.97)]) == ()
    beside = both_ways(("n1", "n2"), 0.5, "together")  # others may be the reason: it is looked at again
    assert findings.find([*records, *beside]) == ()
    seen = [record for record in [*records, *beside] if isinstance(record, PairSeen)]
    assert suspects.half_duplex(seen, suspects.Baseline(seen, "tcp"), "tcp", 9) == [("n1", "n2")]
    found = findings.find([*records, *both_ways(("n1", "n2"), 0.5)])
    assert [(f.kind, f.severity, f.hosts) for f in found] == [("half_duplex", "error", ("n1", "n2"))]


def test_pairs_that_failed_are_told_of_with_the_reason():
    records = Network(5).records(DEFAULT)
    kept = [r for r in records if not (isinstance(r, PairSeen) and {r.source, r.target} == {"n1", "n2"})]
    lost = PairSeen(
        step="alone/tcp/0", source="n1", target="n2", way="tcp", load="alone", failed="n2: the stream stands still"
    )
    found = findings.find([*kept, lost])
    assert [(f.kind, f.severity) for f in found] == [("mtu", "error")]
    gone = [r for r in records if not (isinstance(r, PairSeen) and "n3" in (r.source, r.target))]
    gone += [
        PairSeen(step="alone/tcp/0", source=a, target=b, way="tcp", load="alone", failed="n3 did not answer")
        for name in ("n1", "n2", "n4", "n5")
        for a, b in ((name, "n3"), ("n3", name))
    ]
    assert [(f.kind, f.hosts) for f in findings.find(gone)] == [("host_lost", ("n3",))]
    stalled = [
        structs.replace(r, failed="nearly nothing arrived") if isinstance(r, PairSeen) and r.failed else r for r in gone
    ]
    assert [(f.kind, f.hosts) for f in findings.find(stalled)] == [("mtu", ("n3",))]


def facts(host, **changed):
    own = {
        "interfaces": (Interface(name="eth0", physical=True, up=True, mtu=1500, speed_bytes_per_second=125 * MB),),
        **changed,
    }
    return Facts(host=host, address="198.18.0.1", interface="eth0", cpus=8, **own)


def test_what_hosts_say_of_themselves():
    slow = Interface(name="eth0", physical=True, up=True, mtu=9000, speed_bytes_per_second=125 * MB)
    fast = Interface(name="eth1", physical=True, up=True, mtu=1500, speed_bytes_per_second=1250 * MB)
    gpu = Gpu(index=3, name="H100", pcie_width=4, pcie_width_possible=16)
    said = (
        facts("n1"),
        facts("n2", interfaces=(slow, fast)),
        facts("n3", gpus=(gpu,), rdma_bytes_per_second=5e9),
        facts("n4"),
    )
    found = findings.find(Network(4).records(facts=said))
    assert {(f.kind, f.hosts) for f in found} == {
        ("wrong_interface", ("n2",)),
        ("mtu", ("n2",)),
        ("narrow_pcie", ("n3",)),
        ("gpudirect_off", ("n3",)),
    }


@pytest.mark.parametrize(("gain", "told"), [(1.9, False), (1.2, False), (1.0, True), (0.9, True)])
def test_gpudirect_that_does_nothing_is_told_of(gain, told):
    def curve(gpudirect, seconds, hosts=2):
        points = (Point(1 << 20, 1.0), Point(64 << 20, seconds))
        names = tuple(f"n{n + 1}" for n in range(hosts))
        return Collective(
            name="all_reduce", backend="nccl", hosts=names, ranks=8 * hosts, gpudirect=gpudirect, curve=points
        )

    few = [curve(True, 1.0), curve(False, 1.0)]  # not what jobs run on
    found = findings.gpudirect_idle([*few, curve(True, 1.0, 4), curve(False, gain, 4)])
    assert [(f.kind, f.ratio) for f in found] == ([("gpudirect_off", gain)] if told else [])
    assert findings.gpudirect_idle([curve(None, 1.0)]) == findings.gpudirect_idle([]) == []


def address(n, net):
    return f"10.{net}.0.{n}/16"


def test_other_networks_are_found_by_their_subnets():
    def card(name, text, **said):
        return Interface(
            **{"name": name, "physical": True, "up": True, "kind": "physical", "addresses": (text,), **said}
        )

    hosts = [
        facts(
            f"n{n}",
            interfaces=(
                card("eth0", address(n, 0)),
                card("ib0" if n < 3 else "ib9", address(n, 1)),  # names differ, the subnet counts
                card("docker0", "172.17.0.1/16", kind="bridge"),
                card("eth8", "192.168.0.7/24"),  # the same address everywhere: no way from one to another
                card("eth9", address(n, 2), up=False),
                card("own", address(n, 10 + n)),
            ),
        )
        for n in (1, 2, 3)
    ]
    (network,) = other_networks(hosts)
    assert network.name == "10.1.0.0/16"
    assert network.cards == {"n1": ("ib0", "10.1.0.1"), "n2": ("ib0", "10.1.0.2"), "n3": ("ib9", "10.1.0.3")}
    planned = steps.steps(3, DEFAULT, "tcp", (network.name,))
    pairs = sorted(pair for step in planned if step.network == network.name for phase in step.phases for pair in phase)
    assert pairs == [(a, b) for a in range(3) for b in range(3) if a != b]


def test_a_card_that_does_not_reach_its_rate():
    card = Interface(name="eth0", physical=True, up=True, mtu=1500, speed_bytes_per_second=1250 * MB)
    found = findings.find(Network(3).records(facts=(facts("n1", interfaces=(card,)), facts("n2"), facts("n3"))))
    assert [(f.kind, f.hosts) for f in found] == [("below_nominal", ("n1",))]


def test_a_noisy_link_is_noted():
    records = Network(4).records(DEFAULT)
    shaken = [
        PairSeen(**{**{k: getattr(r, k) for k in r.__struct_fields__}, "variation": 0.4})
        if isinstance(r, PairSeen) and (r.source, r.target) == ("n1", "n2")
        else r
        for r in records
    ]
    assert [(f.kind, f.severity, f.source) for f in findings.find(shaken)] == [("noisy_link", "note", "n1")]


# -- baseline -------------------------------------------------------------------------------------------------------------


def test_the_baseline_shows_what_became_worse():
    before = measured(Network(6).records(DEFAULT))
    same = measured(Network(6, noise=0.01, seed=3).records(DEFAULT))
    assert baseline.worse(before, same) == ()
    found = baseline.worse(before, measured(Network(6, slow={2: 0.6}).records(DEFAULT)))
    assert [(f.kind, f.hosts, f.severity) for f in found] == [("worse_than_baseline", ("n3",), "error")]
    found = baseline.worse(before, measured(Network(6, one_way={(0, 1): 0.8}).records(DEFAULT)))
    assert [(f.source, f.target, f.severity) for f in found] == [("n1", "n2", "warning")]
    assert baseline.worse(measured(Network(6, slow={2: 0.6}).records(DEFAULT)), before) == ()


# -- records --------------------------------------------------------------------------------------------------------------


def test_records_survive_their_lines_and_other_lines_are_told_apart():
    for record in [
        *Network(3).records(),
        StepDone(step="a", what="b", done_seconds=1.0, left_seconds=2.0),
        Ended(seconds=1.0),
    ]:
        assert decode(encode(record)) == record
    for line in ("", "hello", '{"type": "pair"', '{"type": "unknown"}', "[1]"):
        assert decode(line) is None


def test_of_several_measurements_the_fastest_counts_and_curves_are_kept():
    def seen(rate, **more):
        return PairSeen(
            step="x", source="a", target="b", way="mpi", load="alone", bandwidth_bytes_per_second=rate, **more
        )

    slow, fast = (Point(8, 1e-5), Point(64, 2e-5)), (Point(64, 1e-5), Point(512, 1e-4))
    found = best([seen(1.0, curve=slow, latency_seconds=2.0), seen(2.0, curve=fast), seen(5.0, failed="no")])
    (only,) = found.values()
    assert (only.bandwidth_bytes_per_second, only.latency_seconds) == (2.0, 2.0)
    assert only.curve == (slow[0], *fast)


def test_what_is_measured_is_what_the_topology_keeps():
    kept = measured(Network(4).records(DEFAULT))
    assert isinstance(kept, Measured)
    assert kept.hosts == ("n1", "n2", "n3", "n4")
    assert len({(p.source, p.target) for p in kept.pairs if p.load == "alone"}) == 12
    assert all(isinstance(pair, PairLink) for pair in kept.pairs)
    assert measured([]) is None


@pytest.mark.parametrize(("hosts", "width"), [(20, 100), (8, 40), (8, 100)])
def test_the_heat_map_can_be_read_without_colours(hosts, width):
    kept = measured(Network(hosts, slow={1: 0.5}).records())
    console = Console(width=width, file=io.StringIO())
    console.print(heat_map(kept, "tcp", width))
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    cells = {row[0]: row[1:] for row in rows if row and row[0] in kept.hosts and len(row) > hosts}
    slow, fast = ("478", "956") if (hosts, width) == (8, 100) else ("5", "9")
    assert cells["n3"] == [fast, slow, "-"] + [fast] * (hosts - 3)
    assert cells["n2"] == [slow, "-"] + [slow] * (hosts - 2)


def test_columns_of_all_reduce_say_how_many_hosts_and_ranks():
    over = Collective(name="all_reduce", backend="nccl", hosts=("a", "b"), ranks=2, gpudirect=None, curve=())
    assert ranks_text(over) == "2 hosts"
    assert ranks_text(structs.replace(over, ranks=16, gpudirect=False)) == "2 hosts, 16 ranks, no GPUDirect"


def test_bus_bandwidth_is_that_of_nccl_tests():
    one = Collective(name="all_reduce", backend="gloo", hosts=("a",) * 4, ranks=4, curve=(Point(1 << 20, 0.01),))
    assert bus_bandwidth(one.curve[0].size_bytes, one.curve[0].seconds, one.ranks) == pytest.approx(
        (1 << 20) / 0.01 * 1.5
    )
