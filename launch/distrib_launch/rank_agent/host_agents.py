"""Start the agents of all ranks of a host from one Python process: each further agent costs a fork in place of an interpreter.

PRRTE starts `SHELL_SCRIPT` for each rank. The shell of local rank 0 becomes the Python process. The others announce themselves in a FIFO
and wait for the end of the agents, because PRRTE must see one process per rank. Standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from pathlib import Path

from distrib.utils import signals
from distrib.utils.mpi_env import OMPI_LOCAL_SIZE
from distrib_launch.rank_agent import affinity, reaper

DETACH_OPTION = "--detach"
FOLDER_OPTION = "--folder"
POLL_SECONDS = 0.005
DAEMON_END_SECONDS = 2.0

SHELL_SCRIPT = """
d="/tmp/distrib-$0.$PPID"
[ "$OMPI_COMM_WORLD_LOCAL_SIZE" = 1 ] || [ -d "$d" ] || mkdir -m 700 "$d" 2>/dev/null
if [ -L "$d" ] || [ ! -O "$d" ]; then exec "$@"; fi
[ -p "$d/ranks" ] || mkfifo -m 600 "$d/ranks" 2>/dev/null
[ -p "$d/end" ] || mkfifo -m 600 "$d/end" 2>/dev/null
[ "$OMPI_COMM_WORLD_LOCAL_RANK" = 0 ] && exec "$@" --folder "$d"
trap '' USR1 USR2
exec 3<"$d/end" && echo $$ >"$d/ranks" && { read -r d <&3; exit 0; }
"""
"""Command of a rank for `sh -c`; its arguments are the name of the attempt and the command of an agent.

PPID is the daemon of PRRTE, and so the same for all ranks of the host. Where the folder cannot be made, or belongs to another user,
each rank starts an agent of its own. PRRTE forwards SIGUSR1 and SIGUSR2; the launcher sends them to the agents itself.
"""


def fork_agents(
    folder: Path | None, guard: reaper.HostGuard, *, is_detached: bool
) -> tuple[int | None, dict[str, str]]:
    """Fork the agent of each rank of this host. The function returns in the agents; this process waits for all and ends.

    Detached agents (mode async) outlive the process that PRRTE started for their rank: when one of its daemons ends, PRRTE ends
    every process that it started.

    Args:
        folder: Folder of the FIFOs, None if this host has one rank.
        guard: Guard of the host, which ends after all agents.
        is_detached: True for agents in sessions of their own.

    Returns:
        The process that PRRTE started for the rank of this agent, None for local rank 0, whose agent ends with its parent;
        and the environment of the rank.
    """
    affinity.this_machine()  # all agents share what it imports and compiles
    "".encode("idna")
    gc.freeze()
    parent = os.getpid()
    own = os.fork()
    if not own:
        if is_detached:
            os.setsid()
        else:
            reaper.LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h
            if os.getppid() != parent:
                os._exit(1)
        return None, dict(os.environ)
    if is_detached:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(own, number)

    for number in (*signals.FORWARDED, *(() if is_detached else signals.STOPPING)):
        signal.signal(number, forward)
    shells = _Shells(folder) if folder else None
    exit_code, agents = 0, {own: 0}
    while agents:
        for shell in shells.arrived() if shells else ():
            with contextlib.suppress(OSError):  # the shell has ended
                environment = Path(f"/proc/{shell}/environ").read_bytes()
                agent = os.fork()
                if not agent:
                    for number in (*signals.FORWARDED, *signals.STOPPING):
                        signal.signal(number, signal.SIG_DFL)
                    if is_detached:
                        os.setsid()
                    return shell, _decode(environment)
                agents[agent] = shell
        pid, status = os.waitpid(-1, os.WNOHANG if shells and shells.missing else 0)
        if not pid:
            time.sleep(POLL_SECONDS)
            continue
        shell = agents.pop(pid)
        if pid == own:
            exit_code = os.waitstatus_to_exitcode(status)
        elif status:
            with contextlib.suppress(ProcessLookupError):
                os.kill(shell, signal.SIGTERM)  # PRRTE must see that an agent failed
    guard.wait()
    os._exit(exit_code if exit_code >= 0 else 128 - exit_code)


class _Shells:
    """Shells of the other local ranks, which announce themselves.

    Args:
        folder: Folder of the FIFOs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        os.open(folder / "end", os.O_RDWR)  # open in all agents; the shells wait until the last one has ended
        self._ranks = os.open(folder / "ranks", os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""
        self.missing = int(os.environ[OMPI_LOCAL_SIZE]) - 1
        """Number of shells that have not arrived."""

    def arrived(self) -> list[int]:
        """Return the process ids of the shells that have arrived since the last call; remove the FIFOs after the last one."""
        if not self.missing:
            return []
        with contextlib.suppress(BlockingIOError):
            self._rest += os.read(self._ranks, 1 << 16)
        *lines, self._rest = self._rest.split(b"\n")
        self.missing -= len(lines)
        if not self.missing:
            for path in (self._folder / "end", self._folder / "ranks"):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._folder.rmdir()
        return [int(line) for line in lines]


def _decode(environment: bytes) -> dict[str, str]:
    """Return the variables in a file `/proc/PID/environ`."""
    items = (os.fsdecode(item).partition("=") for item in environment.split(b"\0"))
    return {name: value for name, equals, value in items if equals}


def end_engine_daemon() -> None:
    """End the engine's daemon on a host that was cut off, which the daemon itself would detect only after minutes.

    A job that continues depends on it: if the host came back, the engine would end all ranks because of the failed daemon.
    """
    with contextlib.suppress(OSError):
        parent = os.getppid()
        while parent > 1 and Path(f"/proc/{parent}/comm").read_text().strip() != "prted":
            parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        if parent > 1:
            os.kill(parent, signal.SIGKILL)
            deadline = time.monotonic() + DAEMON_END_SECONDS
            while Path(f"/proc/{parent}").exists() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)  # until then its threads may still write to its folder
            folder = Path(os.environ.get("PMIX_SERVER_TMPDIR", ""))
            if folder.name == f"prted.{parent}":
                import shutil  # not at the top: the agent must start fast

                shutil.rmtree(folder, ignore_errors=True)


def take_options() -> tuple[Path | None, bool]:
    """Return the folder of the FIFOs and True for detached agents, from the command line."""
    words = sys.argv[1:]
    folder = Path(words[words.index(FOLDER_OPTION) + 1]) if FOLDER_OPTION in words else None
    return folder, DETACH_OPTION in words
