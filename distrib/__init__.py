"""distrib: from one GPU to a cluster in three lines.

    import distrib

    with distrib.init() as job:
        model, optimizer, loader = job.prepare(model, optimizer, loader)

Importing it is quick: torch and MPI are loaded by `init`, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrib._version import __version__
from distrib.errors import (
    ConfigError,
    DistribError,
    HostfileError,
    JobFailed,
    LaunchError,
    PreflightError,
    TopologyError,
    TrainingError,
)

if TYPE_CHECKING:
    from distrib.training import Job, init
    from distrib.training.memory import estimate_memory

__all__ = [
    "ConfigError",
    "DistribError",
    "HostfileError",
    "Job",
    "JobFailed",
    "LaunchError",
    "PreflightError",
    "TopologyError",
    "TrainingError",
    "__version__",
    "estimate_memory",
    "init",
]


def __getattr__(name: str) -> Any:
    if name in ("Job", "init"):
        import distrib.training

        return getattr(distrib.training, name)
    if name == "estimate_memory":
        import distrib.training.memory

        return distrib.training.memory.estimate_memory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
