"""Memory that a worker shares with a server or another worker of its own host: what is there need not be sent.

The worker makes it without a name (memfd) and tells the other its process and descriptor number; a random word at its end shows that
both see the same memory. Where they do not (containers, other users) everything goes over the socket, as between hosts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch

WORD_BYTES = 16
PAGE_BYTES = 4096


class Arena:
    """On a worker: room for the gradients and the values of chunks of one table, each of `sizes` bytes."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        starts, total = _layout(sizes)
        self._descriptor = os.memfd_create("distrib-parameters", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, total + WORD_BYTES)
        self._memory = mmap.mmap(self._descriptor, total + WORD_BYTES)
        word = os.urandom(WORD_BYTES)
        self._memory[total:] = word
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.gradients = {chunk: whole[at : at + sizes[chunk]] for chunk, (at, _) in starts.items()}
        self.values = {chunk: whole[at : at + sizes[chunk]] for chunk, (_, at) in starts.items()}
        self.about = {"process": os.getpid(), "descriptor": self._descriptor, "word": word.hex()}
        """What others need to find it."""
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    def pin(self) -> None:
        """Keeps it where this process's GPU copies to and from fastest."""
        if torch.cuda.is_available():
            whole = torch.frombuffer(self._memory, dtype=torch.uint8)
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if not int(runtime.cudaHostRegister(whole.data_ptr(), whole.numel(), 0)):
                # The driver would keep pages that nobody maps any more.
                weakref.finalize(self, runtime.cudaHostUnregister, whole.data_ptr()).atexit = False
            else:  # slower, not wrong
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device="cuda")  # or torch would blame the next kernel for it


class Shared:
    """On the other side: the same memory. `gradients` and `values` are bytes by chunk. Raises OSError where it cannot be seen."""

    def __init__(self, about: Mapping[str, Any], sizes: Mapping[int, int]) -> None:
        starts, total = _layout(sizes)
        path = f"/proc/{int(about['process'])}/fd/{int(about['descriptor'])}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != total + WORD_BYTES:
                raise OSError(f"{path} is another file")
            memory = mmap.mmap(descriptor, total + WORD_BYTES)
        finally:
            os.close(descriptor)
        if memory[total:].hex() != about["word"]:
            raise OSError(f"{path} is another file")
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.gradients = {chunk: whole[at : at + sizes[chunk]] for chunk, (at, _) in starts.items()}
        self.values = {chunk: whole[at : at + sizes[chunk]] for chunk, (_, at) in starts.items()}
        for gradient in self.gradients.values():
            gradient.is_borrowed = True  # type: ignore[attr-defined]


def is_borrowed(memory: torch.Tensor) -> bool:
    """Whether the memory is a worker's own, which must not be changed or kept."""
    return getattr(memory, "is_borrowed", False)


def _layout(sizes: Mapping[int, int]) -> tuple[dict[int, tuple[int, int]], int]:
    """Where the gradient and the value of each chunk begin, and the size of all; each on pages of its own."""
    starts, at = {}, 0
    for chunk in sorted(sizes):
        room = -(-sizes[chunk] // PAGE_BYTES) * PAGE_BYTES
        starts[chunk] = at, at + room
        at += 2 * room
    return starts, at
