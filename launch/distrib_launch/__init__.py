"""The two commands, `distrib-launch` and `distrib-topo`, and `run`, a launch from Python. Nothing here imports torch."""

from __future__ import annotations

TYPE_CHECKING = False  # without importing typing, which a module of the user may hide from `python -m distrib_launch`
if TYPE_CHECKING:
    from typing import Any

    from distrib_launch.api import RunResult, run

__all__ = ["RunResult", "run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from distrib_launch import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
