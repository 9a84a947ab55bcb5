"""Memory that a worker shares with a server or another worker of its host: gradients and values there are not sent.

The worker creates it without a name (memfd) and sends its process and descriptor number. A random token at the end proves that
both processes see the same memory. If they do not (containers, other users), all data is sent, as between hosts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch

TOKEN_BYTES = 16


class SharedArena:
    """Memory of a worker for the gradients and values of chunks of one table.

    Args:
        sizes: Bytes of each chunk, by number.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        starts, total = _layout(sizes)
        self._descriptor = os.memfd_create("distrib-parameters", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, total + TOKEN_BYTES)
        self._memory = mmap.mmap(self._descriptor, total + TOKEN_BYTES)
        token = os.urandom(TOKEN_BYTES)
        self._memory[total:] = token
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.gradients = {chunk: whole[at : at + sizes[chunk]] for chunk, (at, _) in starts.items()}
        self.values = {chunk: whole[at : at + sizes[chunk]] for chunk, (_, at) in starts.items()}
        self.description = {"process": os.getpid(), "descriptor": self._descriptor, "token": token.hex()}
        """Values from which `MappedArena` finds it."""
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    def pin(self) -> None:
        """Pin the memory for fast copies from and to this process's GPU, if it has one."""
        if torch.cuda.is_available():
            whole = torch.frombuffer(self._memory, dtype=torch.uint8)
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if not int(runtime.cudaHostRegister(whole.data_ptr(), whole.numel(), 0)):
                # The driver would keep the pages after they are unmapped.
                weakref.finalize(self, runtime.cudaHostUnregister, whole.data_ptr()).atexit = False
            else:  # slower, not wrong
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device="cuda")  # or torch would blame the next kernel for it


class MappedArena:
    """A `SharedArena` of another process of this host. `gradients` and `values` are bytes by chunk.

    Args:
        description: The arena's `description`.
        sizes: Bytes of each chunk, by number.

    Raises:
        OSError: The memory is not reachable from this process.
    """

    def __init__(self, description: Mapping[str, Any], sizes: Mapping[int, int]) -> None:
        starts, total = _layout(sizes)
        path = f"/proc/{int(description['process'])}/fd/{int(description['descriptor'])}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != total + TOKEN_BYTES:
                raise OSError(f"{path} is another file")
            memory = mmap.mmap(descriptor, total + TOKEN_BYTES)
        finally:
            os.close(descriptor)
        if memory[total:].hex() != description["token"]:
            raise OSError(f"{path} is another file")
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.gradients = {chunk: whole[at : at + sizes[chunk]] for chunk, (at, _) in starts.items()}
        self.values = {chunk: whole[at : at + sizes[chunk]] for chunk, (_, at) in starts.items()}
        for gradient in self.gradients.values():
            gradient.is_borrowed = True  # type: ignore[attr-defined]


def is_borrowed(memory: torch.Tensor) -> bool:
    """Return True if memory belongs to a worker, so that it must not be changed or kept.

    Args:
        memory: A gradient.
    """
    return getattr(memory, "is_borrowed", False)


def _layout(sizes: Mapping[int, int]) -> tuple[dict[int, tuple[int, int]], int]:
    """Return the offsets of each chunk's gradient and value, each on its own pages, and the total size."""
    starts, at = {}, 0
    for chunk in sorted(sizes):
        padded = -(-sizes[chunk] // mmap.PAGESIZE) * mmap.PAGESIZE
        starts[chunk] = at, at + padded
        at += 2 * padded
    return starts, at
