"""Where parameter servers are placed, and what a job bears: pure."""

from __future__ import annotations

import pytest
from distrib_launch import cli, job, tolerance
from distrib_launch.failures import Ending
from distrib_launch.plan import LaunchPlan

from distrib.errors import ConfigError


def planned(tmp_path, *words: str, hosts: str = "n1:2,n2:2") -> LaunchPlan:
    script = tmp_path / "train.py"
    script.write_text("")
    if "\n" in hosts:
        (tmp_path / "hosts.txt").write_text(hosts)
        hosts = str(tmp_path / "hosts.txt")
    return job.make_plan(cli.parser().parse_args(["-H", hosts, "--mode", "async", *words, str(script)]))


def servers(plan: LaunchPlan) -> list[str]:
    return [rank.host for rank in plan.ranks if rank.role == "server"]


def test_a_server_beside_the_workers_of_every_host(tmp_path):
    plan = planned(tmp_path)
    assert plan.world_size == 4 and servers(plan) == ["n1", "n2"]
    assert [(rank.rank, rank.role) for rank in plan.started] == [
        (0, "worker"), (1, "worker"), (4, "server"), (2, "worker"), (3, "worker"), (5, "server"),
    ]  # fmt: skip
    first, second = plan.ranks[4].environment, plan.ranks[5].environment
    assert (first["DISTRIB_SERVER"], second["DISTRIB_SERVER"], second["WORLD_SIZE"]) == ("0", "1", "4")
    assert plan.ranks[0].environment["LOCAL_WORLD_SIZE"] == "2"
    assert plan.script_on(plan.hosts[0], "server")[1:] == ("-m", "distrib.training.parameter_server")


def test_hosts_set_apart_idle_hosts_and_workers_hosts(tmp_path):
    apart = planned(tmp_path, hosts="n1:2\nn2 slots=1 role=server\nn3 slots=2 role=server\n")
    assert apart.world_size == 2 and servers(apart) == ["n2", "n3"]
    three = planned(tmp_path, "--servers", "3", hosts="n1:4\nn2 slots=2 role=server\nn3 slots=2 role=server\n")
    assert servers(three) == ["n2", "n2", "n3"]
    assert servers(planned(tmp_path, "-np", "2", "--servers", "1")) == ["n2"]
    assert servers(planned(tmp_path, "--servers", "3")) == ["n1", "n1", "n2"]


@pytest.mark.parametrize(
    ("words", "hosts", "says"),
    [
        (["--servers", "5"], "n1:2,n2:2", "--servers 5, but there are 4 worker"),
        (["--servers", "3"], "n1:2\nn2 slots=2 role=server\n", "role=server have 2 slot"),
        ([], "n1 role=server\nn2 role=server\n", "every host has role=server"),
        (["--replicas", "1", "--servers", "1"], "n1:2", "there is no other server"),
        (["--gradients", "int8"], "n1:2", "async sends no int8"),
        (["--staleness", "0", "--stale-rate"], "n1:2", "nothing to correct"),
    ],
)
def test_what_cannot_be(tmp_path, words, hosts, says):
    with pytest.raises(ConfigError, match=says):
        planned(tmp_path, *words, hosts=hosts)


def ending(rank: int, code: int = 1, lost: bool = False) -> Ending:
    return Ending(
        rank=rank, local_rank=0, host="n1", time=0.0, exit_code=None if lost else code, signal=None, stopped_by="",
        message="", lost="silence" if lost else "",
    )  # fmt: skip


def test_a_job_goes_on_without_some_and_not_without_all(tmp_path):
    plan, kept = planned(tmp_path), planned(tmp_path, "--replicas", "1")
    assert tolerance.goes_on_without(plan, ending(0), [ending(0)])
    assert not tolerance.goes_on_without(plan, ending(3), [ending(rank) for rank in range(4)])
    assert not tolerance.goes_on_without(plan, ending(4, lost=True), [ending(4, lost=True)])
    assert tolerance.goes_on_without(kept, ending(4, lost=True), [ending(4, lost=True)])
    assert tolerance.may_start_again(plan, ending(4), 0) and not tolerance.may_start_again(plan, ending(4), 3)
    assert not tolerance.may_start_again(plan, ending(4, lost=True), 0)
    assert not tolerance.may_start_again(plan, ending(0), 0)
    assert tolerance.succeeded(plan, [ending(0), ending(1, code=0)]) and not tolerance.succeeded(plan, [ending(0)])
    assert tolerance.servers_only(plan, [ending(rank) for rank in range(4)])
