"""`--share-gpus`: devices and environment of ranks on fewer GPUs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib import environment as env
from distrib.cluster import hostfile
from distrib.cluster.topology import Topology
from distrib.errors import ConfigError
from distrib.utils.mpi_env import RankIdentity
from distrib_launch import plan_builder
from distrib_launch.arguments import launch_arguments
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.plan_builder import SHARED_GPUS_NOTE, LocalMachine
from distrib_launch.rank_agent import affinity, script_process
from distrib_launch.rank_agent.control_channel import Assignment
from tests.conftest import SCRIPTS


def planned(*words: str, gpus: int, hosts: str | None = None, topology: Topology | None = None) -> LaunchPlan:
    options = launch_arguments.parse(["--engine", "mpirun", "--run-dir", "/tmp/run", *words, str(SCRIPTS / "where.py")])
    listed = hostfile.parse_host_list(hosts) if hosts else None
    return plan_builder.build_plan(options, listed, topology, LocalMachine(gpus=gpus))


def test_without_the_option_the_refusal_names_it():
    with pytest.raises(ConfigError, match="3 ranks requested with -np, but this machine shows 2 GPU") as refused:
        planned("-np", "3", gpus=2)
    assert "--share-gpus" in refused.value.hint


def test_ranks_beyond_the_gpus_begin_again_with_the_first():
    plan = planned("-np", "5", "--share-gpus", gpus=2)
    assert [rank.device for rank in plan.ranks] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
    assert all(rank.environment[env.DISTRIB_SHARE_GPUS] == "1" for rank in plan.ranks)
    assert SHARED_GPUS_NOTE in plan.notes


@pytest.mark.parametrize("words", [("-np", "2", "--share-gpus"), ("--share-gpus",)])
def test_enough_gpus_are_not_shared(words):
    plan = planned(*words, gpus=2)
    assert [rank.device for rank in plan.ranks] == ["cuda:0", "cuda:1"]
    assert not any(env.DISTRIB_SHARE_GPUS in rank.environment for rank in plan.ranks)
    assert SHARED_GPUS_NOTE not in plan.notes


def test_a_host_with_unknown_gpus_decides_itself_and_all_ranks_use_gloo():
    plan = planned("--share-gpus", gpus=0, hosts="n1:3,n2:1")
    assert {rank.device for rank in plan.ranks} == {"auto"}
    assert all(env.DISTRIB_SHARE_GPUS in rank.environment for rank in plan.ranks)
    one_each = planned("--share-gpus", gpus=0, hosts="n1,n2")
    assert not any(env.DISTRIB_SHARE_GPUS in rank.environment for rank in one_each.ranks)


def test_a_job_on_cpus_shares_nothing():
    plan = planned("-np", "3", "--share-gpus", gpus=0)
    assert {rank.device for rank in plan.ranks} == {"cpu"} and SHARED_GPUS_NOTE not in plan.notes


@given(ranks=st.integers(1, 64), gpus=st.integers(1, 16))
def test_gpus_are_shared_evenly(ranks, gpus):
    devices = [affinity.device_of(rank, gpus, share=True) for rank in range(ranks)]
    loads = Counter(devices)
    assert len(loads) == min(ranks, gpus) and max(loads.values()) - min(loads.values()) <= 1
    assert devices[:gpus] == [affinity.device_of(rank, gpus, share=False) for rank in range(min(ranks, gpus))]


def chosen(local_rank: int, ranks: int, gpus: list[int] | None = None, **environ: str) -> str:
    """Return the device that a rank agent chooses on a host whose CUDA_VISIBLE_DEVICES is in `environ`."""
    assignment = Assignment(
        command=[], is_python=False, directory="/", environment={}, device="auto", tag="test.0", gpus=gpus, bind="none",
        cpu_sharers=ranks, grace_seconds=1.0, host_timeout_seconds=30.0, may_return=False, keep_result=False,
    )  # fmt: skip
    variables = {"OPAL_PREFIX": str(Path("/")), **environ}
    identity = RankIdentity(rank=local_rank, world_size=ranks, local_rank=local_rank, local_world_size=ranks)
    device, _ = script_process._choose_device(assignment, variables, identity)
    assert variables[env.DISTRIB_DEVICE] == device
    return device


def test_the_agent_of_a_host_shares_the_gpus_that_it_finds():
    shown = {"CUDA_VISIBLE_DEVICES": "4,7"}
    assert chosen(1, 3, **shown) == "cuda:1"
    with pytest.raises(script_process.Refused, match="--share-gpus"):
        chosen(2, 3, **shown)
    assert [chosen(rank, 5, **shown, DISTRIB_SHARE_GPUS="1") for rank in range(5)] == [
        "cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0",
    ]  # fmt: skip
    assert chosen(2, 3, CUDA_VISIBLE_DEVICES="", DISTRIB_SHARE_GPUS="1") == "cpu"
    assert chosen(2, 3, gpus=[1], **shown, DISTRIB_SHARE_GPUS="1") == "cuda:0"
