"""Cause of slow steps, from one report of each of three ranks."""

import pytest

from distrib_launch.supervisor import rank_report
from distrib_launch.supervisor.slowdown import find_cause

LOADING = {
    "steps": 20, "step_seconds": 0.2, "batch_seconds": 0.1, "loading_processor_seconds": 0.0, "processor_seconds": 0.1,
    "queued_seconds": 0.0, "cores": 1.0, "workers": 0,
}  # fmt: skip


def find(compute=(0.1, 0.1, 0.1), step=0.2, loader=(0.0, 0.0, 0.0), queued=(0.0, 0.0, 0.0), network=0.0):
    reports = {
        rank: rank_report.parse(
            {
                "steps": 20,
                "step_seconds": step,
                "compute_seconds": compute[rank],
                "exposed_seconds": step - compute[rank],
                "queued_seconds": queued[rank],
                "loading": LOADING | {"loader_seconds": loader[rank]},
            }
        )
        for rank in range(3)
    }
    return find_cause(
        reports, lost_seconds=step - 0.1, exposed_seconds=step - max(compute), network_seconds=network
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "rank", "seen"),
    [
        ("straggler", 1, {"compute": (0.1, 0.19, 0.1)}),
        ("loader", 2, {"compute": (0.1, 0.1, 0.19), "loader": (0.0, 0.0, 0.09)}),
        ("busy CPUs", 0, {"compute": (0.19, 0.1, 0.1), "queued": (0.08, 0.01, 0.0)}),
        ("busy CPUs", 2, {"queued": (0.0, 0.0, 0.08), "network": 0.09}),
        ("network", -1, {"network": 0.09}),
        ("network", -1, {"network": None}),
        ("network", -1, {"compute": (0.1, 0.13, 0.1), "network": 0.07}),
        ("waiting", -1, {"network": 0.01}),
        ("straggler", 1, {"compute": (0.1, 0.19, 0.13), "loader": (0.0, 0.0, 0.03), "network": 0.01}),
    ],
)
def test_the_part_of_a_step_that_explains_most_of_the_lost_time_is_its_cause(cause, rank, seen):
    found = find(**seen)
    assert (found.cause, found.rank) == (cause, rank)


def test_times_that_explain_less_than_half_are_no_cause():
    assert find(compute=(0.14, 0.14, 0.16), step=0.2, queued=(0.04, 0.0, 0.0), network=0.01) is None
