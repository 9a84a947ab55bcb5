"""Job of a probe: runs `distrib.probe` on the hosts, again after a failure without hosts that were lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TextIO

import msgspec

from distrib.cluster.hosts import Host, HostList
from distrib.errors import DistribError, LaunchError, PreflightError
from distrib.probe.journal import Journal
from distrib.probe.protocol import ProbeSpec
from distrib.probe.records import CollectiveMeasurement, PairMeasurement, ProbeEnded, ProbeStarted, Record, StageDone
from distrib.probe.settings import GPUDIRECT_OFF_VALUES, GPUDIRECT_VARIABLE, TIMEOUTS, Mode, Transport
from distrib.probe.stages import LINKS_DONE
from distrib.utils import signals
from distrib.utils.json_text import encode_json
from distrib.utils.log import PLAIN, get_logger
from distrib_launch import runner
from distrib_launch.launch_options import LaunchOptions
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.results import Failure, Result

log = get_logger("topo")

OpenStreams = Callable[[], AbstractContextManager[tuple[TextIO, TextIO]]]
"""Opens standard output and error of one launch; the output takes the records."""


class ProbeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a probe."""

    launch: LaunchOptions
    """Hosts, network and engine of the job."""
    mode: Mode
    transport: Transport | None
    """The transport by which links are judged; None for a choice by rank 0."""
    drop_bad_hosts: bool


class ProbeOutcome(msgspec.Struct, kw_only=True):
    """Result of all launches of a probe."""

    lost: dict[str, str] = {}
    """Hosts that failed during the probe, with the reason."""
    left_out: dict[str, str] = {}
    """Hosts that preflight refused, with the reason."""
    notes: list[str] = []
    all_reduce_failure: str = ""
    """Failure of the last launch in its all-reduces; all links were measured."""
    interrupt_code: int | None = None
    """Exit code if only the measurement without GPUDirect RDMA was interrupted."""
    result: Result | None = None
    """Result of the last launch; None if there was none."""


def probed_hosts(options: ProbeOptions) -> tuple[HostList, tuple[str, ...]]:
    """Return the hosts that the user named, and those of them to probe.

    Args:
        options: Options of the probe.

    Returns:
        All named hosts, and the names of those that a job may run on, parameter servers included.
    """
    planned = runner.plan_launch(options.launch).hosts
    listed = runner.read_hosts(options.launch.hosts)
    if listed is None:
        hosts = tuple(Host(name=host.name, slots=host.ranks) for host in planned)
        listed = HostList(hosts=hosts, source="this machine", dialect="")
    return listed, tuple(host.name for host in planned)


def run_probe(
    options: ProbeOptions, hosts: tuple[str, ...], journal: Journal, run_dir: Path, open_streams: OpenStreams
) -> ProbeOutcome:
    """Launch the probe, and again after failures without lost hosts.

    Args:
        options: Options of the probe.
        hosts: Names of the hosts.
        journal: Holds the records.
        run_dir: Folder of the logs.
        open_streams: Opens the streams of each launch, which write records into the journal.

    Raises:
        PreflightError: Hosts failed the checks before the first launch.
        LaunchError: The probe failed and measured nothing.
    """
    return _ProbeLaunches(options, hosts, journal, run_dir, open_streams).run()


class _ProbeLaunches:
    """The launches of one probe.

    A host that vanished is left out. One on which a process died gets a second chance, but not if that was in an all-reduce: NCCL
    terminates processes of healthy hosts too, and a second launch would end the same way.
    """

    def __init__(
        self, options: ProbeOptions, hosts: tuple[str, ...], journal: Journal, run_dir: Path, open_streams: OpenStreams
    ) -> None:
        self.options, self.hosts, self.journal, self.run_dir = options, hosts, journal, run_dir
        self._open_streams = open_streams
        self.outcome = ProbeOutcome()
        self._failed: set[str] = set()
        self._launches = 0

    def run(self) -> ProbeOutcome:
        """Launch until the probe ends or must not be launched again, at most five times."""
        folder = self.run_dir
        while self._launches < 5 and len(self._present()) >= min(2, len(self.hosts)):
            folder = self.run_dir / f"attempt{self._launches}" if self._launches else self.run_dir
            try:
                self.outcome.result = self._launch(folder)
            except PreflightError as error:
                self._leave_out(error)
                continue
            except DistribError as error:
                if not self._launches:
                    raise
                log.info(f"{error}", extra=PLAIN)
                break
            self._launches += 1
            if self._ended() or not self._may_relaunch():
                break
        self._measure_without_gpudirect()
        self._raise_if_nothing_measured(folder)
        return self.outcome

    def _launch(self, folder: Path, *, gpudirect: bool = True) -> Result:
        """Run one job of the probe on the present hosts."""
        options, present, journal = self.options, self._present(), self.journal
        known = journal.resume_input(present) if journal.done_stages else b""
        spec = ProbeSpec(
            hosts=self.hosts, present=present, mode=options.mode, done=journal.done_with(present), resumed=bool(known),
            primary=options.transport, gpudirect=gpudirect,
        )  # fmt: skip
        wanted = msgspec.structs.replace(
            options.launch, arguments=(encode_json(spec).decode(),), run_dir=str(folder), bind="none", show_rank=0,
            status_lines=False, grace_seconds=TIMEOUTS.exit_seconds,
        )  # fmt: skip
        if not gpudirect:  # of several values of a variable the last one counts
            off = f"{GPUDIRECT_VARIABLE}={GPUDIRECT_OFF_VALUES[0]}"
            wanted = msgspec.structs.replace(wanted, variables=(*wanted.variables, off))
        without = [host for host in self.hosts if host not in present]
        plan = runner.plan_launch(wanted, without)
        if options.mode == "quick":  # without all-reduce, one rank on each host measures everything
            spread = msgspec.structs.replace(wanted.host_filter, spread=True)
            wanted = msgspec.structs.replace(wanted, ranks=len(present), host_filter=spread)
            plan = _with_all_gpus(runner.plan_launch(wanted, without), plan)
        plan = _servers_on_cpus(plan, options)
        planned = tuple(host.name for host in plan.hosts)
        if planned != present:
            raise LaunchError(
                f"ranks are planned on {', '.join(planned)}, expected {', '.join(present)}", code="probe-failed"
            )
        with self._open_streams() as streams:
            return runner.launch(plan, wanted, streams=streams, script_input=known, input_ranks=(0,))

    def _present(self) -> tuple[str, ...]:
        return tuple(host for host in self.hosts if host not in self.outcome.lost and host not in self.outcome.left_out)

    def _leave_out(self, error: PreflightError) -> None:
        """Go on without hosts that failed the preflight checks, if that is allowed. Raises PreflightError else."""
        present = self._present()
        unhealthy = {host: why for host, why in error.hosts.items() if host in present}
        if self._launches and unhealthy:
            self._lose(unhealthy)
        elif self.options.drop_bad_hosts and unhealthy and len(present) - len(unhealthy) > 1:
            self.outcome.left_out |= unhealthy
            for host, why in unhealthy.items():
                log.warning(f"{host} is left out: {why}")
        else:
            hints = [
                error.hint,
                f"--drop-bad-hosts probes the {len(present) - len(unhealthy)} other hosts" * bool(unhealthy),
            ]
            raise PreflightError(
                error.what, hint="; ".join(filter(None, hints)), hosts=error.hosts, code=error.code
            ) from None

    def _lose(self, hosts: Mapping[str, str]) -> None:
        self.outcome.lost |= hosts
        for host, why in hosts.items():
            log.info(f"{host} was lost: {why}; continuing without it", extra=PLAIN)

    def _ended(self) -> bool:
        result = self.outcome.result
        return not result or result.status != "failed" or _contains_record(ProbeEnded, self.journal.read())

    def _may_relaunch(self) -> bool:
        """Handle the failure of a launch. Returns True if another launch may succeed."""
        failure = self.outcome.result.first_failure if self.outcome.result else None
        vanished = failure and failure.rank is not None and failure.exit_code is None and failure.signal is None
        if not vanished and _in_all_reduces(self.journal.read()):
            why = f"{failure.message} ({failure.host})" if failure else "unknown reason"
            self.outcome.all_reduce_failure = f"all-reduce failed: {why}"
            self.outcome.notes.append(self.outcome.all_reduce_failure)
            return False
        if failure is None or failure.host not in self._present():
            return False
        self.journal.reload()
        if failure.exit_code and not self.journal.done_stages:
            return False  # an error of the installation, which would occur again
        if vanished or failure.host in self._failed:
            self._lose({failure.host: failure.message})
        else:
            self._failed.add(failure.host)
            log.info(f"{failure.host}: {failure.message}; trying once more", extra=PLAIN)
        return True

    def _measure_without_gpudirect(self) -> None:
        """Measure all-reduce without GPUDirect RDMA, in a job of its own: NCCL reads its variables once per process.

        All else is measured by then, and must not be lost: a failure becomes a note.
        """
        result = self.outcome.result
        measured = {r.collective.gpudirect for r in self.journal.read() if isinstance(r, CollectiveMeasurement)}
        if not result or result.status != "succeeded" or self.outcome.lost or measured & {True, False} != {True}:
            return
        folder, why = self.run_dir / "no-gpudirect", ""
        try:
            last = self._launch(folder, gpudirect=False)
            if last.status == "stopped":
                why, self.outcome.interrupt_code = "interrupted", last.exit_code
            elif last.status != "succeeded":
                why = _failure_message(last.first_failure, last)
        except KeyboardInterrupt as interrupt:
            why, self.outcome.interrupt_code = "interrupted", signals.exit_code(interrupt)
        except DistribError as error:
            why = str(error)
        if why:
            self.outcome.notes.append(f"all-reduce without GPUDirect RDMA was not completed: {why}")

    def _raise_if_nothing_measured(self, folder: Path) -> None:
        result = self.outcome.result
        records = self.journal.read()
        useful = any(isinstance(record, PairMeasurement) and not record.failed for record in records)
        if (
            result
            and result.status == "failed"
            and not (useful or self.outcome.all_reduce_failure or _contains_record(ProbeEnded, records))
        ):
            raise LaunchError(
                f"the probe failed: {_failure_message(result.first_failure, result)}",
                hint=f"see {folder}/ranks",
                code="probe-failed",
            )


def _failure_message(failure: Failure | None, result: Result) -> str:
    return failure.message if failure else result.status


def _contains_record(kind: type, records: Iterable[Record]) -> bool:
    return any(isinstance(record, kind) for record in records)


def _in_all_reduces(records: Sequence[Record]) -> bool:
    """Return True if the last launch had measured all links."""
    done = False
    for record in records:
        if isinstance(record, ProbeStarted):
            done = False
        elif isinstance(record, StageDone):
            done |= record.stage == LINKS_DONE
    return done


def _servers_on_cpus(plan: LaunchPlan, options: ProbeOptions) -> LaunchPlan:
    """Assign CPUs to ranks on hosts for parameter servers, which may have no GPU, unless all ranks are on such hosts."""
    listed = runner.read_hosts(options.launch.hosts)
    servers = {host.name for host in listed.hosts if host.role == "server"} if listed else set()
    if all(rank.host in servers for rank in plan.ranks):
        return plan
    ranks = tuple(msgspec.structs.replace(r, device="cpu") if r.host in servers else r for r in plan.ranks)
    return msgspec.structs.replace(plan, ranks=ranks)


def _with_all_gpus(plan: LaunchPlan, whole: LaunchPlan) -> LaunchPlan:
    """Let the only rank of each host see all GPUs that the user chose, as `whole` has them: it measures inside the host."""
    chosen = {host.name: host.chosen for host in whole.hosts}
    hosts = tuple(msgspec.structs.replace(host, chosen=chosen.get(host.name, host.chosen)) for host in plan.hosts)
    return msgspec.structs.replace(plan, hosts=hosts)
