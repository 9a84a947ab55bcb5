"""`distrib-topo probe`: measure the cluster's links, say what is wrong with them, and write them into the topology.

The measuring is a job like any other, with `distrib.probe` as its script and one rank on each host. Its lines are kept as
they come; a probe that was cut short goes on where it stopped, and one that loses a host goes on without it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from distrib.cluster.measurements import Measurements
from distrib.errors import ConfigError, DistribError, LaunchError
from distrib.probe import output as probefile
from distrib.probe.journal import Journal
from distrib.probe.records import PairMeasurement, ProbeEnded, ProbeStarted, Record, StageDone, build_measured
from distrib.utils import files, signals
from distrib_launch import probe_job
from distrib_launch.cli.options import add_connection_options, add_host_filter, add_hosts, add_no_preflight
from distrib_launch.console import tolerate_closed_pipe

if TYPE_CHECKING:
    from distrib.cluster.hosts import HostList
    from distrib.cluster.node import Nic
    from distrib.probe.diagnosis.finding import Finding


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `outliers` counts repetitions that were left out of the coefficients of variation.

    `left_out_hosts` were not fit from the beginning (`--drop-bad-hosts`), `lost_hosts` failed while it ran.
    """

    mode: str
    seconds: float
    whole: bool
    hosts: tuple[str, ...]
    lost_hosts: tuple[str, ...]
    left_out_hosts: tuple[str, ...]
    repetitions: int
    outliers: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    measured: Measurements
    run_dir: str


def add_options(probe: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_hosts(probe, "a Slurm allocation's, else this machine alone")
    add_host_filter(probe)
    probe.add_argument("--drop-bad-hosts", action="store_true", help="leave out hosts that are not fit, saying which")
    probe.add_argument("-o", "--output", metavar="FILE", help="write what was measured into this topology file; what "
                       "people wrote there stays")  # fmt: skip
    probe.add_argument("--plot", metavar="FILE", action="append", default=[], help="draw heat map and curves into FILE (.png, "
                       ".svg, .pdf); may be repeated")  # fmt: skip
    probe.add_argument("--json", action="store_true", help="print everything as JSON")
    much = probe.add_mutually_exclusive_group()
    much.add_argument("--quick", dest="mode", action="store_const", const="quick", default="default",
                      help="links and the inside of hosts alone, no curves and no all-reduce: seconds")  # fmt: skip
    much.add_argument("--full", dest="mode", action="store_const", const="full",
                      help="every size by factors of 2, up to 64 MiB (all-reduce: 256 MiB)")  # fmt: skip
    probe.add_argument("--baseline", metavar="FILE", help="an earlier probe's topology: say what became worse")
    probe.add_argument("--strict", action="store_true", help="exit with 1 if a finding is an error")
    probe.add_argument("--resume", action=argparse.BooleanOptionalAction, default=None, help="go on with a probe of the same "
                       "hosts, network and options that was interrupted; with the same -o or --run-dir (default: if it "
                       "was within the hour)")  # fmt: skip
    probe.add_argument("--way", choices=["tcp", "mpi"], help="by which the links are judged (default: mpi where every "
                       "host has InfiniBand or RoCE, else tcp)")  # fmt: skip
    probe.add_argument("-x", dest="environment", action="append", default=[], metavar="NAME[=VALUE]",
                       help="a variable for all ranks, as for distrib-launch; -x CUDA_VISIBLE_DEVICES= leaves GPUs alone")  # fmt: skip
    add_no_preflight(probe)
    probe.add_argument("--engine", choices=["mpirun", "srun"], help="as for distrib-launch")
    add_connection_options(probe)
    probe.add_argument(
        "--run-dir", type=os.path.expanduser, metavar="DIR", help="where logs go (default: distrib-runs/<time>-probe)"
    )


def run(options: argparse.Namespace) -> int:
    """Probe the hosts and tell; 0, with `--strict` 1 where a finding is an error, 130 when interrupted."""
    from distrib_launch import results

    listed, hosts = probe_job.hosts_of(options)
    earlier, baseline = _check_files(options, listed, hosts)
    run_dir = results.choose_run_dir(options.run_dir, "probe")
    journal = _journal(options, hosts, run_dir)
    began = time.monotonic()
    try:
        outcome = probe_job.measure(options, hosts, journal, run_dir)
    except KeyboardInterrupt as interrupt:
        return _interrupted(options, journal, signals.exit_code(interrupt))
    except DistribError:
        if not journal.read():
            journal.done()
        raise
    records = journal.read()
    output = _output(options, hosts, outcome, records, baseline, time.monotonic() - began, run_dir)
    result = outcome.result
    if result and result.status == "stopped" and not output.whole:
        return _interrupted(options, journal, result.exit_code)
    problems = _tell(options, output, outcome, records, earlier, journal)
    if not output.whole:
        failure = result.first_failure if result else None
        why = journal.problem or outcome.without_all_reduce
        why = why or (failure.message if failure else "no host is left to measure with")
        told = LaunchError(f"the probe did not come to its end: {why}", hint=_how_to_go_on(options, journal))
        problems.append(told)  # not raised: what was found has been shown
    for problem in problems:
        print(f"distrib-topo: error: {problem}", file=sys.stderr)
    if problems:
        return problems[-1].exit_code
    if options.output:
        journal.done()
    if outcome.stopped:
        return outcome.stopped
    return 1 if options.strict and any(finding.severity == "error" for finding in output.findings) else 0


def _journal(options: argparse.Namespace, hosts: tuple[str, ...], run_dir: Path) -> Journal:
    """The probe's journal, and the run directory; of that nothing is left where there is nothing to go on with."""
    from distrib_launch import results

    is_new = not files.exists(run_dir)
    with results.held(run_dir):  # not while a job is running there
        results.make_run_dir(run_dir)
    try:
        return Journal(_journal_path(options, run_dir), hosts, options.mode, options.resume, options.way)
    except DistribError:
        if is_new:
            with contextlib.suppress(OSError):  # what else is there stays
                (run_dir / "ranks").rmdir()
                run_dir.rmdir()
                if not options.run_dir:
                    run_dir.parent.rmdir()
        raise


def _check_files(
    options: argparse.Namespace, listed: HostList, hosts: tuple[str, ...]
) -> tuple[Measurements | None, Measurements | None]:
    """What was measured earlier, in the file of `-o` and in that of `--baseline`.

    Raises ConfigError for files that cannot be read, or could not be written later.
    """
    for path in options.plot:
        from distrib.utils.plotting import check_plot_path

        check_plot_path(path)
    earlier = None
    if options.output:
        no_gpus = probe_job.without_gpus(options)
        earlier = probefile.look(options.output, listed, hosts, options.mode, without_gpus=no_gpus)
    return earlier, _baseline(options.baseline, set(hosts)) if options.baseline else None


def _interrupted(options: argparse.Namespace, journal: Journal, code: int) -> int:
    """Say whether there is something to go on from; returns the exit code."""
    journal.take_over()
    if journal.done_steps:
        print(f"distrib-topo: interrupted; {_how_to_go_on(options, journal)}", file=sys.stderr)
    else:
        journal.done()
        print("distrib-topo: interrupted before anything was measured", file=sys.stderr)
    return code


def _how_to_go_on(options: argparse.Namespace, journal: Journal) -> str:
    again = "" if options.output or options.run_dir else f" with --run-dir {journal.path.parent}"
    return (
        f"the same command{again} goes on where it stopped ({journal.path}), after more than an hour with --resume; "
        "--no-resume begins anew"
    )


def _baseline(path: str, hosts: set[str]) -> Measurements:
    from distrib.cluster.topology import read_topology

    measured: Measurements | None = read_topology(path).measured
    if measured is None:
        raise ConfigError(f"--baseline {path}: nothing is measured in it", hint="name a file that probe -o has written")
    if len(hosts & set(measured.hosts)) < min(2, len(hosts)):
        raise ConfigError(
            f"--baseline {path}: it was measured on other hosts: {', '.join(measured.hosts)}",
            hint="name a file that probe -o has written for these",
        )
    return measured


def _journal_path(options: argparse.Namespace, run_dir: Path) -> Path:
    return Path(f"{options.output}.partial.jsonl") if options.output else run_dir / "records.jsonl"


# -- telling ----------------------------------------------------------------------------------------------------------


def _output(
    options: argparse.Namespace,
    hosts: tuple[str, ...],
    outcome: probe_job.Outcome,
    records: Sequence[Record],
    before: Measurements | None,
    seconds: float,
    run_dir: Path,
) -> Output:
    from distrib.probe.diagnosis.checks import check_records
    from distrib.probe.diagnosis.finding import rank_findings
    from distrib.probe.diagnosis.regressions import describe_unchanged, find_regressions
    from distrib.probe.diagnosis.unmeasured import lost_host_finding

    found = check_records(records, _described(options))
    # A warning of this kind is of a further network, or of the way that does not judge the links: such a host is there.
    lost = [each for each in found if (each.kind, each.severity) == ("host_lost", "error")]
    told = {host for each in lost for host in each.hosts}
    gone = [lost_host_finding(host, why) for host, why in outcome.lost.items() if host not in told]
    now = build_measured(records) or Measurements(when="", software={}, hosts=hosts)
    # One that is unfit by now, but was measured before the probe was interrupted, is in what was measured.
    known = {facts.host for record in records if isinstance(record, ProbeStarted) for facts in record.facts}
    there = tuple(host for host in now.hosts if host not in outcome.left_out or host in known)
    now = msgspec.structs.replace(now, hosts=there)
    worse = find_regressions(before, now) if before else ()
    compared = [describe_unchanged(before, now)] if before and not worse else []
    seen = [record for record in records if isinstance(record, PairMeasurement) and not record.failed]
    # What was said of a step counts until the step is done again.
    by_step = {record.stage: record.notes for record in records if isinstance(record, StageDone)}
    notes = [
        f"{host} was left out {'when the probe was gone on with' if host in known else 'from the beginning'}: {why}"
        for host, why in outcome.left_out.items()
    ]
    notes += [note for of_step in by_step.values() for note in of_step]
    notes += [note for record in records if isinstance(record, ProbeEnded) for note in record.notes]
    return Output(
        mode=options.mode,
        seconds=seconds,
        whole=any(isinstance(record, ProbeEnded) for record in records),
        hosts=hosts,
        lost_hosts=tuple(host for host in hosts if host in outcome.lost or host in told),
        left_out_hosts=tuple(outcome.left_out),
        repetitions=sum(record.repetitions for record in seen),
        outliers=sum(record.outliers for record in seen),
        findings=rank_findings([*found, *gone, *worse]),
        notes=(*notes, *outcome.notes, *compared),
        measured=now,
        run_dir=str(run_dir),
    )


def _described(options: argparse.Namespace) -> dict[str, tuple[Nic, ...]]:
    """The network cards that people wrote into the topology, by host."""
    from distrib.cluster.topology import read_topology
    from distrib_launch.runner import read_topology_for

    topology = read_topology_for(options.topology, options.hosts)
    if topology is None and options.output and files.exists(options.output) and Path(options.output).stat().st_size:
        topology = read_topology(options.output)
    return {host: topology.nics_of(host) for host in topology.hosts} if topology else {}


def _tell(
    options: argparse.Namespace,
    output: Output,
    outcome: probe_job.Outcome,
    records: Sequence[Record],
    earlier: Measurements | None,
    journal: Journal,
) -> list[DistribError]:
    """Write, draw and show; what is wrong with a file is returned, as it must not keep the findings from being shown.

    Of hosts that were lost the job went on without, so that what it has of the others is whole. So are the links where only
    the all-reduces failed.
    """
    start = next((record for record in records if isinstance(record, ProbeStarted)), None)
    problems: list[DistribError] = []
    done = []
    if options.output:
        from distrib.cluster.measurements_io import write_measured

        whole = output.whole or bool(outcome.without_all_reduce)
        if why := probefile.why_not(earlier, output.measured, whole=whole, lost=outcome.lost):
            kept = f"what was measured is in {journal.path}"
            problems.append(LaunchError(f"{options.output} stays as it was: {why}", hint=kept))
        else:
            try:
                described = probefile.description(Path(output.run_dir), output.measured.hosts)
                write_measured(options.output, output.measured, described)
                done.append(f"written in {options.output}")
            except DistribError as error:
                problems.append(error)
    if options.plot and start:
        from distrib.probe.matrix_plot import draw

        for path in options.plot:
            try:
                draw(path, output.measured, start.primary)
                done.append(f"drawn in {path}")
            except DistribError as error:
                problems.append(error)
    with tolerate_closed_pipe():
        if options.json:
            print(msgspec.json.format(msgspec.json.encode(output), indent=2).decode())
        else:
            _show(output, records, start, done)
    return problems


def _show(output: Output, records: Sequence[Record], start: ProbeStarted | None, done: Sequence[str]) -> None:
    if start:
        from rich.console import Console

        from distrib.probe.probe_report import show

        width = None if sys.stdout.isatty() else max(160, 7 * len(output.hosts) + 20)
        show(
            Console(width=width, highlight=False, no_color="NO_COLOR" in os.environ),
            output.measured,
            records,
            output.findings,
        )
    for note in output.notes:
        print(f"note: {note}")
    how = ", ".join((output.mode, *done))
    gone = f", {len(output.lost_hosts)} of them lost," if output.lost_hosts else ""
    print(
        f"{len(output.hosts) - len(output.left_out_hosts)} host(s){gone} probed in {output.seconds:.1f} s ({how}; logs in {output.run_dir})"
    )
