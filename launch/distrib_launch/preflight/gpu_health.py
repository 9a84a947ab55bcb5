"""Health of GPUs compared with other GPUs of the same kind. All ranks wait for the slowest one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from distrib.cluster.inventory import Gpu
from distrib.utils.ranges import ranges
from distrib_launch.preflight.check_result import CheckResult, warning

MIN_POWER_FRACTION = 0.98
"""Fraction of the usual power limit below which a limit counts as lower; drivers round to watts."""


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
            for told in _gpu_problems(gpu, kinds[gpu.kind]):
                found.setdefault(told, []).append(gpu.index)
        for (reason, fix), indices in found.items():
            which = f"GPU {indices[0]}" if len(indices) == 1 else f"GPUs {ranges(indices)}"
            yield warning(host, "gpus", f"{which}: {reason}", fix)


def _gpu_problems(gpu: Gpu, alike: Sequence[Gpu]) -> Iterator[tuple[str, str]]:
    """Yield reasons and fixes for one GPU; `alike` are all GPUs of its kind."""
    health = gpu.health
    up = _most([one.health.nvlinks_up for one in alike])
    if health.nvlinks_up is not None and up is not None and health.nvlinks_up < up:
        yield (
            f"{health.nvlinks_up} NVLinks are up, {up:g} with the others of its kind",
            "nvidia-smi nvlink -s there; a reset or a new seat of the board brings links back",
        )
    lanes = _most([one.pcie_width_now for one in alike])
    if (
        gpu.has_narrow_link and lanes is not None and (gpu.pcie_width_now or 0) < lanes
    ):  # not if all links are narrow because they are idle
        yield (
            f"its PCIe link has {gpu.pcie_width_now} lane{'s' * (gpu.pcie_width_now != 1)}, {lanes:g} with others of its kind",
            "reseat the card, and look at its riser and the slot's settings in the BIOS",
        )
    if health.slowed_by:
        heat = health.temperature_celsius
        hot = f" ({heat} C)" if heat is not None and "heat" in health.slowed_by else ""
        yield (
            f"slowed down by {' and '.join(health.slowed_by)}{hot}",
            "see to fans, air and power supplies; nvidia-smi -q -d PERFORMANCE",
        )
    watts = _most([one.health.power_limit_watts for one in alike])
    if (
        health.power_limit_watts is not None
        and watts is not None
        and health.power_limit_watts < MIN_POWER_FRACTION * watts
    ):
        yield (
            f"limited to {health.power_limit_watts:g} W, {watts:g} W with the others of its kind",
            f"nvidia-smi -pl {watts:g} there, if the power supplies allow it",
        )
    if health.has_bad_memory:
        yield "bad rows of its memory could not be replaced", "have it exchanged; nvidia-smi -q -d ROW_REMAPPER"
    elif health.needs_reset:
        yield (
            "bad rows of its memory wait to be replaced",
            "reset it when idle: nvidia-smi --gpu-reset, or boot the host again",
        )
    elif health.uncorrected_errors:
        yield (
            f"{health.uncorrected_errors} uncorrected error(s) of its memory since the driver was loaded",
            "jobs may end by such; nvidia-smi -q -d ECC, and reset it when idle: nvidia-smi --gpu-reset",
        )
    if health.has_fabric is False:
        yield (
            "its NVSwitches are not set up, without which CUDA may not start (error 802)",
            "systemctl status nvidia-fabricmanager there, which must be of the driver's version",
        )


def _most(values: Iterable[float | None]) -> float | None:
    """Return the most common known value; the largest of equally common ones."""
    counts = Counter(value for value in values if value is not None)
    return max(counts, key=lambda value: (counts[value], value), default=None)
