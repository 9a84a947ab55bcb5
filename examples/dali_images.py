"""Images of a folder, read and decoded by NVIDIA DALI: on the GPU, or on the CPU without one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy


class Dali:
    """Batches of one rank's images: bytes [batch, 3, size, size] and labels [batch]. Each pass is an epoch."""

    def __init__(
        self,
        folder: Path,
        args: argparse.Namespace,
        device: torch.device,
        shard: tuple[int, int],
        training: bool = False,
    ) -> None:
        self.device, size = device, args.size
        has_gpu = device.type == "cuda"

        @pipeline_def(  # type: ignore[untyped-decorator]
            batch_size=args.batch_size,
            num_threads=max(1, args.workers),
            device_id=(device.index or 0) if has_gpu else None,
            seed=args.seed + shard[0],
        )
        def pipeline() -> tuple[object, object]:
            encoded, labels = fn.readers.file(
                file_root=str(folder), shard_id=shard[0], num_shards=shard[1], random_shuffle=training, name="reader",
                pad_last_batch=True,
            )  # fmt: skip
            decoder = {"device": "mixed" if has_gpu else "cpu", "output_type": types.RGB}
            if training:
                images = fn.resize(fn.decoders.image_random_crop(encoded, **decoder), size=(size, size))
            else:
                images = fn.resize(fn.decoders.image(encoded, **decoder), resize_shorter=size * 256 // 224)
            mirror = fn.random.coin_flip() if training else 0
            images = fn.crop_mirror_normalize(
                images, crop=(size, size), mirror=mirror, dtype=types.UINT8, output_layout="CHW", mean=[0.0], std=[1.0]
            )
            return images, labels

        policy = LastBatchPolicy.DROP if training else LastBatchPolicy.PARTIAL
        self.reader = DALIClassificationIterator(
            pipeline(), reader_name="reader", auto_reset=True, last_batch_policy=policy
        )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for (batch,) in self.reader:
            yield batch["data"], batch["label"].flatten().long().to(self.device)
