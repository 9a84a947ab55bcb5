"""Shared code of train_resnet50: the model, its FLOPs, the optimizer and options."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import recipe
import torch
from torch import nn


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution without bias, and its normalization."""
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 with a residual connection. The 3 x 3 one has the stride (v1.5)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        reduced = [*convolution(inputs, width, 1), nn.ReLU(inplace=True)]
        spatial = [*convolution(width, width, 3, stride), nn.ReLU(inplace=True)]
        self.residual = nn.Sequential(*reduced, *spatial, *convolution(width, 4 * width, 1))
        nn.init.zeros_(self.residual[-1].weight)  # each block begins as the identity
        is_same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*convolution(inputs, 4 * width, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.residual(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """ResNet v1.5 (arXiv:1512.03385), by default ResNet-50: bytes [batch, 3, height, width] to logits [batch, classes]."""

    def __init__(self, classes: int = 1000, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        for name, values in (("mean", (123.675, 116.28, 103.53)), ("deviation", (58.395, 57.12, 57.375))):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)
        layers = [*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        inputs = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
                inputs = 4 * width << stage
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers((images - self.mean) / self.deviation)


def resnet(args: argparse.Namespace) -> ResNet:
    """Create the model of the options."""
    return ResNet(args.classes, args.blocks, args.width)


def flops_per_image(args: argparse.Namespace) -> int:
    """Return the FLOPs of training on one image: three times those of the convolutions and products of a forward pass."""
    side = math.ceil(args.size / 2)
    products = side**2 * 3 * 7 * 7 * args.width
    side, inputs = math.ceil(side / 2), args.width
    for stage, blocks in enumerate(args.blocks):
        width = args.width << stage
        for block in range(blocks):
            products += side**2 * inputs * width
            if stage and not block:
                side = math.ceil(side / 2)
            products += side**2 * (9 * width + 4 * width + (0 if block else 4 * inputs)) * width
            inputs = 4 * width
    return 3 * 2 * (products + inputs * args.classes)


def sgd(model: nn.Module, lr: float, device: torch.device) -> torch.optim.SGD:
    """Create the optimizer: fused on GPUs, weight decay for matrices and convolutions only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 5e-5}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr, momentum=0.9, nesterov=True, fused=device.type == "cuda")


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any, args: argparse.Namespace, device: torch.device) -> tuple[float, int]:
    """Return the number of correctly classified images in `loader`, and the number of images."""
    model.eval()
    correct, images_seen = torch.zeros((), device=device), 0
    for images, labels in loader:
        images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
        with recipe.autocast(args, device):
            correct += (model(images).argmax(1) == labels.to(device)).sum()
        images_seen += len(images)
    return correct.item(), images_seen


def arguments(description: str | None) -> argparse.Namespace:
    """Parse the options of a training script."""
    options = recipe.parser(description, batch_size=256, lr=0.1, checkpoint="resnet50.pt")
    options.add_argument("--data", type=Path, metavar="DIR", help="images or tar shards (default: synthetic images)")
    options.add_argument("--dali", action="store_true", help="read and decode images with NVIDIA DALI")
    options.add_argument("--epochs", type=int, default=90)
    options.add_argument("--warmup-epochs", type=int, default=5)
    options.add_argument(
        "--epoch-images", type=int, default=1_281_167, help="of all ranks, for shards and synthetic ones"
    )
    options.add_argument("--size", type=int, default=224, help="height and width of an image")
    options.add_argument("--label-smoothing", type=float, default=0.1)
    options.add_argument(
        "--ema", type=float, metavar="DECAY", help="evaluate an average of the parameters, such as 0.9999"
    )
    options.add_argument("--classes", type=int, default=1000)
    options.add_argument("--blocks", type=int, nargs=4, default=(3, 4, 6, 3), help="of the four stages")
    options.add_argument("--width", type=int, default=64)
    tiny = {"batch_size": 8, "size": 32, "classes": 10, "blocks": (1, 1, 1, 1), "width": 8, "lr": 0.02}
    return recipe.parse(
        options, **tiny, epochs=2, warmup_epochs=1, epoch_images=160, checkpoint=Path("resnet50-smoke.pt")
    )
