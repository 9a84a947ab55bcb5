"""A launch from its options to its result: the one path that the command and Python share."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from distrib.errors import ConfigError, DistribError, LaunchError
from distrib.utils import files
from distrib_launch.cli.options import FILE_NAME

if TYPE_CHECKING:
    from distrib.cluster.hostfile import HostList
    from distrib.cluster.topology import Topology
    from distrib_launch.console import Console
    from distrib_launch.launch_plan import Here, LaunchPlan, Options
    from distrib_launch.results import Result

DISK_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)


def read_hosts(given: str | None) -> HostList | None:
    """The hosts of `-H`: a file, a list, or None for Slurm's allocation, if there is one."""
    from distrib.cluster import hostfile

    if given is None:
        from distrib_launch.engines import srun

        srun.refuse_several_launchers(os.environ)
        return hostfile.slurm_hosts(srun.allocation())
    if files.exists(given) or FILE_NAME.search(given):
        return hostfile.read_hostfile(given)
    return hostfile.parse_host_list(given)


def read_topology_for(given: str | None, hosts: str | None) -> Topology | None:
    """The topology that was named, else the YAML file beside the hostfile with its stem, if there is one."""
    path = Path(given) if given else None
    if path is None and hosts and files.exists(hosts):
        candidates = (Path(hosts).with_suffix(suffix) for suffix in (".yaml", ".yml"))
        path = next((candidate for candidate in candidates if files.is_file(candidate)), None)
    if path is None:
        return None
    from distrib.cluster.topology import read_topology

    return read_topology(path)


def _not_described(topology: Topology, hosts: HostList) -> str:
    """A note on hosts that the topology does not know; they are launched on all the same."""
    from distrib.cluster.topology import check_hosts
    from distrib.errors import TopologyError

    try:
        check_hosts(topology, hosts)
    except TopologyError as error:
        return str(error)
    return ""


def this_machine(environment: Mapping[str, str]) -> Here:
    """What a plan made here must know of this machine; `environment` is the ranks'."""
    from distrib.utils import local_addresses
    from distrib_launch import launch_plan as planning
    from distrib_launch.rank_agent import affinity

    return planning.Here(
        names=local_addresses.own_names(),
        gpus=affinity.count_gpus({**os.environ, **environment}),
        machine=affinity.read_machine(),
    )


_PYTHON = re.compile(r"python[\d.]*")
_NO_PYTHON = "leave it out: every host starts its own"


def make_plan(
    options: argparse.Namespace, without: Collection[str] = (), before: LaunchPlan | None = None, *, again: bool = False
) -> LaunchPlan:
    """Decide everything about the launch that `options`, those of the command, ask for.

    `without` names hosts left out. `before` is a plan of this job that was made before: of the same start of it, or where it is
    started `again` of the last one.
    """
    import msgspec

    from distrib_launch import engines
    from distrib_launch import launch_plan as planning
    from distrib_launch.engines import kubernetes
    from distrib_launch.preflight import interface_selection

    directory = str(files.working_directory())
    _refuse_broken_text([options.script, *options.arguments, *options.env, directory, options.run_dir or ""])
    engine = options.engine or engines.default(options.hosts is not None, os.environ)
    in_image = engine == "kubernetes"
    if not in_image:
        kubernetes.refuse_words_on_pods(options)
    if not in_image and not options.module:
        refuse_hostfile(options.script, options.hosts)
        _check_script(options.script, alone=options.hosts is None)
    if options.interface:
        interface_selection.named(options.interface)  # refused before anything is planned where it cannot be
    hosts = read_hosts(options.hosts)
    topology = read_topology_for(options.topology, options.hosts)
    wanted = _wanted(options, engine, without, fewer=again or bool(without))
    _refuse_broken_text([f"{name}={value}" for name, value in wanted.environment.items()])
    if before:
        wanted = msgspec.structs.replace(
            wanted,
            run=before.run,
            restarts=before.restarts + again,
            job=wanted.job if again else before.job,
        )
    if in_image:
        wanted = kubernetes.in_image(wanted, options.script, options.run_dir)
    here = this_machine(wanted.environment)
    plan = _with_outlook(planning.make_plan(wanted, hosts, topology, here), wanted, options, hosts, topology, here)
    plan = msgspec.structs.replace(plan, notes=(*plan.notes, *_notes(options, plan, hosts, topology)))
    if options.min_hosts and not before and not in_image:
        _check_min_hosts(options, plan)
    if options.only_rank is not None and not before and not 0 <= options.only_rank < plan.world_size:
        raise ConfigError(f"--only-rank {options.only_rank}: there are ranks 0 to {plan.world_size - 1}")
    return plan


def _wanted(options: argparse.Namespace, engine: str, without: Collection[str], *, fewer: bool) -> Options:
    """What the command's options ask for, apart from the hosts; `fewer`: whether ranks may be missing where --min-hosts is given."""
    import msgspec

    from distrib_launch import host_selection, rank_environment, results, rsync
    from distrib_launch import launch_plan as planning
    from distrib_launch.cli import training_options

    environment = rank_environment.forwarded_variables(os.environ, options.env)
    if options.profile:
        from distrib_launch import profile_request

        environment |= profile_request.prepare(options)
    run_dir = results.choose_run_dir(options.run_dir, options.script)
    folder = rsync.check_folder(options.sync) if options.sync is not None else None
    return planning.Options(
        script=options.script if options.module else str(files.absolute_path(options.script)),
        module=options.module,
        arguments=tuple(options.arguments),
        interpreter=sys.executable,
        directory=str(files.working_directory()),
        run_dir=str(run_dir),
        ranks=1 if options.profile else options.ranks,
        strategy=training_options.strategy_of(options),
        engine=engine,
        mpirun=options.mpirun,
        ssh_command=options.ssh_command,
        environment=environment,
        wishes=msgspec.structs.replace(
            host_selection.wishes_of(options),
            spread=options.spread,
            without=tuple(without),
            fewer=options.min_hosts is not None and fewer,
        ),
        bind=options.bind,
        grace_seconds=options.grace,
        sync=str(folder) if folder else None,
        max_restarts=options.max_restarts,
    )


def _notes(
    options: argparse.Namespace, plan: LaunchPlan, hosts: HostList | None, topology: Topology | None
) -> list[str]:
    """What the command line and the script, beside the plan itself, are to be told."""
    from distrib_launch.engines import kubernetes, mpirun

    notes = []
    if plan.engine == "kubernetes" and (unheeded := kubernetes.unheeded(options)):
        notes.append(f"left out, as pods have an image and a network of their own: {', '.join(unheeded)}")
    if mpirun.keeps_here("PYTHONPATH", plan, os.environ):
        notes.append("PYTHONPATH is set here, and ranks on other hosts do not have it; -x PYTHONPATH hands it on")
    on_cpus = all(rank.device == "cpu" for rank in plan.ranks)
    if not on_cpus and mpirun.keeps_here("CUDA_VISIBLE_DEVICES", plan, os.environ):
        notes.append(
            "CUDA_VISIBLE_DEVICES is set here, and ranks on other hosts do not have it: they use the first GPUs there; "
            "-x CUDA_VISIBLE_DEVICES hands it on"
        )
    if topology and hosts and (note := _not_described(topology, hosts)):
        notes.append(note)
    late = [word for word in options.arguments if word in ("-np", "-H")]
    if late and options.hosts is None and options.ranks is None:
        notes.append(
            f"{late[0]} after the script is an argument of the script; what is for distrib-launch stands before it"
        )
    return notes


def refuse_hostfile(script: str, hosts: str | None) -> None:
    """Raises ConfigError where what was named as the script is a hostfile by its name, and no hosts were named."""
    if hosts is None and FILE_NAME.search(Path(script).name):
        raise ConfigError(f"{script} is no script", hint=f"hosts are named with -H {script}")


def _check_script(given: str, *, alone: bool) -> None:
    """Raises ConfigError where it is no Python script, or where this machine is `alone` and may not read it."""
    script = Path(given)
    if files.is_file(script):
        if alone and not os.access(script, os.R_OK):
            raise ConfigError(f"{script}: cannot read it: no permission", hint=f"chmod a+r {script}")
        _refuse_other_languages(script)
        return
    hint = "options of distrib-launch stand before the script, the script's own after it"
    raise ConfigError(
        f"{given}: {'is a directory' if files.is_dir(script) else 'no such script'}",
        hint=_NO_PYTHON if _PYTHON.fullmatch(script.name) else hint,
    )


def _refuse_other_languages(script: Path) -> None:
    try:
        with script.open("rb") as file:
            first = file.readline(200)
    except OSError:
        return  # which the hosts are asked about
    if first.startswith(b"\x7fELF"):
        what = "it is a program"
    elif first.startswith(b"#!") and b"python" not in first and not _is_python(script):
        what = "its first line is " + first.decode(errors="replace").strip()
    else:
        return
    hint = "name the Python script that it starts; -x NAME=VALUE sets a variable"
    raise ConfigError(
        f"{script}: {what}, and distrib-launch starts Python scripts",
        hint=_NO_PYTHON if _PYTHON.fullmatch(script.name) else hint,
    )


def _is_python(script: Path) -> bool:
    """Whatever its first line starts: `uv run --script`, or a shell that executes a Python whose path is too long for such a line."""
    import ast

    try:
        ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    return True


def _check_min_hosts(options: argparse.Namespace, plan: LaunchPlan) -> None:
    from distrib_launch import engines

    least = f"--min-hosts {options.min_hosts}"
    if options.min_hosts > len(plan.hosts):
        raise ConfigError(f"{least}: the job has {len(plan.hosts)} host(s)", hint="ask for fewer, or give more hosts")
    if engines.way_to_ask(plan, no_check=options.no_check) is None:
        why = "--no-check asks no host whether it is fit" if options.no_check else engines.NOT_ASKED
        raise ConfigError(f"{least}: {why}", hint=f"leave out {least.split()[0]}")


def _with_outlook(
    plan: LaunchPlan,
    wanted: Options,
    options: argparse.Namespace,
    hosts: HostList | None,
    topology: Topology | None,
    here: Here,
) -> LaunchPlan:
    """The plan with what is predicted of it, and in mode auto with the strategy that is best for it."""
    import msgspec

    from distrib_launch import launch_plan as planning
    from distrib_launch.cli import plan as outlooks

    notes, outlook = plan.notes, None
    if outlooks.is_wanted(options):
        from distrib_launch import performance_forecast as before

        look = before.look(plan, options, topology)
        if look.strategy != plan.strategy:
            plan = planning.make_plan(msgspec.structs.replace(wanted, strategy=look.strategy), hosts, topology, here)
        notes, outlook = (*plan.notes, *look.notes), look.outlook
    return msgspec.structs.replace(
        plan,
        notes=notes,
        topology=topology.source if topology else None,
        outlook=outlook,
        warn_below=options.warn_below,
    )


def _refuse_broken_text(words: list[str]) -> None:
    """Plans are JSON, and so UTF-8; bytes that are not cannot be kept or passed on."""
    from distrib_launch.rank_environment import is_secret

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
    options: argparse.Namespace,
    *,
    streams: tuple[TextIO, TextIO] | None = None,
    script_input: bytes = b"",
    input_ranks: Collection[int] | None = None,
) -> Result:
    """Run the plan to its end and write the run directory. Raises `DistribError` when the job could not be started.

    `streams` take what would go to standard output and error; `script_input` is what the scripts of `input_ranks`, or of
    every rank, find on their standard input.
    """
    from distrib_launch import results
    from distrib_launch.console import Console

    if plan.engine == "kubernetes":
        raise ConfigError("--engine kubernetes writes a manifest and starts nothing", hint="use kubectl create -f")
    run_dir = Path(plan.run_dir)
    console = Console(
        [rank.host for rank in plan.ranks],
        quiet=options.quiet or options.json,
        only_rank=options.only_rank,
        fold=not options.no_fold,
        streams=streams,
    )
    try:
        with results.held(run_dir):
            return _launch(run_dir, plan, options, console, script_input, input_ranks)
    finally:
        console.close()


def _launch(
    run_dir: Path,
    plan: LaunchPlan,
    options: argparse.Namespace,
    console: Console,
    script_input: bytes,
    input_ranks: Collection[int] | None,
) -> Result:
    from distrib_launch import html_report, results
    from distrib_launch.supervisor.attempts import Attempts

    replaced = results.make_run_dir(run_dir)
    if replaced:
        console.say(f"note: {run_dir} held the logs and results of an earlier run: they are gone")
    if os.geteuid() == 0 and not _in_container():
        console.say("note: running as root; on a shared cluster a user of your own is safer")
    began = time.time()
    try:
        ended = Attempts(options, console, script_input=script_input, input_ranks=input_ranks).run(plan)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise LaunchError(
            f"cannot write into the run directory {run_dir}: {error.strerror}",
            hint="make room, or name another with --run-dir",
        ) from error
    except (DistribError, KeyboardInterrupt) as end:  # a job that runs hears of an interrupt in another way
        # Whoever waits for the result is to find it.
        with contextlib.suppress(OSError):
            results.write_json(run_dir / results.RESULT, results.not_started(plan, end, time.time() - began))
        raise
    plan, result = ended.plan, ended.result
    try:
        results.write_json(run_dir / results.RESULT, result)
        html_report.write(plan, result, run_dir, time.time() - result.seconds)
    except OSError as error:
        console.say(f"error: cannot write results into {run_dir}: {error.strerror}")
    ended.tell_failure(console)
    if result.predicted and result.measured:
        seconds, predicted = result.measured.step_seconds, result.predicted.step_seconds
        console.say(
            f"a step took {seconds * 1e3:,.4g} ms, {predicted * 1e3:,.4g} ms was predicted ({seconds / predicted - 1:+.0%})"
        )
    if options.profile:
        from distrib_launch import profile_request

        profile_request.keep(options, result, run_dir, console)
    if result.status != "succeeded" or options.verbose:
        console.say(f"{result.status} after {result.seconds:.1f} s; everything is in {run_dir}")
    return result


def _in_container() -> bool:
    """Where being root is the common way, of no more power than the container has."""
    marks = Path("/.dockerenv"), Path("/run/.containerenv")
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(map(files.exists, marks))
