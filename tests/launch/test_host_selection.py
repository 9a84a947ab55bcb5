"""Selection of hosts, slots and GPUs: `--include`, `--exclude`, `--gpu-type`, `--spread`, `-np`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.cluster.hostfile import Host
from distrib.cluster.node import Gpus
from distrib.errors import ConfigError
from distrib_launch.cli import launch as cli
from distrib_launch.host_selection import HostFilter, SelectedHost, distribute_ranks, parse_filter, select_hosts
from tests.conftest import LAUNCH, SCRIPTS, call

JOB = SCRIPTS / "job.py"


def plan(tmp_path: Path, *arguments: str) -> dict:
    done = call(cli.main, "--dry-run", "--json", *arguments, JOB, cwd=tmp_path)
    assert done.returncode == 0, done
    return json.loads(done.stdout)


def refused(tmp_path: Path, *arguments: str) -> str:
    done = call(cli.main, "--dry-run", *arguments, JOB, cwd=tmp_path)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    return line


def per_host(plan: dict) -> dict[str, int]:
    return {host["name"]: host["ranks"] for host in plan["hosts"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", {"a": None}),
        ("a:0,2@b", {"a": (0, 2), "b": None}),
        ("a:2,0,0", {"a": (0, 2)}),
        ("a:0-2@a:4", {"a": (0, 1, 2, 4)}),
        ("host@host2@node[3-5]:1", {"host": None, "host2": None, "node3": (1,), "node4": (1,), "node5": (1,)}),
        (" a : 0 , 1 @ b ", {"a": (0, 1), "b": None}),
        ("[fd00::1]:0,1@b", {"fd00::1": (0, 1), "b": None}),
        ("10.0.0.1:3", {"10.0.0.1": (3,)}),
        ("NODE1:0", {"node1": (0,)}),
        ("a@a", {"a": None}),
    ],
)
def test_filters_are_read_as_deepspeed_does_and_a_little_more(text, expected):
    assert parse_filter(text, "--include") == expected


@pytest.mark.processes
def test_filters_that_are_given_twice_both_count(tmp_path):
    for words, left in (
        (["--exclude", "a", "--exclude", "b"], ["c"]),
        (["--include", "a", "--include=c"], ["a", "c"]),
    ):
        command = [LAUNCH, "-H", "a:2,b:2,c:2", *words, "--dry-run", "--json", SCRIPTS / "where.py"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True)
        assert [host["name"] for host in json.loads(done.stdout)["hosts"]] == left


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "--include:1: no host here"),
        ("a@@b", "--include:3: no host here"),
        (":0", "no host before the indices"),
        ("a:", "'' is not a valid index"),
        ("a:x", "'x' is not a valid index"),
        ("a:1-", "'1-' is not a valid index"),
        ("a:3-1", "'3-1' is not a valid index"),
        ("a:99999", "'99999' is not a valid index"),
        ("a:-1", "'-1' is not a valid index"),
        ("fd00::1:0", "write an IPv6 address in brackets"),
        ("a@a:1", "a is named twice, whole and in part"),
        ("n[3-1]", "not a range"),
        ("n[1-999999999]", "more than 50,000 hosts"),
        ("a b", "did not expect"),
        ("a,b", "separate hosts by @"),
        ("n[1-2],n3:0", "separate hosts by @"),
        ("-oProxyCommand=x", "begins with '-'"),
    ],
)
def test_filters_that_cannot_be_read_say_where_and_why(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_filter(text, "--include")
    assert words in str(caught.value)


@given(st.text(alphabet="ab@:,-0129[] \n", max_size=30) | st.text(max_size=30))
def test_any_filter_is_read_or_refused(text):
    try:
        chosen = parse_filter(text, "--exclude")
    except ConfigError:
        return
    assert chosen
    assert all(indices is None or list(indices) == sorted(set(indices)) for indices in chosen.values())


def test_included_indices_become_ranks_in_the_order_of_the_hostfile(tmp_path):
    told = plan(tmp_path, "-H", "a:4,b:4,c:4", "--include", "c:1@a:3,0")
    assert [(host["name"], host["ranks"], host["chosen"]) for host in told["hosts"]] == [
        ("a", 2, [0, 3]),
        ("c", 1, [1]),
    ]
    assert [(rank["rank"], rank["host"], rank["local_rank"]) for rank in told["ranks"]] == [
        (0, "a", 0), (1, "a", 1), (2, "c", 0)
    ]  # fmt: skip


def test_ranges_of_hosts_and_whole_hosts(tmp_path):
    told = plan(tmp_path, "-H", "node[1-9]:4", "--include", "node[3-5]:1@node9")
    assert per_host(told) == {"node3": 1, "node4": 1, "node5": 1, "node9": 4}


def test_excluded_hosts_and_indices_are_left_out(tmp_path):
    told = plan(tmp_path, "-H", "a:4,b:4,c:2", "--exclude", "b@a:1,2@c:0-1")
    assert [(host["name"], host["chosen"]) for host in told["hosts"]] == [("a", [0, 3])]


def test_fewer_ranks_than_chosen_indices_take_the_first(tmp_path):
    told = plan(tmp_path, "-H", "a:8", "--include", "a:2,4,6", "-np", "2")
    assert [(host["ranks"], host["chosen"]) for host in told["hosts"]] == [(2, [2, 4])]


def test_this_machine_is_chosen_from_too(tmp_path):
    assert per_host(plan(tmp_path, "--include", "localhost:0,1")) == {"localhost": 2}
    assert "--include names elsewhere" in refused(tmp_path, "--include", "elsewhere:0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--include", "d"], "--include names d, which is not among the hosts; there are a, b, c"),
        (["--exclude", "a:0@x:1"], "--exclude names x, which is not among the hosts; there are a, b, c"),
        (["--include", "a:2"], "--include names slot 2 of a, which has 2 slot(s); there are 0,1"),
        (["--exclude", "a@b@c"], "leaves no host"),
        (["--include", "a", "--exclude", "b"], "--include and --exclude are both given"),
        (["--include", "a", "-np", "3"], "3 ranks requested with -np, but -H has 2 slot(s) on 1 host(s) after your choice"),
        (["--exclude", "c:0"], "the number of slots of c is not known"),
        (["--gpu-type", "A100"], "--gpu-type A100: no host has such a GPU; the GPUs of the hosts are not known"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_refused(tmp_path, arguments, words):
    assert words in refused(tmp_path, "-H", "a:2,b:2,c", *arguments)


TOPOLOGY = """\
nodes:
  - {hosts: "old[1-2]", gpus: {kind: Tesla V100-SXM2-32GB, count: 4}}
  - {hosts: "new[1-2]", gpus: {kind: NVIDIA A100-SXM4-80GB, count: 8}}
  - {hosts: plain, gpus: {count: 0}}
"""


@pytest.fixture
def lab(tmp_path) -> list[str]:
    (tmp_path / "lab.txt").write_text("old[1-2]\nnew[1-2]\nplain\n")
    (tmp_path / "lab.yaml").write_text(TOPOLOGY)
    return ["-H", "lab.txt"]


@pytest.mark.processes
def test_a_pool_keeps_the_hosts_with_such_gpus(tmp_path, lab):
    told = plan(tmp_path, *lab, "--gpu-type", "a100")
    assert per_host(told) == {"new1": 8, "new2": 8}
    assert not any("different GPUs" in note for note in told["notes"])
    line = refused(tmp_path, *lab, "--gpu-type", "H100")
    assert "there are Tesla V100-SXM2-32GB: old1, old2; NVIDIA A100-SXM4-80GB: new1, new2; CPU only: plain" in line


@pytest.mark.processes
def test_a_synchronous_plan_that_mixes_gpus_names_the_pools(tmp_path, lab):
    (note,) = [note for note in plan(tmp_path, *lab)["notes"] if "different GPUs" in note]
    assert "Tesla V100-SXM2-32GB: old1, old2; NVIDIA A100-SXM4-80GB: new1, new2; CPU only: plain" in note
    assert "--gpu-type selects one kind" in note
    for fine in (["--include", "old1@old2"], ["-x", "CUDA_VISIBLE_DEVICES="]):
        assert not any("different GPUs" in note for note in plan(tmp_path, *lab, *fine)["notes"])


@pytest.mark.processes
def test_a_way_that_means_nothing_to_gpus_is_noted(tmp_path, lab):
    words = "--all-reduce flat is for CPU hosts: between GPUs NCCL chooses the algorithm"
    assert words in plan(tmp_path, *lab, "--all-reduce", "flat")["notes"]
    for fine in (
        [],
        ["--all-reduce", "flat", "-x", "CUDA_VISIBLE_DEVICES="],
        ["--all-reduce", "flat", "--include", "plain"],
    ):
        assert words not in plan(tmp_path, *lab, *fine)["notes"]


@pytest.mark.processes
def test_fewer_bytes_that_change_nothing_are_noted(tmp_path, lab):
    words = "--gradients int8 changes nothing on one CPU host: only traffic between hosts is compressed"
    assert words in plan(tmp_path, "-np", "2", "--gradients", "int8")["notes"]
    for fine in (
        ["-np", "2"],
        ["-H", "n1,n2", "--gradients", "int8"],
        [*lab, "--include", "new1", "--gradients", "int8"],
        ["-np", "2", "--gradients", "int8", "--all-reduce", "flat"],
    ):
        assert words not in plan(tmp_path, *fine)["notes"]


@pytest.mark.processes
def test_indices_are_those_of_gpus_where_the_topology_knows_them(tmp_path, lab):
    told = plan(tmp_path, *lab, "--include", "new1:0,7")
    assert [(rank["device"], rank["host"]) for rank in told["ranks"]] == [("cuda:0", "new1"), ("cuda:1", "new1")]
    assert told["hosts"][0]["chosen"] == [0, 7]
    assert "names GPU 4 of old1, which has 4 GPU(s); there are 0-3" in refused(tmp_path, *lab, "--include", "old1:4")
    told = plan(tmp_path, *lab, "--exclude", "old1:1@old2@new1@new2@plain")
    assert told["hosts"][0]["chosen"] == [0, 2, 3]


def test_leaving_out_a_broken_gpu_takes_another_where_there_is_one():
    (host,) = select_hosts([Host(name="a", slots=2)], {"a": Gpus(count=4)}, {"a": 2}, HostFilter(exclude="a:0"))
    assert (host.slots, host.indices) == (2, (1, 2))


@pytest.mark.parametrize("nothing", ["", "-1", " ", "NoDevFiles"])
@pytest.mark.processes
def test_a_list_of_no_gpus_is_a_job_on_cpus(tmp_path, lab, monkeypatch, capsys, nothing):
    monkeypatch.chdir(tmp_path)
    words = ["--dry-run", "--json", *lab, "--gpu-type", "A100", "-x", f"CUDA_VISIBLE_DEVICES={nothing}", str(JOB)]
    assert cli.main(words) == 0
    assert {rank["device"] for rank in json.loads(capsys.readouterr().out)["ranks"]} == {"cpu"}


def test_spread_is_even_and_in_order(tmp_path):
    assert per_host(plan(tmp_path, "-H", "a:4,b:1,c:4", "-np", "6", "--spread")) == {"a": 3, "b": 1, "c": 2}
    told = plan(tmp_path, "-H", "a:4,b:4,c:4", "-np", "5", "--spread")
    assert [rank["host"] for rank in told["ranks"]] == ["a", "a", "b", "b", "c"]
    assert per_host(plan(tmp_path, "-H", "a:4,b:4,c:4", "-np", "2", "--spread")) == {"a": 1, "b": 1}
    assert per_host(plan(tmp_path, "-H", "a:4,b:4,c:4", "-np", "5")) == {"a": 4, "b": 1}


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12).flatmap(
        lambda slots: st.tuples(st.just(slots), st.integers(1, sum(slots)))
    ),
    st.sampled_from(["fill", "spread"]),
)
def test_every_rank_is_shared_out_once(case, how):
    slots, wanted = case
    choices = [SelectedHost(host=Host(name=f"n{i}", slots=n), slots=n) for i, n in enumerate(slots)]
    shares = distribute_ranks(choices, wanted, spread=how == "spread")
    counts = {choice.host.name: count for choice, count in shares}
    assert sum(counts.values()) == wanted
    assert list(counts) == sorted(counts, key=lambda name: int(name[1:]))
    assert all(0 < count <= choice.slots for choice, count in shares)
    every = [(counts.get(choice.host.name, 0), choice.slots) for choice in choices]
    if how == "spread":
        open_ = [count for count, slots in every if count < slots]
        assert max(count for count, _ in every) <= min(open_, default=99) + 1
        assert sorted(open_, reverse=True) == open_
    else:
        filled = [count == slots for count, slots in every if count]
        assert all(filled[:-1])


def test_chosen_gpus_are_all_that_a_script_sees_and_are_counted_from_zero(launch):
    gpus = ["-x", "CUDA_VISIBLE_DEVICES=4,5,GPU-abc,7"]
    run = launch("--no-preflight", *gpus, "--include", "localhost:0,2", JOB, "*:environment")
    assert run.code == 0, run
    assert [rank["device"] for rank in run.result["ranks"]] == ["cuda:0", "cuda:1"]
    for rank in range(2):
        env = json.loads((run.run_dir / f"ranks/{rank}.out").read_text().splitlines()[0])["env"]
        assert env["CUDA_VISIBLE_DEVICES"] == "4,GPU-abc"
        assert (env["DISTRIB_DEVICE"], env["LOCAL_RANK"]) == (f"cuda:{rank}", str(rank))
        assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.cluster
def test_chosen_slots_of_cpu_hosts_and_a_gpu_that_is_not_there(make_cluster, launch):
    cluster = make_cluster(3, slots=4)
    run = launch("-H", cluster.hostfile, "--include", "n2:1,3@n3:0", JOB, "*:environment", cluster=cluster)
    assert run.code == 0, run
    assert [(rank["host"], rank["device"]) for rank in run.result["ranks"]] == [
        ("n2", "cpu"),
        ("n2", "cpu"),
        ("n3", "cpu"),
    ]
    assert "CUDA_VISIBLE_DEVICES" not in (run.run_dir / "ranks/0.out").read_text()
    gpus = ["-x", "CUDA_VISIBLE_DEVICES=0,1"]
    run = launch("--no-preflight", "-H", cluster.hostfile, *gpus, "--include", "n2:1,3", JOB, cluster=cluster)
    assert run.code == 1, run
    assert "n2 has no GPU 3: it shows 2, counted from 0" in run.result["first_failure"]["message"]
    assert cluster.left_over(within_seconds=6) == {}
