"""Runner of single measurements: pairs of hosts, copies inside hosts, all-reduce."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping

import msgspec

from distrib.cluster.shared_links import Pair, Round
from distrib.probe import schedule
from distrib.probe.participants import Participants
from distrib.probe.protocol import AllReduceTask, HostTask, Measurement, PairTask, TaskReply
from distrib.probe.rank_calls import RankCalls
from distrib.probe.records import (
    NO_REPLY,
    CollectiveMeasurement,
    GpuLinkStates,
    IntraNodeMeasurement,
    PairMeasurement,
    Record,
    group_by_machine,
)
from distrib.probe.settings import (
    GPUDIRECT_OFF_VALUES,
    GPUDIRECT_VARIABLE,
    TCP_STREAMS,
    ProbeSettings,
    ProbeTimeouts,
)
from distrib.probe.stages import COLLECTIVE_START_SECONDS, Stage
from distrib.units import format_size


class MeasurementRunner:
    """Runner of measurements: makes tasks for ranks, and records from their replies.

    Args:
        hosts: The participants.
        calls: Sends the tasks.
        emit: Takes each record.
        settings: Settings of the probe mode.
        timeouts: Timeouts of the probe.
    """

    def __init__(
        self,
        hosts: Participants,
        calls: RankCalls,
        emit: Callable[[Record], None],
        settings: ProbeSettings,
        timeouts: ProbeTimeouts,
    ) -> None:
        self.hosts, self.calls, self.settings = hosts, calls, settings
        self._emit, self._timeouts = emit, timeouts
        self._number = 0

    def measure_pairs(self, stage: Stage, phase: Round, number: int = 0) -> list[PairMeasurement]:
        """Measure the pairs of a phase at once, but for those of missing hosts.

        Args:
            stage: The stage of the phase.
            phase: Source and target hosts by number.
            number: Number of the phase within the stage.

        Returns:
            The records, failed ones included; they were emitted.
        """
        pairs = tuple(pair for pair in phase if set(pair).isdisjoint(self.hosts.missing))
        network = self.hosts.networks[stage.network] if stage.network else None
        if network:
            pairs = tuple(pair for pair in pairs if all(self.hosts.names[host] in network.nics for host in pair))
        tasks = {pair: self._pair_task(stage, pair) for pair in pairs if self._unresponsive(pair) is None}
        by_rank = {rank: task for task in tasks.values() for rank in (task.source, task.target)}
        replies = self.calls.call(by_rank, self._transfer_timeout(stage))
        found = [self._unresponsive_record(stage, pair) for pair in pairs if pair not in tasks]
        for pair, task in tasks.items():
            found += self._pair_records(task, pair, replies)
        nics = network.nics if network else {}
        found = [
            msgspec.structs.replace(
                record, phase=number, network=stage.network, interface=nics[record.source][0] if network else None
            )
            for record in found
        ]
        for record in found:
            self._emit(record)
        return found

    def is_unresponsive(self, host: int) -> bool:
        """Return True if the rank that measures on a host gets no more tasks.

        Args:
            host: Number of the host.
        """
        return self.calls.is_unresponsive(self.hosts.ranks.get(host, -1))

    def _unresponsive(self, pair: Pair) -> str | None:
        return next((self.hosts.names[host] for host in pair if self.is_unresponsive(host)), None)

    def _transfer_timeout(self, stage: Stage) -> float:
        return 8 * stage.seconds + self._timeouts.transfer_seconds

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _pair_task(self, stage: Stage, pair: Pair) -> PairTask:
        alone = stage.load == "alone" and not stage.both_ways
        seconds, most = stage.seconds, 2 * stage.seconds if alone else stage.seconds
        sizes = stage.sizes
        if stage.transport == "mpi":
            # A curve takes one half of the time, and the largest messages the other.
            seconds = most = stage.seconds / 2 if len(sizes) > 1 else stage.seconds
            sizes = sizes or (8 << 20,)
        source, target = pair
        return PairTask(
            number=self._next_number(),
            stage=stage.key,
            source=self.hosts.ranks[source],
            target=self.hosts.ranks[target],
            addresses=(self.hosts.address(source, stage.network), self.hosts.address(target, stage.network)),
            transport=stage.transport,
            load=stage.load,
            both_ways=stage.both_ways,
            seconds=seconds,
            max_seconds=most,
            variation=self.settings.variation if alone else None,
            streams=TCP_STREAMS,
            pings=self.settings.pings,
            sizes=sizes,
            timeout_seconds=self._transfer_timeout(stage),
        )

    def _unresponsive_record(self, stage: Stage, pair: Pair) -> PairMeasurement:
        """Record a pair that was not measured; without it the stage would pass for complete."""
        source, target = (self.hosts.names[host] for host in pair)
        return PairMeasurement(
            stage=stage.key, source=source, target=target, transport=stage.transport, load=stage.load,
            both_ways=stage.both_ways, failed=f"{self._unresponsive(pair)} {NO_REPLY}",
        )  # fmt: skip

    def _pair_records(self, task: PairTask, pair: Pair, replies: Mapping[int, TaskReply]) -> list[PairMeasurement]:
        ends = [replies.get(task.source), replies.get(task.target)]
        names = [self.hosts.names[host] for host in pair]
        failures = [
            f"{name}: {reply.failed}" if reply else f"{name} {NO_REPLY}"
            for name, reply in zip(names, ends, strict=True)
            if reply is None or reply.failed
        ]
        found = []
        for sender in (0, 1) if task.both_ways else (0,):
            sent, received = ends[sender], ends[1 - sender]
            record = PairMeasurement(
                stage=task.stage,
                source=names[sender],
                target=names[1 - sender],
                transport=task.transport,
                load=task.load,
                both_ways=task.both_ways,
                streams=task.streams if task.transport == "tcp" else 1,
                busy=max((reply.busy for reply in ends if reply), default=0.0),
                seconds=max((reply.seconds for reply in ends if reply), default=0.0),
                retransmits=sent.retransmits if sent else 0,
                path_mtu=sent.path_mtu if sent else None,
                failed="; ".join(failures) or None,
            )
            if received and received.received and not failures:
                record = msgspec.structs.replace(record, **msgspec.structs.asdict(received.received))
            found.append(record)
        return found

    def measure_inside(self) -> list[str]:
        """Measure copies inside all hosts. Returns messages about failed measurements."""
        number = self._next_number()
        seconds = self.settings.gpu_copy_seconds
        sharing = {first.host: further for first, *further in group_by_machine(self.hosts.facts.values())}
        gpus = max(len(facts.gpus) for facts in self.hosts.facts.values())
        # Each GPU with memory and with each other, both directions; a slow copy takes longer than planned.
        timeout_seconds = self._timeouts.copies_seconds + 4 * seconds * gpus * (gpus + 1)
        tasks = {
            rank: HostTask(
                number=number,
                seconds=seconds,
                both_directions=self.settings.mode != "quick",
                memory=self.hosts.host_of_rank[rank] in sharing,
                timeout_seconds=timeout_seconds,
            )
            for rank in self.hosts.ranks.values()
        }
        replies = self.calls.call(tasks, timeout_seconds)
        for rank, reply in replies.items():
            host = self.hosts.host_of_rank[rank]
            for link in reply.copies:
                self._emit(IntraNodeMeasurement(link=link))
                if link.source == link.target == "memory":
                    for other in sharing[host]:
                        self._emit(IntraNodeMeasurement(link=msgspec.structs.replace(link, host=other.host)))
            if reply.gpus:
                self._emit(GpuLinkStates(host=host, gpus=reply.gpus))
        return self._failures(tasks, replies, "inside hosts, not everything was measured")

    def measure_all_reduce(self, stage: Stage, *, gpudirect: bool) -> tuple[bool, list[str]]:
        """Measure all-reduces over the ranks that take part in collectives.

        Args:
            stage: The stage.
            gpudirect: False if GPUDirect RDMA is disabled in NCCL.

        Returns:
            True if all was measured, and notes for the user.
        """
        self.calls.wait_for_silent()
        if self.calls.silent:
            silent = self.hosts.name_ranks(self.calls.silent)
            return False, [f"{stage.title} was left out, as every rank is needed: no reply from {silent}"]
        left_out = set(range(self.calls.size)) - set(self.hosts.collective_ranks)
        task = AllReduceTask(
            number=self._next_number(),
            host_counts=schedule.collective_host_counts(len(self.hosts.collective_hosts)) or (1,),
            gpudirect=self._gpudirect_used(gpudirect),
            ranks=self.hosts.collective_ranks if left_out else (),
            sizes=self.settings.collective_sizes,
            seconds=self.settings.collective_seconds,
            timeout_seconds=self._timeouts.all_reduce_seconds
            + 3 * (COLLECTIVE_START_SECONDS + self.settings.collective_seconds),
        )
        tasks: dict[int, Measurement] = dict.fromkeys(self.hosts.collective_ranks, task)
        replies = self.calls.call(tasks, task.timeout_seconds)
        failures = self._failures(tasks, replies, f"{stage.title} failed")
        notes = list(failures)
        if left_out:
            notes.append(f"{stage.title} over GPUs only, without {self.hosts.name_ranks(left_out)}")
        first = replies.get(self.hosts.collective_ranks[0])
        for collective in first.collectives if first else ():
            self._emit(CollectiveMeasurement(collective=collective))
            largest = collective.curve[-1].size_bytes if collective.curve else 0
            if largest < task.sizes[-1]:
                notes.append(
                    f"all-reduce over {len(collective.hosts)} hosts: sizes above {format_size(largest, binary=True)} were left "
                    f"out, to {format_size(task.sizes[-1], binary=True)}, for lack of time"
                )
        return not failures, notes

    def _gpudirect_used(self, allowed: bool) -> bool | None:
        """Return True if NCCL may use GPUDirect RDMA, None without the hardware."""
        names = self.hosts.collective_hosts
        able = all(f.gpus and f.rdma_bytes_per_second for f in self.hosts.facts.values() if f.host in names)
        turned_off = os.environ.get(GPUDIRECT_VARIABLE, "").upper() in GPUDIRECT_OFF_VALUES  # by the user
        return allowed and not turned_off if able and len(names) > 1 else None

    def _failures(self, tasks: Collection[int], replies: Mapping[int, TaskReply], what: str) -> list[str]:
        """Return a note for each reason for which ranks failed."""
        ranks: dict[str, list[int]] = {}
        for rank in sorted(tasks):
            reply = replies.get(rank)
            why = reply.failed if reply else "no reply came in time"
            if why:
                ranks.setdefault(why, []).append(rank)
        return [f"{what}: {why} ({self.hosts.name_ranks(failed)})" for why, failed in ranks.items()]
