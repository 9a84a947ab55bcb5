"""Run lessons on several ranks: `lessons.py NAME[,NAME...] [ARGS]`. A failed assertion fails the job."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import distrib


def uneven(job: distrib.Job) -> None:
    """Train and evaluate datasets of each length with batch normalization: no rank hangs."""
    model = job.prepare(nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    for samples in range(job.world_size, 6 * job.world_size):
        for batch_size in (1, 3, 4):
            numbers = torch.arange(samples, dtype=torch.float32).unsqueeze(1)
            for shuffle in (False, True):
                loader = job.prepare(DataLoader(TensorDataset(numbers), batch_size, shuffle=shuffle))
                model.train()
                job.unwrap(model)[1].eval()  # type: ignore[index]  # batches of one sample have no variance
                steps = 0
                for (inputs,) in loader:
                    model(inputs).sum().backward()
                    steps += 1
                assert job.all_reduce(steps, "min") == job.all_reduce(steps, "max") == len(loader) == steps
                model.eval()
                with torch.no_grad():
                    seen = sum(model(inputs).numel() for (inputs,) in loader)
                assert job.all_reduce(seen, "sum") == samples, (samples, batch_size, shuffle, seen)


class Stream(IterableDataset[int]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        yield from range(10)


def collectives(job: distrib.Job) -> None:
    ranks, last = job.world_size, job.world_size - 1
    assert job.all_reduce(job.rank) == last / 2
    assert [job.all_reduce(job.rank, op) for op in ("sum", "max", "min")] == [sum(range(ranks)), last, 0]  # type: ignore[arg-type]
    given = torch.full((2, 3), job.rank, requires_grad=False)
    assert torch.equal(job.all_reduce(given), torch.full((2, 3), last / 2))
    assert torch.equal(given, torch.full((2, 3), job.rank))
    short = torch.tensor([300 * job.rank, -job.rank], dtype=torch.int16)  # no backend reduces int16
    for op, told in (("sum", [150 * ranks * last, -ranks * last // 2]), ("max", [300 * last, 0]), ("min", [0, -last])):
        found = job.all_reduce(short, op)  # type: ignore[arg-type]
        assert isinstance(found, torch.Tensor) and found.dtype == torch.int16 and found.tolist() == told, (op, found)
    streamed = [int(x) for x in job.prepare(DataLoader(Stream(), batch_size=None))]
    assert streamed == list(range(job.rank, 10, ranks)), streamed
    augmented = job.prepare(DataLoader(range(8 * ranks), 4, num_workers=1, worker_init_fn=_noise))  # type: ignore[arg-type]
    assert sum(len(batch) for batch in augmented) == 8
    generator = torch.Generator().manual_seed(job.rank)  # as scripts with different augmentation on each rank
    shuffled = job.prepare(DataLoader(range(8 * ranks), 4, shuffle=True, generator=generator))  # type: ignore[arg-type]
    read = torch.zeros(8 * ranks)
    for batch in shuffled:
        read[batch] += 1
    assert torch.equal(job.all_reduce(read, "sum"), torch.ones(8 * ranks))
    assert distrib.init() is job


def _noise(worker: int) -> None:
    torch.rand(1)


def forks(job: distrib.Job) -> None:
    """Let a thread that is about to run Python code do so before this process forks, after waiting for the GIL."""
    sys.setswitchinterval(60)
    go, gone = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(), gone.set()))
    thread.start()
    time.sleep(0.1)
    go.set()
    forked = os.fork()
    if not forked:
        os._exit(not gone.is_set())
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    thread.join()


def checkpoints(job: distrib.Job) -> None:
    """Only rank 0 sees the file."""
    path = Path(sys.argv[2]) / f"{'seen' if job.is_main else 'unseen'}.pt"
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = job.prepare(model, optimizer)
    assert job.restore(path, model=model, epoch=0) == {"epoch": 0}
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    job.save(path, model=model, optimizer=optimizer, epoch=3)
    weight = job.unwrap(model).weight.detach().clone()
    with torch.no_grad():
        job.unwrap(model).weight.zero_()
    assert job.restore(path, model=model, optimizer=optimizer, epoch=0) == {"epoch": 3}
    assert torch.equal(job.unwrap(model).weight, weight)
    assert not job.restore(path.with_name("none.pt"))


def fails(job: distrib.Job) -> None:
    job.all_reduce(1.0)
    if job.rank == job.world_size - 1:
        if sys.argv[2] == "raise":
            raise ValueError("this rank fails")
        if sys.argv[2] == "exit":
            sys.exit(7)
    try:
        for _ in range(3):
            job.all_reduce(1.0)
    finally:
        time.sleep(5)  # mpirun returns the exit code of the first rank that it sees exit


if __name__ == "__main__":

    def learn(job: distrib.Job) -> None:
        for name in sys.argv[1].split(","):
            globals()[name](job)
            job.print(f"{name}: learnt")

    if os.environ.get("LESSON_WITHOUT_WITH"):
        learn(distrib.init())
    else:
        with distrib.init() as job:
            learn(job)
