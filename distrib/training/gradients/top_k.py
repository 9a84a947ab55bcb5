"""Top-k gradient compression: only the elements of largest magnitude are sent, with their indices."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from distrib.training.gradients.compression import (
    BucketInfo,
    Compressor,
    ErrorFeedback,
    PendingCollectives,
    all_gather_single,
    clear_non_finite,
)


class TopK(Compressor):
    """Sum of the elements of largest magnitude. Error feedback keeps the rest (Stich, Cordonnier, Jaggi 2018, arXiv:1809.07599)."""

    has_error_feedback = True

    def all_reduce(
        self, bucket: torch.Tensor, groups: list[dist.ProcessGroup], errors: ErrorFeedback, info: BucketInfo | None
    ) -> PendingCollectives:
        """Sum the largest elements of all ranks, in place.

        Args:
            bucket: This rank's gradients, one dimension.
            groups: One process group.
            errors: Elements that were not sent in earlier steps.
            info: Not used.
        """
        ranks, count = groups[0].size(), self._count(bucket.numel())
        wanted = errors(0, bucket.numel())
        wanted += bucket
        indices = torch.topk(wanted.abs(), count, sorted=False).indices
        values = wanted[indices]
        wanted[indices] = 0
        clear_non_finite(wanted)
        sent = torch.cat([values.view(torch.uint8), indices.to(torch.int32).view(torch.uint8)])
        received = torch.empty(ranks * sent.numel(), dtype=torch.uint8, device=sent.device)
        yield all_gather_single(received, sent, group=groups[0], async_op=True).get_future()
        bucket.zero_()
        # Rank by rank: a GPU adds duplicate indices in any order, and replicas would diverge.
        for values, indices in received.view(ranks, 2, 4 * count):
            bucket.index_add_(0, indices.view(torch.int32), values.view(torch.float32).to(bucket.dtype))

    def _count(self, elements: int) -> int:
        """Compute the number of elements of a bucket that are sent."""
        return max(1, math.ceil((self.gradients.fraction or 1.0) * elements)) if elements else 0
