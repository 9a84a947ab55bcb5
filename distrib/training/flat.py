"""Many tensors in one message."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

TYPES_OF_NCCL = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64,
}  # fmt: skip
MESSAGE_BYTES = 250 << 20
"""As DDP has it."""


def broadcast(tensors: Sequence[torch.Tensor]) -> None:
    """Makes `tensors` those of rank 0, whatever their types. Every rank."""
    for part in by_device([_real(tensor.detach()) for tensor in tensors]):
        with torch.no_grad():
            if known := [tensor for tensor in part if tensor.is_cuda and tensor.dtype in TYPES_OF_NCCL]:
                # With the fewest kernels, as DDP does.
                dist._broadcast_coalesced(dist.group.WORLD, known, MESSAGE_BYTES, 0)  # type: ignore[attr-defined, arg-type]
                part = [tensor for tensor in part if tensor.dtype not in TYPES_OF_NCCL]
            if not part:
                continue
            message = torch.cat([_bytes(tensor) for tensor in part])
            dist.broadcast(message, src=0)
            if dist.get_rank():
                sizes = [tensor.numel() * tensor.element_size() for tensor in part]
                for tensor, piece in zip(part, torch.split(message, sizes), strict=True):
                    # A piece may begin where no element of its type may: the copy of bytes does not mind.
                    _copy_bytes(tensor, piece)


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The elements of all, as float32 (float64 where one is)."""
    parts = [_real(tensor.detach()).reshape(-1) for tensor in tensors]
    wide = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    return torch.cat([part.to(wide) for part in parts])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copies into `tensors` what `flatten` made of them, or of others of their shapes."""
    with torch.no_grad():
        reals = [_real(tensor.detach()) for tensor in tensors]
        for real, piece in zip(reals, torch.split(flat, [real.numel() for real in reals]), strict=True):
            real.copy_(piece.view(real.shape))


def by_device(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """`tensors` in groups that lie on one device, without the empty ones."""
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault(tensor.device, []).append(tensor)
    return list(groups.values())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _copy_bytes(tensor: torch.Tensor, piece: torch.Tensor) -> None:
    tensor.detach().copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_bytes(thing: Any) -> bytes:
    """`thing`, with the tensors in it, as torch saves it."""
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()
