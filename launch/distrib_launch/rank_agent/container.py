"""Container of a rank's script: docker, podman or apptainer starts it, with the host's network, devices and processes.

The agent stays on the host. Docker passes no descriptors to a container, so script and agent share a mounted folder. It has FIFOs for
events, for the status lines and for the script's process id, and files for its error and its result. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from distrib import environment as env
from distrib.utils.containers import find_runtime
from distrib_launch.rank_agent import reaper
from distrib_launch.rank_agent.control_channel import Assignment

ENTRY = """
exec 7<"$0/events" 8>"$0/status" 9>>"$0/result" || exit 125
echo $$ >"$0/pid" && read -r _ <"$0/go" || exit 125
exec "$@"
"""
"""Start of a script in its container. The agent binds the process to its CPUs before it replies in `go`."""
REMOVAL = '[ -z "$2" ] || "$1" rm --force "$2"; rm -rf "$0"'
EVENTS_FD, STATUS_FD, RESULT_FD = 7, 8, 9
REMOVAL_SECONDS = 10.0
"""Longest time in which a runtime removes the container of a script that has ended."""
IMAGE_VARIABLES = frozenset((
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "VIRTUAL_ENV", "OPAL_PREFIX", "PMIX_PREFIX", "HOSTNAME",
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR",
))  # fmt: skip
"""Variables that name folders or sockets of the host's installation: the image has its own."""
INFINIBAND = Path("/dev/infiniband")


class NotStarted(Exception):
    """Error of a host that cannot start the container."""


class Container:
    """Container of one run of a rank's script.

    Args:
        assignment: Command, image and mounts of the script.
        environ: Environment of the script.
        on_gpu: True if the script uses a GPU.
        has_input: True if the script has standard input.

    Raises:
        NotStarted: No runtime has the image, or a folder cannot be mounted.
    """

    def __init__(self, assignment: Assignment, environ: dict[str, str], *, on_gpu: bool, has_input: bool) -> None:
        self._runtime, problem = find_runtime(assignment.container_runtime, assignment.container)
        if problem:
            raise NotStarted(f"{socket.gethostname()}: cannot start a container: {problem}")
        self._tag, self._name = assignment.tag, f"distrib-{assignment.tag}"
        self.pid: int | None = None
        """Process of the script, None before it has started."""
        self._pending: int | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="distrib-container-"))
        for name in ("events", "status", "pid", "go"):
            os.mkfifo(self._folder / name, 0o600)
        self._error = str(self._folder / "error")
        self.status = self._open("status", os.O_RDONLY | os.O_NONBLOCK)
        self.started = self._open("pid", os.O_RDONLY | os.O_NONBLOCK)
        """Descriptor that is readable once the script's process exists."""
        self._go = self._open("go", os.O_RDWR)
        self.events = self._open("events", os.O_RDWR | os.O_NONBLOCK)
        self.error = self._open("error", os.O_RDWR | os.O_CREAT)
        self.result = self._open("result", os.O_RDWR | os.O_CREAT)
        environ[env.DISTRIB_STATUS_FD] = str(STATUS_FD)
        if env.DISTRIB_SERVER in environ:
            environ[env.DISTRIB_EVENTS_FD] = str(EVENTS_FD)
        environ[env.TORCHELASTIC_ERROR_FILE] = self._error
        if assignment.keep_result:
            environ[env.DISTRIB_RESULT_FD] = str(RESULT_FD)
        try:
            mounts = self._mounts(assignment, environ)
        except NotStarted:
            self.close()
            raise
        home = environ.get("HOME", "")
        own = {
            env.DISTRIB_PROCESS_TAG: assignment.tag,
            "HOME": home if home and _is_below(home, mounts) else self._temporary(environ),
        }
        names = [name for name in environ if not is_of_image(name) and name not in own]
        start = _apptainer if self._runtime == "apptainer" else _docker
        words = start(self._runtime, self._name, assignment, names, own, on_gpu=on_gpu, has_input=has_input)
        for path in mounts:
            words += ["--mount", _mount(path)]
        words += [assignment.container] if self._runtime != "apptainer" else [assignment.container, "sh"]
        program = list(assignment.command)
        if assignment.is_python:
            program = ["python3", str(Path(__file__).with_name("run_script.py")), *program[1:]]
        self.command = [*words, "-c", ENTRY, str(self._folder), *program]
        self.environ = {name: value for name, value in environ.items() if name not in own}
        if self._runtime == "apptainer":
            self.environ = {name: environ[name] for name in names} | own | {"PATH": environ.get("PATH", os.defpath)}
        else:
            self.environ["HOME"] = home or "/"  # of the runtime's own settings

    @property
    def removal(self) -> list[str]:
        """Return the command that ends and removes the container, and its shared folder."""
        name = "" if self._runtime == "apptainer" else self._name  # apptainer's ends with its processes
        return ["sh", "-c", REMOVAL, str(self._folder), self._runtime, name]

    @staticmethod
    def _temporary(environ: Mapping[str, str]) -> str:
        return environ.get("TMPDIR") or "/tmp"

    def _open(self, name: str, flags: int) -> int:
        return os.open(self._folder / name, flags | os.O_CLOEXEC, 0o600)

    def _mounts(self, assignment: Assignment, environ: Mapping[str, str]) -> list[str]:
        """Return the folders to mount, each at its own path. Raises NotStarted if one cannot be."""
        run_dir = environ.get(env.DISTRIB_RUN_DIR, "")
        with contextlib.suppress(OSError):
            os.makedirs(run_dir, exist_ok=True)  # noqa: PTH103  (what is written there must outlive the container)
        script = assignment.command[1 if assignment.is_python else 0]
        wanted = [
            assignment.directory,
            self._temporary(environ),
            str(self._folder),
            str(Path(__file__).parent),
            run_dir,
        ]
        if script.startswith("/"):
            wanted.append(os.path.dirname(script))  # noqa: PTH120
        for path in assignment.container_mounts:
            if not os.path.exists(path):  # noqa: PTH110
                raise NotStarted(f"{socket.gethostname()}: cannot mount {path} in the container: it does not exist")
            wanted.append(path)
        found: list[str] = []
        for path in sorted({os.path.normpath(path) for path in wanted if path}):
            if path == "/":
                raise NotStarted(
                    f"{socket.gethostname()}: cannot mount / in the container; start the job from another folder"
                )
            if os.path.exists(path) and not _is_below(path, found):  # noqa: PTH110
                found.append(path)
        return found

    def on_started(self, cpus: Sequence[int]) -> str:
        """Read the script's process id, bind the process, and let the script begin. Return the reason why it is not bound.

        Args:
            cpus: CPUs of the rank; none for no binding.
        """
        text = os.read(self.started, 64).strip()
        self.pid = int(text) if text.isdigit() else None
        problem = ""
        if self.pid and cpus:
            try:
                os.sched_setaffinity(self.pid, cpus)
            except OSError as error:
                problem = f"cannot bind to CPUs: {error.strerror}"
        if self._pending is not None:
            self.signal(self._pending)
        os.write(self._go, b"\n")
        return problem

    def signal(self, number: int) -> None:
        """Send a signal to the script; before it has started, the signal waits for it.

        Args:
            number: Number of the signal.
        """
        if self.pid is None:
            self._pending = number
            return
        with contextlib.suppress(OSError):
            if f"{env.DISTRIB_PROCESS_TAG}={self._tag}".encode() in Path(f"/proc/{self.pid}/environ").read_bytes():
                os.kill(self.pid, number)

    def end(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until the runtime has removed the container of a script that has ended or was killed; else remove it.

        Args:
            process: The runtime.

        Returns:
            Exit code of the script, negative for a signal.
        """
        try:
            code = process.wait(REMOVAL_SECONDS if self.pid else 0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.remove()
            code = -signal.SIGKILL
        deadline = time.monotonic() + REMOVAL_SECONDS
        while reaper.children_of(os.getpid()) and time.monotonic() < deadline:
            reaper.wait_for_orphans(process.pid)  # podman's monitor, which removes the container
            time.sleep(0.01)
        reaper.sweep({self._tag}, set())
        return exit_status(code)

    def why_not_started(self, code: int) -> str:
        """Return the reason why the container did not start, empty if the script ran.

        Args:
            code: Exit code of the runtime.
        """
        if self.pid is not None:
            return ""
        return f"{socket.gethostname()}: the container did not start: exit code {code} of {self.command[0]}"

    def remove(self) -> None:
        """End and remove the container, if its runtime was killed before it could."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(self.removal, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)

    def close(self) -> None:
        """Remove the shared folder, and close what the script's process does not own."""
        os.close(self.started)
        os.close(self._go)
        shutil.rmtree(self._folder, ignore_errors=True)


def is_of_image(name: str) -> bool:
    """Return True if a variable has the image's value, if any, in place of the host's.

    Args:
        name: Name of the variable.
    """
    return name in IMAGE_VARIABLES or name.startswith(("CONDA_", "BASH_FUNC_"))


def exit_status(code: int) -> int:
    """Convert the exit code of a runtime, 128 + N after signal N, to that of a process.

    Args:
        code: Exit code; negative for a signal.
    """
    return 128 - code if 128 < code <= 128 + signal.NSIG else code


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _mount(path: str) -> str:
    """Return the value of `--mount`, which all runtimes read as a line of CSV."""
    fields = ["type=bind", f"source={path}", f"destination={path}"]
    return ",".join('"{}"'.format(field.replace('"', '""')) if set(',"') & set(field) else field for field in fields)


def _docker(
    runtime: str, name: str, assignment: Assignment, names: Sequence[str], own: Mapping[str, str], *, on_gpu: bool, has_input: bool
) -> list[str]:  # fmt: skip
    """Return the command of docker or podman up to the mounts. Values of variables stay out of it, as all users can read it."""
    words = [runtime, "run", "--rm", "--name", name, "--pull", "never", "--log-driver", "none"]
    words += ["--network", "host", "--ipc", "host", "--pid", "host", "--security-opt", "label=disable"]
    words += ["--user", f"{os.getuid()}:{os.getgid()}", "--workdir", assignment.directory, "--entrypoint", "sh"]
    is_rootless = runtime == "podman" and os.getuid() != 0
    if is_rootless:
        words += ["--userns", "keep-id"]
    else:
        words += [word for group in os.getgroups() if group != os.getgid() for word in ("--group-add", str(group))]
    has_infiniband = INFINIBAND.is_dir()
    files, locked = resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if has_infiniband and not is_rootless:
        locked = (-1, -1)  # RDMA pins its buffers
    most = int(Path("/proc/sys/kernel/pid_max").read_text())  # podman lowers its own limit to this number
    processes = (most if bound < 0 else min(bound, most) for bound in resource.getrlimit(resource.RLIMIT_NPROC))
    for limit, bounds in (("nofile", files), ("memlock", locked), ("nproc", processes)):
        words += ["--ulimit", f"{limit}={':'.join(map(str, bounds))}"]
    if has_infiniband:
        words += ["--device", str(INFINIBAND)]
    if on_gpu:
        words += ["--device", "nvidia.com/gpu=all"] if runtime == "podman" else ["--gpus", "all"]
    for variable in names:
        words += ["--env", variable]
    for variable, value in own.items():
        words += ["--env", f"{variable}={value}"]
    return words + ["--interactive"] * has_input


def _apptainer(
    runtime: str, name: str, assignment: Assignment, names: Sequence[str], own: Mapping[str, str], *, on_gpu: bool, has_input: bool
) -> list[str]:  # fmt: skip
    """Return the command of apptainer up to the mounts; it passes the environment, the user, devices and limits by itself."""
    del name, names, own, has_input
    return [runtime, "exec", "--no-home", "--pwd", assignment.directory, *(["--nv"] if on_gpu else [])]
