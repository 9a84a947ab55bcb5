"""Workarounds for defects of Python and torch."""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist


def make_fork_safe() -> None:
    """Let other threads leave Python before this process forks, as for the workers of a DataLoader. Call it once.

    Before 3.12 Python takes the lock of its list of threads in a forked process before it makes it anew (CPython issue 112275). If
    another thread held it, the process waits forever. Gloo's threads hold it when they free a tensor just after an all-reduce.
    """
    last = 0.0

    def rest() -> None:
        nonlocal last
        if time.monotonic() - last > 0.1:  # else the workers of one loader, which calls no collective between its forks
            time.sleep(0.01)  # a thread that enters or leaves Python has done so
        last = time.monotonic()

    if sys.version_info < (3, 12):
        os.register_at_fork(before=rest)


def wait_for_gloo_callbacks() -> None:
    """Give Gloo's threads time to free the tensors of the last collectives, for which they take Python's lock.

    Before torch 2.8, destroying their group holds the lock and waits for them forever (pytorch pull request 154976). A thread that
    requests the lock while Python exits aborts the process (one exit of four with torch 2.13; pytorch pull request 179291).
    """
    time.sleep(0.1)


def unbind_device() -> None:
    """Unbind the default group from its device, which was named so that NCCL connects at once.

    A later group of some ranks, even a Gloo group, would be split from a bound group. The other ranks would then wait forever
    (pytorch issue 145376).
    """
    dist.group.WORLD.bound_device_id = None  # type: ignore[union-attr]
