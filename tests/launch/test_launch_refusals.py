"""Refused launches: options, scripts and files that are not valid."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from distrib_launch.cli import launch as cli
from tests.conftest import JOB, LAUNCH, TOPO, call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-H", "missing.txt", "JOB"], "missing.txt: no such hostfile"),
        (["-H", "empty.txt", "JOB"], "empty.txt: no hosts in the file"),
        (["-H", "zero.txt", "JOB"], "zero.txt:2:9: slots must be"),
        (["-H", "negative.txt", "JOB"], "negative.txt:1:9: slots must be"),
        (["-H", "a:2,b:2", "-np", "5", "JOB"], "5 ranks requested with -np, but -H has 4 slot(s) on 2 host(s)"),
        (["-np", "0", "JOB"], "'0' is not a valid number of ranks"),
        (["nowhere.py"], "nowhere.py: no such script"),
        (["-np", "2", "."], "is a directory"),
        (["/bin/true"], "/bin/true: it is a program, and distrib-launch starts Python scripts"),
        (
            [LAUNCH.with_name("python"), "JOB"],
            "and distrib-launch starts Python scripts; leave out python: every host starts its own",
        ),
        (["-x", "NOT_SET_ANYWHERE", "JOB"], "-x NOT_SET_ANYWHERE: this variable is not set here"),
        (["-x", "RANK=7", "JOB"], "-x RANK: the launcher sets this variable itself"),
        (["--engine", "kubernetes", "--image", "i", "-x", "LATIN", "JOB"], "LATIN=/data/m\\udcfcller: not UTF-8 text"),
        (["--timeout", "soon", "JOB"], "'soon' is not a valid time"),
        (["--timeout", "9" * 400, "JOB"], "is longer than 366d"),
        (["--host-timeout", "99999999999999999999", "JOB"], "is longer than 366d"),
        (["--mpirun", "/nowhere/mpirun", "JOB"], "--mpirun /nowhere/mpirun: no such command"),
        (["--topology", "bad.yaml", "JOB"], "bad.yaml"),
        (["--no-such-option", "JOB"], "--no-such-option"),
        (["--nproc_per_node=2", "JOB"], "-np N starts N ranks on this machine"),
        (["--nnodes", "2", "JOB"], "-H FILE or -H HOST,HOST names the hosts"),
        (["--ssh-command", "ssh '", "JOB"], "--ssh-command ssh ': no closing quotation"),
        (["--ssh-command", "nowhere/ssh -v", "JOB"], "--ssh-command nowhere/ssh: there is no such command"),
        (["--dry-run", "--interface", "10.0.0.0/33", "JOB"], "--interface 10.0.0.0/33: not a valid network"),
        (["-np", "2", "--show-rank", "2", "JOB"], "--show-rank 2: there are ranks 0 to 1"),
        (["x" * 300], "no such script"),
        (["--sync", "", "JOB"], "--sync: it is empty; is a variable not set?"),
        (["--image", "i", "JOB"], "--image applies to pods only; add --engine kubernetes, or leave out --image"),
        (["--pod-resource", "rdma/hca=1", "JOB"], "--pod-resource applies to pods only"),
    ],
)
def test_invalid_options_are_refused_in_one_line_with_exit_code_2(tmp_path, arguments, words):
    (tmp_path / "empty.txt").write_text("# no host\n\n")
    (tmp_path / "zero.txt").write_text("a slots=2\nb slots=0\n")
    (tmp_path / "negative.txt").write_text("a slots=-1\n")
    (tmp_path / "bad.yaml").write_text("nodes: [{hosts: a, gpus: {count: -2}}]\n")
    latin = os.fsdecode(b"/data/m\xfcller")
    done = call(cli.main, *(JOB if word == "JOB" else word for word in arguments), cwd=tmp_path, LATIN=latin)
    assert done.returncode == 2, done
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("distrib-launch: error: ")
    assert words in last
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "distrib-runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["-np", "99999999999999", "JOB"],
            "'99999999999999' is not a valid number of ranks; give 1 or more, of at most 9 digits",
        ),
        (["-np", "9" * 5000, "JOB"], "is not a valid number of ranks"),
        (["--hostfile", "n1", "JOB"], "--hostfile; -H FILE or -H HOST,HOST names the hosts"),
        (["--num_gpus=8", "JOB"], "; -np N starts N ranks on this machine"),
        (["--num_nodes", "2", "JOB"], "; -H FILE or -H HOST,HOST names the hosts"),
        (["--rdzv_backend=c10d", "JOB"], "; leave it out"),
        (["--standalone", "JOB"], "; leave it out"),
        (["hosts.txt", "JOB"], "hosts.txt is not a script; hosts are named with -H hosts.txt"),
        (["-np", "2", "--include", "localhost", "JOB"], "; -H localhost:N gives this machine N slots"),
        (["--oversubscribe", "-np", "100001", "JOB"], "-np 100001: more than the 100000 ranks that a host may have"),
        *(
            ([option, "", "JOB"], f"{option}: it is empty; is a variable not set?")
            for option in ("--profile", "--run-dir", "--topology", "--interface", "--mpirun", "--hosts")
        ),
        (["--manifest", "", "JOB"], "--manifest: it is empty"),
        (["--manifest", "m.yaml", "JOB"], "--manifest applies to pods only"),
        (["--runtime-class", "nvidia", "JOB"], "--runtime-class applies to pods only"),
    ],
)
def test_invalid_options_are_refused_before_any_file_is_written(tmp_path, monkeypatch, capsys, arguments, words):
    """The error is the command's. Each case runs in this process to save a start."""
    monkeypatch.chdir(tmp_path)
    assert cli.main([str(JOB) if word == "JOB" else word for word in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not os.listdir(tmp_path)


def test_an_unreadable_script_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(JOB))  # root may read any file
    assert cli.main(["--run-dir", str(tmp_path / "run"), str(JOB)]) == 2
    assert f"{JOB}: cannot read it: no permission; chmod a+r {JOB}" in capsys.readouterr().err


@pytest.mark.processes
def test_a_removed_working_directory_is_refused(tmp_path):
    for command in (f"{LAUNCH} {JOB}", f"{TOPO} show"):
        script = f"mkdir -p gone && cd gone && rmdir ../gone && {command}"
        done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 2, done
        assert "error: the working directory" in done.stderr


def test_an_unwritable_profile_is_refused_before_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # other tests check the shared folder while the launcher has its run directory there
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write any file
    assert cli.main(["--profile", str(tmp_path / "p.json"), str(JOB)]) == 2
    assert "p.json: cannot write it: no permission; name a file to write" in capsys.readouterr().err


@pytest.mark.processes
def test_json_of_a_refused_launch_has_its_error(tmp_path):
    command = [str(LAUNCH), "--json", "-H", "missing.txt", str(JOB)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    told = json.loads(done.stdout)
    assert (done.returncode, told["status"], told["exit_code"]) == (2, "failed", 2)
    assert "missing.txt: no such hostfile" in told["error"]


def test_json_of_an_unknown_option_has_its_error(capsys):
    assert cli.main(["--json", "--timout", "3", str(JOB)]) == 2
    assert "did you mean --timeout?" in json.loads(capsys.readouterr().out)["error"]
