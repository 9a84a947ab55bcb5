"""What of the gradients crosses the wire: bytes, by which collective, and what packing them costs."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from distrib.bandwidth_model.bucket_bounds import Piece
from distrib.strategy import Gradients

TOPK_BYTES = 8
"""Of each value that top-k keeps: the value and its place."""


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """`size_bytes` of each rank; `passes`: how often packing and unpacking go over the piece's own bytes."""

    size_bytes: float
    collective: Literal["all_reduce", "all_gather"] = "all_reduce"
    passes: float = 0.0


def payload_of(piece: Piece, gradients: Gradients) -> Payload:
    """What a piece becomes on the wire."""
    if gradients.format in ("fp16", "bf16"):
        # 2 bytes an element, whatever it had; written once, read back once.
        return Payload(size_bytes=min(piece.size_bytes, 2.0 * piece.elements), passes=3.0)
    if gradients.format == "int8":
        return Payload(size_bytes=min(piece.size_bytes, 1.0 * piece.elements), passes=4.0)
    if gradients.format == "powersgd":
        # A matrix of a x b becomes rank x (a + b), at least 2 rank sqrt(ab) (Vogels et al., arXiv:1905.13727); shapes
        # are not known here, so each tensor counts as square.
        rank = gradients.rank or 1
        each = piece.elements / piece.tensors
        packed = piece.tensors * min(each, 2 * rank * math.sqrt(each)) * 4
        return Payload(size_bytes=min(piece.size_bytes, packed), passes=4.0 + 2 * rank)
    if gradients.format == "topk":
        kept = (gradients.fraction or 0.01) * piece.elements * TOPK_BYTES
        return Payload(size_bytes=kept, collective="all_gather", passes=8.0)
    return Payload(size_bytes=piece.size_bytes)
