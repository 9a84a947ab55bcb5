"""`distrib-topo probe`: measure all links, report findings, and write the measurements into the topology file.

The measurement is a job with `distrib.probe` as its script and one rank on each host. The launcher writes each record to a journal at
once, so that an interrupted probe can be resumed. A probe that loses a host continues without it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from distrib.cluster.hosts import HostList
from distrib.cluster.inventory import Inventory
from distrib.cluster.measurements import Measurements
from distrib.cluster.measurements_writer import write_measured
from distrib.cluster.node import Nic
from distrib.cluster.topology import read_topology
from distrib.errors import ConfigError, DistribError, LaunchError
from distrib.probe.diagnosis.checks import check_records
from distrib.probe.diagnosis.finding import Finding, rank_findings
from distrib.probe.diagnosis.regressions import describe_comparison, find_regressions
from distrib.probe.diagnosis.unmeasured import lost_host_finding
from distrib.probe.journal import Journal
from distrib.probe.output import check_output, draft_topology, why_kept
from distrib.probe.probe_report import print_report
from distrib.probe.records import PairMeasurement, ProbeEnded, ProbeStarted, Record, StageDone, build_measured
from distrib.units import count_text
from distrib.utils import files, signals
from distrib.utils.json_text import decode_json, encode_json
from distrib.utils.log import PLAIN, get_logger
from distrib.utils.plotting import check_plot_path
from distrib_launch import run_directory
from distrib_launch.arguments.help_text import CommonHelp
from distrib_launch.arguments.shared_options import (
    Parser,
    accept_old_spelling,
    add_connection_options,
    add_host_filter,
    add_hosts,
    add_no_preflight,
    host_filter,
)
from distrib_launch.cli.probe_progress import ProgressStreams
from distrib_launch.console import tolerate_closed_pipe
from distrib_launch.launch_options import LaunchOptions
from distrib_launch.preflight.preflight import PreflightReport
from distrib_launch.probe_job import ProbeOptions, ProbeOutcome, probed_hosts, run_probe
from distrib_launch.runner import read_topology_for

log = get_logger("topo")


class ProbeOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`."""

    mode: str
    seconds: float
    whole: bool
    """True if the probe was completed."""
    hosts: tuple[str, ...]
    lost_hosts: tuple[str, ...]
    """Hosts that failed during the probe."""
    left_out_hosts: tuple[str, ...]
    """Hosts that failed the preflight checks (`--drop-bad-hosts`)."""
    repetitions: int
    outliers: int
    """Repetitions that the coefficients of variation leave out."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    measured: Measurements
    run_dir: str


USAGE = "distrib-topo probe [options]"
EXAMPLES = """\
  distrib-topo probe -H cluster.txt --quick                   some seconds
  distrib-topo probe -H cluster.txt -o cluster.yaml           keep the results
  distrib-topo probe -H cluster.txt --baseline cluster.yaml   report regressions
"""


def add_options(probe: Parser) -> None:
    """Add the options of the command.

    Args:
        probe: The command's parser.
    """
    probe.shorten_help(USAGE, EXAMPLES)
    hosts = probe.add_argument_group("where to measure")
    add_hosts(hosts, "a Slurm allocation's, else this machine")
    add_host_filter(hosts)
    add_no_preflight(hosts)
    hosts.add_argument(
        "--drop-bad-hosts", action="store_true", help=CommonHelp("leave out hosts that fail the preflight checks")
    )
    add_connection_options(hosts)
    hosts.add_argument(
        "--engine", choices=["mpirun", "srun"], help="start ranks with this engine, as in distrib-launch"
    )
    hosts.add_argument("-x", dest="environment", action="append", default=[], metavar="NAME[=VALUE]",
                       help="set a variable on all ranks, such as CUDA_VISIBLE_DEVICES= to hide GPUs")  # fmt: skip
    much = probe.add_argument_group("what to measure")
    extent = much.add_mutually_exclusive_group()
    extent.add_argument("--quick", dest="mode", action="store_const", const="quick", default="default",
                        help=CommonHelp("measure links and copies inside hosts only"))  # fmt: skip
    extent.add_argument("--full", dest="mode", action="store_const", const="full",
                        help=CommonHelp("measure sizes by factors of 2, up to 64 MiB (all-reduce: 256 MiB)"))  # fmt: skip
    much.add_argument("--transport", choices=["tcp", "mpi"], help="judge links by this transport (default: mpi if every "
                      "host has InfiniBand or RoCE, else tcp)")  # fmt: skip
    accept_old_spelling(much, "--way", "--transport")
    much.add_argument("--resume", action=argparse.BooleanOptionalAction, default=None, help="resume an interrupted probe of "
                      "the same hosts, network and options, with the same -o or --run-dir (default: within one hour)")  # fmt: skip
    output = probe.add_argument_group("what to report and keep")
    output.add_argument("-o", "--output", metavar="FILE", help=CommonHelp("write the measurements into a topology file, such as "
                        "cluster.yaml, and keep the rest of it"))  # fmt: skip
    output.add_argument(
        "--baseline", metavar="FILE", help=CommonHelp("report regressions since an earlier probe -o FILE")
    )
    output.add_argument("--strict", action="store_true", help=CommonHelp("exit with 1 if a finding is an error"))
    output.add_argument("--plot", metavar="FILE", action="append", default=[],
                        help=CommonHelp("draw a heat map and curves into FILE, such as links.svg (.png, .pdf)"))  # fmt: skip
    output.add_argument("--json", action="store_true", help=CommonHelp("print all results as JSON"))
    output.add_argument("--run-dir", type=os.path.expanduser, metavar="DIR",
                        help="write the logs to DIR (default: distrib-runs/<time>-probe)")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Probe the hosts and print the results.

    Args:
        options: Parsed options.

    Returns:
        0; 1 if the probe was not completed, or with `--strict` for a finding that is an error; 130 if interrupted.
    """
    return _ProbeCommand(options).run()


class _ProbeCommand:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.probe = ProbeOptions(
            launch=LaunchOptions(
                script="distrib.probe", module=True, arguments=("{}",), hosts=options.hosts, topology=options.topology,
                host_filter=host_filter(options), interface=options.interface, mpirun=options.mpirun,
                ssh_command=options.ssh_command, engine=options.engine or "", preflight=options.preflight,
                variables=tuple(options.environment),
            ),
            mode=options.mode, transport=options.transport, drop_bad_hosts=options.drop_bad_hosts,
        )  # fmt: skip
        listed, self.hosts = probed_hosts(self.probe)
        self.earlier, self.baseline = self._check_files(listed)
        self.run_dir = run_directory.choose_run_dir(options.run_dir, "probe")
        self.journal = self._open_journal()

    def run(self) -> int:
        """Probe, print the results, and return the exit code."""
        began = time.monotonic()
        try:
            outcome = run_probe(self.probe, self.hosts, self.journal, self.run_dir, self._show_progress)
        except KeyboardInterrupt as interrupt:
            return self._report_interrupt(signals.exit_code(interrupt))
        except DistribError:
            if not self.journal.read():
                self.journal.remove()
            raise
        records = self.journal.read()
        output = self._build_output(outcome, records, time.monotonic() - began)
        result = outcome.result
        if result and result.status == "stopped" and not output.whole:
            return self._report_interrupt(result.exit_code)
        problems = self._publish(output, outcome, records)
        if not output.whole:
            failure = result.first_failure if result else None
            why = (
                self.journal.problem
                or outcome.all_reduce_failure
                or (failure.message if failure else "no host is left")
            )
            # Not raised: the findings have been shown.
            problems.append(
                LaunchError(f"the probe was not completed: {why}", hint=self._resume_hint(), code="probe-failed")
            )
        for problem in problems:
            log.error("%s", problem)
        if problems:
            return problems[-1].exit_code
        if self.options.output:
            self.journal.remove()
        if outcome.interrupt_code:
            return outcome.interrupt_code
        return int(self.options.strict and any(finding.severity == "error" for finding in output.findings))

    # -- before the probe ---------------------------------------------------------------------------------------------

    def _check_files(self, listed: HostList) -> tuple[Measurements | None, Measurements | None]:
        """Return earlier measurements, from the file of `-o` and from that of `--baseline`. Raises ConfigError."""
        for path in self.options.plot:
            check_plot_path(path)
        earlier = None
        if self.options.output:
            earlier, notes = check_output(self.options.output, listed, self.hosts)
            for note in notes:
                log.info("%s", note)
        return earlier, _read_baseline(self.options.baseline, set(self.hosts)) if self.options.baseline else None

    def _open_journal(self) -> Journal:
        """Create the run directory and open the journal."""
        with run_directory.locked_run_dir(self.run_dir):  # raises if a job runs there
            run_directory.prepare_run_dir(self.run_dir)
        path = self.run_dir / "records.jsonl"
        if self.options.output:
            path = Path(f"{self.options.output}.partial.jsonl")
        return Journal(path, self.hosts, self.options.mode, self.options.resume, self.options.transport)

    def _show_progress(self) -> ProgressStreams:
        return ProgressStreams(self.journal.write, show=not self.options.json)

    # -- after the probe ----------------------------------------------------------------------------------------------

    def _report_interrupt(self, code: int) -> int:
        """Report how to resume. Returns the exit code."""
        self.journal.reload()
        if self.journal.done_stages:
            log.info(f"interrupted; {self._resume_hint()}", extra=PLAIN)
        else:
            self.journal.remove()
            log.info("interrupted before anything was measured", extra=PLAIN)
        return code

    def _resume_hint(self) -> str:
        again = ""
        if not (self.options.output or self.options.run_dir):
            again = f" with --run-dir {self.journal.path.parent}"
        return (
            f"run the same command{again} to resume ({self.journal.path}), after more than an hour with --resume; "
            "--no-resume starts again"
        )

    def _build_output(self, outcome: ProbeOutcome, records: Sequence[Record], seconds: float) -> ProbeOutput:
        findings = list(check_records(records, self._configured_nics()))
        # Warnings of this kind are about another network or transport: such a host is not lost.
        silent = {h for f in findings if (f.kind, f.severity) == ("host_lost", "error") for h in f.hosts}
        findings += [lost_host_finding(host, why) for host, why in outcome.lost.items() if host not in silent]
        now = build_measured(records) or Measurements(when="", software={}, hosts=self.hosts)
        # Measurements of a host from before an interruption remain, even if it fails the checks now.
        known = {facts.host for record in records if isinstance(record, ProbeStarted) for facts in record.facts}
        present = tuple(host for host in now.hosts if host not in outcome.left_out or host in known)
        now = msgspec.structs.replace(now, hosts=present)
        notes = [*_collect_notes(records, outcome, known), *outcome.notes]
        if self.baseline:
            findings += find_regressions(self.baseline, now)
            notes.append(describe_comparison(self.baseline, now))
        seen = [record for record in records if isinstance(record, PairMeasurement) and not record.failed]
        return ProbeOutput(
            mode=self.options.mode,
            seconds=seconds,
            whole=any(isinstance(record, ProbeEnded) for record in records),
            hosts=self.hosts,
            lost_hosts=tuple(host for host in self.hosts if host in outcome.lost or host in silent),
            left_out_hosts=tuple(outcome.left_out),
            repetitions=sum(record.repetitions for record in seen),
            outliers=sum(record.outliers for record in seen),
            findings=rank_findings(findings),
            notes=tuple(notes),
            measured=now,
            run_dir=str(self.run_dir),
        )

    def _configured_nics(self) -> dict[str, tuple[Nic, ...]]:
        """Return the NICs of the topology file by host."""
        topology, output = read_topology_for(self.options.topology, self.options.hosts), self.options.output
        if topology is None and output and files.exists(output) and Path(output).stat().st_size:
            topology = read_topology(output)
        return {host: topology.nics_of(host) for host in topology.hosts} if topology else {}

    def _publish(self, output: ProbeOutput, outcome: ProbeOutcome, records: Sequence[Record]) -> list[DistribError]:
        """Write, plot and print the results. Returns errors of files, which must not hide the findings."""
        start = next((record for record in records if isinstance(record, ProbeStarted)), None)
        problems: list[DistribError] = []
        done = []
        if self.options.output:
            try:
                self._write_topology(output, outcome)
                done.append(f"written to {self.options.output}")
            except DistribError as error:
                problems.append(error)
        for path in self.options.plot if start else ():
            from distrib.probe.matrix_plot import draw_probe  # matplotlib is optional, and takes a second to load

            try:
                draw_probe(path, output.measured, start.primary if start else "tcp")
                done.append(f"plotted to {path}")
            except DistribError as error:
                problems.append(error)
        with tolerate_closed_pipe():
            if self.options.json:
                print(encode_json(output, indent=2).decode())
            else:
                _print_results(output, records, start, done)
        return problems

    def _write_topology(self, output: ProbeOutput, outcome: ProbeOutcome) -> None:
        """Write the measurements. Raises LaunchError if the file keeps earlier ones, ConfigError if it is not writable.

        After lost hosts, or failed all-reduces, the other measurements are complete.
        """
        complete = output.whole or bool(outcome.all_reduce_failure)
        if why := why_kept(self.earlier, output.measured, complete=complete, lost=outcome.lost):
            raise LaunchError(
                f"{self.options.output} was not changed: {why}",
                hint=f"the measurements are in {self.journal.path}",
                code="file-not-written",
            )
        draft = draft_topology(_read_inventories(self.run_dir), output.measured.hosts)
        write_measured(self.options.output, output.measured, draft)


def _read_baseline(path: str, hosts: set[str]) -> Measurements:
    measured: Measurements | None = read_topology(path).measured
    if measured is None:
        raise ConfigError(f"--baseline {path}: it has no measurements", hint="name a file that probe -o has written")
    if len(hosts & set(measured.hosts)) < min(2, len(hosts)):
        raise ConfigError(
            f"--baseline {path}: it has measurements of other hosts: {', '.join(measured.hosts)}",
            hint="name a file that probe -o has written for these hosts",
        )
    return measured


def _read_inventories(run_dir: Path) -> dict[str, Inventory]:
    """Return the hosts' inventories from the preflight report; empty if there is none."""
    try:
        return decode_json((run_dir / run_directory.PREFLIGHT).read_bytes(), PreflightReport).inventories
    except (OSError, msgspec.DecodeError):
        return {}


def _collect_notes(records: Sequence[Record], outcome: ProbeOutcome, known: set[str]) -> list[str]:
    """Return notes on hosts that were left out, and those of the last run of each stage."""
    by_stage = {record.stage: record.notes for record in records if isinstance(record, StageDone)}
    left_out = [
        f"{host} was left out {'when the probe was resumed' if host in known else 'from the beginning'}: {why}"
        for host, why in outcome.left_out.items()
    ]
    ended = [note for record in records if isinstance(record, ProbeEnded) for note in record.notes]
    return [*left_out, *(note for notes in by_stage.values() for note in notes), *ended]


def _print_results(
    output: ProbeOutput, records: Sequence[Record], start: ProbeStarted | None, done: Sequence[str]
) -> None:
    if start:
        width = None if sys.stdout.isatty() else max(160, 7 * len(output.hosts) + 20)
        console = Console(width=width, highlight=False, no_color="NO_COLOR" in os.environ)
        print_report(console, output.measured, records, output.findings)
    for note in output.notes:
        print(f"note: {note}")
    lost = f", {len(output.lost_hosts)} of them lost," if output.lost_hosts else ""
    count = len(output.hosts) - len(output.left_out_hosts)
    print(
        f"{count_text(count, 'host')}{lost} probed in {output.seconds:.1f} s ({', '.join((output.mode, *done))}); "
        f"logs in {os.path.relpath(output.run_dir)}"
    )
