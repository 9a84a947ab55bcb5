"""What happens inside a host: memory copies, and where there are GPUs, copies to, from and between them.

A copy of n bytes counts as n bytes, as nvbandwidth and STREAM's authors' note on copy counting by the program do.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distrib.cluster.measurements import IntraNodeLinkMeasurement
from distrib.probe.bench import statistics
from distrib.probe.protocol import first_line
from distrib.utils.cpus import read_cpu_list

MEMORY_BYTES = 64 << 20
GPU_BYTES = 64 << 20
REPETITIONS = 8
COPIES = 4
"""Copies that are timed as one on a GPU: starting one costs microseconds."""

NO_GPUS = ("", "-1", "NoDevFiles")
"""What CUDA_VISIBLE_DEVICES is where GPUs shall not be used; the last is Slurm's word."""

WARM = 3
"""Copies that wake the GPU, map the memory and open the way between two GPUs, and do not count."""


def measure(
    host: str, seconds: float, *, memory: bool = True, backwards: bool = True, deadline: float = float("inf")
) -> tuple[tuple[IntraNodeLinkMeasurement, ...], tuple[str, ...]]:
    """The ways inside this host, and what could not be measured of them.

    Each way from, to and between GPUs takes about `seconds`; none is begun after `deadline` (monotonic seconds). Without
    `memory` copies within it are left out, and without `backwards` one direction between two GPUs.
    """
    found = [_memory(host)] if memory else []
    problems: tuple[str, ...] = ()
    # torch is imported only where there are GPUs; the second are those under WSL.
    if any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
        import torch

        if torch.version.cuda and os.environ.get("CUDA_VISIBLE_DEVICES") not in NO_GPUS:
            try:
                torch.cuda.init()  # type: ignore[no-untyped-call]  # says why, where is_available() says no
            except Exception as error:  # one of its kinds is torch's own, and no RuntimeError
                return tuple(found), (f"GPUs: {first_line(error)}",)
        if torch.cuda.is_available():
            links, problems = gpu_links(host, torch, seconds, backwards=backwards, deadline=deadline)
            found += links
    return tuple(found), problems


def _memory(host: str) -> IntraNodeLinkMeasurement:
    """One thread's memory copy, larger than the caches of most processors."""
    source, target = memoryview(bytearray(MEMORY_BYTES)), memoryview(bytearray(MEMORY_BYTES))
    target[:] = source
    source[:] = target  # what nobody has written to is one page of zeros, which a cache holds
    rates = []
    for _ in range(REPETITIONS):
        begun = time.perf_counter()
        target[:] = source
        rates.append(MEMORY_BYTES / (time.perf_counter() - begun))
    return _link(host, "memory", "memory", "memory", rates)


def gpu_links(
    host: str, torch: Any, seconds: float, *, backwards: bool = True, deadline: float = float("inf")
) -> tuple[list[IntraNodeLinkMeasurement], tuple[str, ...]]:
    """Copies between pinned memory and each GPU, inside each and between each two GPUs, by torch, timed with CUDA events.

    What fails, such as a GPU whose memory is full, costs its own ways only; the second value says what and why.
    """
    gpus = {f"gpu{number}": index for index, number in enumerate(_numbers(torch))}
    buffers: dict[str, tuple[Any, Any, Any]] = {}  # two on the GPU, one in the memory beside it
    why: dict[str, str] = {}  # each reason once, and where it was met first
    for name, index in gpus.items():
        try:
            with _beside(torch, index):
                pinned = torch.empty(GPU_BYTES, dtype=torch.uint8, pin_memory=True)
            here = [torch.empty(GPU_BYTES, dtype=torch.uint8, device=f"cuda:{index}") for _ in range(2)]
            buffers[name] = here[0], here[1], pinned
        except RuntimeError as error:
            why.setdefault(first_line(error), name)
    ways = [way for name in gpus for way in (("memory", name), (name, "memory"), (name, name))]
    ways += [(one, other) for one in gpus for other in gpus if one < other or (backwards and one != other)]
    found: list[IntraNodeLinkMeasurement] = []
    for number, (source, target) in enumerate(ways):
        if time.monotonic() > deadline:
            why[f"for time, {len(ways) - number} of {len(ways)} ways were left out"] = "GPUs"
            break
        if not {source, target} - {"memory"} <= buffers.keys():
            continue
        try:
            path = _path(torch, gpus[source], gpus[target]) if source in gpus and target in gpus else "PCIe"
            device = gpus[source] if source in gpus else gpus[target]
            begin = buffers[target][2] if source == "memory" else buffers[source][0]
            end = buffers[source][2] if target == "memory" else buffers[target][1]
            rates = _copies(torch, device, end, begin, seconds)
            found.append(_link(host, source, target, path, rates))
        except RuntimeError as error:
            why.setdefault(first_line(error), f"{source} to {target}")
    return found, tuple(f"{where}: {what}" for what, where in why.items())


def _handle(torch: Any, index: int) -> Any:
    """NVML's handle of one of torch's GPUs, which are those that it may see, counted from 0."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")


def _numbers(torch: Any) -> list[int]:
    """The numbers of torch's GPUs by NVML, which are those of nvidia-smi and of topology files; torch's own where NVML cannot tell."""
    count = torch.cuda.device_count()
    with contextlib.suppress(Exception):
        import pynvml

        numbers = [int(pynvml.nvmlDeviceGetIndex(_handle(torch, index))) for index in range(count)]
        if len(set(numbers)) == count:
            return numbers
    return list(range(count))


@contextlib.contextmanager
def _beside(torch: Any, index: int) -> Iterator[None]:
    """Memory that is asked for here lies with the processors beside the GPU, where its rank is bound when it trains."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(Exception):
        import pynvml

        told = pynvml.nvmlDeviceGetPciInfo(_handle(torch, index)).busId
        bus = (told.decode() if isinstance(told, bytes) else told).lower()[-12:]
        os.sched_setaffinity(0, read_cpu_list(Path(f"/sys/bus/pci/devices/{bus}/local_cpulist")) & before or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _copies(torch: Any, device: int, target: Any, source: Any, seconds: float) -> list[float]:
    """Bytes per second of repeated copies: at most `REPETITIONS`, and on a slow way those of `seconds`."""
    rates: list[float] = []
    spent = 0.0
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        for _ in range(WARM):
            target.copy_(source, non_blocking=True)
        stream.synchronize()
        while not rates or (len(rates) < REPETITIONS and spent < seconds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            target.copy_(source, non_blocking=True)  # it is at work while it is told of those that count
            begin.record(stream)
            for _ in range(COPIES):
                target.copy_(source, non_blocking=True)
            end.record(stream)
            end.synchronize()
            taken = begin.elapsed_time(end) / 1000
            spent += taken
            rates.append(COPIES * GPU_BYTES / taken)
    return rates


def _path(torch: Any, source: int, target: int) -> str:
    """How bytes go from one GPU to another: NVLink where NVML shows one that leads there, else as peers or through memory."""
    if source == target:
        return "its own memory"
    if not torch.cuda.can_device_access_peer(source, target):
        return "through memory"
    with contextlib.suppress(Exception):
        import pynvml

        handles = [_handle(torch, index) for index in (source, target)]
        state = pynvml.nvmlDeviceGetP2PStatus(*handles, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if state == pynvml.NVML_P2P_STATUS_OK:
            return "NVLink"
    return "PCIe peer"


def _link(host: str, source: str, target: str, path: str, rates: list[float]) -> IntraNodeLinkMeasurement:
    rate = statistics.summarise(rates)
    return IntraNodeLinkMeasurement(
        host=host,
        source=source,
        target=target,
        path=path,
        bandwidth_bytes_per_second=rate.median,
        variation=rate.variation,
    )
