"""Low-rank gradient compression: torch's PowerSGD on CPU hosts and GPUs (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from distrib.strategy import Gradients
from distrib.training.gradients.compression import (
    BucketInfo,
    Compressor,
    ErrorFeedback,
    PendingCollectives,
    clear_non_finite,
)

POWER_SGD_WARMUP_STEPS = 10
"""Uncompressed steps before PowerSGD begins: the first gradients are large, and DDP rebuilds its buckets."""


class PowerSgd(Compressor):
    """torch's PowerSGD with error feedback and warm start, whose state stays finite.

    torch adds error feedback to all later gradients and starts from the last matrices. A NaN or zero in them would persist.
    Only one bucket at a time: torch's callbacks wait for collectives inside Gloo's threads, so two buckets would deadlock.
    """

    max_in_flight, needs_whole_buckets, warmup_steps = 1, True, POWER_SGD_WARMUP_STEPS

    def __init__(self, gradients: Gradients) -> None:
        super().__init__(gradients)
        self._rank = gradients.rank or 1
        self._state: PowerSGDState | None = None
        self._random: dict[int, torch.Tensor] = {}

    def _state_in(self, group: dist.ProcessGroup | None) -> Any:
        """Return torch's state, created at the first call."""
        if self._state is None:
            self._state = PowerSGDState(
                group,
                matrix_approximation_rank=self._rank,
                start_powerSGD_iter=POWER_SGD_WARMUP_STEPS,
                orthogonalization_epsilon=1e-8,  # a layer without gradients must not become NaN
            )
        return self._state

    def average(self, bucket: Any, state: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a DDP bucket over a process group.

        Args:
            bucket: A `GradBucket`, or an object with the same methods.
            state: The result of `_state_in`.

        Returns:
            A future of the bucket's buffer.
        """
        index = bucket.index()

        def repair(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            if index in state.error_dict:
                clear_non_finite(state.error_dict[index])
                start = clear_non_finite(state.q_memory_dict[index])
                start += self._random_for(index, start)  # the same on all ranks, as the matrix is
            return done.value()

        # torch seeds the first matrix of a bucket, and with it all GPUs: dropout would be the same on all ranks.
        buffer = bucket.buffer()
        seeded = [buffer.device.index] if buffer.is_cuda and index not in state.q_memory_dict else []
        with torch.random.fork_rng(devices=seeded, enabled=bool(seeded)):
            future = powerSGD_hook(state, _RowsBucket(bucket))
        return future.then(repair)

    def average_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a whole DDP bucket over all ranks, on a GPU.

        Args:
            bucket: torch's `GradBucket`.

        Returns:
            A future of the bucket's buffer.
        """
        return self.average(bucket, self._state_in(dist.group.WORLD))

    def all_reduce(
        self, bucket: torch.Tensor, groups: list[dist.ProcessGroup], errors: ErrorFeedback, info: BucketInfo | None
    ) -> PendingCollectives:
        """Sum a bucket over the ranks, in place.

        Args:
            bucket: This rank's gradients, one dimension.
            groups: One process group.
            errors: Not used: torch stores the compression errors.
            info: The DDP bucket.
        """
        assert info is not None
        state = self._state_in(groups[0])
        state.iter = info.step  # torch counts last buckets, but inter-host groups take buckets in turn
        bucket.mul_(groups[0].size())  # torch averages, but the caller expects a sum
        yield self.average(_BucketView(bucket, info), state)

    def rescale(self, factor: torch.Tensor) -> None:
        """Scale torch's error feedback.

        Args:
            factor: New scale by old scale, a tensor without dimensions.
        """
        if self._state is not None:
            for errors in self._state.error_dict.values():
                errors *= factor

    def reset(self) -> None:
        if self._state is not None:
            self._state.error_dict.clear()

    def _random_for(self, index: int, start: torch.Tensor) -> torch.Tensor:
        if index not in self._random:
            numbers = torch.randn(start.shape, generator=torch.Generator().manual_seed(index), device="cpu")
            # Negligible beside other values, but PowerSGD's matrices do not become zero.
            self._random[index] = (max(1e-10, torch.finfo(start.dtype).tiny) * numbers).to(start)
        return self._random[index]


class _RowsBucket:
    """Bucket for torch's hook, which needs rows: scalars become vectors of length 1, and empty gradients are left out."""

    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def gradients(self) -> list[torch.Tensor]:
        filled = (gradient for gradient in self._bucket.gradients() if gradient.numel())
        return [gradient if gradient.dim() else gradient.view(1) for gradient in filled]


class _BucketView:
    """DDP bucket interface over a tensor, with the methods that torch's hook calls."""

    def __init__(self, buffer: torch.Tensor, info: BucketInfo) -> None:
        self._buffer, self._info = buffer, info

    def index(self) -> int:
        return self._info.index

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def is_last(self) -> bool:
        return False  # see PowerSgd.all_reduce

    def gradients(self) -> list[torch.Tensor]:
        parts = torch.split(self._buffer, [shape.numel() for shape in self._info.shapes])
        return [part.view(shape) for part, shape in zip(parts, self._info.shapes, strict=True)]
