"""Command `distrib-launch`: parse the options, launch the job, return the exit code."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from distrib.cluster.node import name_hosts
from distrib.errors import ConfigError, DistribError, LaunchError
from distrib.units import count_text
from distrib.utils import files, signals
from distrib.utils.json_text import encode_json
from distrib.utils.log import PLAIN, get_logger
from distrib_launch import run_directory
from distrib_launch.arguments.completion import complete_words, is_completing
from distrib_launch.arguments.config_file import parse_with_config
from distrib_launch.arguments.launch_arguments import EXAMPLES, USAGE, launch_options, parser
from distrib_launch.console import prepare_streams, report_error, tolerate_closed_pipe
from distrib_launch.launch_plan import LaunchPlan, RankPlan, without_secrets
from distrib_launch.status_lines import rank_count


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: Command line without the program's name; None: that of this process.
    """
    signals.raise_on_termination()  # until a job runs, which handles signals itself
    arguments = None
    problem: object = "interrupted"
    prepare_streams()
    closing_line = ""
    if not (sys.argv[1:] if argv is None else argv) and not is_completing():
        print(f"usage: {USAGE}\n\n{EXAMPLES}\ndistrib-launch --help lists the options.", file=sys.stderr)
        return 2
    try:
        command_parser = parser()
        complete_words(command_parser)
        arguments = parse_with_config(command_parser, argv)
        return _run(arguments)
    except DistribError as error:
        status, exit_code, code, problem = "failed", error.exit_code, error.code, error
        closing_line = error.closing_line
    except KeyboardInterrupt as interrupt:
        status, exit_code, code = "stopped", signals.exit_code(interrupt), "stopped"
    report_error(problem)
    if closing_line:
        get_logger("launch").info("%s", closing_line, extra=PLAIN)
    # If parsing failed, `--json` is searched in the words; one among the script's arguments is harmless.
    if arguments.json if arguments else "--json" in (sys.argv[1:] if argv is None else argv):
        with contextlib.suppress(DistribError):  # standard output itself may have failed
            _print_json({"status": status, "exit_code": exit_code, "code": code, "error": str(problem)})
    return exit_code


def _run(arguments: argparse.Namespace) -> int:
    from distrib_launch import runner  # half of the time of --help

    files.working_directory()  # raises ConfigError if the folder was deleted
    options = launch_options(arguments)
    _refuse_second_program(options.arguments)
    if arguments.dry_run:
        plan = runner.plan_launch(options)
        with tolerate_closed_pipe():
            _show_plan(plan, as_json=arguments.json, verbose=options.verbose)
        return 0
    if options.engine == "kubernetes":
        if arguments.stdin != "none":
            raise ConfigError("--stdin: pods have no standard input", hint="mount a file", code="option-conflict")
        from distrib_launch.cli import manifest  # loads the YAML writer

        return manifest.write(options, arguments)
    script_input = _read_input() if arguments.stdin != "none" else b""
    with run_directory.claimed_run_dir(options.run_dir, options.script) as run_dir:
        options = msgspec.structs.replace(options, run_dir=str(run_dir))
        plan = runner.plan_launch(options)
    input_ranks = (0,) if arguments.stdin == "rank0" else None
    result = runner.launch(plan, options, script_input=script_input, input_ranks=input_ranks)
    if arguments.json:
        try:
            _print_json(result)
        except LaunchError as error:
            report_error(error)
            return result.exit_code or error.exit_code
    return result.exit_code


def _refuse_second_program(arguments: Sequence[str]) -> None:
    """Raise ConfigError for a `:` before an option of the launcher or a file, as mpirun separates programs."""
    after = arguments[arguments.index(":") + 1 :] if ":" in arguments else ()
    if after and (after[0] in parser()._option_string_actions or after[0].endswith(".py") or files.is_file(after[0])):
        raise ConfigError(
            f": {shlex.join(after)}: a launch runs one script, not several programs as mpirun does",
            hint="start two launches, or one script that branches on RANK",
        )


def _read_input(limit_bytes: int = 64 << 20) -> bytes:
    """Return standard input, for the ranks, which hold it in memory. Raises ConfigError."""
    if sys.stdin is None:
        return b""
    if sys.stdin.isatty():
        raise ConfigError("--stdin: standard input is a terminal, expected a file or pipe", hint="add < FILE")
    data = sys.stdin.buffer.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise ConfigError(
            f"--stdin: more than {limit_bytes >> 20} MiB of input",
            hint="let the script read a file",
            code="too-long",
        )
    return data


def _print_json(value: object) -> None:
    with tolerate_closed_pipe():
        print(encode_json(value, indent=2).decode())


def _show_plan(plan: LaunchPlan, *, as_json: bool, verbose: bool) -> None:
    if as_json:
        print(encode_json(without_secrets(plan)).decode())
        return
    what = f"{rank_count(plan)} on {count_text(len(plan.hosts), 'host')}"
    print(f"{what}, engine {plan.engine}, mode {plan.mode}")
    for line in _host_lines(plan):
        print(f"  {line}")
    for note in plan.notes:
        print(f"note: {note}")
    if plan.forecast and plan.forecast.warning:
        print(f"warning: {plan.forecast.warning}")
    command, where = plan.rank_command, ""
    if image := plan.container.image:
        command, where = command if plan.program else ("python3", *command[1:]), f" in a container of {image}"
    print(f"each rank runs{where}: {shlex.join(command)}")
    print(f"in: {plan.directory}")
    print(f"run directory: {plan.run_dir}")
    if len(plan.hosts) > 1:
        print(f"network: {plan.network or 'interfaces are chosen at launch, from what the hosts have'}")
    if plan.sync:
        print(f"copied to every host first: {plan.sync}")
    if verbose:
        print(f"command: {shlex.join(plan.command)}")
    print(f"nothing was started; without --dry-run, distrib-launch starts {what}")


def _host_lines(plan: LaunchPlan) -> Iterator[str]:
    """Yield a line for each host with its workers and servers; more than three consecutive equal hosts share one."""
    first = 0
    lines: list[tuple[str, int, int, str]] = []  # host, its workers, their first rank, description
    for host in plan.hosts:
        server_ranks = [rank.rank for rank in plan.ranks if rank.role == "server" and rank.host == host.name]
        servers = f"parameter server {_numbers(server_ranks)}, a free port chosen at launch" if server_ranks else ""
        ranks = plan.ranks[first : first + host.workers]
        devices = list(dict.fromkeys(rank.device for rank in ranks))
        shown = f"{devices[0]} to {devices[-1]}" if len(devices) > 1 else "".join(devices)
        shown += " (its GPUs, if it has any)" if shown == "auto" else ""
        if host.chosen is not None:
            shown += f", chosen: {','.join(map(str, host.chosen))}"
        workers = f", device {shown}, {_cpus(ranks)}" if ranks else ""
        lines.append((host.name, host.workers, first, "; ".join(filter(None, (workers, servers)))))
        first += host.workers
    for (workers, rest), equal in groupby(lines, key=lambda one: (one[1], one[3])):
        names, _, starts, _ = zip(*equal, strict=True)
        if len(names) <= 3 or not workers:
            for name, start in zip(names, starts, strict=True):
                yield f"{name}: {_numbers(range(start, start + workers)) if workers else ''}{rest}"
            continue
        numbers = _numbers(range(starts[0], starts[-1] + workers))
        yield f"{name_hosts(names)}: {numbers}, {workers} on each{rest}"


def _numbers(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _cpus(ranks: Sequence[RankPlan]) -> str:
    if ranks[0].cpus is None:
        return "CPUs decided on the host"
    blocks = list(dict.fromkeys(rank.cpus or "not bound" for rank in ranks))
    shown = " | ".join(blocks if len(blocks) < 9 else [*blocks[:8], "..."])
    return f"CPUs {shown}, {ranks[0].threads} thread(s) each"


if __name__ == "__main__":
    sys.exit(main())
