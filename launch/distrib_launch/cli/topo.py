"""Command `distrib-topo`: show, check and probe a cluster, and plan jobs on it."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Sequence

from distrib._version import __version__
from distrib.errors import DistribError
from distrib.utils import files, signals
from distrib.utils.log import get_logger
from distrib_launch.arguments.completion import complete_words, is_completing
from distrib_launch.arguments.shared_options import Parser
from distrib_launch.console import prepare_streams, tolerate_closed_pipe

COMMANDS = {
    "show": "show hosts, GPUs, NICs, links and switches, by files or by the hosts themselves",
    "check": "check whether each host can run a job, and start nothing",
    "probe": "measure all links between the hosts, and diagnose slow ones",
    "plan": "predict how far a job will scale, its bottleneck, and what to change",
}
"""Commands and their help. Each has a module of its name in this package, with `add_options` and `run`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: Command line without the program's name; None: that of this process.
    """
    signals.raise_on_termination()  # until a job runs, which handles signals itself
    prepare_streams()
    try:
        return _run(argv)
    except DistribError as error:
        get_logger("topo").error("%s", error)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        get_logger("topo").error("interrupted")
        return signals.exit_code(interrupt)


def build_parser(only: str | None = None) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of distrib-topo and those of its commands by name.

    Args:
        only: The command whose options are added, as only its modules are then imported; None for all commands.
    """
    parser = Parser(
        prog="distrib-topo", description="Show, check and probe a cluster, and predict how far jobs scale on it."
    )
    parser.add_argument("--version", action="version", version=f"distrib {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="|".join(COMMANDS))
    commands = {}
    for name, text in COMMANDS.items():
        usage = f"distrib-topo {name} [options]"
        commands[name] = verbs.add_parser(name, help=text, usage=usage, description=f"{text[0].upper()}{text[1:]}.")
        if only in (None, name):
            module = importlib.import_module(f"distrib_launch.cli.{name}")
            module.add_options(commands[name])
            commands[name].set_defaults(run=module.run)
    return parser, commands


def _run(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    command = None if is_completing() else next((word for word in words if word in COMMANDS), "")
    parser, verbs = build_parser(command)
    complete_words(parser)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    try:
        options, unknown = parser.parse_known_args(words)
        if unknown:
            verbs[options.verb].refuse(unknown)
        files.working_directory()  # raises ConfigError if the folder was deleted
        code: int = options.run(options)
    except DistribError as error:
        if "--json" in words:  # programs that read the output get JSON after every error, including mistyped options
            with contextlib.suppress(DistribError), tolerate_closed_pipe():
                failed = {"status": "failed", "exit_code": error.exit_code, "code": error.code, "error": str(error)}
                print(json.dumps(failed))
        raise
    return code


if __name__ == "__main__":
    sys.exit(main())
