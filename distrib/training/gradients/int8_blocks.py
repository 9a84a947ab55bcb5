"""8-bit gradient compression with one scale per block of elements."""

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

BLOCK_ELEMENTS = 256
"""Elements that share a scale. Scales add 1.6 % more bytes, and a large value affects the precision of its own block only."""


class Int8Blocks(Compressor):
    """Sum in 8 bits: the largest magnitude of each block becomes 127 (block-wise quantization, Dettmers et al. 2022, arXiv:2110.02861).

    Each rank sums a share, as in `Half`. Both collectives have error feedback (Tang et al. 2021, arXiv:2102.02888).
    """

    stages, has_error_feedback = 2, True

    def all_reduce(
        self, bucket: torch.Tensor, groups: list[dist.ProcessGroup], errors: ErrorFeedback, info: BucketInfo | None
    ) -> PendingCollectives:
        """Sum a bucket in 8 bits, in place.

        Args:
            bucket: This rank's gradients, one dimension.
            groups: Two process groups.
            errors: Compression errors of earlier steps.
            info: Not used.
        """
        ranks, rank = groups[0].size(), groups[0].rank()
        share = self.padded(math.ceil(bucket.numel() / ranks))
        rows = torch.zeros(ranks, share, dtype=torch.float32, device=bucket.device)
        flat = rows.view(-1)[: bucket.numel()]
        flat.copy_(bucket)
        left_out = errors(0, bucket.numel())
        flat += left_out
        sent = self.encode(rows)
        _record(left_out, flat, self.decode(sent, share).view(-1)[: bucket.numel()])
        received = torch.empty_like(sent)
        yield dist.all_to_all_single(received, sent, group=groups[0], async_op=True).get_future()
        total = self.decode(received, share).sum(dim=0, keepdim=True)
        length = max(0, min((rank + 1) * share, bucket.numel()) - rank * share)
        left_out = errors(1, length)
        total[0, :length] += left_out
        own = self.encode(total)
        _record(left_out, total[0, :length], self.decode(own, share)[0, :length])
        gathered = torch.empty(ranks, own.shape[1], dtype=own.dtype, device=own.device)
        yield all_gather_single(gathered.view(-1), own.view(-1), group=groups[1], async_op=True).get_future()
        bucket.copy_(self.decode(gathered, share).view(-1)[: bucket.numel()])

    @staticmethod
    def padded(elements: int) -> int:
        """Round up to whole blocks.

        Args:
            elements: Any number of elements.

        Returns:
            A multiple of `BLOCK_ELEMENTS`.
        """
        return BLOCK_ELEMENTS * math.ceil(elements / BLOCK_ELEMENTS)

    @staticmethod
    def encode(rows: torch.Tensor) -> torch.Tensor:
        """Quantize rows of whole blocks.

        Args:
            rows: float32, rows x elements.

        Returns:
            uint8, rows x (elements + 4 bytes of scale for each block).
        """
        blocks = rows.view(len(rows), -1, BLOCK_ELEMENTS)
        scales = torch.linalg.vector_norm(blocks, ord=math.inf, dim=2, keepdim=True) / 127
        values = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        return torch.cat(
            [values.view(len(rows), -1).view(torch.uint8), scales.view(len(rows), -1).view(torch.uint8)], dim=1
        )

    @staticmethod
    def decode(rows: torch.Tensor, elements: int) -> torch.Tensor:
        """Dequantize the result of `encode`.

        Args:
            rows: uint8, as `encode` returns them.
            elements: Elements of each row.

        Returns:
            float32, rows x elements.
        """
        values = rows[:, :elements].view(torch.int8).view(len(rows), -1, BLOCK_ELEMENTS).float()
        scales = rows[:, elements:].contiguous().view(torch.float32).view(len(rows), -1, 1)
        return (values * scales).view(len(rows), elements)


def _record(errors: torch.Tensor, wanted: torch.Tensor, sent: torch.Tensor) -> None:
    clear_non_finite(torch.sub(wanted, sent, out=errors))
