"""Checksums of tensors and batches, to compare them between ranks without sending them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch


def element_sum(parameter: torch.Tensor) -> torch.Tensor:
    """Compute the sum of the elements in float64 (complex128), to notice changes.

    Args:
        parameter: A tensor of any shape.

    Returns:
        A tensor without dimensions.
    """
    return parameter.detach().sum(dtype=torch.complex128 if parameter.is_complex() else torch.float64)


def content_digest(batch: Any) -> str:
    """Compute a SHA-256 digest of the tensors, numbers and strings in a batch.

    Args:
        batch: A tensor, number or string, or tuples, lists and dicts of them.

    Returns:
        The digest in hexadecimal; empty if a tensor cannot be read.
    """
    digest = hashlib.sha256()
    try:
        _feed(digest, batch)
    except (RuntimeError, NotImplementedError, TypeError):
        return ""
    return digest.hexdigest()


def sequence_digest(values: Sequence[Any], *, items: int = 32) -> str:
    """Compute a digest of the length of a sequence and of some items spread over it.

    Args:
        values: Indices or batches of indices, as a sampler yields them.
        items: Number of items.

    Returns:
        The length and the digest in hexadecimal.
    """
    chosen = [values[len(values) * part // items] for part in range(items)] if len(values) else []
    return f"{len(values)} {content_digest([item.tolist() if hasattr(item, 'tolist') else item for item in chosen])}"


_INTEGERS = {dtype.itemsize: dtype for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)}


def split_for_sum(values: torch.Tensor, *, max_elements: int = 1 << 22) -> tuple[torch.Tensor, ...]:
    """Split a tensor along its longest dimension, so that a conversion to 8 bytes per element needs little memory.

    Args:
        values: A tensor of any shape.
        max_elements: Approximate limit of each view.

    Returns:
        Views of the tensor.
    """
    if not values.dim():
        return (values,)
    longest = max(range(values.dim()), key=values.size)
    rows = max_elements * values.size(longest) // max(1, values.numel())
    return torch.split(values, max(1, rows), longest)


def bit_sum(values: torch.Tensor) -> int:
    """Compute the sum of all elements' bits, read as integers.

    Args:
        values: A tensor of any shape.

    Returns:
        The sum; 0 for tensors whose memory cannot be read, such as sparse ones.
    """
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    try:
        bits = values.view(_INTEGERS[values.element_size()])
        return sum(int(part.sum(dtype=torch.int64)) for part in split_for_sum(bits))
    except (KeyError, RuntimeError, NotImplementedError, TypeError):
        return 0


def _feed(digest: hashlib._Hash, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            digest.update(repr((value.dtype, value.shape)).encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in value:
            _feed(digest, key)
            _feed(digest, value[key])
    elif isinstance(value, (str, bytes, int, float, bool, type(None))):
        digest.update(repr(value).encode())
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(digest, item)
