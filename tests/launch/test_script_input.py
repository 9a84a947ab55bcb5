"""Frames to and from ranks: the input of a script, and invalid ones."""

from __future__ import annotations

import io
import sys

import pytest

import distrib_launch
from distrib.cluster import hostfile
from distrib.errors import ConfigError
from distrib_launch import plan_builder
from distrib_launch.cli import launch as cli
from distrib_launch.console import Console
from distrib_launch.launch_options import LaunchOptions
from distrib_launch.rank_agent.control_channel import Kind
from distrib_launch.supervisor.supervisor import Supervisor


def planned(tmp_path):
    return plan_builder.build_plan(
        LaunchOptions(script="x", directory="/", run_dir=str(tmp_path), engine="mpirun"),
        hostfile.parse_host_list("a:2,b:2"), None,
    )  # fmt: skip


def test_script_input_goes_to_the_chosen_ranks(tmp_path):
    plan = planned(tmp_path)
    for wanted, ranks in (((0,), [0]), (None, [0, 1, 2, 3])):
        supervisor = Supervisor(plan, Console([]), script_input=b"words", input_ranks=wanted)
        sent = []
        supervisor.connections.send = lambda state, kind, payload, sent=sent: sent.append((state.plan.rank, kind))
        for state in supervisor.job.ranks:
            state.hello = {"port": 1}
        supervisor.assign()
        assert [rank for rank, kind in sent if kind is Kind.INPUT] == ranks
        supervisor.selector.close()


READER = "import os, sys; print(os.environ['RANK'], [*sys.stdin], sys.argv[1:])"


def test_standard_input_reaches_no_rank_rank_0_or_all_ranks_and_colons_reach_the_script(launch, tmp_path):
    (tmp_path / "read.py").write_text(READER)
    piped = ("sh", "-c", 'printf "a\\nb" | "$@"', "sh")
    for words, ranks, arguments in (([], (), [":"]), (["rank0"], (0,), ["1", ":", "2"]), (["all"], (0, 1), [":x"])):
        run = launch("-np", "2", *(["--stdin", *words] if words else []), "read.py", *arguments, wrapper=piped)
        for rank in (0, 1):
            lines = ["a\n", "b"] if rank in ranks else []
            assert (run.run_dir / f"ranks/{rank}.out").read_text() == f"{rank} {lines} {arguments}\n", run


@pytest.mark.parametrize("after", [["-np", "1", "b.py"], ["b.py"], ["--no-python", "b"], ["FILE"]])
def test_several_programs_as_in_mpirun_are_refused(launch_in_process, tmp_path, after):
    (tmp_path / "a.py").touch()
    (tmp_path / "FILE").touch()
    refused = launch_in_process("-np", "2", "a.py", "x", ":", *after)
    assert refused.code == 2 and f"error: : {' '.join(after)}: a launch runs one script" in refused.err
    assert "branches on RANK" in refused.err


def test_input_of_a_terminal_or_without_end_is_refused(monkeypatch, launch_in_process, tmp_path):
    (tmp_path / "a.py").touch()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * 9)))
    with pytest.raises(ConfigError, match="--stdin: more than 0 MiB"):
        cli._read_input(8)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert "--stdin: standard input is a terminal" in launch_in_process("--stdin", "rank0", "a.py").err
    with pytest.raises(ConfigError, match="stdin"):
        distrib_launch.run("a.py", stdin="all")
    pods = launch_in_process("--stdin", "all", "--engine", "kubernetes", "--image", "i", "-H", "a", "a.py")
    assert pods.code == 2 and "pods have no standard input" in pods.err


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (Kind.HEARTBEAT, b"[]"),
        (Kind.HEARTBEAT, b'{"ping": "x"}'),
        (Kind.EXIT, b'{"device": "cpu"}'),
        (Kind.EXIT, b'{"placed": ' + b"[" * 5000),
    ],
)
def test_an_invalid_frame_of_a_rank_is_refused(tmp_path, kind, payload):
    supervisor = Supervisor(planned(tmp_path), Console([]))
    supervisor.job.assigned = True
    with pytest.raises(ValueError):
        supervisor.connections._on_frame(supervisor.job.ranks[0], kind, payload)
    supervisor.selector.close()
