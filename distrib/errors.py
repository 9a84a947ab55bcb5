"""Errors that distrib raises on purpose.

Each has a `code`, such as `hostfile-duplicate-host`, which later versions keep. Compare codes, not sentences.

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

ERROR_CODES: Mapping[str, str] = {
    "error": "any other error",
    "config": "invalid arguments or files",
    "hostfile": "invalid hostfile or host list",
    "topology": "invalid topology file",
    "host-unhealthy": "hosts failed the checks before the start",
    "launch-failed": "the job did not start",
    "training": "misuse of the library in a script",
    "rank-failed": "a rank raised an exception or ended with an exit code",
    "rank-killed": "a signal ended a rank",
    "rank-lost": "a rank ended without an exit record",
    "out-of-memory": "the kernel killed a rank for lack of memory",
    "host-lost": "a host fell silent or lost its daemon, with its ranks",
    "engine-ended": "mpirun or srun ended before its ranks",
    "result-lost": "the return value of a rank could not be written",
    "hang": "no rank made progress for `--hang-timeout`",
    "timeout": "the time limit `--timeout` was reached",
    "stopped": "a user or the batch system stopped the job",
}
"""Codes of all errors and failures, and their meaning."""


class DistribError(Exception):
    """An error that the user can fix. `str()` is one line: the problem and the hint."""

    exit_code = 1
    code = "error"
    """Kind of the error; one of `ERROR_CODES`."""

    def __init__(self, what: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        if code:
            self.code = code

    def __str__(self) -> str:
        return f"{self.what}; {self.hint}" if self.hint else self.what


class ConfigError(DistribError):
    """Invalid arguments or files."""

    exit_code = 2
    code = "config"


class HostfileError(ConfigError):
    """An invalid hostfile or host list.

    `source` is the file, or a name such as `-H`; `line` and `column` from 1, 0 if there is none.
    """

    code = "hostfile"

    def __init__(
        self, what: str, *, source: str, line: int = 0, column: int = 0, hint: str = "", code: str = ""
    ) -> None:
        place = ":".join([source, *(str(n) for n in (line, column) if n)])
        super().__init__(f"{place}: {what}", hint=hint, code=code)
        self.source = source
        self.line = line
        self.column = column


class TopologyError(ConfigError):
    """An invalid topology file; `line` from 1, 0 if unknown."""

    code = "topology"

    def __init__(self, what: str, *, source: str, line: int = 0, hint: str = "", code: str = "") -> None:
        super().__init__(f"{source}:{line}: {what}" if line else f"{source}: {what}", hint=hint, code=code)
        self.source = source
        self.line = line


class PreflightError(DistribError):
    """Hosts cannot run the job; `hosts` maps each of them to the reason."""

    exit_code = 3
    code = "host-unhealthy"

    def __init__(self, what: str, *, hint: str = "", hosts: Mapping[str, str] | None = None, code: str = "") -> None:
        super().__init__(what, hint=hint, code=code)
        self.hosts = dict(hosts or {})


class LaunchError(DistribError):
    """The job did not start, or not as planned."""

    code = "launch-failed"


class JobFailed(DistribError):
    """The job ran and failed, or was stopped.

    `errors` maps each rank that failed by itself to its traceback or cause; `result` is the content of `result.json`, a
    `distrib_launch.results.Result`.
    """

    code = "rank-failed"

    def __init__(self, what: str, *, errors: Mapping[int, str], result: Any, hint: str = "", code: str = "") -> None:
        super().__init__(what, hint=hint, code=code)
        self.errors = dict(errors)
        self.result = result
        self.exit_code = result.exit_code


class TrainingError(DistribError):
    """Misuse of the library inside a training script."""

    code = "training"


class FieldError(ValueError):
    """An invalid field, raised while a struct is built; `field` is its path from that struct on."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(what)
        self.field = field
