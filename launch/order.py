"""What a rank is told to run. Standard library only: the process around the rank reads it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Order(NamedTuple):
    """What the launcher tells the process around a rank; it travels as JSON."""

    command: list[str]
    directory: str
    environment: dict[str, str]
    device: str
    """`cpu`, `cuda:N`, or `auto` for the GPU of its local rank where it sees one."""
    mark: str
    """By which the processes of the rank are found again."""
    chosen: list[int] | None
    """The GPUs of the host that are the job's."""
    bind: str
    sharers: int
    """The ranks that share the host's processors."""
    grace_seconds: float
    """Between SIGTERM and SIGKILL when the engine ends the job."""
    host_timeout_seconds: float
    may_return: bool
    """Whether the job goes on without it where the launcher is lost."""
    keep_value: bool
    """Whether the launcher gets what the script writes to DISTRIB_VALUE_FD."""

    def payload(self) -> dict[str, Any]:
        return self._asdict()
