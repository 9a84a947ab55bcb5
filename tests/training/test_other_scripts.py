"""Unmodified scripts of other launchers run: torchrun, mpi4py and Horovod."""

from __future__ import annotations

import os

import pytest

from tests.conftest import SCRIPTS
from tests.virtual_cluster.calm import repeat_if_spoiled

pytestmark = pytest.mark.forked


def said(run) -> list[str]:
    """Return the output of each rank, in rank order."""
    assert run.code == 0, run
    count = len(run.result["ranks"])
    return [(run.run_dir / f"ranks/{rank}.out").read_text().strip() for rank in range(count)]


def test_a_script_for_torchrun(launch):
    assert said(launch("-np", "2", SCRIPTS / "torchrun_only.py")) == [
        "rank 0 of 2, local rank 0 of 2: 3",
        "rank 1 of 2, local rank 1 of 2: 3",
    ]


@pytest.mark.cluster
def test_a_script_for_torchrun_on_two_hosts(make_cluster, launch):
    cluster = make_cluster(2)
    assert said(launch("-H", "n1:2,n2:1", SCRIPTS / "torchrun_only.py", cluster=cluster)) == [
        "rank 0 of 3, local rank 0 of 2: 6",
        "rank 1 of 3, local rank 1 of 2: 6",
        "rank 2 of 3, local rank 0 of 1: 6",
    ]
    assert cluster.left_over(within_seconds=6) == {}


def test_a_script_for_mpi(launch):
    first, second = said(launch("-np", "2", SCRIPTS / "mpi_ring.py"))
    assert first.startswith("rank 0 of 2 on ") and first.endswith(": 1")
    assert second.startswith("rank 1 of 2 on ") and second.endswith(": 1")


@pytest.mark.cluster
def test_a_script_for_mpi_on_three_hosts(make_cluster, launch):
    cluster = make_cluster(3)
    assert said(launch("-H", cluster.hostfile, SCRIPTS / "mpi_ring.py", cluster=cluster)) == [
        "rank 0 of 3 on n1: 3",
        "rank 1 of 3 on n2: 3",
        "rank 2 of 3 on n3: 3",
    ]


@pytest.mark.horovod
def test_a_script_for_horovod(launch):
    first, second = said(launch("-np", "2", SCRIPTS / "horovod_steps.py"))
    assert first.startswith("rank 0 of 2, local rank 0 of 2, 10 steps")
    assert second.startswith("rank 1 of 2, local rank 1 of 2, 10 steps")


@pytest.mark.horovod
@pytest.mark.cluster
def test_a_script_for_horovod_on_two_hosts(make_cluster, launch):
    cluster = make_cluster(2)
    run = launch("-H", cluster.hostfile, SCRIPTS / "horovod_steps.py", cluster=cluster)
    assert [line.partition(", 10")[0] for line in said(run)] == [
        "rank 0 of 2, local rank 0 of 1",
        "rank 1 of 2, local rank 0 of 1",
    ]
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.horovod
@pytest.mark.prioritized
def test_waiting_ranks_of_horovod_do_not_take_the_cores_from_the_others(launch):
    """Horovod over MPI polls. With 4 ranks on 2 cores, 10 steps took 0.04 s, and 1.1 s without yielding."""
    ranks = min(2 * len(os.sched_getaffinity(0)), 8)

    @repeat_if_spoiled
    def measure() -> None:
        lines = said(launch("-np", str(ranks), SCRIPTS / "horovod_steps.py"))
        assert max(float(line.partition(" steps in ")[2].partition(" s")[0]) for line in lines) < 0.6

    measure()


SCHEDULE_AND_VALIDATION = """
import distrib, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
with distrib.init() as job:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    train = DataLoader(TensorDataset(torch.ones(336, 4)), batch_size=4, shuffle=True)
    validation = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 84)
    model, optimizer, train, validation, schedule = job.prepare(model, optimizer, train, validation, schedule)
    for epoch in range(2):
        model.train()
        for (batch,) in train:
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        model.eval()
        with torch.no_grad():
            print("validated", sum(float(model(batch).sum()) for (batch,) in validation))
    print("steps", schedule.last_epoch)
"""


@pytest.mark.forked
def test_a_schedule_of_all_steps_is_not_measured_by_the_validation_loader(launch, tmp_path):
    """The schedule has 84 steps: two epochs of 42 steps on each rank. The validation loader has 2 batches."""
    script = tmp_path / "schedule.py"
    script.write_text(SCHEDULE_AND_VALIDATION)
    run = launch("-np", "2", script)
    assert run.code == 0 and "steps 84" in run.out, run
    assert not any(word in f"{run.err} {run.result['warnings']}" for word in ("batches", "LR")), run
