"""Health of GPUs compared with other GPUs of the same kind. All ranks wait for the slowest one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from distrib.cluster.inventory import Gpu
from distrib.utils.ranges import ranges
from distrib_launch.preflight.check_result import CheckResult, warning


def unhealthy_gpus(used: Mapping[str, Sequence[Gpu]]) -> Iterator[CheckResult]:
    """Yield warnings about GPUs that are slower or less healthy than others of their kind.

    Args:
        used: GPUs by host.
    """
    kinds: dict[str | None, list[Gpu]] = {}
    for gpu in (gpu for gpus in used.values() for gpu in gpus):
        kinds.setdefault(gpu.kind, []).append(gpu)
    for host, gpus in used.items():
        found: dict[tuple[str, str], list[int]] = {}
        for gpu in gpus:
            for problem in _gpu_problems(gpu, kinds[gpu.kind]):
                found.setdefault(problem, []).append(gpu.index)
        for (reason, fix), indices in found.items():
            which = f"GPU {indices[0]}" if len(indices) == 1 else f"GPUs {ranges(indices)}"
            yield warning(host, "gpus", f"{which}: {reason}", fix)


def _gpu_problems(gpu: Gpu, same_kind: Sequence[Gpu]) -> Iterator[tuple[str, str]]:
    """Yield reasons and fixes for one GPU; `same_kind` are all GPUs of its kind."""
    health = gpu.health
    up = _most([one.health.nvlinks_up for one in same_kind])
    if health.nvlinks_up is not None and up is not None and health.nvlinks_up < up:
        yield (
            f"{health.nvlinks_up} NVLinks are up, {up:g} with the others of its kind",
            "nvidia-smi nvlink -s there; a reset or a new seat of the board brings links back",
        )
    lanes = _most([one.pcie_width_now for one in same_kind])
    # Not if all links are narrow because they are idle.
    if gpu.has_narrow_link and lanes is not None and (gpu.pcie_width_now or 0) < lanes:
        yield (
            f"its PCIe link has {gpu.pcie_width_now} lane{'s' * (gpu.pcie_width_now != 1)}, {lanes:g} with others of its kind",
            "reseat the card, and look at its riser and the slot's settings in the BIOS",
        )
    if health.slowed_by:
        heat = health.temperature_celsius
        hot = f" ({heat} C)" if heat is not None and "heat" in health.slowed_by else ""
        yield (
            f"slowed down by {' and '.join(health.slowed_by)}{hot}",
            "check fans, air and power supplies; nvidia-smi -q -d PERFORMANCE",
        )
    watts = _most([one.health.power_limit_watts for one in same_kind])
    if health.power_limit_watts and watts and health.power_limit_watts < 0.98 * watts:  # drivers round to watts
        yield (
            f"limited to {health.power_limit_watts:g} W, {watts:g} W with the others of its kind",
            f"nvidia-smi -pl {watts:g} there, if the power supplies allow it",
        )
    if health.has_bad_memory:
        yield "bad rows of its memory could not be remapped", "replace the GPU; nvidia-smi -q -d ROW_REMAPPER"
    elif health.needs_reset:
        yield (
            "bad rows of its memory will be remapped at the next reset",
            "reset it when idle: nvidia-smi --gpu-reset, or boot the host again",
        )
    elif health.uncorrected_errors:
        yield (
            f"{health.uncorrected_errors} uncorrected error(s) of its memory since the driver was loaded",
            "they can end jobs; see nvidia-smi -q -d ECC, and reset it when idle: nvidia-smi --gpu-reset",
        )
    if health.has_fabric is False:
        yield (
            "its NVSwitches are not initialized; CUDA may fail to start (error 802)",
            "systemctl status nvidia-fabricmanager there, which must be of the driver's version",
        )


def _most(values: Iterable[float | None]) -> float | None:
    """Return the most common known value; the largest of equally common ones."""
    counts = Counter(value for value in values if value is not None)
    return max(counts, key=lambda value: (counts[value], value), default=None)
