"""Training loop of `benchmarks/faults.py`. One rank fails at step 10: faulty.py KIND RANK FILE, which gets the time of the fault."""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import distrib

KIND, RANK, FILE = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
STEP = 10


def mark() -> None:
    partial = FILE.with_suffix(".partial")
    partial.write_text(str(time.time()))
    partial.rename(FILE)


class Samples(Dataset):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, at: int) -> torch.Tensor:
        if KIND == "loader" and at >= 0 and self.fails:
            mark()
            raise OSError("sample cannot be read")
        return torch.full((4,), float(at % 7))

    fails = False


def end_in_thread() -> None:
    mark()
    os._exit(5)


def fail() -> None:
    mark()
    if KIND == "exception":
        raise ValueError("one sample is wrong")
    if KIND == "exit":
        sys.exit(7)
    if KIND == "os-exit":
        os._exit(9)
    if KIND == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND == "segfault":
        ctypes.string_at(0)
    if KIND == "abort":
        os.abort()
    if KIND == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if KIND == "thread-exit":
        threading.Thread(target=end_in_thread).start()
    if KIND == "hang":
        time.sleep(600)


rank = int(os.environ["RANK"])
if KIND == "import" and rank == RANK:
    mark()
    import not_installed  # noqa: F401  # the fault

with distrib.init() as job:
    samples = Samples()
    samples.fails = rank == RANK
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    workers = {"num_workers": 1} if KIND == "loader" else {}
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(samples, batch_size=8, **workers))
    for step, inputs in enumerate(loader):
        loss = model(inputs).square().mean()
        if step == STEP and rank == RANK:
            if KIND == "nan":
                mark()
                loss = loss * float("nan")
            elif KIND in ("agent-killed", "host-lost", "network-cut"):
                mark()
            else:
                fail()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
