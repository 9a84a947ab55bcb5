"""Plans of `distrib-launch --dry-run`: hosts, ranks, slots, notes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from distrib_launch.cli import launch as cli
from distrib_launch.engines import ssh
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.runner import read_hosts
from tests.conftest import JOB, LAUNCH, call


def dry_run(tmp_path: Path, *arguments: str) -> dict:
    done = call(cli.main, "--dry-run", "--json", *arguments, JOB, cwd=tmp_path)
    assert done.returncode == 0, done
    assert os.listdir(tmp_path) == sorted(p.name for p in tmp_path.iterdir() if p.suffix in (".txt", ".yaml"))
    return json.loads(done.stdout)


@pytest.mark.processes
def test_dry_run_shows_every_rank_and_starts_nothing(tmp_path):
    plan = dry_run(tmp_path, "-H", "a:2,b:3")
    assert (plan["world_size"], plan["engine"]) == (5, "mpirun")
    assert [(r["rank"], r["host"], r["local_rank"], r["role"]) for r in plan["ranks"]] == [
        (0, "a", 0, "worker"), (1, "a", 1, "worker"), (2, "b", 0, "worker"), (3, "b", 1, "worker"), (4, "b", 2, "worker"),
    ]  # fmt: skip
    assert plan["ranks"][3]["environment"]["GROUP_RANK"] == "1"
    assert plan["command"][0].endswith("/mpirun")
    assert Path(plan["script"][0]).parent == LAUNCH.parent
    assert plan["script"][0] in plan["command"]


def test_cuda_visible_devices_that_are_not_forwarded_are_noted(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    told = lambda *words: "CUDA_VISIBLE_DEVICES is set here" in str(dry_run(tmp_path, "-H", *words)["notes"])  # noqa: E731
    assert told("a:2,b:3") and not told("a:2,b:3", "-x", "CUDA_VISIBLE_DEVICES") and not told("localhost:2")


@pytest.mark.processes
def test_folders_keep_the_symlinks_of_the_shell(tmp_path):
    """On another host the link may lead elsewhere, so the plan keeps the shell's name."""
    (tmp_path / "export/home").mkdir(parents=True)
    (tmp_path / "home").symlink_to("export/home")
    (tmp_path / "home/train.py").write_text("")
    home = tmp_path / "home"
    command = [str(LAUNCH), "--dry-run", "--json", "-np", "1", "--sync", ".", "train.py"]
    for called, physical in ((home, home), (tmp_path, home.resolve()), ("home", home.resolve())):
        done = subprocess.run(command, cwd=home, env={**os.environ, "PWD": str(called)}, capture_output=True, text=True)
        plan = json.loads(done.stdout)
        assert (plan["directory"], plan["sync"]) == (str(physical), str(physical)), called
        assert plan["script"][-1] == f"{physical}/train.py" and plan["run_dir"].startswith(f"{physical}/distrib-runs/")


def test_fewer_ranks_than_slots_fill_the_hosts_in_order(tmp_path):
    plan = dry_run(tmp_path, "-H", "a:2,b:2,c:2", "-np", "3")
    assert [r["host"] for r in plan["ranks"]] == ["a", "a", "b"]
    assert any("leaves 1 host idle" in note for note in plan["notes"])


def test_a_host_without_slots_gets_one_per_gpu_of_the_topology(tmp_path):
    (tmp_path / "lab.txt").write_text("gpu1\ngpu2\nother\n")
    (tmp_path / "lab.yaml").write_text("nodes:\n  - hosts: gpu[1-2]\n    gpus: {kind: A100, count: 4}\n")
    plan = dry_run(tmp_path, "-H", "lab.txt")
    assert [r["device"] for r in plan["ranks"] if r["host"] == "gpu2"] == [f"cuda:{i}" for i in range(4)]
    assert [r["device"] for r in plan["ranks"] if r["host"] == "other"] == ["auto"]
    assert any("one per GPU of the topology, 4" in note for note in plan["notes"])
    assert any(note.startswith("other: no slots given; 1 rank each") for note in plan["notes"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["s.py", "--", "--x"], ["--", "--x"]),
        (["-np", "2", "--", "s.py", "--", "--x", "--"], ["--", "--x", "--"]),
        (["s.py"], []),
        (["s.py", "-r", "last.pt", "-no", "-ma"], ["-r", "last.pt", "-no", "-ma"]),
        (["s.py", "-np", "3", "a", "--", "b"], ["-np", "3", "a", "--", "b"]),
        (["-q", "-m", "s.py", "--", "--x"], ["--", "--x"]),
    ],
)
def test_arguments_after_the_script_belong_to_the_script(words, told):
    options = cli.parser().parse_args(words)
    assert (options.script, options.arguments) == ("s.py", told)


@pytest.mark.parametrize(
    ("command", "words", "included"),
    [
        ("ssh -F my.conf", ["ssh"], "my.conf"),
        ("ssh -i key -4Fmy.conf -v", ["ssh", "-i", "key", "-4", "-v"], "my.conf"),
        ("ssh -F one -Fmy.conf", ["ssh"], "my.conf"),
        ("ssh -o ProxyCommand=none -i -F", ["ssh", "-o", "ProxyCommand=none", "-i", "-F"], None),
        ("ssh -F none", ["ssh"], ""),
        ("sshpass -e ssh -F my.conf", ["sshpass", "-e", "ssh"], "my.conf"),
    ],
)
def test_the_ssh_configuration_of_the_user_is_included_beside_that_of_the_hosts(
    tmp_path, tmp_path_factory, monkeypatch, command, words, included
):
    sshpass = tmp_path_factory.mktemp("bin") / "sshpass"
    sshpass.write_text("#!/bin/sh\n")
    sshpass.chmod(0o755)
    monkeypatch.setenv("PATH", str(sshpass.parent), prepend=os.pathsep)
    (tmp_path / "lab.txt").write_text("a slots=1 port=2222\nb slots=1\n")
    plan = msgspec.convert(dry_run(tmp_path, "-H", "lab.txt", "--ssh-command", command), LaunchPlan)
    assert list(plan.ssh[: len(words)]) == words and plan.ssh[len(words)] == "-o"
    assert plan.ssh[-2:] == ("-F", f"{plan.run_dir}/ssh_config") and plan.ssh.count("-F") == 1 + words.count("-F")
    ssh.write_ssh_config(tmp_path, plan)
    includes = [
        line.split(maxsplit=1)[1] for line in (tmp_path / "ssh_config").read_text().splitlines() if "Include" in line
    ]
    default = ["~/.ssh/config", "/etc/ssh/ssh_config"]
    assert includes == (default if included is None else [f'"{tmp_path}/{included}"'] if included else [])


def test_more_ranks_than_slots_fill_hosts_up_to_max_slots(tmp_path, launch):
    (tmp_path / "lab.txt").write_text("a slots=2 max_slots=4\nb slots=1\nc slots=1 max_slots=8\n")
    count = lambda *words: [rank["host"] for rank in dry_run(tmp_path, "-H", "lab.txt", *words)["ranks"]]  # noqa: E731
    assert count() == ["a", "a", "b", "c"]
    assert count("-np", "7") == ["a"] * 4 + ["b"] + ["c"] * 2
    assert count("-np", "13") == ["a"] * 4 + ["b"] + ["c"] * 8
    run = launch("-H", tmp_path / "lab.txt", "-np", "14", "--dry-run", JOB)
    assert run.code == 2 and "4 slot(s) on 3 host(s), 13 with max_slots" in run.err, run


@pytest.mark.parametrize(
    ("slurm", "words", "ranks"),
    [
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2", "SLURM_GPUS_PER_NODE": "8"}, (), [8, 8]),
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2", "SLURM_GPUS_PER_NODE": "8"}, ("-np", "2", "--spread"), [1, 1]),
        ({"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4", "SLURM_GPUS_PER_NODE": "8"}, ("-np", "16"), [8, 8]),
        ({"SLURM_TASKS_PER_NODE": "128(x2)", "SLURM_JOB_CPUS_PER_NODE": "128(x2)"}, (), [1, 1]),
        ({"SLURM_TASKS_PER_NODE": "128(x2)", "SLURM_JOB_CPUS_PER_NODE": "128(x2)"}, ("-np", "6"), [3, 3]),
    ],
)  # fmt: skip
def test_ranks_of_mpirun_in_a_slurm_allocation_follow_gpus_and_tasks(tmp_path, monkeypatch, slurm, words, ranks):
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", **slurm}.items():
        monkeypatch.setenv(name, value)
    plan = dry_run(tmp_path, "--engine", "mpirun", *words)
    assert [sum(rank["host"] == host for rank in plan["ranks"]) for host in ("n1", "n2")] == ranks
    unasked = "n1, n2: no slots given; 1 rank each (--ntasks-per-node=N or -np N for more)"
    assert (unasked in plan["notes"]) == (not words and "SLURM_NTASKS" not in slurm)


def test_a_thousand_hosts_are_planned(tmp_path):
    (tmp_path / "big.txt").write_text("".join(f"node{i:04d} slots=8\n" for i in range(1000)))
    assert dry_run(tmp_path, "-H", "big.txt")["world_size"] == 8000


def test_a_host_list_may_be_longer_than_a_file_name():
    names = [f"ip-10-0-12-{n}.us-west-2.compute.internal" for n in range(1, 201)]
    assert [host.name for host in read_hosts(",".join(f"{name}:8" for name in names)).hosts] == names


@pytest.mark.parametrize(
    "first", ["#!/usr/bin/env -S uv run --script", "#!/bin/sh\n'''exec' /a/long/path \"$0\" \"$@\"\n' '''"]
)
def test_python_scripts_with_any_interpreter_line_are_accepted(tmp_path, capsys, first):
    script = tmp_path / "train.py"
    script.write_text(f"{first}\nprint('\\d')\n")  # newer Pythons warn of this escape
    assert cli.main(["-np", "1", "--dry-run", str(script)]) == 0, capsys.readouterr().err


def test_hosts_with_equal_ranks_share_a_line_of_the_plan(tmp_path, capsys):
    script = tmp_path / "a.py"
    script.write_text("")
    assert cli.main(["-H", "n[1-100]:8,m1:4", "--dry-run", str(script)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1].startswith("  n[1-100]: ranks 0 to 799, 8 on each, device ")
    assert told[2].startswith("  m1: ranks 800 to 803, device ")
