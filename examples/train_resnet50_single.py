"""Train ResNet-50 on images, on one GPU or CPU. `train_resnet50.py` does so on several."""

from __future__ import annotations

import images as data
import recipe
import resnet
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def main() -> None:
    args = resnet.arguments(__doc__)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model = resnet.resnet(args).to(device, memory_format=torch.channels_last)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.ema), use_buffers=True) if args.ema else None
    optimizer = resnet.sgd(model, args.lr, device)
    scaler = recipe.grad_scaler(args, device)
    training, validation = data.loaders(args, device)
    epoch_steps = len(training) / args.accumulate
    schedule = recipe.warmup_cosine(
        optimizer, round(args.warmup_epochs * epoch_steps), round(args.epochs * epoch_steps)
    )
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "loader": training}
    state.update({"average": average} if average else {})
    done = recipe.restore(args.checkpoint, **state, epoch=0, step=0)
    step = done["step"]

    compiled = torch.compile(model) if args.compile else model
    peak = recipe.peak_flops(device, args.dtype)
    meter = recipe.Meter("images", resnet.flops_per_image(args), peak)

    for epoch in range(done["epoch"] + 1, args.epochs + 1):
        model.train()
        meter.restart()
        for images, labels in training:
            images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            with recipe.autocast(args, device):
                loss = nn.functional.cross_entropy(compiled(images), labels, label_smoothing=args.label_smoothing)
            scaler.scale(loss / args.accumulate).backward()
            meter.add(len(images))
            if meter.batches % args.accumulate:
                continue
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            rate = schedule.get_last_lr()[0]
            schedule.step()
            step += 1
            if average:
                average.update_parameters(model)
            if step % args.log_every == 0:
                metrics = {"step": step, "loss": loss.item(), "lr": rate, **meter.lap()}
                print(recipe.line(metrics))

        correct, seen = resnet.evaluate(average or model, validation, args, device)
        print(f"epoch {epoch}: validation accuracy {correct / seen:.1%}")
        recipe.save(args.checkpoint, **state, epoch=epoch, step=step)


if __name__ == "__main__":
    main()
