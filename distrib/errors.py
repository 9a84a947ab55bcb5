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

ERROR_CODES: Mapping[str, Mapping[str, str]] = {
    "Files and options": {
        "option-unknown": "unknown option",
        "option-missing": "a required option or argument is missing",
        "option-value": "invalid value of an option or argument",
        "option-conflict": "an option does not apply with the other ones",
        "config-file": "unreadable or empty file of --config",
        "environment-invalid": "invalid or contradictory environment variables",
        "file-unreadable": "a file cannot be read",
        "file-not-written": "a file or folder cannot be written",
        "file-in-use": "another job or probe writes there",
        "tool-missing": "a program or package is not installed",
        "script-missing": "no such script",
        "script-not-python": "the script is a program",
        "function-unpicklable": "a function cannot be sent to the ranks",
        "too-long": "command and environment of a rank are too long",
        "too-many-ranks": "more ranks than slots, GPUs or cores",
        "launcher-under-srun": "srun started the launcher several times",
    },
    "Hosts": {
        "hostfile-unreadable": "the hostfile cannot be read or is no text",
        "hostfile-empty": "the hostfile or host list has no hosts",
        "hostfile-is-topology": "a topology file was given as hostfile",
        "hostfile-syntax": "text that is neither a host nor a setting",
        "hostfile-host-name": "invalid host name or address",
        "hostfile-unknown-setting": "unknown setting of a host",
        "hostfile-value": "invalid value of a setting",
        "hostfile-duplicate-setting": "a setting is given twice",
        "hostfile-duplicate-host": "a host is named twice",
        "hostfile-too-large": "more hosts than a cluster has",
        "slurm-allocation": "unusable variables of a Slurm allocation",
        "no-hosts": "no host is left or named",
        "host-unknown": "an option names a host that the job does not have",
        "topology-unreadable": "the topology file cannot be read",
        "topology-empty": "the topology file is empty",
        "topology-is-hostfile": "a hostfile was given as topology",
        "topology-syntax": "the topology file is not valid YAML",
        "topology-unknown-field": "unknown field",
        "topology-missing-field": "a required field is missing",
        "topology-value": "invalid value of a field",
        "topology-missing-host": "a host of the hostfile is not in the topology",
    },
    "Plan and probe": {
        "network-unknown": "links between hosts are not described or measured",
        "gpu-unknown": "the GPU is not in the catalogue, or no host has it",
        "workload-unknown": "the workload is not in the catalogue",
        "workload-invalid": "invalid workload file",
        "probe-failed": "a probe did not finish",
        "probe-not-resumable": "the journal has no such probe",
        "profile-failed": "the script could not be measured",
    },
    "Start of a job": {
        "host-unhealthy": "hosts failed the checks before the start",
        "host-no-reply": "no host replied",
        "too-few-hosts": "fewer healthy hosts than --min-hosts",
        "sync-failed": "files could not be copied to hosts",
        "launch-failed": "the job did not start",
        "network-unreachable": "no network leads to the hosts",
        "ranks-missing": "ranks did not connect to the launcher",
        "too-many-open-files": "the limit of open files is too low",
    },
    "End of a job": {
        "rank-failed": "a rank raised an exception or ended with an exit code",
        "rank-killed": "a signal ended a rank",
        "connection-lost": "a rank lost its connection to another rank, and no rank failed before",
        "rank-lost": "a rank ended without an exit record",
        "out-of-memory": "the kernel killed a rank for lack of memory",
        "host-lost": "a host fell silent or lost its daemon, with its ranks",
        "engine-ended": "mpirun or srun ended before its ranks",
        "result-lost": "the return value of a rank could not be written",
        "hang": "no rank made progress for --hang-timeout",
        "timeout": "the time limit --timeout was reached",
        "stopped": "a user or the batch system stopped the job",
    },
    "Training script": {
        "training": "misuse of the library, or a model or optimizer that the mode cannot train",
        "job-closed": "the job was used after job.close(), or joined twice",
        "rendezvous-failed": "ranks did not find each other",
        "mpi-mismatch": "MPI or Horovod started other ranks than planned",
        "gpu-unavailable": "torch cannot use the GPU of a rank",
        "script-without-main-guard": 'a worker process imports a script without if __name__ == "__main__"',
        "peer-exited": "another rank of the host exited",
        "error-on-other-rank": "an error on another rank, reported here",
        "no-parameter-server": "mode async without parameter servers",
        "server-unreachable": "a parameter server does not reply",
        "ranks-differ": "ranks prepare different models, loaders or datasets",
        "weights-differ": "ranks have different weights",
        "epochs-differ": "ranks read different epochs",
        "step-counts-differ": "ranks take different numbers of steps",
        "model-not-prepared": "an optimizer trains a model that was not prepared",
        "optimizer-not-prepared": "an optimizer updates a prepared model but was not prepared",
        "parameter-in-two-optimizers": "a parameter is in two optimizers",
        "step-in-backward": "an optimizer takes its step before gradients are averaged",
        "gradient-not-reduced": "a gradient was not averaged over the ranks",
        "gradient-missing": "a parameter got no gradient on a rank",
        "gradient-not-finite": "a gradient is NaN or infinite",
        "dataset-too-small": "fewer samples than ranks",
        "loader-unsupported": "a DataLoader cannot be shared",
        "checkpoint-unsavable": "an object cannot be saved",
        "checkpoint-invalid": "damaged, or not a checkpoint of job.save",
        "checkpoint-mismatch": "a checkpoint of another model or optimizer",
        "metric-invalid": "a metric is not a number, string or list, or too long",
        "error": "any other error",
    },
}
"""Codes of all errors and failures by subject, with their meaning."""

SECONDARY_CODES = ("peer-exited", "server-unreachable", "error-on-other-rank")
"""Codes of errors that follow from the failure of another rank or of a server."""


class DistribError(Exception):
    """An error that the user can fix. `str()` is one line: the problem and the hint."""

    exit_code = 1
    code = "error"
    """Kind of the error; one of `ERROR_CODES`."""
    closing_line = ""
    """Last line of a run that it ended, which a command prints after the error."""
    secondary = False
    """True on a rank that reports a failure of another rank or of a server."""

    def __init__(self, what: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        if code:
            self.code = code
        self.secondary = self.code in SECONDARY_CODES

    def __str__(self) -> str:
        return f"{self.what}; {self.hint}" if self.hint else self.what


class ConfigError(DistribError):
    """Invalid arguments or files."""

    exit_code = 2
    code = "option-value"


class HostfileError(ConfigError):
    """An invalid hostfile or host list.

    `source` is the file, or a name such as `-H`; `line` and `column` from 1, 0 if there is none.
    """

    code = "hostfile-syntax"

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

    code = "topology-value"

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
