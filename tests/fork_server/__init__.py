"""Fork server: a process that has imported torch and forks one child for each script of a rank.

`import torch` and the first optimizer, which imports dynamo, cost 2.7 CPU seconds; a fork costs milliseconds.
`environment()` returns variables for a command that starts ranks. With them, Python starts `sitecustomize.py` of this
folder, which hands a rank's script to the server and stands in for it: it forwards signals and ends as the script ends.
The script runs with the rank's own descriptors, variables, folder, limits, CPUs and namespaces.

Tests of processes (stopped processes, sessions, memory, stacks of other processes) do without. Children share one hash seed.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
ADDRESS = "TEST_FORK_SERVER"
ALONE = {"TEST_FORK_ALONE": "1"}
"""Variables by which a script without launcher is forked, too, beside those of `environment()`."""


@functools.cache
def _start() -> tuple[subprocess.Popen[bytes], Path]:
    folder = tempfile.TemporaryDirectory(prefix="fork-server-")
    path = Path(folder.name, "socket")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": folder.name}
    command = [sys.executable, str(FOLDER / "server.py"), str(path)]
    process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def stop() -> None:
        process.communicate()  # the server ends with its standard input
        folder.cleanup()

    atexit.register(stop)
    assert process.stdout
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError("the fork server does not start")
    return process, path


def environment(pythonpath: str = "") -> dict[str, str]:
    """Return the variables by which scripts of ranks are forked, starting the server before the first.

    Args:
        pythonpath: folders that the script's PYTHONPATH holds, separated by colons.
    """
    has_gpu = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    if has_gpu and os.environ.get("CUDA_VISIBLE_DEVICES") != "":  # tests of GPUs: CUDA does not survive a fork
        return {"PYTHONPATH": pythonpath} if pythonpath else {}
    _, path = _start()
    folders = [str(FOLDER), *filter(None, [pythonpath])]
    return {ADDRESS: f"{sys.prefix}:{path}", "PYTHONPATH": os.pathsep.join(folders)}


def login_environment() -> dict[str, str]:
    """Return the variables for SSH sessions on virtual hosts; none in a test that is not marked `forked`."""
    return {name: os.environ[name] for name in (ADDRESS, "PYTHONPATH")} if ADDRESS in os.environ else {}


def server_process() -> int | None:
    """Return the process number of the server, or None before its start."""
    return _start()[0].pid if _start.cache_info().currsize else None
