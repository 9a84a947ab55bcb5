"""Placement of parameter servers, and rules for tolerated failures."""

from __future__ import annotations

import msgspec
import pytest

from distrib.errors import ConfigError
from distrib.strategy import Strategy
from distrib_launch import runner
from distrib_launch.arguments import launch_arguments
from distrib_launch.launch_options import LaunchOptions
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.supervisor.fault_tolerance import MAX_RANK_RESTARTS, ToleranceRules
from distrib_launch.supervisor.rank_exit import RankExit


def options(tmp_path, *words: str, hosts: str = "n1:2,n2:2") -> LaunchOptions:
    script = tmp_path / "train.py"
    script.write_text("")
    if "\n" in hosts:
        (tmp_path / "hosts.txt").write_text(hosts)
        hosts = str(tmp_path / "hosts.txt")
    return launch_arguments.parse(["-H", hosts, "--mode", "async", *words, str(script)])


def planned(tmp_path, *words: str, hosts: str = "n1:2,n2:2") -> LaunchPlan:
    return runner.plan_launch(options(tmp_path, *words, hosts=hosts))


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


def test_servers_run_on_hosts_that_were_chosen(tmp_path):
    apart = "n1:2\nn2:2\nn3 role=server\nn4 role=server\n"
    assert servers(planned(tmp_path, "--exclude", "n3", hosts=apart)) == ["n4"]
    assert servers(planned(tmp_path, "--exclude", "n[3-4]", hosts=apart)) == ["n1", "n2"]
    assert servers(planned(tmp_path, "--include", "n1@n4", hosts=apart)) == ["n4"]
    assert servers(planned(tmp_path, "--include", "n1", hosts=apart)) == ["n3", "n4"]
    assert servers(planned(tmp_path, "--exclude", "n2", "--servers", "1")) == ["n1"]
    assert servers(planned(tmp_path, "--exclude", "n3", "-np", "2", "--servers", "1", hosts="n1:2,n2:2,n3:2")) == ["n2"]
    without = options(tmp_path, "--drop-bad-hosts", hosts=apart)
    assert servers(runner.plan_launch(without, dropped=["n3"])) == ["n4"]
    with pytest.raises(ConfigError, match="n9, "):
        planned(tmp_path, "--exclude", "n9", hosts=apart)
    with pytest.raises(ConfigError, match=r"--exclude .* n3, .*role=server"):
        planned(tmp_path, "--exclude", "n3:0", hosts=apart)


def test_a_host_for_servers_that_trains_is_told_of(tmp_path):
    apart = "n1:2\nn3 role=server\n"
    assert any("n3 has role=server" in note for note in planned(tmp_path, "--mode", "sync", hosts=apart).notes)
    for words in ([], ["--mode", "sync", "--exclude", "n3"]):
        assert not any("role=server" in note for note in planned(tmp_path, *words, hosts=apart).notes)


@pytest.mark.parametrize(
    ("words", "hosts", "says"),
    [
        (["--servers", "5"], "n1:2,n2:2", "--servers 5, but there are 4 worker.*start more workers"),
        (["--servers", "3"], "n1:2\nn2 slots=2 role=server\n", "role=server have 2 slot"),
        ([], "n1 role=server\nn2 role=server\n", "every host has role=server"),
        (["--replicas", "1", "--servers", "1"], "n1:2", "needs another server"),
        (["--replicas", "1"], "n1:2", "needs two parameter servers"),
        (["--replicas", "1"], "n1:2\nn2 role=server\n", "needs two parameter servers"),
        (["--gradients", "int8"], "n1:2", "async does not support int8"),
        (["--staleness", "0", "--delay-compensation", "0.04"], "n1:2", "does not apply with --staleness 0"),
    ],
)
def test_what_cannot_be(tmp_path, words, hosts, says):
    with pytest.raises(ConfigError, match=says):
        planned(tmp_path, *words, hosts=hosts)


def ending(rank: int, code: int = 1, lost: bool = False, stopped_by: str = "") -> RankExit:
    return RankExit(
        rank=rank, local_rank=0, host="n1", time=0.0, exit_code=None if lost else code, signal=None,
        stopped_by=stopped_by, message="", lost="silence" if lost else "",
    )  # fmt: skip


def test_a_job_goes_on_without_some_and_not_without_all(tmp_path):
    plan, kept = planned(tmp_path), planned(tmp_path, "--replicas", "1")
    assert ToleranceRules(plan, [ending(0)]).continues_without(ending(0))
    assert not ToleranceRules(plan, [ending(rank) for rank in range(4)]).continues_without(ending(3))
    assert not ToleranceRules(plan, [ending(4, lost=True)]).continues_without(ending(4, lost=True))
    assert ToleranceRules(kept, [ending(4, lost=True)]).continues_without(ending(4, lost=True))
    assert "--replicas 1" in ToleranceRules(plan, []).missing_replica(ending(4, lost=True))
    assert not ToleranceRules(plan, []).missing_replica(ending(3)) and not ToleranceRules(kept, []).missing_replica(
        ending(4)
    )
    assert (
        ToleranceRules(plan, [ending(0), ending(1, code=0)]).succeeded
        and not ToleranceRules(plan, [ending(0)]).succeeded
    )
    assert not ToleranceRules(plan, [ending(0), ending(1, code=0, stopped_by="launcher")]).succeeded
    assert not ToleranceRules(plan, [ending(4, code=0)]).succeeded


@pytest.mark.parametrize("rank", [0, 4])
def test_who_may_be_started_again(tmp_path, rank):
    plan = planned(tmp_path)
    assert ToleranceRules(plan, []).may_restart(ending(rank), 0) and ToleranceRules(plan, []).may_restart(
        ending(rank), 2
    )
    assert not ToleranceRules(plan, []).may_restart(ending(rank), 3)
    assert not ToleranceRules(plan, []).may_restart(ending(rank, lost=True), 0)
    assert not ToleranceRules(plan, []).may_restart(ending(rank, stopped_by="engine"), 0)
    sync = msgspec.structs.replace(plan, mode="sync", strategy=Strategy())
    assert (
        not ToleranceRules(sync, []).may_restart(ending(rank), 0)
        and not ToleranceRules(sync, [ending(0)], set()).is_over
    )


def test_the_job_is_over_when_those_that_were_there_from_the_start_have_ended(tmp_path):
    plan = planned(tmp_path)  # workers 0 to 3, servers 4 and 5
    ended = [ending(0, code=0), ending(1), ending(2, code=0)]
    assert ToleranceRules(plan, ended, set()).is_training and not ToleranceRules(plan, ended, set()).is_over
    assert ToleranceRules(plan, ended, {3}).is_over  # though rank 3 is running again
    assert not ToleranceRules(plan, ended[1:], {3}).is_over
    assert ToleranceRules(plan, [ending(rank) for rank in range(4)], set()).is_over
    assert not ToleranceRules(plan, [ending(4)], {1, 2}).is_over


def test_workers_that_were_started_again_do_not_carry_on_alone(tmp_path):
    plan = planned(tmp_path)
    failed = [ending(rank) for rank in (1, 2, 3)]
    assert not ToleranceRules(plan, failed, {0}).continues_without(ending(3))
    assert ToleranceRules(plan, [*failed, ending(0, code=0)], {0}).continues_without(ending(3))  # the rank finished
    assert not ToleranceRules(plan, [*failed, ending(0, code=0, stopped_by="launcher")], {0}).continues_without(
        ending(3)
    )
    assert ToleranceRules(plan, failed[1:], {0}).continues_without(ending(3))


def test_main_is_the_first_worker_that_has_never_failed(tmp_path):
    plan = planned(tmp_path)
    assert ToleranceRules(plan, [], set()).main == 0
    assert ToleranceRules(plan, [ending(0, code=0)], set()).main == 0
    assert ToleranceRules(plan, [ending(1)], {0}).main == 2
    assert ToleranceRules(plan, [ending(rank) for rank in (0, 1, 2)], {3}).main is None


def test_who_was_cut_off_may_return_while_somebody_trains(tmp_path):
    plan = planned(tmp_path)
    lost = ending(3, lost=True)
    assert ToleranceRules(plan, [lost], set()).may_rejoin(lost, 0)
    assert ToleranceRules(plan, [lost], set()).may_rejoin(lost, MAX_RANK_RESTARTS)
    assert ToleranceRules(plan, [ending(5, lost=True)], {0, 1, 2}).may_rejoin(ending(5, lost=True), 0)
    assert not ToleranceRules(plan, [lost], {0, 1, 2}).may_rejoin(lost, 0)
    assert not ToleranceRules(plan, [ending(3, code=0)], set()).may_rejoin(ending(3, code=0), 0)
    assert not ToleranceRules(plan, [ending(3)], set()).may_rejoin(ending(3, stopped_by="launcher"), 0)
    assert not ToleranceRules(planned(tmp_path, "--mode", "sync"), [lost], set()).may_rejoin(lost, 0)
    died = ending(3)  # then its host was disconnected
    assert ToleranceRules(plan, [died], set()).may_rejoin(died, MAX_RANK_RESTARTS - 1)
    assert not ToleranceRules(plan, [died], set()).may_rejoin(died, MAX_RANK_RESTARTS)


def test_what_is_said_of_a_rank_that_died(tmp_path):
    plan = planned(tmp_path)

    def said(rank: int, *, again: bool, was_main: bool = False) -> str:
        return ToleranceRules(plan, []).warning(ending(rank), "SIGKILL", restarted=again, was_main=was_main)

    assert said(1, again=True) == "worker rank 1 on n1 died (SIGKILL) and was restarted"
    assert said(1, again=False) == "worker rank 1 on n1 was lost (SIGKILL); the job continues without it"
    assert said(0, again=True, was_main=True).endswith("was restarted; the next worker prints and saves now")
    assert said(4, again=True).startswith("parameter server rank 4")
    back = ToleranceRules(plan, []).warning(ending(2, lost=True), "silence", restarted=True, was_main=False)
    assert back == "worker rank 2 on n1 is reachable again and was restarted"
