"""Train a small CNN on handwritten digits with plain torch, under any launcher that sets torchrun's variables."""

from __future__ import annotations

import gc
import os
import time

import digits
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset


def main() -> None:
    args = digits.arguments(__doc__)
    torch.manual_seed(args.seed)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo", init_method="env://")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    training, validation = digits.load(args.data)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(training, seed=args.seed)
    loader = DataLoader(training, args.batch_size, sampler=sampler)
    validation_loader = DataLoader(Subset(validation, range(rank, len(validation), world_size)), 256)
    model = DistributedDataParallel(
        digits.Cnn(digits.classes(training)).to(device), device_ids=[device.index] if gpu else None
    )
    lr = args.lr * world_size
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=args.epochs * len(loader))
    accuracy = 0.0

    for epoch in range(1, args.epochs + 1):
        model.train()
        sampler.set_epoch(epoch)
        begin, loss = time.perf_counter(), 0.0
        for images, labels in digits.progress(loader, f"epoch {epoch}"):
            images, labels = images.to(device), labels.to(device)
            batch_loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            batch_loss.backward()
            optimizer.step()
            schedule.step()
            loss += batch_loss.item() / len(loader)
        rate = len(training) / (time.perf_counter() - begin)

        model.eval()
        correct = torch.zeros((), device=device)
        with torch.no_grad():
            for images, labels in validation_loader:
                images, labels = images.to(device), labels.to(device)
                correct += (model(images).argmax(1) == labels).sum()
        dist.all_reduce(correct)
        accuracy = correct.item() / len(validation)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.1%}, {rate:,.0f} samples/s", flush=True)

    if rank == 0:
        print(f"validation accuracy {100 * accuracy:.1f} %", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # free the model: while it holds the group, Gloo's threads are not joined and may abort
    time.sleep(0.1)  # before torch 2.8 the threads must first release their tensors, else later calls may hang
    dist.destroy_process_group()
