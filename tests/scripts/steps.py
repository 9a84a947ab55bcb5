"""Take steps of known compute time and print the last loss: `steps.py STEPS SECONDS ELEMENTS [how]`.

`how` is a file for a profile, or a variation:
    thread, unprepared, no-backward, two-optimizers
    accumulates    a step of the optimizer after four batches
    hiccup         one step takes a second longer
    late:S:R       each step of rank R takes S seconds longer
    cpu            the CPU computes, instead of sleeping
    busy:S:N       N processes load the data, with S seconds of CPU time per sample
    far:S:N        N processes load the data, S seconds per sample without CPU time; 0: the rank loads it
"""

import sys
import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrib

steps, seconds, elements = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
how = sys.argv[4] if len(sys.argv) > 4 else ""
extra_seconds, number = (float(how.split(":")[1]), int(how.split(":")[2])) if ":" in how else (0.0, 0)


def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


take = compute if how == "cpu" else time.sleep


class Work(torch.autograd.Function):
    """A stand-in for layers: sleeps in forward and, twice as long, in backward."""

    @staticmethod
    def forward(ctx, x):
        take(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        take(2 * seconds / 3)
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, elements // 16), nn.Linear(elements // 16, 8)

    def forward(self, x):
        x = self.first(x)
        return self.last(Work.apply(x) if self.training else x)


class Busy(TensorDataset):
    def __getitem__(self, index):
        compute(extra_seconds)
        return super().__getitem__(index)


class Far(TensorDataset):
    def __getitem__(self, index):
        time.sleep(extra_seconds)
        return super().__getitem__(index)


def main():
    torch.manual_seed(1)
    job = distrib.init()
    if how.endswith(".json"):
        job.profile(how, warmup_steps=2, steps=8)
    kind = {"busy": Busy, "far": Far}.get(how.partition(":")[0], TensorDataset)
    data = kind(torch.randn(4096, 8))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)
    loader = DataLoader(data, 4, shuffle=True, num_workers=0 if how.startswith("late:") else number)
    if how != "unprepared":
        model, optimizer, loader = job.prepare(model, optimizer, loader)
    if how == "two-optimizers":
        job.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters(), 1e-5))
    if how == "thread":
        threading.Thread(target=time.sleep, args=(600,)).start()
    done, loss = 0, None
    while done < steps:
        for (x,) in loader:
            if how != "accumulates" or done % 4 == 0:
                optimizer.zero_grad()
            if how.startswith("late:") and job.rank == number:
                time.sleep(extra_seconds)
            if how == "hiccup" and done == 12:
                time.sleep(1)
            loss = model(x).square().mean()
            if how != "no-backward":
                loss.backward()
            if how != "accumulates" or done % 4 == 3:
                optimizer.step()
            done += 1
            if done == steps:
                break
    job.print(f"loss {loss.item():.9f} after {done} steps")


if __name__ == "__main__":  # from Python 3.14 on, loader processes import this file
    main()
