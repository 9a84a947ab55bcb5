"""Errors that distrib raises on purpose.

DistribError              an error that the user can fix; `hint` is the advice
├── ConfigError           invalid arguments or files (exit code 2)
│   ├── HostfileError     a hostfile or host list, with file, line and column
│   └── TopologyError     a topology file, with file, line and the path inside it
├── PreflightError        unhealthy hosts (exit code 3)
├── LaunchError           the job did not start, or not as planned
├── JobFailed             the job ran and failed; `errors` by rank, `result` (its own exit code)
└── TrainingError         misuse of the library inside a script
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class DistribError(Exception):
    """An error that the user can fix. `str()` is one line: the problem and the hint."""

    exit_code = 1

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}; {self.hint}" if self.hint else self.what


class ConfigError(DistribError):
    """Invalid arguments or files."""

    exit_code = 2


class HostfileError(ConfigError):
    """An invalid hostfile or host list.

    `source` is the file, or a name such as `-H`; `line` and `column` from 1, 0 if there is none.
    """

    def __init__(self, what: str, *, source: str, line: int = 0, column: int = 0, hint: str = "") -> None:
        place = ":".join([source, *(str(n) for n in (line, column) if n)])
        super().__init__(f"{place}: {what}", hint=hint)
        self.source = source
        self.line = line
        self.column = column


class TopologyError(ConfigError):
    """An invalid topology file; `line` from 1, 0 if unknown."""

    def __init__(self, what: str, *, source: str, line: int = 0, hint: str = "") -> None:
        super().__init__(f"{source}:{line}: {what}" if line else f"{source}: {what}", hint=hint)
        self.source = source
        self.line = line


class PreflightError(DistribError):
    """Hosts cannot run the job; `hosts` maps each of them to the reason."""

    exit_code = 3

    def __init__(self, what: str, *, hint: str = "", hosts: Mapping[str, str] | None = None) -> None:
        super().__init__(what, hint=hint)
        self.hosts = dict(hosts or {})


class LaunchError(DistribError):
    """The job did not start, or not as planned."""


class JobFailed(DistribError):
    """The job ran and failed, or was stopped.

    `errors` maps each rank that failed by itself to its traceback or cause; `result` is the content of `result.json`, a
    `distrib_launch.results.Result`.
    """

    def __init__(self, what: str, *, errors: Mapping[int, str], result: Any, hint: str = "") -> None:
        super().__init__(what, hint=hint)
        self.errors = dict(errors)
        self.result = result
        self.exit_code = result.exit_code


class TrainingError(DistribError):
    """Misuse of the library inside a training script."""


class FieldError(ValueError):
    """An invalid field, raised while a struct is built; `field` is its path from that struct on."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(what)
        self.field = field
