"""Schedule of the probe: rounds of pairs, stages, sizes and time budgets."""

from __future__ import annotations

import pytest

from distrib.probe import schedule, stages
from distrib.probe.settings import FULL, MODES


def test_every_pair_meets_exactly_once_in_rounds_of_disjoint_pairs():
    for hosts in range(2, 130):
        rounds = schedule.round_robin(hosts)
        assert len(rounds) == (hosts - 1 if hosts % 2 == 0 else hosts)
        pairs = [pair for round_ in rounds for pair in round_]
        assert len(pairs) == len(set(pairs)) == hosts * (hosts - 1) // 2
        assert all(a < b for a, b in pairs)
        for round_ in rounds:
            members = [host for pair in round_ for host in pair]
            assert len(members) == len(set(members)) == hosts - hosts % 2


def test_the_bisection_pairs_one_half_with_the_other():
    for hosts in range(4, 130):
        round_ = schedule.bisection_round(hosts)
        assert len(round_) == hosts // 2
        assert {a for a, _ in round_} == set(range(hosts // 2))
        assert {b for _, b in round_} == set(range(hosts - hosts // 2, hosts))


def test_collectives_are_measured_on_powers_of_two_and_all_hosts():
    assert schedule.collective_host_counts(1) == ()
    assert schedule.collective_host_counts(2) == (2,)
    assert schedule.collective_host_counts(8) == (2, 4, 8)
    assert schedule.collective_host_counts(13) == (2, 4, 8, 13)


def test_a_full_probe_covers_8_bytes_to_256_mib():
    streamed = {size for step in stages.plan_stages(8, FULL, "tcp") for size in step.sizes}
    assert streamed == {8 * 2**n for n in range(24)}  # 8 B to 64 MiB
    assert FULL.collective_sizes == tuple(1024 * 2**n for n in range(19))  # 1 KiB to 256 MiB


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hosts", [2, 3, 8, 33, 128])
def test_every_pair_is_measured_and_the_time_for_pairs_alone_is_bounded(mode, hosts):
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
