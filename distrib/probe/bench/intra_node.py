"""Copies inside a host: in memory, and to, from and between GPUs.

A copy of n bytes counts as n bytes, as in nvbandwidth.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml

from distrib.cluster.measurements import IntraNodeLinkMeasurement
from distrib.probe.bench import statistics
from distrib.probe.protocol import first_line
from distrib.utils.cpus import read_cpu_list

COPY_BYTES = 64 << 20
"""Size of each copy, larger than the caches of most CPUs."""

REPETITIONS = 8
HIDDEN_GPUS = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs; Slurm sets the last."""


def measure_host(
    host: str, seconds: float, *, memory: bool = True, both_directions: bool = True, deadline: float = float("inf")
) -> tuple[tuple[IntraNodeLinkMeasurement, ...], tuple[str, ...]]:
    """Measure copies in host memory and of GPUs.

    Args:
        host: Name of this host.
        seconds: Duration of each pair of GPUs, or GPU and memory.
        memory: False to leave out copies within host memory.
        both_directions: False to measure one direction between two GPUs.
        deadline: Monotonic seconds after which no copy is begun.

    Returns:
        The copies, and messages about failed measurements.
    """
    found = [_measure_memory(host)] if memory else []
    problems: tuple[str, ...] = ()
    if any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):  # the latter under WSL
        import torch  # takes seconds, on hosts with GPUs only

        if torch.version.cuda and os.environ.get("CUDA_VISIBLE_DEVICES") not in HIDDEN_GPUS:
            try:
                torch.cuda.init()  # type: ignore[no-untyped-call]  # raises with the reason
            except Exception as error:  # DeferredCudaCallError is not a RuntimeError
                return tuple(found), (f"GPUs: {first_line(error)}",)
        if torch.cuda.is_available():
            links, problems = measure_gpu_copies(
                host, torch, seconds, both_directions=both_directions, deadline=deadline
            )
            found += links
    return tuple(found), problems


def _measure_memory(host: str) -> IntraNodeLinkMeasurement:
    """Measure one thread's copies."""
    source, target = memoryview(bytearray(COPY_BYTES)), memoryview(bytearray(COPY_BYTES))
    target[:] = source
    source[:] = target  # unwritten memory is a single zero page, which is read from the cache
    rates = []
    for _ in range(REPETITIONS):
        begun = time.perf_counter()
        target[:] = source
        rates.append(COPY_BYTES / (time.perf_counter() - begun))
    return _copy_link(host, "memory", "memory", "memory", rates)


def measure_gpu_copies(
    host: str, torch: Any, seconds: float, *, both_directions: bool = True, deadline: float = float("inf")
) -> tuple[list[IntraNodeLinkMeasurement], tuple[str, ...]]:
    """Measure copies between pinned memory and each GPU, within each GPU and between GPUs, timed with CUDA events.

    Args:
        host: Name of this host.
        torch: The module torch.
        seconds: Duration of each pair.
        both_directions: False to measure one direction between two GPUs.
        deadline: Monotonic seconds after which no copy is begun.

    Returns:
        The copies, and messages about failed measurements, such as a GPU with full memory.
    """
    gpus = {f"gpu{number}": index for index, number in enumerate(_gpu_numbers(torch))}
    buffers: dict[str, tuple[Any, Any, Any]] = {}  # two buffers on the GPU, one in pinned host memory
    problems: dict[str, str] = {}  # each reason once, with the first GPU
    for name, index in gpus.items():
        try:
            with _near_gpu(torch, index):
                pinned = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
            here = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{index}") for _ in range(2)]
            buffers[name] = here[0], here[1], pinned
        except RuntimeError as error:
            problems.setdefault(first_line(error), name)
    pairs = [pair for name in gpus for pair in (("memory", name), (name, "memory"), (name, name))]
    pairs += [(one, other) for one in gpus for other in gpus if one < other or (both_directions and one != other)]
    found: list[IntraNodeLinkMeasurement] = []
    for number, (source, target) in enumerate(pairs):
        if time.monotonic() > deadline:
            problems[f"{len(pairs) - number} of {len(pairs)} copies were left out for lack of time"] = "GPUs"
            break
        if not {source, target} - {"memory"} <= buffers.keys():
            continue
        try:
            path = _peer_path(torch, gpus[source], gpus[target]) if source in gpus and target in gpus else "PCIe"
            device = gpus[source] if source in gpus else gpus[target]
            begin = buffers[target][2] if source == "memory" else buffers[source][0]
            end = buffers[source][2] if target == "memory" else buffers[target][1]
            rates = _time_copies(torch, device, end, begin, seconds)
            found.append(_copy_link(host, source, target, path, rates))
        except RuntimeError as error:
            problems.setdefault(first_line(error), f"{source} to {target}")
    return found, tuple(f"{where}: {what}" for what, where in problems.items())


def _nvml_handle(torch: Any, index: int) -> Any:
    """Return NVML's handle of a GPU by torch's index."""
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")


def _gpu_numbers(torch: Any) -> list[int]:
    """Return NVML's indices of torch's GPUs, as in nvidia-smi and topology files; torch's own if NVML fails."""
    count = torch.cuda.device_count()
    with contextlib.suppress(Exception):
        numbers = [int(pynvml.nvmlDeviceGetIndex(_nvml_handle(torch, index))) for index in range(count)]
        if len(set(numbers)) == count:
            return numbers
    return list(range(count))


@contextlib.contextmanager
def _near_gpu(torch: Any, index: int) -> Iterator[None]:
    """Allocate memory on the NUMA node of a GPU, to which its rank is bound in training."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(Exception):
        bus = pynvml.nvmlDeviceGetPciInfo(_nvml_handle(torch, index)).busId
        bus = (bus.decode() if isinstance(bus, bytes) else bus).lower()[-12:]
        os.sched_setaffinity(0, read_cpu_list(Path(f"/sys/bus/pci/devices/{bus}/local_cpulist")) & before or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _time_copies(torch: Any, device: int, target: Any, source: Any, seconds: float) -> list[float]:
    """Return bytes per second of at most `REPETITIONS` repeated copies, or fewer after `seconds`."""
    rates: list[float] = []
    spent = 0.0
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        for _ in range(3):  # wake the GPU and enable peer access
            target.copy_(source, non_blocking=True)
        stream.synchronize()
        while not rates or (len(rates) < REPETITIONS and spent < seconds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            target.copy_(source, non_blocking=True)  # keeps the GPU busy while the timed copies are launched
            begin.record(stream)
            together = 4  # as launching one copy takes microseconds
            for _ in range(together):
                target.copy_(source, non_blocking=True)
            end.record(stream)
            end.synchronize()
            taken = begin.elapsed_time(end) / 1000
            spent += taken
            rates.append(together * COPY_BYTES / taken)
    return rates


def _peer_path(torch: Any, source: int, target: int) -> str:
    """Return the path between two GPUs: NVLink if NVML reports one, else PCIe peer access or host memory."""
    if source == target:
        return "its own memory"
    if not torch.cuda.can_device_access_peer(source, target):
        return "through memory"
    with contextlib.suppress(Exception):
        handles = [_nvml_handle(torch, index) for index in (source, target)]
        state = pynvml.nvmlDeviceGetP2PStatus(*handles, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if state == pynvml.NVML_P2P_STATUS_OK:
            return "NVLink"
    return "PCIe peer"


def _copy_link(host: str, source: str, target: str, path: str, rates: list[float]) -> IntraNodeLinkMeasurement:
    rate = statistics.summarize(rates)
    return IntraNodeLinkMeasurement(
        host=host,
        source=source,
        target=target,
        path=path,
        bandwidth_bytes_per_second=rate.median,
        variation=rate.variation,
    )
