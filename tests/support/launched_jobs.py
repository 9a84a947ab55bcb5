"""Launched jobs of this machine and their processes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.conftest import LAUNCH, our_processes


def rank_process() -> int:
    """Return the process of `job.py` on one of the ranks."""
    return next(
        pid for pid, command in our_processes().items() if re.match(r"\S*python\S* (\S+ )?\S+/job.py ", command)
    )


def live_children() -> list[str]:
    """List the live children that `job.py` started. One of them has an empty environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if command[0] == b"sleep" and command[1].endswith(b".%d" % os.getpid()):
                found.append(f"{entry.name}: {command}")
    return found


def start_job(run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [str(LAUNCH), "--run-dir", str(run_dir), *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=run_dir.parent,
    )  # fmt: skip
    assert process.stdout
    assert "rank" in process.stdout.readline()
    return process
