"""`--sync`, separate interpreters for some hosts, and a read-only home directory."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from distrib.errors import ConfigError, PreflightError
from distrib.utils.netif import is_here
from distrib_launch.engines import ssh_wrapper
from distrib_launch.engines.engine import AGENT
from distrib_launch.rsync import check_folder, sync
from tests.conftest import LAUNCH, SCRIPTS

JOB = SCRIPTS / "job.py"
VENV = Path(sys.prefix)


def test_which_hosts_are_this_machine():
    assert is_here("localhost")
    assert is_here("127.0.0.1")
    assert is_here(socket.gethostname())
    assert not is_here("198.51.100.1")
    assert not is_here("no-such-host.invalid")


def test_folders_that_cannot_be_brought(tmp_path):
    (tmp_path / "file").touch()
    for given, words in (
        ("nowhere", "no such folder"),
        (str(tmp_path / "file"), "not a folder"),
        ("/", "root of the file"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_folder(given)


def test_without_other_hosts_there_is_nothing_to_bring(tmp_path):
    assert str(sync(tmp_path, ["localhost"], ["ssh"])) == f"--sync {tmp_path}: there is no other host"


def test_without_rsync_here_a_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install rsync"):
        sync(tmp_path, ["198.51.100.1"], ["ssh"])


def test_an_ssh_that_fails_is_named_with_what_to_try(tmp_path):
    ssh = tmp_path / "my ssh"
    ssh.write_text('#!/bin/sh\necho "$1 says no" >&2\nexit 255\n')
    ssh.chmod(0o755)
    with pytest.raises(PreflightError) as caught:
        sync(tmp_path, ["198.51.100.1", "198.51.100.2"], [str(ssh), "it's me"])
    (told,) = str(caught.value).splitlines()
    assert told.startswith(f"198.51.100.1, 198.51.100.2: --sync {tmp_path} failed: it's me says no; try: '{ssh}' "), (
        told
    )
    assert told.endswith(" 198.51.100.1 true")
    assert list(caught.value.hosts) == ["198.51.100.1", "198.51.100.2"]


TRY, INSTALL = "; try: ", "; install rsync on 198.51.100.1, or"
BANNER = "Warning: Permanently added '198.51.100.1' to the list of known hosts."
DENIED = "root@h: Permission denied (publickey)."


@pytest.mark.parametrize(
    ("words", "line", "hint"),
    [
        (f"{BANNER}\nLoad key: Permission denied\n{DENIED}", DENIED, TRY),
        ("zsh:1: command not found: rsync", "zsh:1: command not found: rsync", INSTALL),
        ("rsync: Command not found.", "rsync: Command not found.", INSTALL),  # tcsh
        ("mkdir: cannot create directory '/x': No such file or directory", "mkdir: cannot create", "; choose a folder"),
        (f"{BANNER}\nrsync: --x: unknown option", "rsync: --x: unknown option", "; rsync's exit code is "),
    ],
    ids=["ssh", "zsh", "tcsh", "mkdir", "rsync"],
)
@pytest.mark.parametrize("closes", ["0", "1", "0 1"])
def test_why_a_host_was_not_given_the_folder_whoever_ends_first(tmp_path, words, line, hint, closes):
    # If ssh has closed its pipes but not exited, rsync exits with its own code (12), else with that of ssh.
    ssh = tmp_path / "ssh"
    close = " ".join(f"{fd}<&-" for fd in closes.split())
    ssh.write_text(f"#!/bin/sh\ncat >&2 <<'.'\n{words}\n.\nexec {close}\nsleep 0.3\nexit 255\n")
    ssh.chmod(0o755)
    with pytest.raises(PreflightError) as caught:
        sync(tmp_path, ["198.51.100.1"], [str(ssh)])
    assert f" failed: {line}" in str(caught.value)
    assert hint in str(caught.value)


def test_an_ssh_that_may_not_be_run_is_no_matter_of_the_folder(tmp_path):
    (tmp_path / "ssh").touch()
    with pytest.raises(PreflightError, match=r"Permission denied \(13\)"):
        sync(tmp_path, ["198.51.100.1"], [str(tmp_path / "ssh")])


SETTINGS = {"ssh": ["ssh", "-F", "/a b/config"], "prefix": "/v", "prefixes": {"n2": "/w w"}}


def test_the_agent_starts_the_daemon_where_it_is_on_that_host():
    remote = "PRTE_PREFIX=/v;export PRTE_PREFIX;LD_LIBRARY_PATH=/v/lib:$LD_LIBRARY_PATH;/v/bin/prted"
    *ssh, host, command = ssh_wrapper.rewrite(["n2", remote, "--uri", '"x"'], SETTINGS)
    assert (ssh, host) == (["ssh", "-F", "/a b/config"], "n2")
    assert command.startswith("exec /bin/sh -c ")
    assert "/w w" in command and f'else {remote} --uri "x"; fi' in command
    assert ssh_wrapper.rewrite(["n1", remote], SETTINGS) == ["ssh", "-F", "/a b/config", "n1", remote]
    csh = "set path = ( /v/bin $path ) ; setenv LD_LIBRARY_PATH /v/lib ; /v/bin/prted --uri x"
    command = ssh_wrapper.rewrite(["n3", csh], {**SETTINGS, "prefixes": {"n3": "/v"}})[-1]
    assert "setenv" not in command and command.endswith("; /v/bin/prted --uri x'")


@pytest.mark.processes
def test_the_plan_shows_which_ranks_an_interpreter_of_its_own_runs(tmp_path):
    (tmp_path / "hosts.txt").write_text('a slots=2\nb slots=2 python="/opt/my env/bin/python"\nc slots=1\n')
    command = [str(LAUNCH), "--dry-run", "--json", "-H", "hosts.txt", str(JOB)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    plan = json.loads(done.stdout)
    script = plan["command"][plan["command"].index("/bin/sh") + 2]
    own = shlex.join(["/opt/my env/bin/python", *AGENT])
    assert script.startswith(f'case "$OMPI_COMM_WORLD_RANK" in 2|3) set -- {own};; esac\n')
    assert plan["command"][-len(AGENT) - 1 :] == [plan["script"][0], *AGENT]
    assert plan["hosts"][1]["python"] == "/opt/my env/bin/python"


# -- on the virtual cluster -------------------------------------------------------------------------------------------


def hide(cluster, host: str, folder: Path) -> None:
    """Replace a folder by an empty one on one host."""
    cluster.run(host, ["mount", "-t", "tmpfs", "tmpfs", folder], check=True)


@pytest.fixture
def project(tmp_path) -> Path:
    folder = tmp_path / "my project, $HOME's – ü"
    for name in (".git", "__pycache__", ".venv-old", "distrib-runs", "package", "runs"):
        (folder / name).mkdir(parents=True)
        (folder / name / "inside").write_text(name)
    (folder / "train.py").write_text(
        "import os, socket\nprint(socket.gethostname(), *sorted(os.listdir(os.path.dirname(__file__))), sep='|')\n"
    )
    return folder


@pytest.mark.cluster
def test_a_folder_is_brought_to_hosts_without_it(make_cluster, launch, project):
    cluster = make_cluster(3)
    script = project / "train.py"
    for host in ("n2", "n3"):
        hide(cluster, host, project)
    options = [
        "-H",
        "root@n1:1,root@n2:1,n3:1",
        "--run-dir",
        project / "runs/one two",
        "--no-dedup",
    ]  # the path for `ssh -F` has blanks
    run = launch(*options, script, cluster=cluster, cwd=project.parent)
    assert run.code != 0, run  # no file has been copied yet
    run = launch(*options, "--sync", project, script, cluster=cluster, cwd=project.parent)
    assert run.code == 0, run
    assert f"--sync {project}: " in run.err
    assert "to 2 host(s) in " in run.err
    outputs = [(project / f"runs/one two/ranks/{rank}.out").read_text().strip() for rank in range(3)]
    assert outputs[0].startswith("n1|.git|")
    assert outputs[1:] == ["n2|package|runs|train.py", "n3|package|runs|train.py"]

    # The second copy finds no change: a file deleted here remains there.
    (project / "package/inside").unlink()
    run = launch(*options, "--sync", project, script, cluster=cluster, cwd=project.parent)
    assert run.code == 0, run
    assert "0 file(s), 0 bytes" in run.err
    assert cluster.run("n2", ["cat", project / "package/inside"]).stdout == "package"
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.cluster
def test_a_host_without_rsync_is_named(make_cluster, launch, project, tmp_path):
    cluster = make_cluster(3)
    missing = tmp_path / "rsync"
    missing.write_text("#!/bin/sh\necho 'bash: line 1: rsync: command not found' >&2\nexit 127\n")
    missing.chmod(0o755)
    cluster.run("n2", ["mount", "--bind", missing, "/usr/bin/rsync"], check=True)
    run = launch("-H", cluster.hostfile, "--sync", project, project / "train.py", cluster=cluster)
    assert run.code == 3, run
    (error,) = re.findall("distrib-launch: error: .*", run.err)
    assert error.startswith(f"distrib-launch: error: n2: --sync {project} failed: ")
    assert "install rsync on n2, or keep the folder on a file system that every host shares" in error
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.cluster
def test_hosts_run_their_own_interpreters(make_cluster, launch, tmp_path):
    cluster = make_cluster(3, slots=2)
    other = tmp_path / "other place"
    other.mkdir()
    # n2 has the files only at other paths; n3 has them at both.
    for host in ("n2", "n3"):
        cluster.run(host, ["mount", "--bind", VENV, other], check=True)
    hide(cluster, "n2", VENV)
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text(f'n3 slots=1 python="{other}/bin/python"\nn1 slots=2\nn2 slots=2 python="{other}/bin/python"\n')
    script = tmp_path / "who.py"
    script.write_text(
        "from mpi4py import MPI\nimport os, socket, sys\n"
        "comm = MPI.COMM_WORLD\nassert comm.rank == int(os.environ['RANK']) and comm.allreduce(1) == 5\n"
        "maps = {line.split(None, 5)[-1].strip() for line in open('/proc/self/maps') if 'libmpi.so' in line}\n"
        "print(socket.gethostname(), os.environ['LOCAL_RANK'], sys.prefix, *maps, sep='|')\n"
    )
    run = launch("-H", hostfile, "--no-dedup", script, cluster=cluster)
    assert run.code == 0, run
    told = [(run.run_dir / f"ranks/{rank}.out").read_text().strip().split("|")[:3] for rank in range(5)]
    assert told == [["n3", "0", str(other)], ["n1", "0", str(VENV)], ["n1", "1", str(VENV)],
                    ["n2", "0", str(other)], ["n2", "1", str(other)]]  # fmt: skip
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert [host["python"] for host in plan["hosts"]] == [f"{other}/bin/python", None, f"{other}/bin/python"]
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.cluster
def test_an_interpreter_that_is_not_there_is_named_with_its_host(make_cluster, launch, tmp_path):
    cluster = make_cluster(2)
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("n1\nn2 python=/no/such/python\n")
    run = launch("-H", hostfile, JOB, cluster=cluster)
    assert run.code == 3, run
    assert "n2" in run.err and "/no/such/python" in run.err
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.cluster
def test_nothing_is_written_at_home_or_in_the_working_directory(make_cluster, launch, tmp_path):
    cluster = make_cluster(2)
    cwd = tmp_path / "read only"
    cwd.mkdir()
    home = Path.home() / ".ssh"
    for folder in (home, cwd):
        cluster.run("n1", ["mount", "--bind", folder, folder], check=True)
        cluster.run("n1", ["mount", "-o", "remount,ro,bind", folder], check=True)
    assert cluster.run("n1", ["touch", home / "x"]).returncode != 0
    absent = tmp_path / "no such home"
    run = launch("-H", cluster.hostfile, JOB, "--mpi", cluster=cluster, env={"HOME": str(absent)}, cwd=cwd)
    assert run.code == 0, run
    assert not absent.exists()
    # If the run directory cannot be created, the error has a hint.
    command = [LAUNCH, "-H", cluster.hostfile, JOB]
    done = cluster.run("n1", command, env={"HOME": str(absent)}, cwd=cwd)
    assert done.returncode == 2, done
    assert "cannot make the run directory" in done.stderr and "--run-dir" in done.stderr
    assert cluster.left_over(within_seconds=6) == {}
