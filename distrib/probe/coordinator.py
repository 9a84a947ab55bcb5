"""Coordinator on rank 0: runs the stages of a probe, emits records, and has suspicious links measured again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import msgspec

from distrib.probe import journal, schedule
from distrib.probe.diagnosis.check_inputs import DiagnosisInputs, collect_inputs
from distrib.probe.measurement_runner import MeasurementRunner
from distrib.probe.participants import Participants
from distrib.probe.protocol import Measurement, ProbeSpec, RankHello, TaskReply
from distrib.probe.rank_calls import RankCalls
from distrib.probe.records import PairMeasurement, ProbeEnded, ProbeStarted, Record, StageDone
from distrib.probe.second_pass import find_shared_link, suspicious_stage
from distrib.probe.settings import MODES, TIMEOUTS, ProbeTimeouts, Transport
from distrib.probe.stages import LINKS_DONE, SECOND_PASS, Stage, alone_rounds, plan_stages


class Coordinator:
    """Coordinator of a probe on rank 0: runs its stages and emits the records.

    Args:
        comm: MPI communicator of all ranks.
        perform: Performs a task of rank 0.
        spec: The launcher's request.
        hellos: The first message of each rank.
        emit: Called with each record.
        before: The records of an interrupted probe.
        timeouts: Timeouts of the coordination.
    """

    def __init__(
        self,
        comm: Any,
        perform: Callable[[Measurement], TaskReply],
        spec: ProbeSpec,
        hellos: Sequence[RankHello],
        emit: Callable[[Record], None],
        before: Sequence[Record] = (),
        timeouts: ProbeTimeouts = TIMEOUTS,
    ) -> None:
        self.spec, self._emit_record = spec, emit
        self.settings = MODES[spec.mode]
        self.hosts = Participants(spec, hellos)
        self.calls = RankCalls(comm, perform, timeouts)
        self.runner = MeasurementRunner(self.hosts, self.calls, self.emit, self.settings, timeouts)
        starts = [record for record in before if isinstance(record, ProbeStarted)]
        self.start = self._start_record(starts)
        restart = any(journal.network_change(start, self.start) for start in starts)
        self._done = () if restart else spec.done
        self._pairs = [] if restart else [record for record in before if isinstance(record, PairMeasurement)]
        self._given_up: set[tuple[str | None, Transport]] = set()
        self._remaining_seconds = 0.0
        self._begun = time.monotonic()
        self.skip_finalize = False
        """True if ranks exit without MPI_Finalize, as ranks that loaded torch do: other ranks must not wait for them."""

    @property
    def silent_hosts(self) -> str:
        """The hosts of ranks that did not reply to their last task; their processes will hardly exit."""
        return self.hosts.name_ranks(self.calls.silent)

    def _start_record(self, starts: Sequence[ProbeStarted]) -> ProbeStarted:
        facts = tuple(self.hosts.facts.values())
        # Lost hosts count too: the transport must not change in the middle of a probe.
        known = {each.host: each for start in starts for each in start.facts} | {each.host: each for each in facts}
        rdma = all(each.rdma_bytes_per_second and each.mpi_over_rdma for each in known.values())
        return ProbeStarted(
            when=datetime.now(timezone.utc).isoformat(timespec="seconds"), mode=self.spec.mode, hosts=self.spec.hosts,
            primary=self.spec.primary or ("mpi" if rdma else "tcp"), facts=facts,
        )  # fmt: skip

    def emit(self, record: Record) -> None:
        """Pass on a record and keep measurements of pairs.

        Args:
            record: Any record.
        """
        if isinstance(record, PairMeasurement):
            self._pairs.append(record)
        self._emit_record(record)

    def run(self) -> None:
        """Run all stages that are not done, then shut the ranks down."""
        self.emit(self.start)
        todo = self._planned_stages()
        self._remaining_seconds = sum(stage.estimate_seconds for stage in todo)
        links = [stage for stage in todo if stage.kind != "all_reduce"]
        collectives = [stage for stage in todo if stage.kind == "all_reduce"]
        for stage in links:
            self._run_stage(stage)
        if self.spec.gpudirect:
            if links or SECOND_PASS not in self._done:
                self._finish_stage(Stage(key=SECOND_PASS, title="second pass"), notes=self._second_pass())
            if collectives:
                self._finish_stage(Stage(key=LINKS_DONE, title="all links"))
        for stage in collectives:
            self._run_stage(stage)
        self.skip_finalize = bool(collectives) or self.hosts.has_gpus
        self.calls.shut_down(skip_finalize=self.skip_finalize)
        self.emit(ProbeEnded(seconds=time.monotonic() - self._begun, notes=tuple(self._final_notes())))

    def _planned_stages(self) -> list[Stage]:
        """List the stages to run. Without GPUDirect RDMA only all-reduce is measured."""
        planned = plan_stages(len(self.spec.hosts), self.settings, self.start.primary, tuple(self.hosts.networks))
        if not self.spec.gpudirect:
            planned = tuple(
                msgspec.structs.replace(
                    stage, key=f"{stage.key}/no-gpudirect", title="all-reduce without GPUDirect RDMA"
                )
                for stage in planned
                if stage.kind == "all_reduce"
            )
        several = len(self.hosts.collective_ranks) > 1
        return [stage for stage in planned if stage.key not in self._done and (several or stage.kind != "all_reduce")]

    def _run_stage(self, stage: Stage) -> None:
        self._remaining_seconds = max(0.0, self._remaining_seconds - stage.estimate_seconds)
        if stage.kind == "inside":
            notes = self.runner.measure_inside()
            self._finish_stage(stage, complete=not notes, notes=notes)
        elif stage.kind == "all_reduce":
            complete, notes = self.runner.measure_all_reduce(stage, gpudirect=self.spec.gpudirect)
            self._finish_stage(stage, complete=complete, notes=notes)
        else:
            self._run_transfers(stage)

    def _run_transfers(self, stage: Stage) -> None:
        complete, notes = True, []
        secondary = stage.network is not None or stage.transport != self.start.primary
        for number, phase in enumerate(stage.phases):
            if (stage.network, stage.transport) in self._given_up:
                complete = False
                break
            complete &= all(record.failed is None for record in self.runner.measure_pairs(stage, phase, number))
            if secondary and not complete and (why := self._hopeless(stage.network, stage.transport)):
                self._given_up.add((stage.network, stage.transport))
                notes.append(f"{stage.network or stage.transport} was given up, as no pair of hosts succeeded ({why})")
        self._finish_stage(stage, complete=complete, notes=notes)

    def _hopeless(self, network: str | None, transport: Transport) -> str:
        """Return the first failure of a network and transport, if three pairs without a common host failed and none succeeded."""
        seen = [record for record in self._pairs if (record.network, record.transport) == (network, transport)]
        if len(seen) < 3 or not all(record.failed for record in seen):
            return ""
        if set.intersection(*({record.source, record.target} for record in seen)):
            return ""  # one host may be the reason
        return f"{seen[0].source} to {seen[0].target}: {seen[0].failed}"

    def _second_pass(self) -> Sequence[str]:
        stage = suspicious_stage(self._inputs(), self.runner, self.start.primary)
        if stage:
            self._run_transfers(stage)
        return find_shared_link(self._inputs(), self.runner, self.start.primary, self.emit)

    def _inputs(self) -> DiagnosisInputs:
        inputs = collect_inputs([self.start, *self._pairs])
        assert inputs
        return inputs

    def _finish_stage(self, stage: Stage, *, complete: bool = True, notes: Sequence[str] = ()) -> None:
        self.emit(
            StageDone(
                stage=stage.key, title=stage.title, done_seconds=time.monotonic() - self._begun,
                remaining_seconds=self._remaining_seconds, complete=complete,
                without=tuple(self.spec.hosts[number] for number in self.hosts.missing), notes=tuple(notes),
            )
        )  # fmt: skip

    def _final_notes(self) -> list[str]:
        notes = []
        hosts = len(self.spec.hosts)
        alone, every = alone_rounds(hosts, self.settings)[0], len(schedule.round_robin(hosts))
        if alone < every and self.spec.gpudirect:
            notes.append(
                f"for lack of time only {alone} of {every} rounds were measured pair by pair; all ran concurrently"
            )
        if self.calls.silent:  # perhaps since the last stage: then no pair's record has it
            notes.append(f"no reply came from {self.silent_hosts} to the last task")
        return notes
