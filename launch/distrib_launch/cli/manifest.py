"""Manifest of `distrib-launch --engine kubernetes`: the MPIJob, and the command line of the launcher inside the cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import yaml

from distrib.errors import ConfigError
from distrib.utils.log import PLAIN, get_logger
from distrib_launch import rank_environment, runner
from distrib_launch.arguments.launch_arguments import parser
from distrib_launch.console import tolerate_closed_pipe
from distrib_launch.engines import kubernetes
from distrib_launch.launch_options import LaunchOptions

log = get_logger("launch")

DECIDED_HERE = {
    "help", "version", "hosts", "ranks", "topology", "include", "exclude", "gpu_type", "spread", "engine", "image", "manifest",
    "pod_resources", "runtime_class", "mpirun", "ssh_command", "interface", "sync", "dry_run", "json", "env", "config",
}  # fmt: skip
"""Options that the manifest contains already or that have no meaning inside the cluster."""


def write(options: LaunchOptions, arguments: argparse.Namespace) -> int:
    """Write the manifest of a launch to `--manifest` or standard output, and return the exit code 0.

    Args:
        options: Options of the launch.
        arguments: The parsed command line.

    Raises:
        ConfigError: There is no `--image`, or the file cannot be written.
    """
    plan, pods = runner.plan_launch(options), options.pods
    if not pods.image:
        raise ConfigError(
            "--engine kubernetes: --image is missing",
            hint="build the Dockerfile, push the image, and give its name",
            code="option-missing",
        )
    environment = runner.forwarded(options)
    document = kubernetes.manifest(
        plan,
        pods,
        words=_launcher_words(arguments, rank_environment.SHOWN_PREFIXES),
        environment=environment,
        grace_seconds=options.grace_seconds,
    )
    text = json.dumps(document, indent=2)
    if not arguments.json:
        text = yaml.safe_dump(json.loads(text), sort_keys=False)  # a tree without shared nodes, so no YAML anchors
    for note in (*plan.notes, *kubernetes.notes_on_pods(plan, environment, pods.resources)):
        log.info("%s", note)
    if pods.manifest:
        try:
            Path(pods.manifest).write_text(text)
        except OSError as error:
            raise ConfigError(
                f"--manifest {pods.manifest}: {error.strerror}", hint="name another file", code="file-not-written"
            ) from None
        log.info("start it with: kubectl create -f %s", pods.manifest, extra=PLAIN)
    else:
        with tolerate_closed_pipe():
            print(text, end="")
    return 0


def _launcher_words(arguments: argparse.Namespace, forwarded: Sequence[str]) -> list[str]:
    """Return the options for the launcher inside the cluster."""
    words: list[str] = []
    for action in parser()._actions:
        value = getattr(arguments, action.dest, None)
        if not action.option_strings or action.dest in DECIDED_HERE or value == action.default:
            continue
        flag = action.option_strings[-1]
        for item in value if isinstance(value, list) else [value]:
            words += [flag] if action.nargs == 0 else [flag, _plain(item) if isinstance(item, float) else str(item)]
    for item in arguments.env:
        name = item.partition("=")[0]
        if not name.startswith(tuple(forwarded)):
            words += ["-x", name]
    return words


def _plain(number: float) -> str:
    """Format without an exponent, which options do not accept."""
    return f"{Decimal(str(number)):f}".removesuffix(".0")
