"""Take steps of asynchronous training without computation: `push_pull.py MEGABYTES TENSORS SECONDS`.

Gradients are ready at once and forward only waits for parameters, so that a step consists of network time. Every rank
prints the seconds of a step and the CPU time of its process.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn

import distrib


class Nothing(nn.Module):
    """Parameters of `megabytes` in `tensors` tensors, with a forward that only waits for them."""

    def __init__(self, megabytes: float, tensors: int) -> None:
        super().__init__()
        size = int(megabytes * 1e6) // 4 // tensors
        for number in range(tensors):
            self.register_parameter(f"tensor{number}", nn.Parameter(torch.zeros(size)))

    def forward(self) -> None:
        """Do nothing: the parameters have arrived before this call."""


def main() -> None:
    megabytes, tensors, seconds = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    with distrib.init() as job:
        model = Nothing(megabytes, tensors)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        model, optimizer = job.prepare(model, optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        steps, times = 0, []
        job.all_reduce(0.0)
        begun = used = 0.0
        while True:
            now = time.perf_counter()
            if steps == 2:
                begun, used = now, time.process_time()
            optimizer.step()
            model()
            steps += 1
            times.append(time.perf_counter() - now)
            if steps > 4 and (steps - 2) % 2 == 0 and job.all_reduce(time.perf_counter() - begun, "max") > seconds:
                break
        took = time.perf_counter() - begun
        print(json.dumps({"step_seconds": sum(times[2:]) / (steps - 2), "wall": took / (steps - 2), "steps": steps - 2,
                          "cpu": (time.process_time() - used) / took}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
