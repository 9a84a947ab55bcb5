"""Hosts, slots and GPUs of a Slurm allocation."""

from __future__ import annotations

import re

import pytest

from distrib.cluster.hostfile import slurm_hosts
from distrib.cluster.slurm import gpus_per_host
from distrib.errors import HostfileError
from tests.support.hostfile_tables import TABLES, h, hosts_of

TWO = {"SLURM_JOB_NODELIST": "n[1-2]"}
ONE_TASK = {**TWO, "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NTASKS": "2"}
UNASKED = {**TWO, "SLURM_TASKS_PER_NODE": "128(x2)", "SLURM_JOB_CPUS_PER_NODE": "128(x2)"}
IN_STEP = {
    **TWO,
    "SLURM_STEP_ID": "0",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_NTASKS": "1",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
}
A_RANK_PER_GPU = "one rank for each"


# Slurm's variables, then slots and max_slots of each host, and words of the note.
SLURM_SLOTS: list[tuple[dict[str, str], int | None, int | None, str]] = [
    ({**ONE_TASK, "SLURM_GPUS_PER_NODE": "8"}, 8, 8, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_GPUS_PER_NODE": "gpu:8"}, 8, 8, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_GPUS_PER_NODE": "a100:4,h100:2"}, 6, 6, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_GPUS_PER_NODE": "gpu:a100:4(S:0-1)"}, 4, 4, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_GPUS_PER_NODE": "a100"}, 1, 1, ""),
    ({**ONE_TASK, "SLURM_GPUS_ON_NODE": "4"}, 4, 4, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_GPUS": "16", "SLURM_GPUS_ON_NODE": "8"}, 8, 8, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_GPUS": "16"}, 8, 8, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_GPUS": "16", "SLURM_GPUS_ON_NODE": "9"}, 1, None, ""),  # GPUs of each host unknown
    ({**ONE_TASK, "SLURM_GPUS": "3"}, 1, None, ""),
    ({**ONE_TASK, "SLURM_GPUS_PER_TASK": "a100:8"}, 8, 8, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_GPUS_PER_TASK": "2"}, 4, 8, ""),
    ({**ONE_TASK, "SLURM_GPUS_PER_NODE": "0"}, 1, None, ""),
    ({**ONE_TASK, "SLURM_JOB_CPUS_PER_NODE": "16(x2)"}, 1, 16, ""),
    ({**UNASKED, "SLURM_GPUS_PER_NODE": "8"}, 8, 8, A_RANK_PER_GPU),
    (UNASKED, None, 128, ""),
    ({**UNASKED, "SLURM_NTASKS": "256"}, 128, 128, ""),
    ({**ONE_TASK, "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_GPUS_PER_NODE": "8"}, 4, 8, ""),
    (IN_STEP, None, 4, "inside a Slurm step"),
    ({**IN_STEP, "SLURM_NTASKS_PER_NODE": "2"}, 2, 4, "inside a Slurm step"),
    ({**IN_STEP, "SLURM_GPUS_PER_NODE": "8"}, 8, 8, A_RANK_PER_GPU),
    ({**IN_STEP, "SLURM_JOB_CPUS_PER_NODE": "4"}, None, None, "inside a Slurm step"),
    ({**ONE_TASK, "SLURM_HET_SIZE": "2"}, 1, None, "heterogeneous job of 2 components"),
    ({**ONE_TASK, "SLURM_HET_SIZE": "9" * 5000}, 1, None, ""),
]


def test_slurm_variables_give_the_hosts_of_the_allocation() -> None:
    for environ, hosts in TABLES["valid_slurm"]:
        read = slurm_hosts(environ)
        if hosts is None:
            assert read is None, environ
        else:
            assert read is not None
            assert list(read.hosts) == hosts_of(hosts, 0), environ
            assert (read.dialect, read.source) == ("slurm", "Slurm"), environ


def test_invalid_slurm_variables_are_refused_with_their_name() -> None:
    for nodes, tasks, variable, column, message in TABLES["invalid_slurm"]:
        with pytest.raises(HostfileError, match=re.escape(message)) as caught:
            slurm_hosts({"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks})
        assert (caught.value.source, caught.value.column) == (variable, column), (nodes, tasks)


def test_slots_of_slurm_hosts_follow_tasks_gpus_and_cpus() -> None:
    for environ, slots, most, note in SLURM_SLOTS:
        read = slurm_hosts(environ)
        assert read is not None
        assert list(read.hosts) == [h(name, slots, max_slots=most, line=0) for name in ("n1", "n2")], environ
        assert note in " ".join(read.notes) and bool(note) == bool(read.notes), environ


def test_gpus_per_host_are_zero_unless_equal_on_all_hosts() -> None:
    assert gpus_per_host({}) == 0
    assert gpus_per_host(UNASKED) == 0
    assert gpus_per_host({**ONE_TASK, "SLURM_GPUS_PER_TASK": "8"}) == 8
    assert gpus_per_host({**ONE_TASK, "SLURM_TASKS_PER_NODE": "2,1", "SLURM_GPUS_PER_TASK": "2"}) == 0
    assert gpus_per_host({**ONE_TASK, "SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_GPUS_PER_NODE": "2"}) == 0


def test_components_of_a_heterogeneous_job_without_common_step_are_refused() -> None:
    components = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]"}
    with pytest.raises(HostfileError, match="2 components"):
        slurm_hosts({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", **components})
