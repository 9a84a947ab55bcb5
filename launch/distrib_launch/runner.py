"""A launch from its options to its result, for the command line and for `distrib_launch.run`."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TextIO

import msgspec

from distrib import units
from distrib.cluster import hostfile
from distrib.cluster.hostfile import HostList
from distrib.cluster.topology import Topology, check_hosts, read_topology
from distrib.errors import ConfigError, DistribError, LaunchError, TopologyError
from distrib.utils import files, netif, signals
from distrib_launch import (
    engines,
    html_report,
    plan_builder,
    profile_request,
    rank_environment,
    rsync,
    run_directory,
    status_lines,
)
from distrib_launch.console import Console
from distrib_launch.engines import kubernetes, srun
from distrib_launch.launch_options import HOST_FILE_NAME, LaunchOptions
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.plan_builder import LocalMachine
from distrib_launch.preflight import interface_selection
from distrib_launch.rank_agent import affinity
from distrib_launch.rank_environment import is_secret
from distrib_launch.results import Failure, Result

MAX_RANKS_PER_CORE = 8
"""Most ranks per core of this machine without `--oversubscribe`: a script is tried with a few, and a typing error must not stop work."""

DISK_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)
NO_INTERPRETER_HINT = "leave out python: every host starts its own"


def read_hosts(given: str | None) -> HostList | None:
    """Read the hosts of a launch.

    Args:
        given: Value of `-H`: a hostfile or a list; None: Slurm's allocation, if there is one.

    Returns:
        The hosts; None for this machine.

    Raises:
        HostfileError: The file or list is not valid.
        ConfigError: srun started several launchers.
    """
    if given is None:
        srun.refuse_several_launchers(os.environ)
        return hostfile.slurm_hosts(srun.allocation())
    if files.exists(given) or HOST_FILE_NAME.search(given):
        return hostfile.read_hostfile(given)
    return hostfile.parse_host_list(given)


def read_topology_for(given: str | None, hosts: str | None) -> Topology | None:
    """Read the topology of a launch.

    Args:
        given: Value of `--topology`; None: the YAML file beside the hostfile with the same stem, if there is one.
        hosts: Value of `-H`.

    Raises:
        TopologyError: The file is not valid.
    """
    path = Path(given) if given else None
    if path is None and hosts and files.exists(hosts):
        candidates = (Path(hosts).with_suffix(suffix) for suffix in (".yaml", ".yml"))
        path = next((candidate for candidate in candidates if files.is_file(candidate)), None)
    if path is None:
        return None
    return read_topology(path)


def _unknown_hosts(topology: Topology, hosts: HostList) -> str:
    """Return a note on hosts that the topology does not describe; the launch continues with them."""
    try:
        check_hosts(topology, hosts)
    except TopologyError as error:
        return str(error)
    return ""


def local_machine(environment: Mapping[str, str]) -> LocalMachine:
    """Return the properties of this machine that a plan depends on.

    Args:
        environment: Variables that the ranks get from the user.
    """
    return plan_builder.LocalMachine(
        names=netif.own_names(),
        gpus=affinity.count_gpus({**os.environ, **environment}),
        machine=affinity.read_machine(),
    )


def plan_launch(
    options: LaunchOptions, dropped: Collection[str] = (), before: LaunchPlan | None = None, *, restart: bool = False
) -> LaunchPlan:
    """Read hosts and topology, and decide everything about the launch.

    Args:
        options: Options of the user.
        dropped: Hosts that cannot take part.
        before: Earlier plan of the same job.
        restart: The job restarts after `before`; else the plan replaces `before` in the same start.

    Raises:
        DistribError: The options, files or hosts do not allow the launch.
    """
    engine = options.engine or engines.default(options.hosts is not None, os.environ)
    in_image = engine == "kubernetes"
    if in_image:
        _refuse_undecodable([options.script, *options.arguments, *options.variables])
    else:
        kubernetes.refuse_pod_options(options.pods)
        if not options.module:
            refuse_hostfile(options.script, options.hosts)
            _check_script(options.script, is_local=options.hosts is None, is_program=options.program)
    if options.interface:
        interface_selection.parse_interface(options.interface)  # refused before anything is planned
    hosts = read_hosts(options.hosts)
    topology = read_topology_for(options.topology, options.hosts)
    resolved = _resolve(options, engine, dropped, allow_fewer_ranks=restart or bool(dropped))
    if in_image:
        _refuse_undecodable([f"{name}={value}" for name, value in resolved.environment.items()])
    if before:
        resolved = msgspec.structs.replace(
            resolved,
            job_id=before.job_id,
            restarts=before.restarts + restart,
            attempt_id=secrets.token_hex(4) if restart else before.attempt_id,
        )
    if in_image:
        resolved = kubernetes.in_image(resolved, options.script, options.run_dir)
    local = local_machine(resolved.environment)
    if engine == "mpirun" and not options.oversubscribe:
        _refuse_oversubscription(resolved, hosts, local)
    plan = plan_builder.build_plan(resolved, hosts, topology, local)
    plan = _add_forecast(plan, resolved, hosts, topology, local)
    plan = msgspec.structs.replace(plan, notes=(*plan.notes, *_notes(options, plan, hosts, topology)))
    if options.min_hosts and not before and not in_image:
        _check_min_hosts(options.min_hosts, plan, preflight=options.preflight)
    if options.show_rank is not None and not before and not 0 <= options.show_rank < plan.world_size:
        raise ConfigError(f"--show-rank {options.show_rank}: there are ranks 0 to {plan.world_size - 1}")
    return plan


def forwarded(options: LaunchOptions) -> dict[str, str]:
    """Return the variables that every rank gets from the user.

    Args:
        options: Options of the user.
    """
    return rank_environment.forwarded_variables(os.environ, options.variables)


def _resolve(
    options: LaunchOptions, engine: str, dropped: Collection[str], *, allow_fewer_ranks: bool
) -> LaunchOptions:
    """Fill in what the user left to the launcher."""
    environment = forwarded(options)
    if options.profile:
        environment |= profile_request.prepare(msgspec.structs.replace(options, engine=engine))
    run_dir = run_directory.choose_run_dir(options.run_dir or None, options.script)
    return msgspec.structs.replace(
        options,
        script=options.script
        if options.module
        else str(files.absolute_path(_program_path(options.script) if options.program else options.script)),
        directory=str(files.working_directory()),
        run_dir=str(run_dir),
        ranks=1 if options.profile else options.ranks,
        engine=engine,
        environment=environment,
        host_filter=msgspec.structs.replace(
            options.host_filter,
            dropped=tuple(dropped),
            allow_fewer_ranks=options.min_hosts is not None and allow_fewer_ranks,
        ),
        sync=str(rsync.check_folder(options.sync)) if options.sync is not None else None,
    )


def _notes(options: LaunchOptions, plan: LaunchPlan, hosts: HostList | None, topology: Topology | None) -> list[str]:
    """Return notes on the command line, the script and the topology."""
    notes = []
    if plan.engine == "kubernetes" and (ignored := kubernetes.ignored_options(options)):
        notes.append(f"left out, as pods have an image and a network of their own: {', '.join(ignored)}")
    on_cpus = all(rank.device == "cpu" for rank in plan.ranks)
    keeps_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") and "CUDA_VISIBLE_DEVICES" not in plan.forwarded
    if (
        keeps_gpus
        and not on_cpus
        and plan.engine == "mpirun"
        and not all(netif.is_here(host.name) for host in plan.hosts)
    ):
        notes.append(
            "CUDA_VISIBLE_DEVICES is set here but not for ranks on other hosts: they use the first GPUs there; "
            "-x CUDA_VISIBLE_DEVICES forwards it"
        )
    if topology and hosts and (note := _unknown_hosts(topology, hosts)):
        notes.append(note)
    late = [word for word in options.arguments if word in ("-np", "-H")]
    if late and options.hosts is None and options.ranks is None:
        notes.append(
            f"{late[0]} after the script is an argument of the script; options of distrib-launch stand before it"
        )
    return notes


def refuse_hostfile(script: str, hosts: str | None) -> None:
    """Raise ConfigError if the script has the name of a hostfile and no hosts were given.

    Args:
        script: Path that was given as the script.
        hosts: Value of `-H`.
    """
    if hosts is None and HOST_FILE_NAME.search(Path(script).name):
        raise ConfigError(f"{script} is not a script", hint=f"hosts are named with -H {script}", code="script-missing")


def _program_path(given: str) -> str:
    """Return the path of a program, found on PATH if it is given without a folder."""
    return given if "/" in given else shutil.which(given) or given


def _similar_scripts(script: Path) -> list[str]:
    """Return scripts whose folders and name are similar to those of a path that does not exist, the most similar first."""
    folders = [Path(script.anchor)]
    for part in script.parts[bool(script.anchor) : -1]:
        folders = [
            folder / name
            for folder in folders
            for name in (
                [part] if files.is_dir(folder / part) else _similar(part, filter(files.is_dir, folder.glob("*")))
            )
        ]
    found = [str(folder / name) for folder in folders for name in _similar(script.name, folder.glob("*.py"))]
    return difflib.get_close_matches(str(script), found, cutoff=0.0)


def _similar(name: str, paths: Iterable[Path]) -> list[str]:
    return difflib.get_close_matches(name, sorted(path.name for path in paths), cutoff=0.75)


def _check_script(given: str, *, is_local: bool, is_program: bool) -> None:
    """Raise ConfigError if it is not a Python script, or if a job on this machine only may not read it."""
    script = Path(_program_path(given) if is_program else given)
    is_interpreter = script.name.startswith("python") and script.suffix != ".py"
    if not files.is_file(script):
        is_folder = files.is_dir(script)
        near = sorted(map(str, script.glob("*.py"))) if is_folder else _similar_scripts(script)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else "options of distrib-launch stand before the script, the script's own after it"
        )
        raise ConfigError(
            f"{given}: {'is a directory' if is_folder else 'no such script'}",
            hint=NO_INTERPRETER_HINT if is_interpreter else hint,
            code="script-missing",
        )
    if is_local and not os.access(script, os.R_OK):
        raise ConfigError(
            f"{script}: cannot read it: no permission", hint=f"chmod a+r {script}", code="file-unreadable"
        )
    if is_program:
        if not os.access(script, os.X_OK):
            raise ConfigError(
                f"{script}: cannot run it: no permission", hint=f"chmod +x {script}", code="file-unreadable"
            )
        return
    with contextlib.suppress(OSError), script.open("rb") as file:  # the preflight checks whether the hosts can read it
        if file.read(4) == b"\x7fELF":
            raise ConfigError(
                f"{script}: it is a program, and distrib-launch starts Python scripts",
                hint=NO_INTERPRETER_HINT
                if is_interpreter
                else "name the Python script that it starts, or add --no-python",
                code="script-not-python",
            )


def _refuse_oversubscription(options: LaunchOptions, hosts: HostList | None, local: LocalMachine) -> None:
    """Raise ConfigError for far more ranks on this machine alone than it has cores: they would make it unusable."""
    cores = sum(map(len, local.machine.nodes.values())) if local.machine else 0
    listed = hosts.hosts if hosts and options.host_filter.is_empty else ()
    ranks = options.ranks or sum(host.slots or 1 for host in listed)
    if cores and ranks > MAX_RANKS_PER_CORE * cores and {host.name for host in listed} <= local.names:
        given = f"-np {ranks}" if options.ranks else f"{ranks} slots of {options.hosts}"
        raise ConfigError(
            f"{given}: this machine has {units.count_text(cores, 'core')}, expected at most {MAX_RANKS_PER_CORE * cores} ranks",
            hint="start fewer ranks, or add --oversubscribe",
            code="too-many-ranks",
        )


def _check_min_hosts(min_hosts: int, plan: LaunchPlan, *, preflight: bool) -> None:
    if min_hosts > len(plan.hosts):
        raise ConfigError(
            f"--min-hosts {min_hosts}: the job has {len(plan.hosts)} host(s)",
            hint="lower it, or give more hosts",
            code="too-few-hosts",
        )
    if engines.shell_to_hosts(plan, preflight=preflight) is None:
        why = engines.NOT_ASKED if preflight else "--no-preflight does not check any host"
        raise ConfigError(f"--min-hosts {min_hosts}: {why}", hint="leave out --min-hosts")


def _add_forecast(
    plan: LaunchPlan,
    resolved: LaunchOptions,
    hosts: HostList | None,
    topology: Topology | None,
    local: LocalMachine,
) -> LaunchPlan:
    """Add the predicted performance, and in mode auto the fastest strategy."""
    notes, record = plan.notes, None
    if resolved.wants_forecast:
        from distrib_launch import performance_forecast  # loads the bandwidth model

        forecast = performance_forecast.forecast(plan, resolved, topology)
        if forecast.strategy != plan.strategy:
            changed = msgspec.structs.replace(resolved, strategy=forecast.strategy)
            plan = plan_builder.build_plan(changed, hosts, topology, local)
        notes, record = (*plan.notes, *forecast.notes), forecast.record
    return msgspec.structs.replace(
        plan,
        notes=notes,
        topology=topology.source if topology else None,
        forecast=record,
        warn_below=resolved.warn_below,
    )


def _refuse_undecodable(words: list[str]) -> None:
    """Raise ConfigError for text that is not UTF-8, which a manifest of Kubernetes cannot contain."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            shown = word.encode(errors="backslashreplace").decode()
            name, is_variable, _ = shown.partition("=")
            if is_variable and is_secret(name):
                shown = f"{name}=***"
            raise ConfigError(
                f"{shown}: not UTF-8 text", hint="rename the file, or encode the argument or variable"
            ) from None


def launch(
    plan: LaunchPlan,
    options: LaunchOptions,
    *,
    streams: tuple[TextIO, TextIO] | None = None,
    script_input: bytes = b"",
    input_ranks: Collection[int] | None = None,
) -> Result:
    """Run a plan to its end and write the run directory.

    Args:
        plan: Result of `plan_launch`.
        options: Options of the user.
        streams: Replacements of standard output and standard error.
        script_input: Standard input of the scripts.
        input_ranks: Ranks that get `script_input`; None: all.

    Returns:
        The content of `result.json`.

    Raises:
        DistribError: The job could not be started.
    """
    if not engines.get(plan.engine).starts_ranks:
        raise ConfigError(
            "--engine kubernetes writes a manifest and starts nothing",
            hint="use kubectl create -f",
            code="option-conflict",
        )
    run_dir = Path(plan.run_dir)
    console = Console(
        [rank.host for rank in plan.ranks],
        quiet=options.quiet,
        status_lines=options.status_lines,
        show_rank=options.show_rank,
        dedup=options.dedup,
        streams=streams,
    )
    try:
        with run_directory.locked_run_dir(run_dir):
            return _launch(run_dir, plan, options, console, script_input, input_ranks)
    finally:
        console.close()


def _launch(
    run_dir: Path,
    plan: LaunchPlan,
    options: LaunchOptions,
    console: Console,
    script_input: bytes,
    input_ranks: Collection[int] | None,
) -> Result:
    from distrib_launch.supervisor.attempts import AttemptLoop  # a third of the imports; other commands only plan

    console.status(status_lines.start_line(plan))
    replaced = run_directory.prepare_run_dir(run_dir)
    if replaced:
        console.say(f"note: replaced logs and results of an earlier run in {run_dir}")
    if os.geteuid() == 0 and not _in_container():
        console.say("note: running as root; use your own user on a shared cluster")
    began = time.time()
    try:
        ended = AttemptLoop(options, console, plan_launch, script_input=script_input, input_ranks=input_ranks).run(plan)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise LaunchError(
            f"cannot write into the run directory {run_dir}: {error.strerror}",
            hint="make room, or name another with --run-dir",
            code="file-not-written",
        ) from error
    except (DistribError, KeyboardInterrupt) as end:  # before the job runs; the supervisor handles later interrupts
        result = _not_started(plan, end, time.time() - began)
        with contextlib.suppress(OSError):
            run_directory.write_json(run_dir / run_directory.RESULT, result)  # programs may wait for it
        line = status_lines.end_line(result, run_dir)
        if isinstance(end, KeyboardInterrupt):
            console.status(line)
        elif options.status_lines:
            end.closing_line = line
        raise
    plan, result = ended.plan, ended.result
    try:
        run_directory.write_json(run_dir / run_directory.RESULT, result)
        html_report.write_report(plan, result, run_dir, time.time() - result.seconds)
    except OSError as error:
        console.say(f"error: cannot write results into {run_dir}: {error.strerror}")
    ended.report_failure(console)
    if result.predicted and result.measured:
        seconds, predicted = result.measured.step_seconds, result.predicted.step_seconds
        console.say(
            f"a step took {seconds * 1e3:,.4g} ms, predicted {predicted * 1e3:,.4g} ms ({seconds / predicted - 1:+.0%})"
        )
    if options.profile:
        profile_request.save(options, result, run_dir, console)
    console.status(status_lines.end_line(result, run_dir))
    return result


def _in_container() -> bool:
    """Return True inside a container, where it is usual to run as root and harmless to the host."""
    marks = Path("/.dockerenv"), Path("/run/.containerenv")
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(map(files.exists, marks))


def _not_started(plan: LaunchPlan, end: DistribError | KeyboardInterrupt, seconds: float) -> Result:
    """Return the result of a job that failed or was stopped before any rank ran its script."""
    code = signals.exit_code(end) if isinstance(end, KeyboardInterrupt) else end.exit_code
    failure = None
    if isinstance(end, DistribError):
        failure = Failure(host="", time=time.time(), exit_code=code, code=end.code, message=str(end))
    return Result(
        status="failed" if failure else "stopped", exit_code=code, world_size=plan.world_size,
        hosts=tuple(host.name for host in plan.hosts), seconds=seconds, restarts=0, ranks=(), first_failure=failure, warnings=(),
    )  # fmt: skip
