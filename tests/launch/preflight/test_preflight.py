"""Preflight of virtual clusters, and `distrib-topo check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from distrib_launch.preflight.check_result import COLUMNS
from tests.conftest import BIN, SCRIPTS, TOPO

pytestmark = pytest.mark.processes

WHERE = SCRIPTS / "where.py"
JOB = SCRIPTS / "job.py"
GLOO = SCRIPTS / "gloo.py"


def refused(run, cluster, host, check, *words):
    assert run.code == 3, run
    assert f"distrib-launch: error: {host}: {check}: " in run.err, run
    for word in words:
        assert word in run.err, run
    result = json.loads((run.run_dir / "result.json").read_text())
    assert (result["status"], result["exit_code"], result["ranks"]) == ("failed", 3, [])
    assert cluster.left_over(within_seconds=6) == {}
    report = json.loads((run.run_dir / "preflight.json").read_text())
    assert {c["host"] for c in report["checks"] if c["status"] == "error"} == {host}


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a script, whose content can differ between hosts."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job/where.py").write_text(WHERE.read_text())
    return tmp_path / "job"


@pytest.mark.cluster
def test_another_torch_on_one_host(make_cluster, launch, tmp_path):
    cluster = make_cluster(3)
    (metadata,) = Path(sysconfig.get_path("purelib")).glob("torch-*.dist-info/METADATA")
    other = tmp_path / "METADATA"
    lines = metadata.read_text().splitlines(keepends=True)
    other.write_text("".join("Version: 2.9.0\n" if line.startswith("Version:") else line for line in lines))
    cluster.run("n2", ["mount", "--bind", other, metadata], check=True)
    run = launch("-H", cluster.hostfile, WHERE, cluster=cluster)
    refused(run, cluster, "n2", "torch", "torch 2.9.0, 2 others have 2.", "-m pip install torch==2.")


@pytest.mark.cluster
def test_a_script_that_one_host_lacks_or_has_differently(make_cluster, launch, folder, tmp_path):
    cluster = make_cluster(3)
    other = tmp_path / "other.py"
    other.write_text("print('an old version')\n")
    cluster.run("n3", ["mount", "--bind", other, folder / "where.py"], check=True)
    run = launch("-H", cluster.hostfile, folder / "where.py", cluster=cluster)
    refused(run, cluster, "n3", "script", "not the same as here", "rsync -a")
    cluster.run("n3", ["umount", folder / "where.py"], check=True)
    cluster.run("n2", ["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    run = launch("-H", cluster.hostfile, folder / "where.py", cluster=cluster)
    refused(run, cluster, "n2", "script", f"no {folder}/where.py there", "--sync")


@pytest.mark.cluster
def test_ssh_refused_key_refused_and_unknown_keys(make_cluster, launch, tmp_path):
    cluster = make_cluster(4)
    other = tmp_path / "authorized_keys"
    other.write_text("# nobody\n")
    cluster.run("n2", ["mount", "--bind", other, cluster.directory / "ssh/authorized_keys"], check=True)
    refused(launch("-H", "n1,n2", WHERE, cluster=cluster), cluster, "n2", "ssh", "refuses the key", "ssh-copy-id n2")

    known = Path.home() / ".ssh/known_hosts"
    lines = (cluster.directory / "ssh/known_hosts").read_text()
    another = "AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    for text, words in (
        (lines.replace("n3,", ""), "not known here"),
        (f"n3 ssh-ed25519 {another}\n", "host key has changed"),
    ):
        (tmp_path / "known_hosts").write_text(text.replace("198.18.0.3,", "") if "n1" in text else text)
        cluster.run("n1", ["mount", "--bind", tmp_path / "known_hosts", known], check=True)
        refused(launch("-H", "n1,n3", WHERE, cluster=cluster), cluster, "n3", "ssh", words)
        cluster.run("n1", ["umount", known], check=True)

    os.kill(cluster.listener_process("n4"), 9)
    run = launch("-H", "n1,n4", WHERE, cluster=cluster)
    refused(run, cluster, "n4", "ssh", "no sshd listens on port 22", "systemctl start ssh")
    run = launch("-H", "n1,n3", "--ssh-command", "ssh -J n4", WHERE, cluster=cluster)
    refused(
        run,
        cluster,
        "n3",
        "ssh",
        "connect to host n4 port 22: Connection refused",
    )


@pytest.mark.cluster
def test_bad_hosts_are_left_out_on_request_and_never_silently(make_cluster, launch):
    cluster = make_cluster(3, slots=2)
    os.kill(cluster.listener_process("n2"), 9)
    run = launch("-H", cluster.hostfile, "--drop-bad-hosts", WHERE, cluster=cluster)
    assert run.code == 0, run
    assert run.result["hosts"] == ["n1", "n3"]
    assert run.result["world_size"] == 4
    assert any(w.startswith("left out: n2: ssh: ") for w in run.result["warnings"])
    assert "(--drop-bad-hosts); 4 rank" in run.err
    assert "[2-3] n3" in run.out or "[2@n3]" in run.out, run

    too_few = launch("-H", cluster.hostfile, "-np", "6", "--drop-bad-hosts", WHERE, cluster=cluster)
    assert too_few.code == 3, too_few
    assert "n2: ssh: " in too_few.err and "6 ranks requested" in too_few.err
    none_left = launch("-H", "n2", "--drop-bad-hosts", WHERE, cluster=cluster)
    assert none_left.code == 3, none_left
    assert "n2: ssh: " in none_left.err
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.cluster
@pytest.mark.parametrize("settings", ["", " user=root port=22"])
def test_an_idle_host_steps_in_for_a_bad_one(make_cluster, launch, tmp_path, settings):
    cluster = make_cluster(3)
    project = tmp_path / "project"
    project.mkdir()
    (project / "where.py").write_text(WHERE.read_text())
    cluster.run("n2", ["mount", "--bind", "/bin/false", sys.executable], check=True)
    cluster.run("n3", ["mount", "-t", "tmpfs", "tmpfs", project], check=True)  # --sync will fill it
    (tmp_path / "hosts.txt").write_text(f"n1 slots=1\nn2 slots=1\nn3 slots=1{settings}\n")
    words = ("-H", tmp_path / "hosts.txt", "-np", "2", "--drop-bad-hosts", "--sync", project)
    run = launch(*words, project / "where.py", cluster=cluster, cwd=project)
    assert run.code == 0, run
    assert run.result["hosts"] == ["n1", "n3"]
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.cluster
def test_without_a_check_nothing_is_asked_and_the_card_is_the_one_that_leads_to_the_launcher(make_cluster, launch):
    cluster = make_cluster(2)
    run = launch("-H", cluster.hostfile, "--no-preflight", JOB, "*:environment", cluster=cluster)
    assert run.code == 0, run
    assert not (run.run_dir / "preflight.json").exists()
    assert [env["GLOO_SOCKET_IFNAME"] for env in environments(run, 2)] == ["eth0", "eth0"]


@pytest.mark.cluster
def test_check_alone_as_text_and_json(make_cluster):
    cluster = make_cluster(3, slots=2)
    fit = cluster.run("n1", [TOPO, "check", "-v", "-H", cluster.hostfile, WHERE])
    assert fit.returncode == 0, fit
    assert "n[1-3]" in fit.stdout and "3 hosts healthy" in fit.stdout
    assert "network: eth0 on n1, n2, n3 (every host is in 198.18.0.0/16)" in fit.stdout
    os.kill(cluster.listener_process("n3"), 9)
    bad = cluster.run("n1", [TOPO, "check", "-H", cluster.hostfile])
    assert bad.returncode == 3, bad
    assert "error: n3: ssh: " in bad.stdout and "1 of 3 hosts unhealthy" in bad.stdout
    assert cluster.run("n1", [TOPO, "check", "-H", cluster.hostfile, "--exclude", "n3"]).returncode == 0
    told = cluster.run("n1", [TOPO, "check", "-H", cluster.hostfile, "--json"])
    assert told.returncode == 3
    report = json.loads(told.stdout)
    assert report["fit"] is False
    assert sorted(report["inventories"]) == ["n1", "n2"]
    assert {(c["host"], c["check"]) for c in report["checks"]} == {
        (h, c) for h in report["hosts"] for c in ("ssh", *COLUMNS)
    }
    assert cluster.left_over(within_seconds=6) == {}


def environments(run, ranks):
    return [json.loads((run.run_dir / f"ranks/{n}.out").read_text().splitlines()[0])["env"] for n in range(ranks)]


@pytest.mark.cluster
def test_a_temporary_folder_that_became_read_only_is_named(make_cluster):
    """A file system becomes read-only after an error. The engine's daemon would exit without a message."""
    cluster = make_cluster(2)
    cluster.run("n2", ["sh", "-c", "mount --bind /tmp /tmp && mount -o remount,ro,bind /tmp"], check=True)
    told = cluster.run("n1", [TOPO, "check", "-H", cluster.hostfile])
    assert told.returncode == 3, told
    assert "error: n2: disk: no file can be created in /tmp: Read-only file system" in told.stdout


@pytest.mark.cluster
@pytest.mark.forked
def test_a_bridge_with_the_same_address_everywhere_and_cards_of_different_names(make_cluster, launch):
    cluster = make_cluster(3)
    for host in cluster.hosts:
        # The bridge has a container's link, so that its state is up, as that of the NIC.
        lines = ("link add docker0 type bridge", "address add 172.17.0.1/16 dev docker0", "link set docker0 up",
                 "link add port0 type veth peer name port1", "link set port0 master docker0 up",
                 "link set port1 up")  # fmt: skip
        for line in lines:
            cluster.run(host, ["ip", *line.split()], check=True)
    for line in ("link set eth0 down", "link set eth0 name ens5", "link set ens5 up"):
        cluster.run("n2", ["ip", *line.split()], check=True)
    run = launch("-H", cluster.hostfile, JOB, "--mpi", "*:environment", cluster=cluster)
    assert run.code == 0, run
    found = environments(run, 3)
    assert [env["GLOO_SOCKET_IFNAME"] for env in found] == ["eth0", "ens5", "eth0"]
    assert [env["NCCL_SOCKET_IFNAME"] for env in found] == ["=eth0", "=ens5", "=eth0"]
    assert [env["DISTRIB_ADDRESS"] for env in found] == ["198.18.0.1", "198.18.0.2", "198.18.0.3"]
    assert {env["MASTER_ADDR"] for env in found} == {"198.18.0.1"}
    assert {env["OMPI_MCA_btl_tcp_if_include"] for env in found} == {"198.18.0.0/16"}
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert [host["interface"] for host in plan["hosts"]] == ["eth0", "ens5", "eth0"]
    assert plan["listen"] == ["198.18.0.1"]
    assert "invalid value" not in (run.run_dir / "engine.log").read_text()

    trained = launch("-H", cluster.hostfile, GLOO, cluster=cluster)
    assert trained.code == 0, trained

    wanted = launch("-H", cluster.hostfile, "--interface", "eth0,ens5", JOB, "*:environment", cluster=cluster)
    assert wanted.code == 0, wanted
    missing = launch("-H", cluster.hostfile, "--interface", "eth0", JOB, cluster=cluster)
    refused(missing, cluster, "n2", "network", "no usable interface eth0; it has", "ens5 (198.18.0.2/16)")
    unasked = launch("-H", cluster.hostfile, "--interface", "eth0", "--no-preflight", JOB, cluster=cluster)
    assert unasked.code == 2 and "--no-preflight does not query" in unasked.err, unasked
    decoy = launch("-H", cluster.hostfile, "--interface", "docker0", JOB, cluster=cluster)
    assert decoy.code == 3, decoy
    assert "is on n1, n2, n3 too" in decoy.err
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.cluster
@pytest.mark.forked
def test_hosts_whose_own_name_leads_to_loopback_train_together(make_cluster, launch, tmp_path):
    cluster = make_cluster(2)
    for host in cluster.hosts:
        cluster.write_hosts_file(host, own_address="127.0.1.1")
    run = launch("-H", cluster.hostfile, GLOO, cluster=cluster)
    assert run.code == 0, run
    run = launch("-H", cluster.hostfile, JOB, "--mpi", "*:environment", cluster=cluster)
    assert run.code == 0, run
    assert [env["DISTRIB_ADDRESS"] for env in environments(run, 2)] == ["198.18.0.1", "198.18.0.2"]
    script = tmp_path / "adds.py"
    script.write_text("import distrib\njob = distrib.init(timeout_seconds=30)\njob.print(job.all_reduce(1.0, 'sum'))\n")
    bare = cluster.run("n1", [BIN / "mpirun", "--allow-run-as-root", "-H", "n1,n2", sys.executable, script])
    assert (bare.returncode, bare.stdout) == (0, "2.0\n"), bare
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.cluster
@pytest.mark.parametrize("others", ["", ",n1:1"])
def test_hosts_by_names_that_ssh_alone_knows(make_cluster, launch, others):
    cluster = make_cluster(3)
    names = {"gpu1": "198.18.0.2", "gpu2": "198.18.0.3"}
    config = "".join(f"Host {name}\n  HostName {address}\n" for name, address in names.items())
    (cluster.directory / "ssh/config").write_text(config)
    run = launch("-H", f"gpu1:1,gpu2:1{others}", JOB, "--mpi", "*:environment", cluster=cluster)
    assert run.code == 0, run
    found = environments(run, 2)
    assert [env["DISTRIB_ADDRESS"] for env in found] == list(names.values())
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert plan["seen_as"] == ["198.18.0.1"]
    assert cluster.left_over(within_seconds=6) == {}


def test_a_hostfile_without_its_option_is_no_script(tmp_path):
    """The command would take the hostfile for a script, and check only this machine."""
    (tmp_path / "cluster.txt").write_text("n1\nn2\n")
    topo = [TOPO, "check", "cluster.txt"]
    run = subprocess.run(topo, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert run.returncode == 2
    assert "-H cluster.txt" in run.stderr
    run = subprocess.run([TOPO, "check", JOB], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert "1 host healthy" in run.stdout, run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["distrib-topo", "probe", "--quikc"], "--quikc; did you mean --quick?"),
        (
            ["distrib-topo", "show", "up.yaml"],
            "up.yaml; a topology is named with --topology up.yaml",
        ),
        (
            ["distrib-topo", "show", "hosts.txt"],
            "hosts.txt; hosts are named with -H hosts.txt",
        ),
        (["distrib-launch", "--timout=3", "x.py"], "did you mean --timeout?"),
    ],
)
def test_an_option_that_is_none_is_told_with_the_one_that_may_have_been_meant(words, told):
    run = subprocess.run([TOPO.with_name(words[0]), *words[1:]], capture_output=True, text=True, timeout=200)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert told in run.stderr


@pytest.mark.cluster
def test_what_the_user_has_set_is_left_alone(make_cluster, launch):
    cluster = make_cluster(2)
    run = launch("-H", cluster.hostfile, "-x", "NCCL_SOCKET_IFNAME=ib0", JOB, "*:environment", cluster=cluster)
    assert run.code == 0, run
    assert {env["NCCL_SOCKET_IFNAME"] for env in environments(run, 2)} == {"ib0"}
    assert "NCCL_SOCKET_IFNAME=ib0" in run.err
