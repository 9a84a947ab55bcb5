"""Train the examples' CNN on the digits for a time, and print a JSON line with end time and loss of each step.

    digits_loss.py --seconds N [--lockstep] [--pause SECONDS] [--slow RANK FACTOR] [--seed S]

Every step pauses for the compute time of an accelerator; rank RANK pauses FACTOR times as long. Times are those of
the machine's clock, which the virtual hosts share. Ranks wait for each other only as their mode requires.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import digits

import distrib


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--lockstep", action="store_true", help="all ranks end at the same step")
    parser.add_argument("--slow", type=float, nargs=2, default=(-1, 1))
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    job = distrib.init()
    training, _ = digits.load()
    model = digits.Cnn()
    optimizer = torch.optim.SGD(model.parameters(), job.scale_lr(args.lr), momentum=0.9)
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(training, args.batch, shuffle=True))
    pause = args.pause * (args.slow[1] if job.rank == args.slow[0] else 1)
    job.barrier()
    steps: list[tuple[float, float]] = []
    begun = time.time()
    ended = False
    while not ended:
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            time.sleep(pause)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append((round(time.time(), 4), round(loss.item(), 4)))
            ended = steps[-1][0] - begun > args.seconds
            if args.lockstep and len(steps) % 10 == 0:
                ended = job.all_reduce(float(ended), "max") > 0
            elif args.lockstep:
                ended = False
            if ended:
                break
    print(json.dumps({"begun": begun, "steps": steps}), flush=True)
    job.close()


if __name__ == "__main__":
    main()
