"""Train the examples' CNN on the digits and print a JSON line with the results of each epoch.

    digits_epochs.py [--plain] [--epochs N] [--lr LR] [--seed S]

Seconds and bytes are those of this rank's training, without evaluation. `--plain` uses torch's
DistributedDataParallel with its defaults, and of distrib only the process group and the loader.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import digits

import distrib


def sent_bytes() -> int:
    """Return the bytes that this host's NIC has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    job = distrib.init()
    training, validation = digits.load()
    model = digits.Cnn()
    lr = job.scale_lr(args.lr)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    loader, validation_loader = job.prepare(DataLoader(training, 16, shuffle=True), DataLoader(validation, 256))
    if args.plain:
        model = DistributedDataParallel(model)
    else:
        model, optimizer = job.prepare(model, optimizer)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=args.epochs * len(loader))
    seconds, sent, steps = 0.0, 0, 0
    for epoch in range(1, args.epochs + 1):
        model.train()
        job.barrier()
        begin, begin_bytes = time.perf_counter(), sent_bytes()
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
            steps += 1
        job.barrier()
        seconds, sent = seconds + time.perf_counter() - begin, sent + sent_bytes() - begin_bytes
        model.eval()
        with torch.no_grad():
            correct = sum((model(images).argmax(1) == labels).sum().item() for images, labels in validation_loader)
        accuracy = job.all_reduce(correct, "sum") / len(validation)
        job.print(
            json.dumps({"epoch": epoch, "steps": steps, "seconds": seconds, "sent_bytes": sent, "accuracy": accuracy})
        )
    job.close()


if __name__ == "__main__":
    main()
