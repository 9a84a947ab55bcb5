"""Jobs of engine srun under a real slurmctld and real slurmds, on hosts of the virtual cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import JOB, LAUNCH, SCRIPTS, TOPO
from tests.virtual_cluster import Cluster, slurm

WHERE = SCRIPTS / "where.py"
needs_slurm = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        bool(slurm.why_unavailable()) and os.environ.get("DISTRIB_TEST_CLUSTER") != "required",
        reason=f"no Slurm: {slurm.why_unavailable()}",
    ),
]


@pytest.fixture
def make_slurm(bring_up: Callable[[Cluster], None]) -> Callable[..., slurm.SlurmCluster]:
    """Build virtual clusters that have their own Slurm and last as long as the test."""

    def build(hosts: int, *, slots: int = 2, **parts: Any) -> slurm.SlurmCluster:
        cluster = slurm.SlurmCluster(hosts, slots=slots, **parts)
        bring_up(cluster)
        return cluster

    return build


def batch(cluster, tmp_path, *arguments, allocation=()):
    """Run `distrib-launch` in a batch job without -H, as Slurm users do. Return its exit code and output."""
    submitted(cluster, tmp_path, *arguments, allocation=allocation)
    wait_for(lambda: (tmp_path / "exit-code").exists(), 150)
    return int((tmp_path / "exit-code").read_text()), (tmp_path / "output").read_text()


def submitted(cluster, tmp_path, *arguments, allocation=(), replaces_shell=False):
    """Submit such a batch job, whose shell writes `exit-code` unless the launcher replaces it. Return its number."""
    command = shlex.join(map(str, [LAUNCH, "--run-dir", tmp_path / "run", *arguments]))
    written = f"{command}\necho $? > {tmp_path}/code\nmv {tmp_path}/code {tmp_path}/exit-code"
    (tmp_path / "exit-code").unlink(missing_ok=True)
    script = tmp_path / "batch.sh"
    script.write_text(f"#!/bin/sh\nexport OMP_NUM_THREADS=1\n{f'exec {command}' if replaces_shell else written}\n")
    sbatch = ["sbatch", "--parsable", f"--output={tmp_path}/output", *allocation, script]
    return cluster.run("n1", sbatch, check=True).stdout.strip()


def wait_for(what, seconds=20.0, interval=0.05):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(interval)
    return found


def result_in(tmp_path):
    return json.loads((tmp_path / "run/result.json").read_text())


def _folder(path):
    path.mkdir()
    return path


def nothing_left(cluster):
    assert wait_for(lambda: not cluster.jobs(), interval=0.2)  # commands of Slurm cost CPU time
    assert cluster.left_over(within_seconds=6) == {}


class TestInAnAllocation:
    pytestmark = needs_slurm

    def test_a_batch_job_needs_no_hosts_and_may_choose_them(self, make_slurm, tmp_path):
        cluster = make_slurm(3)
        code, out = batch(
            cluster, tmp_path, JOB, "--mpi", "*:environment", allocation=["--nodes=3", "--ntasks-per-node=2"]
        )
        assert code == 0, out + cluster.logs()
        result = result_in(tmp_path)
        assert result["hosts"] == ["n1", "n2", "n3"]
        assert [(r["host"], r["local_rank"], r["exit_code"]) for r in result["ranks"]] == [
            (host, local_rank, 0) for host in ("n1", "n2", "n3") for local_rank in (0, 1)
        ]
        assert re.search(r"started with srun inside Slurm job \d+", out)
        told = json.loads((tmp_path / "run/ranks/5.out").read_text().splitlines()[0])["env"]
        assert (told["RANK"], told["WORLD_SIZE"], told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("5", "6", "1", "2")
        assert told["DISTRIB_ADDRESS"] == "198.18.0.3"
        nothing_left(cluster)
        words = ("--engine", "srun", "-H", "n3:1,n1:2", WHERE)
        code, out = batch(cluster, _folder(tmp_path / "chosen"), *words, allocation=["-N3", "--ntasks-per-node=1"])
        assert code == 0, out
        seen = [(tmp_path / f"chosen/run/ranks/{rank}.out").read_text().strip() for rank in range(3)]
        assert seen == ["n3", "n1", "n1"]
        nothing_left(cluster)

    def test_the_first_failure_is_named_with_its_code(self, make_slurm, tmp_path):
        cluster = make_slurm(2)
        code, out = batch(cluster, tmp_path, JOB, "2:exit=7", "*:children", allocation=["-N2", "--ntasks-per-node=2"])
        assert code == 7, out
        failure = result_in(tmp_path)["first_failure"]
        assert (failure["rank"], failure["host"], failure["exit_code"]) == (2, "n2", 7)
        nothing_left(cluster)

    @pytest.mark.forked
    def test_another_step_can_follow_a_failed_one(self, make_slurm, tmp_path):
        cluster = make_slurm(2)
        words = ("--max-restarts", "1", SCRIPTS / "restarts.py", "3", "0:1:1:boom")
        code, out = batch(cluster, tmp_path, *words, allocation=[f"--chdir={tmp_path}", "-N2", "--ntasks-per-node=1"])
        assert code == 0, out
        assert "start 1 of 2 ranks from epoch 2" in out
        assert result_in(tmp_path)["restarts"] == 1
        nothing_left(cluster)

    def test_ranks_follow_the_gpus_of_the_allocation(self, make_slurm, tmp_path):
        cluster = make_slurm(2, slots=4, gpus=2)
        for number, (allocation, words, hosts) in enumerate(
            [
                (["--ntasks-per-node=1", "--gpus-per-node=2"], (), ["n1", "n1", "n2", "n2"]),
                (["--ntasks-per-node=1", "--gres=gpu:2", "--cpus-per-task=2"], (), ["n1", "n1", "n2", "n2"]),
                (["--ntasks-per-node=1", "--gpus-per-task=2"], (), ["n1", "n1", "n2", "n2"]),
                (["--ntasks-per-node=2", "--gpus-per-task=1"], (), ["n1", "n1", "n2", "n2"]),
                (["--ntasks-per-node=1", "--export=ALL,SRUN_CPUS_PER_TASK=4", "--cpus-per-task=4", "--gpus-per-node=2"], (),
                 ["n1", "n1", "n2", "n2"]),
                (["--exclusive", "--gpus=4"], (), ["n1", "n1", "n2", "n2"]),
                (["--ntasks-per-node=1", "--gpus-per-node=2"], ("-np", "2", "--spread"), ["n1", "n2"]),
                (["--exclusive"], (), ["n1", "n1", "n2", "n2"]),
                (["--ntasks-per-node=2"], (), ["n1", "n1", "n2", "n2"]),
            ]
        ):  # fmt: skip
            folder = _folder(tmp_path / str(number))
            code, out = batch(cluster, folder, "--no-preflight", *words, WHERE, allocation=["-N2", *allocation])
            assert code == 0, (allocation, out)
            ranks = result_in(folder)["ranks"]
            assert [rank["host"] for rank in ranks] == hosts, allocation
            gpus = allocation != ["--ntasks-per-node=2"]
            devices = [f"cuda:{rank['local_rank']}" if gpus else "cpu" for rank in ranks]
            assert [rank["device"] for rank in ranks] == devices, allocation
            assert "Warning" not in (folder / "run/engine.log").read_text(), allocation
            nothing_left(cluster)

    def test_ranks_without_gpus_are_one_per_host_or_per_task_or_fewer(self, make_slurm, tmp_path):
        cluster = make_slurm(2, slots=4)
        for number, (allocation, words, hosts) in enumerate(
            [
                (["--exclusive"], ("-v",), ["n1", "n2"]),
                (["--exclusive", "--ntasks-per-node=1"], ("-np", "5"), ["n1", "n1", "n1", "n2", "n2"]),
                (["--ntasks=3"], (), ["n1", "n1", "n2"]),
                (["--ntasks-per-node=2"], ("-np", "2"), ["n1", "n1"]),
            ]
        ):
            folder = _folder(tmp_path / str(number))
            code, out = batch(cluster, folder, *words, WHERE, allocation=["-N2", *allocation])
            assert code == 0, (allocation, out)
            assert [rank["host"] for rank in result_in(folder)["ranks"]] == hosts, allocation
            assert ("n1, n2: no slots given; 1 rank each (--ntasks-per-node=N or -np N for more)" in out) == (
                allocation == ["--exclusive"]
            ), (allocation, out)
            cpus = len(os.sched_getaffinity(0))
            few = cpus < 3 == hosts.count("n1")
            assert [line for line in out.splitlines() if "Slurm gave" in line] == [
                f"distrib-launch: warning: n1: cores: Slurm gave {cpus} CPUs for 3 ranks; request more with --cpus-per-task=N or --exclusive of sbatch or salloc"
            ] * few, (allocation, out)
            nothing_left(cluster)

    def test_gpus_of_gres_are_found_without_variables_of_salloc_and_without_a_login(self, make_slurm, tmp_path):
        cluster = make_slurm(2, gpus=2)
        words = ["salloc", "-N2", "--gres=gpu:2", LAUNCH, "--no-preflight", "--run-dir", tmp_path / "run", WHERE]
        allocated = cluster.run("n1", words, timeout=200)
        assert allocated.returncode == 0, allocated
        ranks = [(rank["host"], rank["device"]) for rank in result_in(tmp_path)["ranks"]]
        assert ranks == [("n1", "cuda:0"), ("n1", "cuda:1"), ("n2", "cuda:0"), ("n2", "cuda:1")], allocated
        checked = cluster.run("n1", ["salloc", "-N2", "--exclusive", "--gres=gpu:2", TOPO, "check", "--json"])
        report = json.loads(checked.stdout)
        assert (checked.returncode, report["by"]) == (0, "srun"), checked
        assert "srun" in {check["check"] for check in report["checks"]}
        # The GPUs of the step. The process that checks is not part of it.
        assert [facts["visible_gpus"] for facts in report["inventories"].values()] == ["0,1", "0,1"]
        nothing_left(cluster)

    def test_inside_a_step_of_the_allocation(self, make_slurm, tmp_path):
        cluster = make_slurm(2, gpus=2)
        for gpus, device in ([], "cpu"), (["--gpus-per-node=2"], "cuda:{}"):
            folder = _folder(tmp_path / device[:3])
            step = ["srun", "-N1", "-n1", "--overlap", LAUNCH, "--no-preflight", "--run-dir", folder / "run", WHERE]
            allocated = cluster.run("n1", ["salloc", "-N2", "--ntasks-per-node=2", *gpus, *step], timeout=200)
            assert allocated.returncode == 0, allocated
            ranks = [(rank["host"], rank["device"]) for rank in result_in(folder)["ranks"]]
            assert ranks == [(host, device.format(n)) for host in ("n1", "n2") for n in (0, 1)], allocated
            nothing_left(cluster)

    @pytest.mark.forked
    def test_the_library_trains_alike_with_and_without_mpi(self, make_slurm, tmp_path):
        cluster = make_slurm(2, slots=1)
        trained = set()
        for mpi in ("pmix", "none"):
            folder = _folder(tmp_path / mpi)
            allocation = ["-N2", "--ntasks-per-node=1", f"--export=ALL,SLURM_MPI_TYPE={mpi}", f"--chdir={folder}"]
            code, out = batch(cluster, folder, SCRIPTS / "restarts.py", "2", allocation=allocation)
            assert code == 0, out
            assert "start 0 of 2 ranks" in out
            trained |= set(re.findall(r"parameters \[.*\]", out))
            nothing_left(cluster)
        assert len(trained) == 1, trained

    def test_preflight_runs_through_srun(self, make_slurm, tmp_path):
        cluster = make_slurm(3, second_rates={"n1": "1gbit", "n2": "1gbit", "n3": "1gbit"})
        allocation = ["-N3", "--ntasks-per-node=1"]
        code, out = batch(
            cluster, tmp_path, "--interface", "198.19.0.0/16", JOB, "*:environment", allocation=allocation
        )
        assert code == 0, out
        told = json.loads((tmp_path / "run/ranks/2.out").read_text().splitlines()[0])["env"]
        assert (told["DISTRIB_ADDRESS"], told["GLOO_SOCKET_IFNAME"]) == (cluster.address("n3", 1), "eth1")
        report = json.loads((tmp_path / "run/preflight.json").read_text())
        assert report["by"] == "srun" and set(report["inventories"]) == {"n1", "n2", "n3"}
        # The user's ssh session is on this machine only.
        assert not any(facts["ssh_connection"] for facts in report["inventories"].values())
        nothing_left(cluster)

    def test_a_host_that_others_cannot_reach_is_dropped(self, make_slurm, tmp_path):
        cluster = make_slurm(3)
        cluster.wall("n3", ports="22, 6818")  # slurmd listens on 6818
        allocation = ["-N3", "--ntasks-per-node=1"]
        code, out = batch(cluster, tmp_path, WHERE, allocation=allocation)
        assert code == 3, out
        assert "n3: network: n1, n2 cannot reach it at 198.18.0.3" in out and "srun" in out
        code, out = batch(cluster, tmp_path, "--drop-bad-hosts", WHERE, allocation=allocation)
        assert code == 0, out
        assert result_in(tmp_path)["hosts"] == ["n1", "n2"]
        nothing_left(cluster)

    def test_hosts_that_slurm_cannot_start_are_reported(self, make_slurm, tmp_path):
        cluster = make_slurm(2)
        hostfile = tmp_path / "hosts"
        hostfile.write_text("n1\nn2 python=/nowhere/python\nn7\n")
        words = ["--engine", "srun", "-H", hostfile, WHERE]
        code, out = batch(cluster, tmp_path, *words, allocation=["-N2", "--ntasks-per-node=1"])
        assert code == 3, out
        assert "n2: python: cannot run /nowhere/python there" in out
        assert re.search(r"n7: srun: Slurm .*: srun: error:", out), out
        nothing_left(cluster)

    def test_mpirun_follows_the_plan_instead_of_the_tasks_of_slurm(self, make_slurm, tmp_path):
        cluster = make_slurm(2, slots=4)
        allocation = ["-N2", "--ntasks-per-node=2"]
        code, out = batch(cluster, tmp_path, "--engine", "mpirun", JOB, "--mpi", allocation=allocation)
        assert code == 0, out
        assert result_in(tmp_path)["hosts"] == ["n1", "n2"]
        for hosts, ranks in ("localhost:4", ["n1"] * 4), ("n2:1,n1:3", ["n2", "n1", "n1", "n1"]):
            folder = _folder(tmp_path / ranks[0])
            code, out = batch(cluster, folder, "--engine", "mpirun", "-H", hosts, WHERE, allocation=allocation)
            assert code == 0, (hosts, out)
            seen = [(folder / f"run/ranks/{rank}.out").read_text().strip() for rank in range(4)]
            assert seen == ranks
            nothing_left(cluster)

    @pytest.mark.forked
    def test_an_asynchronous_job_continues_without_a_lost_node(self, make_slurm, tmp_path):
        cluster = make_slurm(2)
        words = ["--mode", "async", "--no-stale-rate", "--servers", "2", "--replicas", "1", SCRIPTS / "asynchronous.py"]
        lesson = ["counting", tmp_path, 10, 0.05, "enough"]
        allocation = ["-N2", "--ntasks-per-node=1", "--no-kill"]
        submitted(cluster, tmp_path, "--host-timeout", "3", *words, *lesson, allocation=allocation)
        wait_for(
            lambda: {path.name for path in tmp_path.glob("acknowledged.*")} >= {"acknowledged.0", "acknowledged.1"}, 60
        )
        cluster.lose("n2")
        # Slurm itself would report this state after minutes.
        cluster.run("n1", ["scontrol", "update", "nodename=n2", "state=down", "reason=lost"], check=True)
        before = int((tmp_path / "acknowledged.0").read_text())
        time.sleep(2)  # Slurm would end the other ranks in this time
        code = tmp_path / "exit-code"
        wait_for(lambda: code.exists() or int((tmp_path / "acknowledged.0").read_text()) > before + 20, 60)
        (tmp_path / "enough").touch()
        wait_for(code.exists, 60)
        out = (tmp_path / "output").read_text()
        assert int(code.read_text()) == 0 and result_in(tmp_path)["status"] == "succeeded", out
        assert "requested with --no-kill" in out and "rank 1 on n2 was lost" in out
        nothing_left(cluster)

    def test_the_first_failed_rank_is_named_although_slurm_killed_all(self, make_slurm, launch):
        """If a rank dies after MPI_Init, Slurm kills the whole job at once, often before the rank can report."""
        cluster = make_slurm(2)
        run = launch("--engine", "srun", "-H", "n1:2,n2:2", JOB, "--mpi", "2:signal=11", "*:sleep=60", cluster=cluster)
        assert run.code == 128 + signal.SIGSEGV, run
        assert "rank 2 on n2 failed first: killed by SIGSEGV" in run.err
        nothing_left(cluster)

    def test_scancel_stops_the_job(self, make_slurm, tmp_path):
        cluster = make_slurm(2)
        allocation = ["-N2", "--ntasks-per-node=1"]
        job = submitted(cluster, tmp_path, JOB, "*:sleep=60", allocation=allocation, replaces_shell=True)
        wait_for(lambda: (tmp_path / "output").exists() and (tmp_path / "output").read_text().count("sleeps") == 2)
        cluster.run("n1", ["scancel", job], check=True)
        nothing_left(cluster)
        result = result_in(tmp_path)
        assert (result["status"], result["exit_code"]) == ("stopped", 128 + signal.SIGTERM)


class TestOutsideAnAllocation:
    pytestmark = needs_slurm

    def test_srun_requests_the_hosts(self, make_slurm, launch):
        cluster = make_slurm(3, slots=4)
        run = launch("--engine", "srun", "-H", "n3:1,n1:3,n2:2", JOB, "--mpi", "*:environment", cluster=cluster)
        assert run.code == 0, run
        plan = json.loads((run.run_dir / "plan.json").read_text())
        assert not any(word.startswith("--nodes") for word in plan["command"])  # Slurm 24.11 rejects it
        assert [r["host"] for r in run.result["ranks"]] == ["n3", "n1", "n1", "n1", "n2", "n2"]
        for rank, host in enumerate(["n3", "n1", "n1", "n1", "n2", "n2"]):
            env = json.loads((run.run_dir / f"ranks/{rank}.out").read_text().splitlines()[0])["env"]
            assert (env["DISTRIB_ADDRESS"], env["SLURMD_NODENAME"]) == (cluster.address(host), host)
            assert env["SLURM_PMIX_FENCE"] == "ring"  # with a tree, MPI_Init fails occasionally
            assert "DISTRIB_TOKEN" not in env
        nothing_left(cluster)

    def test_the_first_failure_is_named_with_its_code(self, make_slurm, launch):
        cluster = make_slurm(2)
        run = launch("--engine", "srun", "-H", "n1:1,n2:2", JOB, "--mpi", "1:raise", "*:children", cluster=cluster)
        assert run.code == 1, run
        assert "rank 1 on n2 failed first: RuntimeError: boom in rank 1" in run.err
        nothing_left(cluster)

    def test_scancel_stops_the_job(self, make_slurm, tmp_path):
        """The job stops too if the script saves on SIGTERM and exits with code 0."""
        cluster = make_slurm(2)
        for handler in "", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n":
            folder = _folder(tmp_path / ("saves" if handler else "ends"))
            (folder / "waits.py").write_text(
                f"import os, pathlib, signal, sys, time\n{handler}"
                f"pathlib.Path({str(folder)!r}, 'there' + os.environ['RANK']).touch()\ntime.sleep(60)\n"
            )
            command = [LAUNCH, "--run-dir", folder / "run", "--engine", "srun", "-H", "n1:1,n2:1", folder / "waits.py"]
            process = cluster.popen("n1", command)
            wait_for(lambda folder=folder: len([*folder.glob("there*")]) == 2)
            cluster.run("n1", ["scancel", cluster.jobs()[0].split()[0]], check=True)
            _, err = process.communicate(timeout=50)
            result = result_in(folder)
            assert (result["status"], result["exit_code"]) == ("stopped", 128 + signal.SIGTERM), err
            assert "Slurm ended the job" in err
            nothing_left(cluster)

    def test_nothing_is_left_when_launcher_or_srun_is_killed(self, make_slurm, tmp_path):
        cluster = make_slurm(2)
        for victim in "distrib-launch", "srun":
            command = [
                LAUNCH,
                "--run-dir",
                tmp_path / f"run-{victim}",
                "--engine",
                "srun",
                "-H",
                "n1:1,n2:1",
                JOB,
                "*:children",
            ]
            process = cluster.popen("n1", command)
            for line in process.stdout:
                if "has children" in line:
                    break
            token = next(iter(re.findall(rb"DISTRIB_TOKEN=(\w+)", environ_of(cluster, "n1", "srun"))))
            for host in cluster.hosts:
                assert not [c for c in cluster.processes(host).values() if token.decode() in c]
            running = cluster.processes("n1").items()
            pids = [pid for pid, command in running if re.search(rf"/{victim}( |$)", command[:200])]
            assert pids and (process.pid in pids) == (victim == "distrib-launch")
            for pid in [process.pid] if victim == "distrib-launch" else pids:
                os.kill(pid, signal.SIGKILL)
            _, err = process.communicate(timeout=50)
            assert process.returncode != 0, err
            nothing_left(cluster)

    def test_gpus_are_requested_if_the_hosts_have_them(self, make_slurm, launch):
        cluster = make_slurm(2, gpus=2)
        run = launch("--engine", "srun", "-H", "n1:2,n2:1", JOB, cluster=cluster)
        assert run.code == 0, run
        assert [rank["device"] for rank in run.result["ranks"]] == ["cuda:0", "cuda:1", "cuda:0"]
        nothing_left(cluster)

    def test_hosts_unknown_to_slurm_are_refused(self, make_slurm, launch):
        cluster = make_slurm(2)
        (Path("/etc/netns") / cluster.namespace("n1") / "hosts").open("a").write("198.18.0.9 other\n")
        run = launch("--engine", "srun", "-H", "n1:1,other:1", JOB, cluster=cluster)
        assert run.code == 1, run
        assert re.search("error: Slurm does not know every host of the plan: srun: .*Invalid node name", run.err), run
        nothing_left(cluster)

    def test_a_job_waits_for_busy_hosts(self, make_slurm, launch, tmp_path):
        cluster = make_slurm(2)
        queued = f"until grep -qs queued {tmp_path}/*/engine.log || [ $((n += 1)) = 300 ]; do sleep 0.2; done; sleep 1"
        holder = cluster.popen("n1", ["srun", "--exclusive", "-N2", "-n2", "sh", "-c", queued])
        wait_for(lambda: any("RUNNING" in job for job in cluster.jobs()))
        run = launch("--engine", "srun", "-H", "n1:2,n2:2", WHERE, cluster=cluster)
        holder.communicate()
        assert run.code == 0, run
        assert "srun waits for the hosts" in run.err
        nothing_left(cluster)


def environ_of(cluster, host, name):
    pid = next(
        pid for pid, command in cluster.processes(host).items() if command.partition(" ")[0].endswith(f"/{name}")
    )
    return Path(f"/proc/{pid}/environ").read_bytes()
