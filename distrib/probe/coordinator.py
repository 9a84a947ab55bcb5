"""Rank 0: leads everyone through the steps, writes down what was found, and looks again where something seems wrong."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import msgspec

from distrib.cluster import shared_links
from distrib.cluster.node import name_hosts
from distrib.probe import resume, schedule
from distrib.probe.bench.polling import ProbeTimeout, wait
from distrib.probe.diagnosis import remeasure
from distrib.probe.diagnosis.check_inputs import CheckInputs, collect_inputs
from distrib.probe.diagnosis.oversubscription import cpus_saturated
from distrib.probe.protocol import REPLY, TASK, AllReduce, Hello, Inside, Leave, Reply, Spec, Task, Transfer
from distrib.probe.records import (
    NO_REPLY,
    CollectiveMeasurement,
    GpuLinkStates,
    IntraNodeMeasurement,
    PairMeasurement,
    ProbeEnded,
    ProbeStarted,
    Record,
    SharedLinkSides,
    StageDone,
    group_by_machine,
)
from distrib.probe.schedule import Pair, Round
from distrib.probe.secondary_networks import other_networks
from distrib.probe.settings import (
    GPUDIRECT_OFF_VALUES,
    GPUDIRECT_VARIABLE,
    LIMITS,
    MIN_FAST_LINK_STREAMS,
    MODES,
    SINGLE_STREAM_BYTES_PER_SECOND,
    Transport,
)
from distrib.probe.stages import COLLECTIVE_START_SECONDS, LINKS_DONE, Stage, alone_share, steps
from distrib.probe.worker import Worker
from distrib.units import format_size

STREAM_SIZE = 8 << 20
"""What is streamed over MPI where no curve is asked for, in bytes."""

PATIENCE_SECONDS = 6.0
"""How much longer than planned a measurement may take before it counts as failed."""

ANSWER_SECONDS = 2.0
CROSSING_SECONDS = 0.6
INSIDE_PATIENCE_SECONDS = 60.0
"""For torch and the driver to start, beside the copies."""

HOPELESS = 3
"""A further network or way is given up when so many pairs, no host in all of them, have failed and none has passed."""

ATTEMPTS = 3
"""How often the sides of a shared link are looked for: something else on a host can spoil the answer of one test."""

SECOND_LOOK = "second look"
"""The step that stands for it in what is done."""


class Coordinator:
    """Runs the whole probe; `emit` takes each record as it is made, `before` are those of a probe that was interrupted."""

    def __init__(
        self,
        comm: Any,
        worker: Worker,
        spec: Spec,
        hellos: Sequence[Hello],
        emit: Callable[[Record], None],
        before: Sequence[Record] = (),
    ) -> None:
        self.comm, self.worker, self.spec, self.emit_record = comm, worker, spec, emit
        self.settings = MODES[spec.mode]
        first = {hello.facts.host: rank for rank, hello in enumerate(hellos) if hello.facts}
        self.facts = {spec.hosts.index(hello.facts.host): hello.facts for hello in hellos if hello.facts}
        self._host_names: list[str] = []
        """By rank: the ranks of a host come after the one that measures."""
        for hello in hellos:
            self._host_names.append(hello.facts.host if hello.facts else self._host_names[-1])
        starts = resume.starts(before)
        # A host that was lost since still has its say: the way must not change in the middle of a probe.
        known = {facts.host: facts for start in starts for facts in start.facts}
        known |= {facts.host: facts for facts in self.facts.values()}
        rdma = all(facts.rdma_bytes_per_second and facts.mpi_over_rdma for facts in known.values())
        self.primary: Transport = spec.primary or ("mpi" if rdma else "tcp")
        self.start = ProbeStarted(
            when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            mode=spec.mode,
            hosts=spec.hosts,
            primary=self.primary,
            facts=tuple(self.facts.values()),
        )
        anew = any(resume.other_network(start, self.start) for start in starts)
        self.done = () if anew else spec.done
        self.ranks = {spec.hosts.index(host): rank for host, rank in first.items()}
        """The rank that measures, by the number of its host."""
        self.missing = [number for number in range(len(spec.hosts)) if number not in self.ranks]
        self._size: int = comm.size
        on_gpus = tuple(rank for rank, hello in enumerate(hellos) if hello.on_gpu)
        self._some_on_gpus = bool(on_gpus)
        self.at_once = False
        """Whether some ranks have loaded torch, and end without MPI's end: the others must not wait for them there."""
        self._reducing = on_gpus or tuple(range(comm.size))
        """The ranks that take part in all-reduces: NCCL and Gloo do not meet, and hosts for parameter servers may have no GPU."""
        self.networks = {network.name: network for network in other_networks(tuple(self.facts.values()))}
        cards_of: dict[str | None, dict[str, str | None]] = {
            name: {host: card for host, (card, _) in network.cards.items()} for name, network in self.networks.items()
        }
        cards_of[None] = {each.host: each.interface for each in self.facts.values()}
        self._streams = {name: self._streams_on(cards) for name, cards in cards_of.items()}
        """The TCP connections of a link, by network."""
        self.seen: list[PairMeasurement] = (
            [] if anew else [record for record in before if isinstance(record, PairMeasurement)]
        )
        self.sick: dict[int, int] = {}
        """Ranks that did not answer, by how often; after the second time they are asked no more, until they have answered all."""
        self._asked: dict[int, Task] = {}
        """The last task of each rank."""
        self._silent: set[int] = set()
        """Those that did not answer when they were last asked, nor since."""
        self._hopeless: set[tuple[str | None, Transport]] = set()
        """Networks and ways that were given up; never those that judge the links."""
        self._left_out = self._rounds_left_out()
        self._number = 0
        self._begun = time.monotonic()

    @property
    def silent(self) -> str:
        """The hosts of ranks that did not answer when they were last asked: these will hardly end by themselves, either."""
        return self._named(self._silent) if self._silent else ""

    def _streams_on(self, cards: Mapping[str, str | None]) -> int:
        """Where all of these cards, by host, are known to be slow, as many as the mode has; where machines are rented each connection
        may be limited, and their cards tell no rate."""
        known = [each.named(cards[each.host]) for each in self.facts.values() if each.host in cards]
        slow = all(card and 0 < (card.speed_bytes_per_second or 0) <= SINGLE_STREAM_BYTES_PER_SECOND for card in known)
        return self.settings.streams if slow else max(self.settings.streams, MIN_FAST_LINK_STREAMS)

    def emit(self, record: Record) -> None:
        if isinstance(record, PairMeasurement):
            self.seen.append(record)
        self.emit_record(record)

    def run(self) -> None:
        """All steps that are not done already, then a second look at what seems wrong."""
        self.emit(self.start)
        planned = steps(len(self.spec.hosts), self.settings, self.primary, tuple(self.networks))
        if not self.spec.gpudirect:
            planned = tuple(
                msgspec.structs.replace(step, key=f"{step.key}/no-gpudirect", what="all-reduce without GPUDirect RDMA")
                for step in planned
                if step.kind == "all_reduce"
            )
        several = len(self._reducing) > 1
        todo = [step for step in planned if step.key not in self.done and (several or step.kind != "all_reduce")]
        left = sum(step.estimate_seconds for step in todo)
        before_collectives = [step for step in todo if step.kind != "all_reduce"]
        for step in before_collectives:
            left -= step.estimate_seconds
            self._step(step, left)
        if self.spec.gpudirect and (before_collectives or SECOND_LOOK not in self.done):
            notes = self._look_again(left)
            self._done(Stage(key=SECOND_LOOK, what="a second look"), left, notes=notes)
        collectives = todo[len(before_collectives) :]
        if collectives and self.spec.gpudirect is not False:
            self._done(Stage(key=LINKS_DONE, what="all but all-reduce"), left)
        for step in collectives:
            left -= step.estimate_seconds
            self._step(step, left)
        self.at_once = bool(collectives) or self._some_on_gpus or any(facts.gpus for facts in self.facts.values())
        for rank in range(1, self._size):
            self._send(rank, Leave(at_once=self.at_once))
        for _ in self._heard():
            pass  # it is no longer silent
        said = list(self._left_out)
        if self.silent:  # perhaps since the last step: then no pair tells of it
            said.append(f"no answer came from {self.silent} when last asked")
        self.emit(ProbeEnded(seconds=time.monotonic() - self._begun, notes=tuple(said)))

    # -- steps --------------------------------------------------------------------------------------------------------

    def _step(self, step: Stage, left_seconds: float) -> None:
        whole = True
        notes: list[str] = []
        if step.kind == "inside":
            whole, notes = self._inside()
        elif step.kind == "all_reduce":
            whole, notes = self._all_reduce(step)
        further = step.network is not None or step.transport != self.primary
        for number, phase in enumerate(step.phases):
            if (step.network, step.transport) in self._hopeless:
                whole = False
                break
            seen = self._transfer(step, phase, number)
            whole &= all(record.failed is None for record in seen)
            if further and not whole and (why := self._is_hopeless(step.network, step.transport)):
                self._hopeless.add((step.network, step.transport))
                notes.append(f"{step.network or step.transport} was given up, as nothing passes between hosts ({why})")
        self._done(step, left_seconds, whole=whole, notes=notes)

    def _done(self, step: Stage, left_seconds: float, *, whole: bool = True, notes: Sequence[str] = ()) -> None:
        done = time.monotonic() - self._begun
        self.emit(
            StageDone(
                stage=step.key, what=step.what, done_seconds=done, left_seconds=left_seconds, whole=whole,
                without=tuple(self.spec.hosts[number] for number in self.missing), notes=tuple(notes),
            )
        )  # fmt: skip

    def _is_hopeless(self, network: str | None, transport: Transport) -> str:
        """How a pair of a further network or way failed, where enough of them did to give it up; empty where there is hope."""
        seen = [record for record in self.seen if (record.network, record.transport) == (network, transport)]
        hosts = [{record.source, record.target} for record in seen]
        if len(seen) < HOPELESS or set.intersection(*hosts) or not all(record.failed for record in seen):
            return ""
        return f"{seen[0].source} to {seen[0].target}: {seen[0].failed}"

    def _inside(self) -> tuple[bool, list[str]]:
        """Whether all was measured, and what was not."""
        self._number += 1
        gpus = max(len(facts.gpus) for facts in self.facts.values())
        seconds = self.settings.gpu_copy_seconds
        same_memory = {first.host: further for first, *further in group_by_machine(self.facts.values())}
        # Each GPU with the memory and with each other, both ways; and a slow way takes longer than it should.
        patience_seconds = INSIDE_PATIENCE_SECONDS + 4 * seconds * gpus * (gpus + 1)
        tasks: dict[int, Task] = {
            rank: Inside(
                number=self._number,
                seconds=seconds,
                backwards=self.settings.mode != "quick",
                memory=self._host_names[rank] in same_memory,
                patience_seconds=patience_seconds,
            )
            for rank in self.ranks.values()
        }
        replies = self._together(tasks, patience_seconds)
        for rank, reply in replies.items():
            host = self._host_names[rank]
            for link in reply.inside:
                self.emit(IntraNodeMeasurement(link=link))
                if link.source == link.target == "memory":
                    for other in same_memory[host]:
                        self.emit(IntraNodeMeasurement(link=msgspec.structs.replace(link, host=other.host)))
            if reply.gpus:
                self.emit(GpuLinkStates(host=host, gpus=reply.gpus))
        notes = self._failures(tasks, replies, "inside the hosts not everything was measured")
        return not notes, notes

    def _failures(self, tasks: Collection[int], replies: Mapping[int, Reply], what: str) -> list[str]:
        """A note for each reason for which ranks failed, or none."""
        ranks: dict[str, list[int]] = {}
        for rank in sorted(tasks):
            reply = replies.get(rank)
            why = reply.failed if reply else "no answer came in time"
            if why:
                ranks.setdefault(why, []).append(rank)
        return [f"{what}: {why} ({self._named(failed)})" for why, failed in ranks.items()]

    def _named(self, ranks: Collection[int]) -> str:
        """The hosts of these ranks."""
        return name_hosts(self._host_names[rank] for rank in sorted(ranks))

    def _all_reduce(self, step: Stage) -> tuple[bool, list[str]]:
        """Whether all was measured, and what was not."""

        def all_there() -> bool:
            for _ in self._heard():
                pass  # it is no longer silent
            return not self._silent

        with contextlib.suppress(ProbeTimeout):
            wait(all_there, time.monotonic() + PATIENCE_SECONDS, "late answers", idle=True)
        if self._silent:
            gone = self._named(self._silent)
            return False, [f"{step.what} was left out, as everyone is needed for it: no answer from {gone}"]
        self._number += 1
        left_out = set(range(self._size)) - set(self._reducing)
        task = AllReduce(
            number=self._number,
            counts=schedule.counts(len(self._reducing_hosts())) or (1,),
            gpudirect=self._gpudirect(),
            ranks=self._reducing if left_out else (),
            sizes=self.settings.collective_sizes,
            seconds=self.settings.collective_seconds,
            patience_seconds=60.0 + 3 * (COLLECTIVE_START_SECONDS + self.settings.collective_seconds),
        )
        tasks: dict[int, Task] = dict.fromkeys(self._reducing, task)
        replies = self._together(tasks, task.patience_seconds)
        failures = self._failures(tasks, replies, f"{step.what} failed")
        notes = list(failures)
        if left_out:
            notes.append(f"{step.what} is that of GPUs, without {self._named(left_out)}")
        first = replies.get(self._reducing[0])
        for collective in first.collectives if first else ():
            self.emit(CollectiveMeasurement(collective=collective))
            largest = collective.curve[-1].size_bytes if collective.curve else 0
            if largest < task.sizes[-1]:
                notes.append(
                    f"all-reduce over {len(collective.hosts)} hosts: for time, nothing above {format_size(largest, binary=True)} "
                    f"of {format_size(task.sizes[-1], binary=True)}"
                )
        return not failures, notes

    def _rounds_left_out(self) -> list[str]:
        hosts = len(self.spec.hosts)
        alone, every = alone_share(hosts, self.settings)[0], len(schedule.rounds(hosts))
        if alone == every or not self.spec.gpudirect:
            return []
        return [f"for time, {alone} of {every} rounds were measured pair by pair too; every pair was beside others"]

    def _reducing_hosts(self) -> set[str]:
        return {self._host_names[rank] for rank in self._reducing}

    def _gpudirect(self) -> bool | None:
        """Whether GPUDirect RDMA was left on; None where there is nothing that could use it."""
        hosts = self._reducing_hosts()
        able = all(f.gpus and f.rdma_bytes_per_second for f in self.facts.values() if f.host in hosts)
        # Whoever probes may have turned it off: then there is nothing to compare.
        is_on = self.spec.gpudirect and os.environ.get(GPUDIRECT_VARIABLE, "").upper() not in GPUDIRECT_OFF_VALUES
        return is_on if able and len(hosts) > 1 else None

    def _transfer(self, step: Stage, phase: Round, number: int = 0) -> list[PairMeasurement]:
        """Measure the pairs of a phase at once, those whose hosts are there."""
        there = schedule.without(phase, self.missing)
        if step.network:
            cards = self.networks[step.network].cards
            there = tuple(pair for pair in there if all(self.spec.hosts[host] in cards for host in pair))
        pairs = [pair for pair in there if not any(map(self._is_sick, pair))]
        tasks: dict[int, Task] = {}
        transfers: dict[Pair, Transfer] = {}
        sizes = step.sizes or ((STREAM_SIZE,) if step.transport == "mpi" else ())
        patience_seconds = 8 * step.seconds + PATIENCE_SECONDS
        alone = step.load == "alone" and not step.both_ways
        for source, target in pairs:
            self._number += 1
            share = step.seconds
            transfers[source, target] = Transfer(
                number=self._number,
                stage=step.key,
                source=self.ranks[source],
                target=self.ranks[target],
                addresses=(self._address(source, step.network), self._address(target, step.network)),
                transport=step.transport,
                load=step.load,
                both_ways=step.both_ways,
                # Over MPI the curve takes one part of the time and the largest messages another.
                seconds=share / 2 if step.transport == "mpi" and len(sizes) > 1 else share,
                longest=(share / 2 if len(sizes) > 1 else share)
                if step.transport == "mpi"
                else (2 * share if alone else share),
                variation=self.settings.variation if alone else None,
                streams=self._streams[step.network],
                pings=self.settings.pings,
                sizes=sizes,
                patience_seconds=patience_seconds,
            )
            tasks[self.ranks[source]] = tasks[self.ranks[target]] = transfers[source, target]
        made = [self._not_asked(step, pair) for pair in there if pair not in transfers]
        replies = self._together(tasks, patience_seconds)
        for (source, target), transfer in transfers.items():
            made += self._records(transfer, source, target, replies)
        network = self.networks[step.network] if step.network else None
        found = [
            msgspec.structs.replace(
                record,
                phase=number,
                network=step.network,
                interface=network.cards[record.source][0] if network else None,
            )
            for record in made
        ]
        for record in found:
            self.emit(record)
        return found

    def _not_asked(self, step: Stage, pair: Pair) -> PairMeasurement:
        """What is known of a pair of which one does not answer any more: without it the step would pass for whole."""
        source, target = (self.spec.hosts[host] for host in pair)
        silent = next(self.spec.hosts[host] for host in pair if self._is_sick(host))
        return PairMeasurement(
            stage=step.key, source=source, target=target, transport=step.transport, load=step.load, both_ways=step.both_ways,
            failed=f"{silent} {NO_REPLY}",
        )  # fmt: skip

    def _address(self, host: int, network: str | None) -> str:
        if network is None:
            return self.facts[host].address
        return self.networks[network].cards[self.spec.hosts[host]][1]

    def _records(
        self, transfer: Transfer, source: int, target: int, replies: dict[int, Reply]
    ) -> list[PairMeasurement]:
        ends = [replies.get(transfer.source), replies.get(transfer.target)]
        names = self.spec.hosts
        failures = [
            f"{names[host]}: {reply.failed}" if reply else f"{names[host]} {NO_REPLY}"
            for host, reply in zip((source, target), ends, strict=True)
            if reply is None or reply.failed
        ]
        directions = [(source, target, ends[0], ends[1])]
        if transfer.both_ways:
            directions.append((target, source, ends[1], ends[0]))
        found = []
        for sender, receiver, out, came in directions:
            seen = came.arrived if came else None
            record = PairMeasurement(
                stage=transfer.stage,
                source=names[sender],
                target=names[receiver],
                transport=transfer.transport,
                load=transfer.load,
                both_ways=transfer.both_ways,
                streams=transfer.streams if transfer.transport == "tcp" else 1,
                busy=max((reply.busy for reply in ends if reply), default=0.0),
                seconds=max((reply.seconds for reply in ends if reply), default=0.0),
                retransmits=out.retransmits if out else 0,
                path_mtu=out.path_mtu if out else None,
                failed="; ".join(failures) or None,
            )
            if seen and not failures:
                record = msgspec.structs.replace(record, **msgspec.structs.asdict(seen))
            found.append(record)
        return found

    # -- looking again ------------------------------------------------------------------------------------------------

    def _look_again(self, left_seconds: float) -> tuple[str, ...]:
        """Measure again, alone, what looked slow; find who shares a link with whom."""
        numbers = {host: number for number, host in enumerate(self.spec.hosts)}
        again = remeasure.links_to_remeasure(self._inputs(), self.settings.max_remeasured)
        if again:
            phases = tuple(((numbers[a], numbers[b]),) for a, b in again)
            seconds = max(self.settings.concurrent_seconds, alone_share(len(self.spec.hosts), self.settings)[1])
            self._step(
                Stage(key="again", what="a second look", transport=self.primary, phases=phases, seconds=seconds),
                left_seconds,
            )
        inputs = self._inputs()
        baseline = inputs.alone
        slowed_pairs = remeasure.concurrent_pairs_slowed(inputs)
        if not slowed_pairs:
            return ()
        if cpus_saturated(inputs):
            return ("pairs slow each other down, and CPUs were busy: whether they share links is unknown",)
        worst: Round = tuple((numbers[a], numbers[b]) for a, b in slowed_pairs[0])

        def run(key: str, phase: Round) -> dict[Pair, float]:
            step = Stage(
                key=f"sharing/{key}", what="who shares", transport=self.primary, load="sharing", phases=(phase,),
                # The last phase gives the ratio: long, so that it matters little that not all begin and end at once.
                seconds=CROSSING_SECONDS if key == "crossing" else self.settings.concurrent_seconds,
            )  # fmt: skip
            parts = {}
            for record in self._transfer(step, phase):
                if record.failed is None:
                    own = baseline.expected(record.source, record.target)
                    pair = numbers[record.source], numbers[record.target]
                    parts[pair] = record.bandwidth_bytes_per_second / own if own else 1.0
            if len(parts) < len(phase):
                raise ProbeTimeout(f"a host {NO_REPLY}")
            return parts

        try:
            found, slowed = None, False
            for _ in range(ATTEMPTS):
                load = shared_links.slowed_pairs(run("repeat", worst))
                slowed |= bool(load)
                paired = {host for pair in load for host in pair}
                others = tuple(n for n in self.ranks if n not in paired and not self._is_sick(n))
                if found := shared_links.find_sides(tuple(load), run, others):
                    break
            if not slowed:
                return ()
        except ProbeTimeout as problem:
            return (f"who shares a link could not be found: {problem}",)
        if found is None:
            busy = max(record.busy for record in self.seen if record.load == "sharing") > LIMITS.saturated_cpu_fraction
            why = "; the processors were busy throughout" if busy else ""
            return (f"pairs slow each other down, but not as hosts on two sides of one link would{why}",)
        names = self.spec.hosts
        self.emit(SharedLinkSides(sides=(tuple(names[n] for n in found.left), tuple(names[n] for n in found.right))))
        return ()

    def _inputs(self) -> CheckInputs:
        inputs = collect_inputs([self.start, *self.seen])
        assert inputs
        return inputs

    # -- orders and answers -------------------------------------------------------------------------------------------

    def _is_sick(self, host: int) -> bool:
        return self.sick.get(self.ranks.get(host, -1), 0) > 1

    def _send(self, rank: int, task: Task) -> None:
        self.comm.send(msgspec.msgpack.encode(task), rank, TASK)

    def _together(self, tasks: dict[int, Task], patience_seconds: float) -> dict[int, Reply]:
        """Have each rank do its task, all at once; the answers of those that answered in time."""
        self._asked |= tasks
        for rank in sorted(tasks):
            if rank:
                self._send(rank, tasks[rank])
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + patience_seconds + ANSWER_SECONDS
        if 0 in tasks:
            replies[0] = self.worker.perform(tasks[0])

        def all_here() -> bool:
            for reply in self._heard():
                if getattr(self._asked.get(reply.rank), "number", None) != reply.number:
                    continue  # late, and more is waited for
                if reply.rank in tasks:
                    replies[reply.rank] = reply
                else:
                    self.sick.pop(reply.rank, None)
            return len(replies) == len(tasks)

        try:
            wait(all_here, deadline, "answers", idle=True)
        except ProbeTimeout:
            for rank in tasks:
                if rank not in replies:
                    self.sick[rank] = self.sick.get(rank, 0) + 1
        self._silent |= set(tasks)
        self._silent -= set(replies)
        return replies

    def _heard(self) -> Iterator[Reply]:
        """The answers that have come. Whoever answers late is there again."""
        while self.comm.iprobe(tag=REPLY):
            reply = msgspec.msgpack.decode(self.comm.recv(tag=REPLY), type=Reply)
            self._silent.discard(reply.rank)
            yield reply
