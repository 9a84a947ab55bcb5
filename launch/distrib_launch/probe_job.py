"""The job that measures: `distrib.probe` on one rank of each host and more, started again after a failure without what is lost."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from distrib.errors import DistribError, LaunchError, PreflightError
from distrib.probe.journal import Journal
from distrib.probe.protocol import Spec
from distrib.probe.records import CollectiveMeasurement, PairMeasurement, ProbeEnded, ProbeStarted, Record, StageDone
from distrib.probe.settings import GPUDIRECT_OFF_VALUES, GPUDIRECT_VARIABLE
from distrib.probe.stages import LINKS_DONE
from distrib.utils import signals

if TYPE_CHECKING:
    from distrib.cluster.hosts import HostList
    from distrib_launch.launch_options import LaunchOptions
    from distrib_launch.launch_plan import LaunchPlan
    from distrib_launch.results import Result

RELAUNCHES = 4
"""So often the probe goes on after a failure; then it gives up."""


class Outcome(msgspec.Struct, kw_only=True):
    """How the job or jobs went. Hosts that were lost, or not fit from the beginning, are there with the reason."""

    lost: dict[str, str] = {}
    left_out: dict[str, str] = {}
    notes: list[str] = []
    without_all_reduce: str = ""
    """Why the last job failed in its all-reduces, where all else was measured."""
    stopped: int | None = None
    """The exit code where the last job, without which there is enough to tell, was interrupted."""
    result: Result | None = None


def hosts_of(options: argparse.Namespace) -> tuple[HostList, tuple[str, ...]]:
    """The hosts that were named, and those of them that are probed: all that a job could run on, parameter servers too."""
    from distrib.cluster.hosts import Host, HostList
    from distrib_launch.runner import read_hosts

    planned = _plan(_launcher_options(options, [], "{}")).hosts
    listed = read_hosts(options.hosts)
    if listed is None:
        listed = HostList(
            hosts=tuple(Host(name=host.name, slots=host.ranks) for host in planned), source="this machine", dialect=""
        )
    return listed, tuple(host.name for host in planned)


def without_gpus(options: argparse.Namespace) -> bool:
    """Whether ranks are shown no GPU, by `-x CUDA_VISIBLE_DEVICES=`."""
    from distrib_launch.rank_agent.affinity import listed_gpus
    from distrib_launch.rank_environment import forwarded_variables

    visible = forwarded_variables(os.environ, options.environment).get("CUDA_VISIBLE_DEVICES")
    return visible is not None and not listed_gpus(visible)


def measure(options: argparse.Namespace, hosts: tuple[str, ...], journal: Journal, run_dir: Path) -> Outcome:
    """Run the job, and go on after a failure, without the hosts that are lost.

    A host that vanished, or is found unfit before the probe goes on, is left out; one where a process died gets a second try,
    unless that was in an all-reduce: NCCL has processes end that are well, on hosts that are, and a second one would end alike.
    """
    outcome = Outcome()
    failed: set[str] = set()
    attempt = 0
    present = hosts
    while attempt <= RELAUNCHES:
        present = tuple(host for host in hosts if host not in outcome.lost and host not in outcome.left_out)
        if len(present) < min(2, len(hosts)):
            break
        folder = run_dir / f"attempt{attempt}" if attempt else run_dir
        try:
            result = outcome.result = _launch(options, hosts, present, journal, folder)
        except PreflightError as error:
            unfit = {host: why for host, why in error.hosts.items() if host in present}
            if attempt and unfit:
                outcome.lost |= unfit
                _say_lost(unfit)
                continue
            fit = len(present) - len(unfit)
            if options.drop_bad_hosts and unfit and fit > 1:
                outcome.left_out |= unfit
                for host, why in unfit.items():
                    print(f"distrib-topo: warning: {host} is left out: {why}", file=sys.stderr)
                continue
            raise _with_a_way_out(error, [host for host in present if host not in unfit]) from None
        except DistribError as error:
            if not attempt:
                raise
            print(f"distrib-topo: {error}", file=sys.stderr)
            break
        attempt += 1
        if result.status != "failed" or any(isinstance(record, ProbeEnded) for record in journal.read()):
            break
        failure = result.first_failure
        vanished = failure and failure.rank is not None and failure.exit_code is None and failure.signal is None
        if not vanished and _links_done(journal.read()):
            why = f"{failure.message} ({failure.host})" if failure else "it is not known why"
            outcome.without_all_reduce = f"all-reduce failed: {why}"
            outcome.notes.append(outcome.without_all_reduce)
            break
        if failure is None or failure.host not in present:
            break
        journal.take_over()
        if failure.exit_code and not journal.done_steps:
            break  # a mistake of the installation, which would be made again
        if vanished or failure.host in failed:
            outcome.lost[failure.host] = failure.message
            _say_lost({failure.host: failure.message})
        else:
            failed.add(failure.host)
            print(f"distrib-topo: {failure.host}: {failure.message}; going on with it once more", file=sys.stderr)
    last = outcome.result
    if last and last.status == "succeeded" and not outcome.lost and _gpudirect_matters(journal.read()):
        why, outcome.stopped = _without_gpudirect(options, hosts, present, journal, run_dir / "no-gpudirect")
        if why:
            outcome.notes.append(f"all-reduce without GPUDirect RDMA was not measured to its end: {why}")
    told = outcome.without_all_reduce or any(_is_pair(r) or isinstance(r, ProbeEnded) for r in journal.read())
    if last and last.status == "failed" and not told:
        failure = last.first_failure
        raise LaunchError(
            f"the probe failed: {failure.message if failure else last.status}", hint=f"see {folder}/ranks"
        )
    return outcome


def _with_a_way_out(error: PreflightError, fit: Sequence[str]) -> PreflightError:
    """The refusal, and how to go on with the hosts that are fit."""
    if not fit or not error.hosts:
        return error
    way_out = f"--drop-bad-hosts probes the {len(fit)} other hosts, --exclude {'@'.join(error.hosts)} does too"
    if len(fit) == 1:
        way_out = f"one host alone has no link to measure; distrib-topo probe -H {fit[0]} looks inside it"
    return PreflightError(f"{error.what}\n\n{way_out}", hint=error.hint, hosts=error.hosts)


def _without_gpudirect(
    options: argparse.Namespace, hosts: tuple[str, ...], present: tuple[str, ...], journal: Journal, folder: Path
) -> tuple[str, int | None]:
    """Measure all-reduce once more, by a job of its own, as NCCL reads its variables once in a process.

    Returns why where that failed, and the exit code where it was interrupted: all else is measured by then, and must not be lost.
    """
    try:
        result = _launch(options, hosts, present, journal, folder, gpudirect=False)
    except KeyboardInterrupt as interrupt:
        return "interrupted", signals.exit_code(interrupt)
    except DistribError as error:
        return str(error), None
    if result.status == "stopped":
        return "interrupted", result.exit_code
    if result.status == "succeeded":
        return "", None
    return result.first_failure.message if result.first_failure else result.status, None


def _say_lost(hosts: Mapping[str, str]) -> None:
    for host, why in hosts.items():
        print(f"distrib-topo: {host} was lost: {why}; going on without it", file=sys.stderr)


def _gpudirect_matters(records: Sequence[Record]) -> bool:
    """Whether all-reduce was measured with GPUDirect RDMA, and not yet without."""
    seen = {record.collective.gpudirect for record in records if isinstance(record, CollectiveMeasurement)}
    return True in seen and False not in seen


def _links_done(records: Sequence[Record]) -> bool:
    """Whether the last job has come to its all-reduces."""
    done = False
    for record in records:
        if isinstance(record, ProbeStarted):
            done = False
        elif isinstance(record, StageDone):
            done |= record.stage == LINKS_DONE
    return done


def _is_pair(record: Record) -> bool:
    return isinstance(record, PairMeasurement) and not record.failed


def _launch(
    options: argparse.Namespace,
    hosts: tuple[str, ...],
    present: tuple[str, ...],
    journal: Journal,
    folder: Path,
    *,
    gpudirect: bool = True,
) -> Result:
    from distrib_launch import runner
    from distrib_launch.cli.probe_progress import View

    known = journal.seen(present) if journal.done_steps else b""
    spec = Spec(
        hosts=hosts,
        present=present,
        mode=options.mode,
        done=journal.done_for(present),
        resumed=bool(known),
        primary=options.way,
        gpudirect=gpudirect,
    )
    words = ["--run-dir", str(folder), "--bind", "none", "--show-rank", "0"]
    if options.mode == "quick":  # without all-reduce, one rank on each host measures everything
        words += ["-np", str(len(present)), "--spread"]
    # Of several values of a variable the last one counts.
    variables = (
        options.environment if gpudirect else [*options.environment, f"{GPUDIRECT_VARIABLE}={GPUDIRECT_OFF_VALUES[0]}"]
    )
    wanted = _launcher_options(options, words, msgspec.json.encode(spec).decode(), variables)
    without = [host for host in hosts if host not in present]
    plan = _plan(wanted, without)
    plan = _servers_on_cpus(plan, options)
    if options.mode == "quick" and (options.include or options.exclude):
        plan = _with_all_gpus(plan, _plan(_launcher_options(options, [], "{}"), without))
    planned = tuple(host.name for host in plan.hosts)
    if planned != present:
        raise LaunchError(f"ranks are planned on {', '.join(planned)}; {', '.join(present)} were wanted")
    with View(journal.write, bar=not options.json) as view:
        return runner.launch(plan, wanted, streams=view.streams, script_input=known, input_ranks=(0,))


def _servers_on_cpus(plan: LaunchPlan, options: argparse.Namespace) -> LaunchPlan:
    """The plan with the ranks on CPUs that are on hosts set apart for parameter servers: those need no GPU."""
    from distrib_launch.runner import read_hosts

    listed = read_hosts(options.hosts)
    apart = {host.name for host in listed.hosts if host.role == "server"} if listed else set()
    ranks = tuple(msgspec.structs.replace(r, device="cpu") if r.host in apart else r for r in plan.ranks)
    if all(rank.host in apart for rank in plan.ranks):
        return plan
    return msgspec.structs.replace(plan, ranks=ranks)


def _with_all_gpus(plan: LaunchPlan, whole: LaunchPlan) -> LaunchPlan:
    """The plan of one rank on each host, which sees all the GPUs that were chosen, as `whole` has them: it measures inside the host."""
    chosen = {host.name: host.chosen for host in whole.hosts}
    hosts = tuple(msgspec.structs.replace(host, chosen=chosen.get(host.name, host.chosen)) for host in plan.hosts)
    return msgspec.structs.replace(plan, hosts=hosts)


def _launcher_options(
    options: argparse.Namespace, words: Sequence[str], spec: str, variables: Sequence[str] | None = None
) -> LaunchOptions:
    """The launcher's own options: `words`, and those that were given to probe; `variables` in the place of its own."""
    from distrib_launch.cli import launch_arguments

    words = list(words)
    for name in (
        "hosts", "topology", "include", "exclude", "gpu_type", "interface", "engine", "mpirun", "ssh_command",
    ):  # fmt: skip
        if (value := getattr(options, name)) is not None:
            words.append(f"--{name.replace('_', '-')}={value}")
    for variable in options.environment if variables is None else variables:
        words += ["-x", variable]
    if not options.preflight:
        words.append("--no-preflight")
    return launch_arguments.parse([*words, "--module", "distrib.probe", spec])


def _plan(wanted: LaunchOptions, without: Sequence[str] = ()) -> LaunchPlan:
    from distrib_launch import runner

    return runner.plan_launch(wanted, without)
