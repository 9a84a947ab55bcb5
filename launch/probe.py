"""`distrib-topo probe`: measure the cluster's links, say what is wrong with them, and write them into the topology.

The measuring is a job like any other, with `distrib.probe` as its script and one rank on each host. Its lines are kept as
they come; a probe that was cut short goes on where it stopped, and one that loses a host goes on without it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from distrib_launch.journal import Journal

from distrib.cluster.measured import Measured
from distrib.errors import ConfigError, DistribError, LaunchError, PreflightError

if TYPE_CHECKING:
    from distrib_launch.results import Result

    from distrib.cluster.hosts import HostList
    from distrib.probe.finding import Finding
    from distrib.probe.records import Record

RELAUNCHES = 4
"""So often the probe goes on after a failure; then it gives up."""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `outliers` counts repetitions that were left out of the coefficients of variation."""

    mode: str
    seconds: float
    whole: bool
    hosts: tuple[str, ...]
    lost_hosts: tuple[str, ...]
    repetitions: int
    outliers: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    measured: Measured
    run_dir: str


def add_options(probe: argparse.ArgumentParser) -> None:
    """The verb's options."""
    probe.add_argument("-H", "--hosts", metavar="FILE|LIST", help="a hostfile, or hosts such as a,b (default: Slurm's)")
    probe.add_argument("--topology", metavar="FILE", help="what the hosts are made of (default: the YAML file beside "
                       "the hostfile with its stem)")  # fmt: skip
    probe.add_argument("-o", "--output", metavar="FILE", help="write what was measured into this topology file; what "
                       "people wrote there stays")  # fmt: skip
    probe.add_argument("--plot", metavar="FILE", help="draw heat map and curves (.png, .svg, .pdf)")
    probe.add_argument("--json", action="store_true", help="print everything as JSON")
    much = probe.add_mutually_exclusive_group()
    much.add_argument("--quick", dest="mode", action="store_const", const="quick", default="default",
                      help="links only, seconds")  # fmt: skip
    much.add_argument("--full", dest="mode", action="store_const", const="full",
                      help="every size by factors of 2, up to 64 MiB (all-reduce: 256 MiB)")  # fmt: skip
    probe.add_argument("--baseline", metavar="FILE", help="an earlier probe's topology: say what became worse")
    probe.add_argument("--strict", action="store_true", help="exit with 1 if a finding is an error")
    probe.add_argument("--resume", action=argparse.BooleanOptionalAction, default=None, help="go on with a probe that was "
                       "interrupted (default: if it was within the hour)")  # fmt: skip
    probe.add_argument("--interface", metavar="NAME|CIDR", help="the network between the hosts, as for distrib-launch")
    probe.add_argument("--way", choices=["tcp", "mpi"], help="by which the links are judged (default: mpi where every "
                       "host has InfiniBand or RoCE, else tcp)")  # fmt: skip
    probe.add_argument("--no-check", action="store_true", help="ask the hosts nothing beforehand")
    probe.add_argument("--engine", choices=["mpirun", "srun"], help="as for distrib-launch")
    probe.add_argument("--mpirun", metavar="PATH", help="a site's own Open MPI 5")
    probe.add_argument("--ssh-command", metavar="CMD", help="how to reach hosts (default: ssh)")
    probe.add_argument("--run-dir", metavar="DIR", help="where logs go (default: distrib-runs/<time>-probe)")


def run(options: argparse.Namespace) -> int:
    """Probe the hosts and tell; 0, with `--strict` 1 where a finding is an error, 130 when interrupted."""
    from distrib_launch import results
    from distrib_launch.job import read_hosts

    listed = read_hosts(options.hosts)
    if listed is None:
        raise ConfigError("which hosts?", hint="name them with -H")
    hosts = tuple(host.name for host in listed.hosts if host.role == "worker")
    if len(hosts) < 2:
        raise ConfigError(f"{listed.source}: one host has no links to measure", hint="name two hosts or more")
    before = _check_files(options, listed)
    run_dir = results.choose_run_dir(options.run_dir, "probe")
    results.make_run_dir(run_dir)
    journal = Journal(_journal_path(options, run_dir), hosts, options.mode, options.resume)
    began = time.monotonic()
    try:
        lost, result = _measure(options, hosts, journal, run_dir)
    except KeyboardInterrupt:
        return _interrupted(options, journal, 130)
    except DistribError:
        if not journal.read():
            journal.done()
        raise
    records = journal.read()
    output = _output(options, hosts, lost, records, before, time.monotonic() - began, run_dir)
    if result and result.status == "stopped" and not output.whole:
        return _interrupted(options, journal, result.exit_code)
    _tell(options, output, records)
    if not output.whole:
        told = result.first_failure.message if result and result.first_failure else "no host is left to measure with"
        raise LaunchError(f"the probe did not come to its end: {told}", hint=_how_to_go_on(options, journal))
    if options.output:
        journal.done()
    return 1 if options.strict and any(finding.severity == "error" for finding in output.findings) else 0


def _check_files(options: argparse.Namespace, listed: HostList) -> Measured | None:
    """What was measured earlier, for `--baseline`. Raises ConfigError for files that cannot be read or written later."""
    if options.plot:
        from distrib.probe.plot import check_name

        check_name(options.plot)
    if options.output:
        from distrib.cluster.measured_part import check_writable
        from distrib.cluster.topology import check_hosts, read_topology

        check_writable(options.output)
        if Path(options.output).exists() and Path(options.output).stat().st_size:
            # What is measured of hosts that the file does not know could not be written into it afterwards.
            topology = read_topology(options.output)
            check_hosts(topology, listed)
            if options.mode == "quick" and topology.measured and topology.measured.collectives:
                print(
                    f"distrib-topo: note: {options.output} has all-reduce and curves of {topology.measured.when}; "
                    "--quick measures neither, and will take their place",
                    file=sys.stderr,
                )
    return _baseline(options.baseline, {host.name for host in listed.hosts}) if options.baseline else None


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
    return f"the same command{again} goes on where it stopped ({journal.path})"


def _baseline(path: str, hosts: set[str]) -> Measured:
    from distrib.cluster.topology import read_topology

    measured: Measured | None = read_topology(path).measured
    if measured is None:
        raise ConfigError(f"--baseline {path}: nothing is measured in it", hint="name a file that probe -o has written")
    if len(hosts & set(measured.hosts)) < 2:
        raise ConfigError(
            f"--baseline {path}: it was measured on other hosts: {', '.join(measured.hosts)}",
            hint="name a file that probe -o has written for these",
        )
    return measured


def _journal_path(options: argparse.Namespace, run_dir: Path) -> Path:
    return Path(f"{options.output}.partial.jsonl") if options.output else run_dir / "records.jsonl"


# -- measuring --------------------------------------------------------------------------------------------------------


def _measure(
    options: argparse.Namespace, hosts: tuple[str, ...], journal: Journal, run_dir: Path
) -> tuple[dict[str, str], Result | None]:
    """Run the job, and go on after a failure, without the hosts that are lost; returns those, why, and the last result.

    A host that vanished, or is found unfit before the probe goes on, is left out; one where a process died gets a second try.
    """
    from distrib.probe.records import Ended

    lost: dict[str, str] = {}
    failed: set[str] = set()
    result = None
    attempt = 0
    while attempt <= RELAUNCHES:
        present = tuple(host for host in hosts if host not in lost)
        if len(present) < 2:
            break
        folder = run_dir / f"attempt{attempt}" if attempt else run_dir
        try:
            result = _launch(options, hosts, present, journal, folder)
        except PreflightError as error:
            unfit = {host: why for host, why in error.hosts.items() if host in present}
            if not attempt or not unfit:
                raise
            lost |= unfit
            _say_lost(unfit)
            continue
        except DistribError as error:
            if not attempt:
                raise
            print(f"distrib-topo: {error}", file=sys.stderr)
            break
        attempt += 1
        if result.status != "failed" or any(isinstance(record, Ended) for record in journal.read()):
            break
        failure = result.first_failure
        if failure is None or failure.host not in present:
            break
        journal.take_over()
        if failure.exit_code and not journal.done_steps:
            break  # a mistake of the installation, which would be made again
        vanished = failure.rank is not None and failure.exit_code is None and failure.signal is None
        if vanished or failure.host in failed:
            lost[failure.host] = failure.message
            _say_lost({failure.host: failure.message})
        else:
            failed.add(failure.host)
            print(f"distrib-topo: {failure.host}: {failure.message}; going on with it once more", file=sys.stderr)
    if result and result.status == "succeeded" and not lost and _gpudirect_matters(journal.read()):
        # NCCL reads its variables once in a process.
        result = _launch(options, hosts, hosts, journal, run_dir / "no-gpudirect", gpudirect=False)
    if result and result.status == "failed" and not any(_is_pair(record) for record in journal.read()):
        failure = result.first_failure
        raise LaunchError(
            f"the probe failed: {failure.message if failure else result.status}", hint=f"see {folder}/ranks"
        )
    return lost, result


def _say_lost(hosts: Mapping[str, str]) -> None:
    for host, why in hosts.items():
        print(f"distrib-topo: {host} was lost: {why}; going on without it", file=sys.stderr)


def _gpudirect_matters(records: Sequence[Record]) -> bool:
    """Whether all-reduce was measured with GPUDirect RDMA, and not yet without."""
    from distrib.probe.records import CollectiveSeen

    seen = {record.collective.gpudirect for record in records if isinstance(record, CollectiveSeen)}
    return True in seen and False not in seen


def _is_pair(record: Record) -> bool:
    from distrib.probe.records import PairSeen

    return isinstance(record, PairSeen) and not record.failed


def _launch(
    options: argparse.Namespace,
    hosts: tuple[str, ...],
    present: tuple[str, ...],
    journal: Journal,
    folder: Path,
    *,
    gpudirect: bool = True,
) -> Result:
    from distrib_launch import cli, job
    from distrib_launch.probeview import View

    from distrib.probe.messages import Spec

    known = journal.seen(present) if journal.done_steps else b""
    spec = Spec(
        hosts=hosts,
        present=present,
        mode=options.mode,
        done=journal.done_steps,
        resumed=bool(known),
        primary=options.way,
        gpudirect=gpudirect,
    )
    words = ["--run-dir", str(folder), "--bind", "none", "--only-rank", "0"]
    if options.mode == "quick":  # links only, which one rank on each host measures
        words += ["-np", str(len(present)), "--spread"]
    if not gpudirect:
        words += ["-x", "NCCL_NET_GDR_LEVEL=LOC"]
    for name in ("hosts", "topology", "interface", "engine", "mpirun", "ssh_command"):
        if (value := getattr(options, name)) is not None:
            words.append(f"--{name.replace('_', '-')}={value}")
    if options.no_check:
        words.append("--no-check")
    if len(present) < len(hosts):
        words.append(f"--exclude={'@'.join(host for host in hosts if host not in present)}")
    wanted = cli.parser().parse_args([*words, "--module", "distrib.probe", msgspec.json.encode(spec).decode()])
    plan = job.make_plan(wanted)
    planned = tuple(host.name for host in plan.hosts)
    if planned != present:
        raise LaunchError(f"ranks are planned on {', '.join(planned)}; {', '.join(present)} were wanted")
    with View(journal.write, bar=not options.json) as view:
        return job.launch(plan, wanted, streams=view.streams, script_input=known)


# -- telling ----------------------------------------------------------------------------------------------------------


def _output(
    options: argparse.Namespace,
    hosts: tuple[str, ...],
    lost: Mapping[str, str],
    records: Sequence[Record],
    before: Measured | None,
    seconds: float,
    run_dir: Path,
) -> Output:
    from distrib.probe import baseline, finding, findings
    from distrib.probe.records import Ended, PairSeen, measured

    found = findings.find(records)
    told = {host for finding in found if finding.kind == "host_lost" for host in finding.hosts}
    gone = [findings.lost_host(host, why) for host, why in lost.items() if host not in told]
    now = measured(records) or Measured(when="", software={}, hosts=hosts)
    worse = baseline.worse(before, now) if before else ()
    seen = [record for record in records if isinstance(record, PairSeen) and not record.failed]
    return Output(
        mode=options.mode,
        seconds=seconds,
        whole=any(isinstance(record, Ended) for record in records),
        hosts=hosts,
        lost_hosts=tuple(lost),
        repetitions=sum(record.repetitions for record in seen),
        outliers=sum(record.outliers for record in seen),
        findings=finding.ranked([*found, *gone, *worse]),
        notes=tuple(note for record in records if isinstance(record, Ended) for note in record.notes),
        measured=now,
        run_dir=str(run_dir),
    )


def _tell(options: argparse.Namespace, output: Output, records: Sequence[Record]) -> None:
    from distrib.probe.records import Started

    start = next((record for record in records if isinstance(record, Started)), None)
    if options.output and output.measured.pairs:
        from distrib.cluster.measured_part import write_measured

        write_measured(options.output, output.measured)
    if options.plot and start:
        from distrib.probe.plot import draw

        draw(options.plot, output.measured, start.primary)
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(output), indent=2).decode() + "\n")
        return
    if start:
        from rich.console import Console

        from distrib.probe.report import show

        width = None if sys.stdout.isatty() else max(160, 7 * len(output.hosts) + 20)
        show(
            Console(width=width, highlight=False, no_color="NO_COLOR" in os.environ),
            output.measured,
            records,
            output.findings,
        )
    for note in output.notes:
        print(f"note: {note}")
    written = "".join(
        f", {what} in {path}" for what, path in (("written", options.output), ("drawn", options.plot)) if path
    )
    print(
        f"{len(output.hosts)} hosts probed in {output.seconds:.1f} s ({output.mode}{written}; logs in {output.run_dir})"
    )
