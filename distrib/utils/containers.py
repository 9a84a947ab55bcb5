"""Container runtimes of a host: docker, podman and apptainer. Standard library only; it is also sent to hosts as source text."""

from __future__ import annotations

import os
import shutil
import subprocess

RUNTIMES = ("docker", "podman", "apptainer")
"""Runtimes in the order in which `auto` tries them."""
TIMEOUT_SECONDS = 20.0


def find_runtime(wanted: str, image: str) -> tuple[str, str]:
    """Find the runtime that starts an image on this host: the first that is installed and has it.

    Args:
        wanted: One of `RUNTIMES`, or `auto`.
        image: Name of the image, or the path of an Apptainer image.

    Returns:
        Name of the runtime, and the reason why none can start the image; one of them is empty.
    """
    names = RUNTIMES if wanted == "auto" else (wanted,)
    problems = []
    for name in names:
        if shutil.which(name):
            problem = _image_problem(name, image)
            if not problem:
                return name, ""
            problems.append(problem)
    return "", " and ".join(problems) or "{} is not installed".format(" or ".join(names))


def _image_problem(runtime: str, image: str) -> str:
    """Return the reason why a runtime cannot start an image, empty if it can."""
    if runtime == "apptainer":
        return "" if "://" in image or os.access(image, os.R_OK) else f"apptainer cannot read {image}"
    try:
        done = subprocess.run(
            [runtime, "image", "inspect", "--format", "{{.Id}}", image], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"{runtime} does not reply: {error}"
    if not done.returncode:
        return ""
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
    if "no such image" in lines[-1].lower() or "not known" in lines[-1]:
        return f"{runtime} has no image {image}"
    return f"{runtime}: {lines[-1]}"
