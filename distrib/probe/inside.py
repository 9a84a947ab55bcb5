"""What happens inside a host: memory copies, and where there are GPUs, copies to, from and between them.

A copy of n bytes counts as n bytes, as nvbandwidth and STREAM's authors' note on copy counting by the program do.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from distrib.cluster.measured import InsideLink
from distrib.probe import samples

MEMORY_BYTES = 64 << 20
GPU_BYTES = 256 << 20
REPETITIONS = 8
COPIES = 4
"""Copies that are timed as one on a GPU: starting one costs microseconds."""


def measure(host: str) -> tuple[InsideLink, ...]:
    """The ways inside this host."""
    found = [_memory(host)]
    if os.path.exists("/dev/nvidiactl"):  # noqa: PTH110 (torch is imported only where there are GPUs)
        import torch

        if torch.cuda.is_available():
            found += gpu_links(host, torch)
    return tuple(found)


def _memory(host: str) -> InsideLink:
    """One thread's memory copy, larger than the caches of most processors."""
    source, target = memoryview(bytearray(MEMORY_BYTES)), memoryview(bytearray(MEMORY_BYTES))
    target[:] = source
    rates = []
    for _ in range(REPETITIONS):
        begun = time.perf_counter()
        target[:] = source
        rates.append(MEMORY_BYTES / (time.perf_counter() - begun))
    return _link(host, "memory", "memory", "memory", rates)


def gpu_links(host: str, torch: Any) -> list[InsideLink]:
    """Copies between pinned memory and each GPU, and between each two GPUs, by torch, timed with CUDA events."""
    count = torch.cuda.device_count()
    pinned = torch.empty(GPU_BYTES, dtype=torch.uint8, pin_memory=True)
    buffers = [torch.empty(GPU_BYTES, dtype=torch.uint8, device=f"cuda:{index}") for index in range(count)]
    found = []
    for index, buffer in enumerate(buffers):
        name = f"gpu{index}"
        found.append(_link(host, "memory", name, "PCIe", _copies(torch, index, buffer, pinned)))
        found.append(_link(host, name, "memory", "PCIe", _copies(torch, index, pinned, buffer)))
        for other, target in enumerate(buffers):
            if other != index:
                path = _path(torch, index, other)
                found.append(_link(host, name, f"gpu{other}", path, _copies(torch, index, target, buffer)))
    return found


def _copies(torch: Any, device: int, target: Any, source: Any) -> list[float]:
    """Bytes per second of repeated copies."""
    rates = []
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        for repetition in range(REPETITIONS + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            for _ in range(COPIES):
                target.copy_(source, non_blocking=True)
            end.record(stream)
            end.synchronize()
            if repetition > 1:  # the first ones wake the GPU and map the memory
                rates.append(COPIES * GPU_BYTES / (begin.elapsed_time(end) / 1000))
    return rates


def _path(torch: Any, source: int, target: int) -> str:
    """How bytes go from one GPU to another: NVLink where NVML shows one that leads there, else as peers or through memory."""
    if not torch.cuda.can_device_access_peer(source, target):
        return "through memory"
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in (source, target)]
        state = pynvml.nvmlDeviceGetP2PStatus(*handles, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if state == pynvml.NVML_P2P_STATUS_OK:
            return "NVLink"
    return "PCIe peer"


def _link(host: str, source: str, target: str, path: str, rates: list[float]) -> InsideLink:
    summary: Callable[[list[float]], samples.Summary] = samples.summarise
    rate = summary(rates)
    return InsideLink(
        host=host,
        source=source,
        target=target,
        path=path,
        bandwidth_bytes_per_second=rate.median,
        variation=rate.variation,
    )
