"""Train GPT-2 (124M) on a file of tokens, on one GPU or CPU. `train_gpt2.py` does so on several."""

from __future__ import annotations

import gpt2
import recipe
import torch
from torch import nn


def main() -> None:
    args = gpt2.arguments(__doc__)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    training, validation = gpt2.loaders(args, device)
    model = gpt2.Gpt2(args.shape).to(device)
    optimizer = gpt2.adamw(model, args.lr, device)
    schedule = recipe.warmup_cosine(optimizer, args.warmup_steps, args.steps, end=0.1)
    scaler = recipe.grad_scaler(args, device)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "loader": training}
    step = recipe.restore(args.checkpoint, **state, step=0)["step"]

    compiled = torch.compile(model) if args.compile else model
    batches = recipe.endless(training)
    peak = recipe.peak_flops(device, args.dtype)
    meter = recipe.Meter("tokens", gpt2.flops_per_token(args.shape), peak)

    while step < args.steps:
        tokens, targets = (part.to(device, non_blocking=True) for part in next(batches))
        with recipe.autocast(args, device):
            loss = compiled(tokens, targets)
        scaler.scale(loss / args.accumulate).backward()
        meter.add(tokens.numel())
        if meter.batches % args.accumulate:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        rate = schedule.get_last_lr()[0]
        schedule.step()
        step += 1
        if step % args.log_every == 0:
            metrics = {"step": step, "loss": loss.item(), "lr": rate, **meter.lap()}
            print(recipe.line(metrics))
        if step % args.save_every == 0 or step == args.steps:
            recipe.save(args.checkpoint, **state, step=step)
            meter.restart()

    total, blocks = gpt2.evaluate(model, validation, args, device)
    print(f"validation loss {total / blocks:.4f}")


if __name__ == "__main__":
    main()
