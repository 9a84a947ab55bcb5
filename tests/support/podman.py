"""Podman's images for tests: a base of this machine's own packages, and distrib's image for CPUs, built on it."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.container_base import write_base

BASE = "localhost/distrib-test-base"
IMAGE = "localhost/distrib:cpu"
"""Name of the image in the documentation."""
ROOT = Path(__file__).parents[2]
DEBIAN_PYTHON = "/usr/bin/python3"


def skip_or_fail(why: str) -> None:
    """Skip a test that needs what this machine lacks; fail it if DISTRIB_TEST_CONTAINERS=required.

    Args:
        why: The reason.
    """
    if os.environ.get("DISTRIB_TEST_CONTAINERS") == "required":
        pytest.fail(why)
    pytest.skip(why)


def open_store(folder: Path) -> dict[str, str]:
    """Make a store of podman with the base image, apart from the store of this machine.

    Args:
        folder: Folder of the store.

    Returns:
        Variables that select it.
    """
    is_debian = Path("/var/lib/dpkg/status").exists()
    if os.geteuid() != 0 or not is_debian or not shutil.which("podman") or not shutil.which("runc"):
        skip_or_fail("needs root, Debian, podman and runc")
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    )
    # Podman's own limits exceed those that root has where it lacks CAP_SYS_RESOURCE.
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    files, processes = (resource.getrlimit(what)[1] for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    processes = most if processes < 0 else min(processes, most)
    (folder / "containers.conf").write_text(
        f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]\n'
        f'[engine]\nruntime = "runc"\n[network]\nnetwork_config_dir = "{folder}/networks"\n'
        + ('network_backend = "netavark"\n' if has_netavark() else "")
    )
    (folder / "networks").mkdir()
    chosen = {
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"), "CONTAINERS_CONF": str(folder / "containers.conf"),
    }  # fmt: skip
    write_base(folder / "base.tar")
    podman(chosen, "import", "-q", folder / "base.tar", BASE)
    return chosen


def has_netavark() -> bool:
    """Return True if podman's networks resolve the names of containers."""
    return all(Path("/usr/lib/podman", name).exists() for name in ("netavark", "aardvark-dns"))


def close_store(folder: Path, chosen: Mapping[str, str]) -> None:
    """Remove all images and the store.

    Args:
        folder: Folder of the store.
        chosen: Variables that select it.
    """
    podman(chosen, "rmi", "--all", "--force")
    subprocess.run(["umount", "-q", folder / "graph/overlay"], check=False)
    shutil.rmtree(folder)


def podman(chosen: Mapping[str, str], *words: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    """Run podman on a store, and return its output. Raises AssertionError if it fails.

    Args:
        chosen: Variables that select the store.
        words: Arguments.
    """
    done = subprocess.run(
        ["podman", *words], env={**os.environ, **chosen}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def build_image(folder: Path, chosen: Mapping[str, str]) -> None:
    """Build the target `cpu` of the Dockerfile on the base image, without a network.

    pip of this machine downloads the packages as it is configured here, for the version of Python in the base.

    Args:
        folder: Empty folder for the packages.
        chosen: Variables that select the store.
    """
    version = subprocess.run([DEBIAN_PYTHON, "-V"], capture_output=True, text=True, check=True).stdout.split()[1]
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "-q", "-c", "constraints.txt", "-d", folder, "--only-binary", ":all:",
            "--python-version", version, ".[examples,plot]", "setuptools>=77",
        ], cwd=ROOT, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    given = {"CPU_BASE": BASE, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/packages"}
    arguments = [word for name, value in given.items() for word in ("--build-arg", f"{name}={value}")]
    podman(
        chosen, "build", "--target", "cpu", "--layers=false", "--network", "none", *arguments,
        "--volume", f"{folder}:/packages:ro", "--tag", IMAGE, str(ROOT),
    )  # fmt: skip
    shutil.rmtree(folder)
