"""Ranks of this host, started with mpirun only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import fork_server
from tests.conftest import ROOT


def run_ranks(
    ranks: int, script: Path, *arguments: object, seconds: float = 400, forked: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `script` on `ranks` ranks of this host with mpirun only; `forked` uses the fork server."""
    done = _run_once(ranks, script, *arguments, seconds=seconds, forked=forked, **variables)
    if done.returncode and "PMIx server's listener thread failed to start" in done.stderr:
        # Open MPI's own fault (lfortran/lfortran#8610), for which distrib-launch starts it once more, too. No rank has run.
        done = _run_once(ranks, script, *arguments, seconds=seconds, forked=forked, **variables)
    return done


def _run_once(
    ranks: int, script: Path, *arguments: object, seconds: float, forked: bool, **variables: str
) -> subprocess.CompletedProcess[str]:
    mpirun = Path(sys.executable).parent / "mpirun"
    options = ["--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "-np", str(ranks)]
    command = [mpirun, *options, sys.executable, script, *arguments]
    python = fork_server.environment(str(ROOT)) if forked else {"PYTHONPATH": str(ROOT)}
    tools = {**python, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **tools, **variables},
    )
    with process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(process.pid).children(recursive=True)[::-1]:
                if child.name().startswith("python"):
                    child.send_signal(signal.SIGABRT)  # prints the stacks of a hang
            out, err = process.communicate(timeout=seconds)
            pytest.fail(f"no end after {seconds:g} s\n{out}\n{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
