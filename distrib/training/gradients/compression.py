"""Interface of gradient compression, and its two simplest forms: no compression, and 16-bit gradients.

To add a compression, write a module with a `Compressor` and register it in `distrib.strategy.FORMATS`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from distrib.strategy import FORMATS, Gradients

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13

PendingCollectives = Iterator[torch.futures.Future[Any]]
"""Iterator over collectives. Each must end before the next one is requested."""
ErrorFeedback = Callable[[int, int], torch.Tensor]
"""Maps a stage and a number of elements to the compression error of earlier steps. The compressor overwrites the tensor."""


@dataclass(frozen=True, kw_only=True)
class BucketInfo:
    """The DDP bucket that is compressed, for compressors that need whole buckets."""

    index: int
    shapes: tuple[torch.Size, ...]
    step: int
    """Number of steps averaged before this one."""


class Compressor:
    """Compressed sum of gradients over ranks.

    Collectives of stage s run in `groups[s]`, so that the collectives of several buckets keep their order in each group.
    """

    stages = 1
    """Number of consecutive collectives of a sum."""
    max_in_flight = 8
    """Number of buckets on the network at the same time."""
    needs_whole_buckets = False
    """True if a bucket must be one of DDP's, described by a `BucketInfo`."""
    has_error_feedback = False
    """True if the compression error of a bucket is added to the same bucket of the next step."""
    warmup_steps = 0
    """Number of uncompressed steps at the start, if more than the three before bucket boundaries are fixed."""
    value_dtype: torch.dtype | None = None
    """Type in which values travel; None if each travels in its own type."""
    torch_hook: Callable[[Any, Any], torch.futures.Future[torch.Tensor]] | None = None
    """torch's own DDP communication hook of this format, for GPUs."""

    def __init__(self, gradients: Gradients) -> None:
        """Create the compressor of one model.

        Args:
            gradients: The format and its argument.
        """
        self.gradients = gradients

    def all_reduce(
        self, bucket: torch.Tensor, groups: list[dist.ProcessGroup], errors: ErrorFeedback, info: BucketInfo | None
    ) -> PendingCollectives:
        """Sum a bucket over the ranks, in place.

        Args:
            bucket: This rank's gradients, one dimension.
            groups: One process group for each stage.
            errors: Compression errors of earlier steps.
            info: The DDP bucket, if `needs_whole_buckets`.

        Yields:
            The future of each collective, in order.
        """
        raise NotImplementedError

    def average_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a whole DDP bucket over all ranks, on a GPU. Only with `needs_whole_buckets`.

        Args:
            bucket: torch's `GradBucket`.

        Returns:
            A future of the bucket's buffer.
        """
        raise NotImplementedError

    def rescale(self, factor: torch.Tensor) -> None:
        """Scale the compressor's own error feedback, as a GradScaler changed its scale.

        Args:
            factor: New scale by old scale, a tensor without dimensions.
        """

    def reset(self) -> None:
        """Drop state that is stored by bucket, after bucket boundaries have changed."""


class NoCompression(Compressor):
    """Exact sum of the gradients.

    Two buckets at once, because Gloo has two threads. A third bucket would wait there, in another order than in other groups.
    """

    max_in_flight = 2

    def all_reduce(
        self, bucket: torch.Tensor, groups: list[dist.ProcessGroup], errors: ErrorFeedback, info: BucketInfo | None
    ) -> PendingCollectives:
        """Sum a bucket with one all-reduce, in place.

        Args:
            bucket: This rank's gradients, one dimension.
            groups: One process group.
            errors: Not used.
            info: Not used.
        """
        yield dist.all_reduce(bucket, group=groups[0], async_op=True).get_future()


class Half(Compressor):
    """Sum in float16 or bfloat16: all-to-all of shares, sum in float32, all-gather. Each value is rounded once per collective.

    Buffers are reused in later steps: the allocation of new pages takes longer than the conversion.
    """

    stages = 2

    def __init__(self, gradients: Gradients) -> None:
        super().__init__(gradients)
        self.dtype = self.value_dtype = torch.float16 if gradients.format == "fp16" else torch.bfloat16
        self.torch_hook = (
            default_hooks.fp16_compress_hook if gradients.format == "fp16" else default_hooks.bf16_compress_hook
        )
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        """Unused buffers by size and type. Sizes are powers of 2, so that buckets of similar size share them."""

    def all_reduce(
        self, bucket: torch.Tensor, groups: list[dist.ProcessGroup], errors: ErrorFeedback, info: BucketInfo | None
    ) -> PendingCollectives:
        """Sum a bucket in 16 bits, in place.

        Args:
            bucket: This rank's gradients, one dimension, in host memory.
            groups: Two process groups.
            errors: Not used.
            info: Not used.
        """
        ranks = groups[0].size()
        share = math.ceil(bucket.numel() / ranks)
        buffers = [self._buffer(ranks * share, self.dtype), self._buffer(ranks * share, self.dtype)]
        buffers.append(self._buffer(share, torch.float32))
        sent, received, total = buffers[0][: ranks * share], buffers[1][: ranks * share], buffers[2][:share]
        sent[: bucket.numel()].copy_(bucket)
        yield dist.all_to_all_single(_bytes_of(received), _bytes_of(sent), group=groups[0], async_op=True).get_future()
        own, *others = received.view(ranks, share)
        total.copy_(own)
        for other in others:
            total += other
        own.copy_(total)
        yield all_gather_single(_bytes_of(sent), _bytes_of(own), group=groups[1], async_op=True).get_future()
        bucket.copy_(sent[: bucket.numel()])
        for buffer in buffers:
            self._free[buffer.numel(), buffer.dtype].append(buffer)

    def _buffer(self, min_elements: int, dtype: torch.dtype) -> torch.Tensor:
        elements = 1 << (min_elements - 1).bit_length()
        free = self._free.setdefault((elements, dtype), [])
        return free.pop() if free else torch.zeros(elements, dtype=dtype, device="cpu")

    def reset(self) -> None:
        self._free.clear()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # Gloo does not support bfloat16


def clear_non_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Replace NaN and Inf by 0 in place, so that error feedback does not carry them into later steps.

    Args:
        tensor: Compression errors of a step.

    Returns:
        The same tensor.
    """
    return tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def create_compressor(gradients: Gradients) -> Compressor:
    """Create the registered compressor of a format.

    Args:
        gradients: The format and its argument.

    Returns:
        A compressor for one model.
    """
    module, _, kind = FORMATS[gradients.format].compressor.partition(":")
    compressor: Compressor = getattr(importlib.import_module(module), kind)(gradients)
    return compressor
