"""World of a rank: sizes, places on the host, devices, addresses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader

from distrib.errors import TrainingError
from distrib.training.rendezvous import _choose_interface, _exchange_hosts, _own_address
from distrib.training.world import World, _from_mpi, find_device, find_world
from distrib.utils import netif
from tests import fork_server
from tests.conftest import ROOT, SCRIPTS
from tests.support.ranks import run_ranks
from tests.support.sharded_loaders import sharded


def test_the_world_is_found_in_plan_slurm_and_mpi_variables(capsys):
    alone = World(rank=0, size=1, local_rank=0, local_size=1)
    assert find_world({}) == alone
    inside_slurm = {"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    plan = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for environ in (plan, {**plan, **inside_slurm}):
        assert find_world(environ) == World(rank=3, size=4, local_rank=1, local_size=2)
        assert not find_world(environ).on_one_host
    for wrong in ({"RANK": "4"}, {"WORLD_SIZE": "x"}, {"LOCAL_RANK": "2"}):
        with pytest.raises(TrainingError):
            find_world({**plan, **wrong})
    assert capsys.readouterr().err == ""
    for rank in "01":  # only one rank prints the warning for all
        assert find_world({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": rank}) == alone
        assert find_world({"PMI_SIZE": "2", "PMI_RANK": rank}) == alone
    told = capsys.readouterr().err.splitlines()[::2]
    assert [line.partition(", but each is a job of its own")[0] for line in told] == [
        "distrib: warning: srun started 8 processes",
        "distrib: warning: mpirun started 2 processes",
    ]
    with pytest.raises(TrainingError, match=r"1 rank.* 8 .*OMPI_COMM_WORLD_SIZE"):
        mpi = types.SimpleNamespace(COMM_WORLD=types.SimpleNamespace(rank=0, size=1))
        _from_mpi(mpi, {"OMPI_COMM_WORLD_SIZE": "8"}, True)


def test_ranks_with_and_without_gpus_are_refused_at_the_rendezvous():
    store, hosts = torch.distributed.HashStore(), []
    with ThreadPoolExecutor(2) as ranks:
        for backends in (["gloo", "gloo"], ["gloo", "cpu:gloo,cuda:nccl"]):
            calls = [ranks.submit(_exchange_hosts, store, rank, 2, backend) for rank, backend in enumerate(backends)]
            hosts += [call.exception() or len({*call.result()}) for call in calls]
            store = torch.distributed.HashStore()
    assert hosts[:2] == [1, 1]
    assert [str(error).partition(";")[0] for error in hosts[2:]] == ["rank 0 see no GPU, but other ranks do"] * 2


def test_a_device_that_torch_cannot_use_is_refused(monkeypatch):
    assert find_device(0, {"DISTRIB_DEVICE": "cpu"}) == torch.device("cpu")
    with pytest.raises(TrainingError, match="names no device"):
        find_device(0, {"DISTRIB_DEVICE": "toaster"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(TrainingError, match=r"local rank 2 .*GPU 2,.* 2 GPU"):
        find_device(2, {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainingError, match="not compiled with CUDA"):
        find_device(0, {"DISTRIB_DEVICE": "cuda:0"})


def test_the_address_of_a_rank_is_given_or_found_on_its_interfaces(monkeypatch):
    assert _own_address(True) == "127.0.0.1"
    monkeypatch.setenv("DISTRIB_ADDRESS", "198.18.0.1")
    assert _own_address(True) == "198.18.0.1"
    monkeypatch.delenv("DISTRIB_ADDRESS")
    addresses = [("lo", "127.0.0.1"), ("lo", "::1"), ("eth0", "fe80::1"), ("eth0", "2001:db8::1")]
    monkeypatch.setattr(netif, "interface_addresses", lambda: addresses)
    monkeypatch.setattr(netif, "is_up", lambda name: True)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert _own_address(False) == "2001:db8::1"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # restores the variable after the test
    _choose_interface(False, "localhost")  # a host name that other hosts cannot reach
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0" and "NCCL_SOCKET_IFNAME" not in os.environ


@pytest.mark.processes
def test_local_ranks_are_found_without_variables_of_the_launcher(tmp_path):
    """The ranks of a host determine local rank and local size themselves, such as under plain srun."""
    script = tmp_path / "places.py"
    script.write_text(
        "import os, sys\nfor name in [n for n in os.environ if 'LOCAL' in n and not sys.argv[1:]]:\n    del os.environ[name]\n"
        "import distrib\nwith distrib.init() as job:\n"
        "    print(job.rank, job.local_rank, job.local_world_size, flush=True)\n"
    )
    result = run_ranks(3, script)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(result.stdout.split("\n")[:-1]) == ["0 0 3", "1 1 3", "2 2 3"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        meets = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, "told"], stdout=subprocess.PIPE, text=True,
            env={**os.environ, **fork_server.environment(str(ROOT)), **meets, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]  # fmt: skip
    assert [rank.communicate(timeout=200)[0] for rank in ranks] == ["0 0 2\n", "1 1 2\n"]


@pytest.mark.processes
def test_a_world_size_other_than_that_of_mpi_is_refused(tmp_path):
    result = run_ranks(2, SCRIPTS / "lessons.py", "collectives", WORLD_SIZE="3")
    assert result.returncode == 1
    assert "MPI started 2 rank(s), but 3 were planned" in result.stderr


@pytest.mark.gpu
def test_a_rank_with_a_gpu_has_its_device_and_batches_there():
    device = find_device(0, {})
    assert device == torch.device("cuda", 0) == torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(TrainingError, match="torch sees"):
        find_device(torch.cuda.device_count(), {})
    loader = DataLoader(torch.arange(8.0), 4, pin_memory=True)
    batches = sharded(loader, 0, 1, device=device)
    assert [batch.device for batch in batches] == [device, device]
