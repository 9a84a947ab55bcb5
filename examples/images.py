"""Images for train_resnet50: folders, tar shards of WebDataset, NVIDIA DALI, or synthetic ones, all as bytes."""

from __future__ import annotations

import argparse
import io
import itertools
import random
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import recipe
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

if TYPE_CHECKING:
    import distrib

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
CROP_SHARE = 224 / 256
SHUFFLE_BUFFER = 1000


class Folder(Dataset[tuple[torch.Tensor, int]]):
    """Images in the subfolders of a folder. Each subfolder, by name, is a class."""

    def __init__(self, folder: Path, size: int, *, training: bool) -> None:
        groups = sorted(path for path in folder.iterdir() if path.is_dir())
        self.files = [
            (file, label)
            for label, group in enumerate(groups)
            for file in sorted(group.iterdir())
            if file.suffix.lower() in SUFFIXES
        ]
        self.size, self.training = size, training

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file, label = self.files[index]
        return decode(file.read_bytes(), self.size, training=self.training), label


class Shards(IterableDataset[tuple[torch.Tensor, int]]):
    """Images and classes in tar files: `name.jpg` and `name.cls` follow each other. Each rank and worker reads its own files.

    While training, the files are read again and again, in another order each time.
    """

    def __init__(self, shards: Sequence[Path], size: int, rank: int, ranks: int, *, training: bool) -> None:
        if len(shards) < ranks:
            sys.exit(f"{len(shards)} tar files are too few for {ranks} ranks")
        self.shards, self.size, self.training = list(shards[rank::ranks]), size, training

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        worker = get_worker_info()
        shards = self.shards[worker.id :: worker.num_workers] if worker else self.shards
        samples = itertools.chain.from_iterable(map(read_shard, shards))
        if self.training and shards:
            samples = shuffled(shards, random.Random(int(torch.randint(2**31, ()))))
        for image, label in samples:
            yield decode(image, self.size, training=self.training), label


def read_shard(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the encoded images of a tar file and their classes."""
    present, parts = "", {}
    with tarfile.open(path, "r|*") as shard:
        for member in shard:
            folder, _, file = member.name.rpartition("/")
            name, _, suffix = file.partition(".")
            if f"{folder}/{name}" != present:
                present, parts = f"{folder}/{name}", {}
            kind = "image" if f".{suffix.lower()}" in SUFFIXES else suffix
            if kind in ("image", "cls") and (content := shard.extractfile(member)):
                parts[kind] = content.read()
            if len(parts) == 2:
                yield parts.pop("image"), int(parts.pop("cls"))


def shuffled(shards: Sequence[Path], source: random.Random) -> Iterator[tuple[bytes, int]]:
    """Yield the samples of `shards` without end: in a random order of shards, and each from a buffer at random."""
    buffer: list[tuple[bytes, int]] = []
    while True:
        for shard in source.sample(shards, len(shards)):
            for sample in read_shard(shard):
                buffer.append(sample)
                if len(buffer) >= SHUFFLE_BUFFER:
                    place = source.randrange(len(buffer))
                    buffer[place], buffer[-1] = buffer[-1], buffer[place]
                    yield buffer.pop()
        if not buffer:
            sys.exit(f"{shards[0]}: no samples, expected files NAME.jpg and NAME.cls")
        source.shuffle(buffer)
        yield from buffer
        buffer.clear()


def decode(image: bytes, size: int, *, training: bool) -> torch.Tensor:
    """Decode an image to bytes [3, size, size]: a random crop, perhaps mirrored, or the center for an evaluation."""
    from PIL import Image  # synthetic images and DALI do without

    with Image.open(io.BytesIO(image)) as opened:
        opened.draft("RGB", (2 * size, 2 * size))  # a JPEG decoder that leaves out what is scaled away
        picture = opened.convert("RGB")
    box = random_box(*picture.size) if training else center_box(*picture.size)
    picture = picture.resize((size, size), Image.Resampling.BILINEAR, box, reducing_gap=2.0)
    if training and torch.rand(()) < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(numpy.array(picture)).permute(2, 0, 1).contiguous()


def random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Draw a box of 8 to 100 % of the area, with sides of 3:4 to 4:3 (arXiv:1409.4842)."""
    for _ in range(10):
        area, place_x, place_y = torch.rand(3).tolist()
        ratio = float(torch.empty(()).uniform_(-0.2877, 0.2877).exp())  # the logarithm of 4/3
        area = width * height * (0.08 + 0.92 * area)
        box_width, box_height = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if box_width <= width and box_height <= height:
            left, top = place_x * (width - box_width), place_y * (height - box_height)
            return left, top, left + box_width, top + box_height
    return center_box(width, height)


def center_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Return the central square of an image, without its margins."""
    side = min(width, height) * CROP_SHARE
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


class Epochs:
    """Epochs of `batches` batches each from an endless stream of one rank, whose state is not saved."""

    def __init__(self, stream: Iterable[Any], batches: int) -> None:
        self.stream, self.batches = stream, batches
        self._reader: Iterator[Any] | None = None

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        if self._reader is None:
            self._reader = iter(self.stream)
        return itertools.islice(self._reader, self.batches)

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def synthetic(args: argparse.Namespace, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch of random images and labels on the device."""
    generator = torch.Generator().manual_seed(seed)
    shape = (args.batch_size, 3, args.size, args.size)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(args.classes, (args.batch_size,), generator=generator)
    return images.to(device, memory_format=torch.channels_last), labels.to(device)


def loaders(args: argparse.Namespace, device: torch.device, job: distrib.Job | None = None) -> tuple[Any, Any]:
    """Create the loaders of this rank for training and for validation: the source follows from `--data` and `--dali`.

    `job` prepares the loaders of folders. The other sources divide themselves by rank.
    """
    rank, ranks = (job.rank, job.world_size) if job else (0, 1)
    batches = max(1, args.epoch_images // (args.batch_size * ranks))
    options: dict[str, Any] = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    options.update(batch_size=args.batch_size, pin_memory=device.type == "cuda")
    if args.data is None:
        batch = synthetic(args, device, args.seed + rank)
        return Epochs(itertools.repeat(batch), batches), [batch]
    if shards := sorted(args.data.glob("*train*.tar")):
        training = Shards(shards, args.size, rank, ranks, training=True)
        validation = Shards(sorted(args.data.glob("*val*.tar")), args.size, rank, ranks, training=False)
        return Epochs(DataLoader(training, drop_last=True, **options), batches), DataLoader(validation, **options)
    if not all((args.data / name).is_dir() for name in ("train", "val")):
        sys.exit(f"--data {args.data}: neither *train*.tar nor folders train and val")
    training = Folder(args.data / "train", args.size, training=True)
    validation = Folder(args.data / "val", args.size, training=False)
    if args.dali:
        import dali_images  # installed on request: pip install 'distrib[dali]'

        stream = dali_images.Dali(args.data / "train", args, device, (rank, ranks), training=True)
        batches = len(training) // (args.batch_size * ranks)
        return Epochs(recipe.endless(stream), batches), dali_images.Dali(args.data / "val", args, device, (rank, ranks))
    order = recipe.Shuffle(len(training), args.seed)
    both = DataLoader(training, sampler=order, drop_last=True, **options), DataLoader(validation, **options)
    return job.prepare(*both) if job else both
