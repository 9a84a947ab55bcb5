"""Rank of the probe under MPI."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from distrib.probe import __main__ as rank_of_probe
from distrib.probe.protocol import ProbeSpec, RankSetup, ShutdownTask
from distrib.probe.settings import ProbeTimeouts


class Comm:
    """MPI communicator of rank 1, which receives these tasks from rank 0, each after a delay."""

    def __init__(self, size, *words):
        self.rank, self.size, self.words, self.looks = 1, size, list(words), 0

    def send(self, words, rank, tag):
        pass

    def iprobe(self, *, source, tag):
        self.looks += 1
        return self.looks % 3 == 0

    def recv(self, *, source, tag):
        return msgspec.msgpack.encode(self.words.pop(0))


@pytest.fixture
def run_rank(monkeypatch):
    """Return a function that runs `python -m distrib.probe` with a given communicator."""

    def run(comm):
        spec = msgspec.json.encode(ProbeSpec(hosts=("n1", "n2"), present=("n1", "n2"))).decode()
        monkeypatch.setattr(rank_of_probe.sys, "argv", ["probe", spec])
        monkeypatch.setattr(rank_of_probe, "init_mpi", lambda: SimpleNamespace(COMM_WORLD=comm))
        monkeypatch.setattr(rank_of_probe, "exit_process", lambda mpi, skip_finalize: None)  # would end the process
        for name, value in {"WORLD_SIZE": 3, "GROUP_RANK": 1, "LOCAL_RANK": 1}.items():
            monkeypatch.setenv(name, str(value))
        return rank_of_probe.main()

    return run


@pytest.mark.parametrize(
    ("variable", "do"), [("SLURM_PROCID", "no PMIx: use --engine mpirun"), ("OMPI_COMM_WORLD_RANK", "another MPI's")]
)
def test_ranks_that_mpi_started_as_separate_jobs_measure_nothing(run_rank, monkeypatch, capsys, variable, do):
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    monkeypatch.setenv(variable, "1")
    assert run_rank(Comm(1)) == 1
    err = capsys.readouterr().err
    assert "MPI started 1 of 3 ranks" in err and do in err


def test_a_rank_waits_longer_for_setup_than_rank_0_for_its_hello(run_rank, monkeypatch):
    monkeypatch.setattr(rank_of_probe, "TIMEOUTS", ProbeTimeouts(hello_seconds=-1.0))
    assert run_rank(Comm(3, RankSetup(token=b"", ports={}), ShutdownTask())) == 0
