"""Process of a rank's script: device, CPUs, pipes, start and end."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distrib import environment as env
from distrib.utils.mpi_env import OMPI_LOCAL_SIZE, RankIdentity
from distrib.utils.ranges import is_whole_number, ranges
from distrib.utils.rlimits import raise_open_files
from distrib_launch.rank_agent import affinity, reaper
from distrib_launch.rank_agent.container import Container, NotStarted
from distrib_launch.rank_agent.control_channel import Assignment, Kind
from distrib_launch.rank_agent.oom import OutOfMemory

CHUNK_BYTES = 1 << 18
"""Most bytes that one read takes from a pipe."""
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
"""1 if a process may trace its descendants only: https://docs.kernel.org/admin-guide/LSM/Yama.html"""
RDMA_DEVICES = Path("/sys/class/infiniband"), Path("/sys/class/cxi")
"""Folders of InfiniBand, RoCE and EFA devices, and of Slingshot's."""
RUN_SCRIPT = Path(__file__).with_name("run_script.py")


class Refused(Exception):
    """Error of a rank that cannot run its script on this host."""


class ScriptProcess:
    """Process of a rank's script, on its share of the CPUs.

    Args:
        assignment: Command and limits of the script.
        environ: Environment of the script; variables that depend on this host are added.
        identity: Number of the rank.
        guard: Guard of the rank's processes.
        script_input: Descriptor of its standard input, None for none.
        selector: Selector of the agent's loop.
        on_output: Called with output, errors and status lines.

    Raises:
        Refused: The host lacks a GPU, or the command cannot be started.
        OSError: Too many files are open, or too many processes run.
    """

    def __init__(
        self,
        assignment: Assignment,
        environ: dict[str, str],
        identity: RankIdentity,
        *,
        guard: reaper.RankGuard,
        script_input: int | None,
        selector: selectors.BaseSelector,
        on_output: Callable[[Kind, bytes], None],
    ) -> None:
        self._selector, self._on_output = selector, on_output
        self._tag = environ[env.DISTRIB_PROCESS_TAG] = assignment.tag
        self.device, gpus = _choose_device(assignment, environ, identity)
        _skip_unused_transport(environ)
        share = affinity.share_of(
            affinity.this_machine(), identity.local_rank, assignment.cpu_sharers, environ, assignment.bind,
            on_gpus=gpus > 0,
        )  # fmt: skip
        environ.setdefault("OMP_NUM_THREADS", str(share.threads))
        self._streams: dict[int, Kind] = {}
        self._cpus: tuple[int, ...] = ()
        self._status_tail = b""
        self._result: int | None = None
        self._events: int | None = None
        """Pipe to a parameter server."""
        self._container = self._in_container(assignment, environ, has_input=script_input is not None)
        if self._container is None:
            # The script opens the file through /proc of this process, so that it inherits no descriptor.
            self._error_file = os.memfd_create("distrib-error")
            environ[env.TORCHELASTIC_ERROR_FILE] = f"/proc/{os.getpid()}/fd/{self._error_file}"
        self.started = time.time()
        self._memory = OutOfMemory()
        self._adopts_orphans = reaper.adopt_orphans()
        self._guard = guard
        guard.watch(self._tag)
        try:
            with self._pipes(assignment, environ) as (status, passed):
                self._process = self._spawn(assignment, environ, share, passed, script_input)
        except (OSError, Refused):
            guard.dismiss()
            if self._container:
                self._container.close()
            raise
        guard.watch(self._tag, self._process.pid, self._container.removal if self._container else ())
        try:
            assert self._process.stdout and self._process.stderr
            for descriptor, kind in (
                (self._process.stdout.fileno(), Kind.OUT),
                (self._process.stderr.fileno(), Kind.ERR),
                (status, Kind.STATUS),
            ):
                os.set_blocking(descriptor, False)
                self._streams[descriptor] = kind
                selector.register(descriptor, selectors.EVENT_READ, self._read)
        except OSError:
            self.signal(signal.SIGKILL)
            raise

    @property
    def pid(self) -> int:
        """Return the process id of the script."""
        return (self._container and self._container.pid) or self._process.pid

    @property
    def child_pid(self) -> int:
        """Return the process id of the child: the script, or the runtime of its container."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Return True if the process has ended; its children may still run."""
        return self._process.poll() is not None

    def _in_container(self, assignment: Assignment, environ: dict[str, str], *, has_input: bool) -> Container | None:
        """Prepare the container, whose folder has the files of the script. Raises Refused if this host cannot start it."""
        if not assignment.container:
            return None
        try:
            container = Container(assignment, environ, on_gpu=self.device.startswith("cuda"), has_input=has_input)
        except NotStarted as why:
            raise Refused(str(why)) from None
        self._error_file, self._result, self._events = container.error, container.result, container.events
        return container

    def _on_started(self, descriptor: int) -> None:
        """Let the script in the container begin, on the CPUs of the rank."""
        assert self._container
        self._selector.unregister(descriptor)
        if problem := self._container.on_started(self._cpus):
            self.placed.update(cpus="", problem=problem)

    @contextlib.contextmanager
    def _pipes(self, assignment: Assignment, environ: dict[str, str]) -> Iterator[tuple[int, list[int]]]:
        """Open the script's descriptors and add them to `environ`; yield the status pipe, and the descriptors to inherit."""
        if self._container:
            self._selector.register(self._container.started, selectors.EVENT_READ, self._on_started)
            yield self._container.status, []
            return
        status, script_status = os.pipe()
        os.set_blocking(script_status, False)
        with contextlib.suppress(OSError):  # the kernel limits the pipe memory of a user
            fcntl.fcntl(status, fcntl.F_SETPIPE_SZ, 1 << 16)
        environ[env.DISTRIB_STATUS_FD] = str(script_status)
        if assignment.keep_result:
            self._result = os.memfd_create("distrib-result")
            environ[env.DISTRIB_RESULT_FD] = str(self._result)
        script_ends = [script_status]
        if env.DISTRIB_SERVER in environ:
            script_events, self._events = os.pipe()
            os.set_blocking(self._events, False)
            environ[env.DISTRIB_EVENTS_FD] = str(script_events)
            script_ends.append(script_events)
        try:
            yield status, script_ends if self._result is None else [*script_ends, self._result]
        except BaseException:
            os.close(status)
            raise
        finally:
            for descriptor in script_ends:
                os.close(descriptor)

    def _spawn(
        self, assignment: Assignment, environ: dict[str, str], share: affinity.Share, passed: list[int],
        script_input: int | None,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        command = assignment.command
        if self._container:
            command, environ = self._container.command, {**self._container.environ}
        elif assignment.is_python:
            command = [command[0], str(RUN_SCRIPT), *command[1:]]
        if script_input is not None:
            os.lseek(script_input, 0, os.SEEK_SET)
        raise_open_files(65536)  # a rank is connected to every other one, once per process group
        try:
            with affinity.bound(share.cpus) as problem:
                process = subprocess.Popen(
                    command, cwd=assignment.directory, env=environ,
                    stdin=subprocess.DEVNULL if script_input is None else script_input,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, pass_fds=passed,
                    preexec_fn=None if self._container else _allow_tracing(),
                )  # fmt: skip
        except OSError as error:
            what = error.filename if isinstance(error.filename, str) else command[0]
            raise Refused(f"{socket.gethostname()}: cannot start {command[0]}: {what}: {error.strerror}") from None
        threads, self._cpus = environ["OMP_NUM_THREADS"], share.cpus
        self.placed = {
            "cpus": "" if problem else ranges(share.cpus),
            "threads": int(threads) if is_whole_number(threads) else None, "problem": problem,
        }  # fmt: skip
        return process

    # -- while it runs --------------------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """Send a signal to the script only, or SIGKILL to its whole session.

        Other signals would kill the workers of a DataLoader, or run a handler that they inherited.

        Args:
            number: Number of the signal.
        """
        if self._container:
            self._container.signal(number)
        elif self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if number == signal.SIGKILL else os.kill)(self._process.pid, number)

    def send_event(self, event: dict[str, Any]) -> None:
        """Send an event of the job to a parameter server; workers get none.

        Args:
            event: JSON object.
        """
        if self._events is not None:
            with contextlib.suppress(OSError):
                os.write(self._events, json.dumps(event).encode() + b"\n")

    def set_reading(self, *, enabled: bool) -> None:
        """Start or stop reading the script's output; while it is not read, the script blocks in its `print`.

        Args:
            enabled: True to read, False to stop reading.
        """
        for descriptor in self._streams:
            is_read = descriptor in self._selector.get_map()
            if is_read and not enabled:
                self._selector.unregister(descriptor)
            elif enabled and not is_read:
                self._selector.register(descriptor, selectors.EVENT_READ, self._read)

    def _read(self, descriptor: int) -> None:
        kind = self._streams[descriptor]
        try:
            data = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._close_stream(descriptor)
            return
        if kind is Kind.STATUS:  # whole lines only
            whole, newline, rest = (self._status_tail + data).rpartition(b"\n")
            self._status_tail = rest[-4096:]
            data = whole + newline
        if data:
            self._on_output(kind, data)

    def _close_stream(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):  # reading is stopped
            self._selector.unregister(descriptor)
        if self._streams.pop(descriptor) is Kind.STATUS:
            os.close(descriptor)  # the process object closes its own pipes

    # -- the end --------------------------------------------------------------------------------------------------

    def end(self) -> int:
        """Kill all remaining processes of the script.

        Returns:
            Its exit code; negative for the signal that ended it.
        """
        self.signal(signal.SIGKILL)
        code = self._container.end(self._process) if self._container else self._process.wait()
        if self._adopts_orphans:
            reaper.end_descendants()
        else:
            reaper.sweep({self._tag}, {self._process.pid})
        return code

    def read_rest(self) -> bool:
        """Read output that has arrived. Return True if there may be more."""
        for descriptor in list(self._streams):
            self._read(descriptor)
        return bool(self._streams)

    def result_chunks(self) -> Iterator[bytes]:
        """Yield the bytes that the script wrote to DISTRIB_RESULT_FD."""
        if self._result is not None:
            os.lseek(self._result, 0, os.SEEK_SET)
            while chunk := os.read(self._result, CHUNK_BYTES):
                yield chunk

    def error(self) -> str:
        """Return the content of the error file."""
        os.lseek(self._error_file, 0, os.SEEK_SET)
        return os.read(self._error_file, 1 << 20).decode(errors="replace")

    def why_ended(self, code: int) -> str:
        """Return the reason if the kernel may have killed the script, or if its container did not start; else an empty string.

        Args:
            code: Exit code; negative for a signal.
        """
        if code == -signal.SIGKILL:
            return self._memory.why_killed()
        return self._container.why_not_started(code) if self._container else ""

    def close(self) -> None:
        """Dismiss the guard and close all descriptors of a script that has ended."""
        self._guard.dismiss()
        for descriptor in list(self._streams):  # output that was not read because the network was slow
            self._close_stream(descriptor)
        if self._container:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._container.started)
            self._container.close()
        os.close(self._error_file)
        for end in (self._result, self._events):
            if end is not None:
                os.close(end)


def _allow_tracing() -> Callable[[], object] | None:
    """Return a function that lets py-spy, a child of this process, read the script's memory; None where Yama does not forbid it.

    Without such a function, `subprocess` starts the script by vfork, which copies no page tables.
    """
    try:
        if YAMA.read_bytes().strip() != b"1":
            return None
    except OSError:
        return None
    parent = ctypes.c_ulong(os.getpid())
    return lambda: reaper.LIBC.prctl(0x59616D61, parent, 0, 0, 0)  # PR_SET_PTRACER of linux/prctl.h


def _skip_unused_transport(environ: dict[str, str]) -> None:
    """Let Open MPI leave out its RDMA transport on a host without RDMA devices, where it only delays MPI_Init by a second.

    Its `mca_btl_ofi_component_close` sleeps: opal/mca/btl/ofi/btl_ofi_component.c of Open MPI 5.0. mpirun passes the choice in a user's
    mca-params.conf as a variable, which wins; srun does not, so the default remains there.
    """
    has_rdma = any(folder.is_dir() and os.listdir(folder) for folder in RDMA_DEVICES)
    if OMPI_LOCAL_SIZE in environ and not has_rdma:
        environ.setdefault("OMPI_MCA_btl", "^ofi")


def _choose_device(assignment: Assignment, environ: dict[str, str], identity: RankIdentity) -> tuple[str, int]:
    """Choose the device of a rank (`cpu` or `cuda:N`), and set the variables that depend on it. Return also the job's GPUs here."""
    host = socket.gethostname()
    gpus = affinity.count_gpus(environ)
    if gpus and assignment.gpus is not None:
        try:
            environ["CUDA_VISIBLE_DEVICES"] = affinity.take_gpus(environ, assignment.gpus, gpus)
        except IndexError as missing:
            raise Refused(f"{host} has no GPU {missing}: it shows {gpus}, counted from 0") from None
        gpus = len(assignment.gpus)
    device = assignment.device
    if device == "auto":
        device = affinity.device_of(identity.local_rank, gpus, share=env.DISTRIB_SHARE_GPUS in environ)
    if device.startswith("cuda:") and int(device[5:]) >= gpus:
        raise Refused(
            f"rank {identity.rank} wants {device}, but {host} shows {gpus} GPU(s) for "
            f"{identity.local_world_size} rank(s); give the host fewer slots, share its GPUs with --share-gpus, or run on its "
            "CPUs with -x CUDA_VISIBLE_DEVICES="
        )
    environ[env.DISTRIB_DEVICE] = device
    if gpus:  # number GPUs as nvidia-smi does; CUDA's default puts the fastest first
        environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if device == "cpu":
        # A waiting rank must not take a core from a computing one.
        environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        environ.setdefault("ACCELERATE_USE_CPU", "1")  # accelerate would otherwise join no process group
    own = Path(sys.executable).parent.parent
    if not Path(environ.get("OPAL_PREFIX", "/")).is_dir() and (own / "bin/prted").exists():
        environ["OPAL_PREFIX"] = str(own)  # Open MPI has another path on this host than on the launcher's machine
    return device, gpus
