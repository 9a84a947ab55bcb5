"""Train GPT-2 (124M) on a file of tokens, on all GPUs or CPUs of the job."""

from __future__ import annotations

import gpt2
import recipe
import torch
from torch import nn

import distrib


def main() -> None:
    args = gpt2.arguments(__doc__)
    torch.manual_seed(args.seed)
    job = distrib.init()
    device = job.device

    training, validation = gpt2.loaders(args, device)
    model = gpt2.Gpt2(args.shape).to(device)
    optimizer = gpt2.adamw(model, args.lr, device)
    schedule = recipe.warmup_cosine(optimizer, args.warmup_steps, args.steps, end=0.1)
    scaler = recipe.grad_scaler(args, device)
    model, optimizer, scaler = job.prepare(model, optimizer, scaler, accumulate=args.accumulate)
    training, validation = job.prepare(training, validation)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "loader": training}
    step = job.restore(args.checkpoint, **state, step=0)["step"]

    compiled = torch.compile(model) if args.compile else model
    batches = recipe.endless(training)
    peak = recipe.peak_flops(device, args.dtype)
    meter = recipe.Meter("tokens", gpt2.flops_per_token(args.shape), peak, job.world_size)

    while step < args.steps:
        tokens, targets = (part.to(device, non_blocking=True) for part in next(batches))
        with recipe.autocast(args, device):
            loss = compiled(tokens, targets)
        scaler.scale(loss).backward()
        meter.add(tokens.numel())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not job.stepped:
            continue
        rate = schedule.get_last_lr()[0]
        schedule.step()
        step += 1
        if step % args.log_every == 0:
            metrics = {"step": step, "loss": job.all_reduce(loss.item()), "lr": rate, **meter.lap()}
            job.log(**metrics)
            job.print(recipe.line(metrics))
        if step % args.save_every == 0 or step == args.steps:
            job.save(args.checkpoint, **state, step=step)
            meter.restart()

    total, blocks = gpt2.evaluate(model, validation, args, device)
    job.print(f"validation loss {job.all_reduce(total, 'sum') / job.all_reduce(blocks, 'sum'):.4f}")


if __name__ == "__main__":
    main()
