"""Command `distrib-topo`: show, check and probe a cluster, and plan jobs on it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from distrib._version import __version__
from distrib.errors import DistribError
from distrib.utils import files, signals
from distrib.utils.log import get_logger
from distrib_launch.cli.options import Parser
from distrib_launch.console import ignore_closed_streams, tolerate_closed_pipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Command line without the program's name; None: that of this process.

    Returns:
        The exit code.
    """
    signals.raise_on_termination()  # until a job runs, which handles signals itself
    ignore_closed_streams()
    try:
        return _run(argv)
    except DistribError as error:
        get_logger("topo").error("%s", error)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        get_logger("topo").error("interrupted")
        return signals.exit_code(interrupt)


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of distrib-topo and those of its commands by name."""
    from distrib_launch.cli import check, plan, probe, show

    parser = Parser(
        prog="distrib-topo",
        description="What a cluster is made of, what its wires do, and how far a job will scale on it.",
    )
    parser.add_argument("--version", action="version", version=f"distrib {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="show|check|probe|plan")
    show_verb = verbs.add_parser(
        "show", help="hosts, GPUs, NICs, links and switches, as the files tell, or the hosts themselves"
    )
    show.add_options(show_verb)
    show_verb.set_defaults(run=show.run)
    check_verb = verbs.add_parser("check", help="ask every host whether it is fit to run a job, and start nothing")
    check.add_options(check_verb)
    check_verb.set_defaults(run=check.run)
    probe_verb = verbs.add_parser("probe", help="measure every link between the hosts, and say what is wrong with it")
    probe.add_probe_options(probe_verb)
    probe_verb.set_defaults(run=probe.run_probe_command)
    plan_verb = verbs.add_parser("plan", help="predict how far a job will scale, what caps it and what to change")
    plan.add_options(plan_verb)
    plan_verb.set_defaults(run=plan.run)
    return parser, {"show": show_verb, "check": check_verb, "probe": probe_verb, "plan": plan_verb}


def _run(argv: Sequence[str] | None) -> int:
    parser, verbs = build_parser()
    words = sys.argv[1:] if argv is None else argv
    try:
        options, unknown = parser.parse_known_args(words)
        if unknown:
            verbs[options.verb].refuse(unknown)
        files.working_directory()  # raises ConfigError if the folder was deleted
        code: int = options.run(options)
    except DistribError as error:
        if "--json" in words:  # programs that read the output get JSON after every error, including mistyped options
            import json

            with contextlib.suppress(DistribError), tolerate_closed_pipe():
                print(json.dumps({"status": "failed", "exit_code": error.exit_code, "error": str(error)}))
        raise
    return code


if __name__ == "__main__":
    sys.exit(main())
