"""Train ResNet-50 on images, on all GPUs or CPUs of the job."""

from __future__ import annotations

import images as data
import recipe
import resnet
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import distrib


def main() -> None:
    args = resnet.arguments(__doc__)
    torch.manual_seed(args.seed)
    job = distrib.init()
    device = job.device

    model = resnet.resnet(args).to(device, memory_format=torch.channels_last)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.ema), use_buffers=True) if args.ema else None
    optimizer = resnet.sgd(model, job.scale_lr(args.lr), device)
    scaler = recipe.grad_scaler(args, device)
    model, optimizer, scaler = job.prepare(model, optimizer, scaler, accumulate=args.accumulate)
    training, validation = data.loaders(args, device, job)
    torch.manual_seed(args.seed + job.rank)  # each rank has its own random crops
    epoch_steps = len(training) / args.accumulate
    schedule = recipe.warmup_cosine(
        optimizer, round(args.warmup_epochs * epoch_steps), round(args.epochs * epoch_steps)
    )
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "loader": training}
    state.update({"average": average} if average else {})
    done = job.restore(args.checkpoint, **state, epoch=0, step=0)
    step = done["step"]

    compiled = torch.compile(model) if args.compile else model
    peak = recipe.peak_flops(device, args.dtype)
    meter = recipe.Meter("images", resnet.flops_per_image(args), peak, job.world_size)

    for epoch in range(done["epoch"] + 1, args.epochs + 1):
        model.train()
        meter.restart()
        for images, labels in training:
            images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            with recipe.autocast(args, device):
                loss = nn.functional.cross_entropy(compiled(images), labels, label_smoothing=args.label_smoothing)
            scaler.scale(loss).backward()
            meter.add(len(images))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if not job.stepped:
                continue
            rate = schedule.get_last_lr()[0]
            schedule.step()
            step += 1
            if average:
                average.update_parameters(model)
            if step % args.log_every == 0:
                metrics = {"step": step, "loss": job.all_reduce(loss.item()), "lr": rate, **meter.lap()}
                job.log(**metrics)
                job.print(recipe.line(metrics))

        correct, seen = resnet.evaluate(average or model, validation, args, device)
        accuracy = job.all_reduce(correct, "sum") / job.all_reduce(seen, "sum")
        job.print(f"epoch {epoch}: validation accuracy {accuracy:.1%}")
        job.save(args.checkpoint, **state, epoch=epoch, step=step)


if __name__ == "__main__":
    main()
