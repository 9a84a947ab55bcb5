"""Coordinator of the probe: late and missing replies, abandoned networks, resumed probes, all-reduces."""

from __future__ import annotations

import msgspec
import pytest

from distrib.cluster.inventory import Interface
from distrib.cluster.measurements import Collective, IntraNodeLinkMeasurement, Point
from distrib.probe.coordinator import Coordinator
from distrib.probe.diagnosis.checks import check_records
from distrib.probe.protocol import (
    AllReduceTask,
    HostTask,
    PairTask,
    ProbeSpec,
    RankHello,
    RankTask,
    ReceivedRate,
    ShutdownTask,
    TaskReply,
)
from distrib.probe.records import (
    CollectiveMeasurement,
    GpuPcieLink,
    HostFacts,
    IntraNodeMeasurement,
    PairMeasurement,
    ProbeEnded,
    ProbeStarted,
    SharedLinkSides,
    StageDone,
)
from distrib.probe.settings import ProbeTimeouts
from distrib.probe.stages import SECOND_PASS
from tests.support.simulated_network import of_kind

RATE = 100e6
OTHER_NETWORK = "10.1.0.0/16"
IMPATIENT = ProbeTimeouts(reply_seconds=-3.0, transfer_seconds=-3.0, copies_seconds=-3.0)


class FakeRanks:
    """Hosts with these ranks, whose replies `answer` returns at once; None stands for a missing reply."""

    def __init__(self, hosts, *, ranks=1, answer=None, networks=1, net=0):
        self.hosts = tuple(f"n{n + 1}" for n in range(hosts))
        self.ranks = ranks
        self.size = hosts * ranks
        self.answer = answer or usual_reply
        self.tasks = []
        self.replies = []
        self.late = []
        self.hellos = []
        for number in range(hosts):
            cards = tuple(
                Interface(name=f"eth{n}", kind="physical", addresses=(f"10.{n}.0.{number}/16",))
                for n in range(networks)
            )
            facts = HostFacts(
                host=self.hosts[number], address=f"10.{net}.0.{number}", interface=f"eth{net}", cpus=1, interfaces=cards
            )
            self.hellos += [RankHello(facts=facts), *[RankHello()] * (ranks - 1)]

    def perform(self, task):
        return self.answer(0, task)

    def send(self, words, rank, tag):
        task = msgspec.msgpack.decode(words, type=RankTask)
        self.tasks.append(task)
        if not isinstance(task, ShutdownTask) and (reply := self.answer(rank, task)):
            self.replies.append(reply)

    def iprobe(self, *, tag):
        """Return True if a reply is ready. A late reply is ready only after rank 0 stopped waiting for it."""
        if not self.replies:
            self.replies = [reply for reply, waited_for in self.late if waited_for]
            self.late = [(reply, True) for reply, waited_for in self.late if not waited_for]
        return bool(self.replies)

    def recv(self, *, tag):
        return msgspec.msgpack.encode(self.replies.pop(0))

    def probe(self, mode="default", done=(), before=()):
        """Run a probe of these hosts and return its records."""
        found = []
        spec = ProbeSpec(hosts=self.hosts, present=self.hosts, mode=mode, done=done)
        Coordinator(self, self.perform, spec, self.hellos, found.append, before, IMPATIENT).run()
        return found


def usual_reply(rank, task, rate=RATE):
    if isinstance(task, HostTask):
        link = IntraNodeLinkMeasurement(
            host=f"n{rank + 1}", source="memory", target="memory", bandwidth_bytes_per_second=1e9, variation=0.0
        )
        return TaskReply(number=task.number, rank=rank, copies=(link,))
    if isinstance(task, AllReduceTask):
        curve = tuple(Point(size, 1e-3) for size in task.sizes)
        made = Collective(name="all_reduce", backend="gloo", hosts=("n1",), ranks=2, curve=curve)
        return TaskReply(number=task.number, rank=rank, collectives=(made,) * (not rank))
    received = ReceivedRate(
        latency_seconds=1e-5, bandwidth_bytes_per_second=rate, variation=0.0, repetitions=9, outliers=0
    )
    takes = rank == task.target or task.both_ways
    return TaskReply(number=task.number, rank=rank, received=received if takes else None)


def notes(records):
    return [note for record in of_kind(StageDone, records) for note in record.notes]


def test_the_memory_of_a_machine_is_measured_once_for_all_its_hosts():
    def answer(rank, task):
        if isinstance(task, HostTask) and not task.memory:
            return TaskReply(number=task.number, rank=rank)
        return usual_reply(rank, task)

    cluster = FakeRanks(4, answer=answer)
    for number, machine in enumerate(("a", "b", "a", "")):
        facts = msgspec.structs.replace(cluster.hellos[number].facts, machine=machine)
        cluster.hellos[number] = RankHello(facts=facts)
    records = cluster.probe("quick")
    assert [task.memory for task in cluster.tasks if isinstance(task, HostTask)] == [
        True,
        False,
        True,
    ]  # rank 0 also sends tasks to itself
    assert sorted(record.link.host for record in of_kind(IntraNodeMeasurement, records)) == ["n1", "n2", "n3", "n4"]


def test_a_failed_all_reduce_is_noted_with_reason_and_host():
    def answer(rank, task):
        if isinstance(task, AllReduceTask) and rank == 5:
            return TaskReply(number=task.number, rank=rank, failed="CUDA out of memory")
        return usual_reply(rank, task)

    records = FakeRanks(3, ranks=2, answer=answer).probe()
    assert notes(records) == ["all-reduce failed: CUDA out of memory (n3)"]
    assert not next(record for record in of_kind(StageDone, records) if record.stage == "all-reduce").complete
    assert of_kind(CollectiveMeasurement, records)


def test_all_reduce_is_skipped_with_a_note_if_a_host_does_not_reply():
    def answer(rank, task):
        return None if rank == 2 and not isinstance(task, HostTask) else usual_reply(rank, task)

    assert any(
        "all-reduce was left out" in n and "no reply from n3" in n for n in notes(FakeRanks(3, answer=answer).probe())
    )


def test_a_host_that_was_late_once_takes_part_in_all_reduce():
    def answer(rank, task):
        return None if rank == 2 and isinstance(task, HostTask) else usual_reply(rank, task)

    records = FakeRanks(3, answer=answer).probe()
    assert of_kind(CollectiveMeasurement, records)
    assert notes(records) == ["inside hosts, not everything was measured: no reply came in time (n3)"]


def test_late_replies_are_awaited_before_all_reduce():
    def answer(rank, task):
        last = isinstance(task, PairTask) and task.stage == "together/mpi/2" and task.source == 1
        if rank == 1 and last:
            cluster.late.append((usual_reply(rank, task), False))
            return None
        return usual_reply(rank, task)

    cluster = FakeRanks(3, answer=answer)
    assert of_kind(CollectiveMeasurement, cluster.probe())


@pytest.mark.parametrize("answers", [0, 4])
def test_a_frozen_rank_gets_no_more_tasks_and_its_host_is_lost(answers):
    """Rank 0 stops sending tasks after several timeouts. Stages with missing measurements are incomplete."""
    given = []

    def answer(rank, task):
        if rank == 2 and isinstance(task, PairTask):
            given.append(task)
        return None if rank == 2 and len(given) > answers else usual_reply(rank, task)

    records = FakeRanks(8, answer=answer, networks=2).probe("quick")
    assert len([task for task in given if task.stage.startswith("together")]) < 10
    mine = [r for r in of_kind(PairMeasurement, records) if "n3" in (r.source, r.target)]
    assert {r.failed for r in mine if r.failed} == {"n3 did not reply"}
    assert {r.interface for r in mine if r.network} == {"eth1"}
    assert len({(r.source, r.target) for r in mine}) == 14
    failed = {r.stage for r in mine if r.failed}
    assert failed == {r.stage for r in of_kind(StageDone, records) if not r.complete} - {"inside", "all-reduce"}
    found = {(f.kind, f.severity, f.hosts) for f in check_records(records) if f.severity == "error"}
    assert found == {("host_lost", "error", ("n3",))}
    assert of_kind(ProbeEnded, records)[0].notes[-1] == "no reply came from n3 to the last task"


def test_a_rank_late_twice_gets_tasks_again_after_its_replies():
    given, held = [], []

    def answer(rank, task):
        if rank == 2:
            given.append(task)
            if len(given) <= 2:
                held.append(usual_reply(rank, task))
                return None
        elif rank == 1 and len(given) == 2:  # in a later round
            cluster.replies += held
            held.clear()
        return usual_reply(rank, task)

    cluster = FakeRanks(8, answer=answer)
    records = cluster.probe()
    assert len(given) > 20 and of_kind(CollectiveMeasurement, records)
    assert not [finding for finding in check_records(records) if finding.kind == "host_lost"]


def test_hosts_without_a_last_reply_are_silent_at_the_end():
    def silent_after(answer):
        cluster = FakeRanks(3, answer=answer)
        spec = ProbeSpec(hosts=cluster.hosts, present=cluster.hosts, mode="quick")
        found = []
        (
            coordinator := Coordinator(cluster, cluster.perform, spec, cluster.hellos, found.append, timeouts=IMPATIENT)
        ).run()
        return coordinator.silent_hosts, of_kind(ProbeEnded, found)[0].notes

    assert silent_after(usual_reply) == ("", ())
    silent = lambda rank, task: None if rank == 2 else usual_reply(rank, task)  # noqa: E731
    assert silent_after(silent) == ("n3", ("no reply came from n3 to the last task",))
    once = lambda rank, task: None if rank == 2 and isinstance(task, HostTask) else usual_reply(rank, task)  # noqa: E731
    assert silent_after(once) == ("", ())


def test_intra_node_links_are_kept_when_others_fail():
    def answer(rank, task):
        reply = usual_reply(rank, task)
        return (
            msgspec.structs.replace(reply, failed="gpu3: no memory") if isinstance(task, HostTask) and rank else reply
        )

    records = FakeRanks(2, answer=answer).probe("quick")
    assert {record.link.host for record in of_kind(IntraNodeMeasurement, records)} == {"n1", "n2"}
    assert notes(records) == ["inside hosts, not everything was measured: gpu3: no memory (n2)"]


def fails_on(network, where):
    """Return replies in which pairs fail on this network, if `where` is true of their host numbers."""

    def answer(rank, task):
        on_it = isinstance(task, PairTask) and task.addresses[0].startswith(network)
        if on_it and where(task.source, task.target):
            return TaskReply(number=task.number, rank=rank, failed="timed out")
        return usual_reply(rank, task)

    return answer


def test_a_further_network_without_any_connection_is_abandoned():
    records = FakeRanks(6, networks=2, answer=fails_on("10.1.", lambda a, b: True)).probe()
    assert len([record for record in of_kind(PairMeasurement, records) if record.network == OTHER_NETWORK]) == 3
    [note] = notes(records)
    assert note.startswith(f"{OTHER_NETWORK} was given up") and "timed out" in note
    assert not any(
        record.complete for record in of_kind(StageDone, records) if record.stage.startswith(f"alone/{OTHER_NETWORK}")
    )
    assert len({(r.source, r.target) for r in of_kind(PairMeasurement, records) if r.network is None}) == 30


def test_a_secondary_transport_without_any_connection_is_abandoned():
    def answer(rank, task):
        if isinstance(task, PairTask) and task.transport == "mpi":
            return TaskReply(number=task.number, rank=rank, failed="no answer to a ping")
        return usual_reply(rank, task)

    records = FakeRanks(4, answer=answer).probe()
    assert len([record for record in of_kind(PairMeasurement, records) if record.transport == "mpi"]) < 6
    assert notes(records)[0].startswith("mpi was given up")


@pytest.mark.parametrize("hosts", [3, 4, 6])
def test_a_network_is_not_abandoned_for_one_host(hosts):
    records = FakeRanks(hosts, networks=2, answer=fails_on("10.1.", lambda a, b: 1 in (a, b))).probe()
    seen = {(r.source, r.target) for r in of_kind(PairMeasurement, records) if r.network and not r.failed}
    assert len(seen) == (hosts - 1) * (hosts - 2)
    assert notes(records) == []


def uplink(rank, task):
    """Return replies of two halves of hosts, between which parallel streams have half the rate."""
    alone = isinstance(task, PairTask) and task.load == "alone"
    crosses = isinstance(task, PairTask) and (task.source < 4) != (task.target < 4)
    return usual_reply(rank, task, RATE / 2 if crosses and not alone else RATE)


@pytest.mark.parametrize("mode", ["quick", "default"])
def test_a_probe_interrupted_in_its_second_pass_repeats_the_second_pass(mode):
    first = FakeRanks(8, answer=uplink).probe(mode)
    finished = [
        record for record in of_kind(StageDone, first) if not record.stage.startswith(("again", SECOND_PASS, "all"))
    ]
    before = [
        record
        for record in first
        if isinstance(record, ProbeStarted)
        or (isinstance(record, PairMeasurement) and record.stage in {s.stage for s in finished})
    ]
    second = FakeRanks(8, answer=uplink)
    records = second.probe(mode, tuple(record.stage for record in finished), before)
    assert [
        record.stage
        for record in of_kind(PairMeasurement, records)
        if not record.stage.startswith(("again", "sharing"))
    ] == []
    assert any(record.stage.startswith("sharing") for record in of_kind(PairMeasurement, records))
    assert of_kind(SharedLinkSides, records) or notes(records)
    # The probe does not repeat it after the second pass.
    done = tuple(record.stage for record in of_kind(StageDone, first))
    third = FakeRanks(8, answer=uplink).probe(mode, tuple(step for step in done if step != "all-reduce"), before)
    assert of_kind(PairMeasurement, third) == []
    # The probe reports the start of the all-reduces each time.
    assert [record.stage for record in of_kind(StageDone, third)] == (
        ["links", "all-reduce"] if mode == "default" else []
    )


def test_measurements_over_another_network_are_repeated():
    first = FakeRanks(3, networks=2, net=0).probe("quick")
    done = tuple(record.stage for record in of_kind(StageDone, first))
    before = [record for record in first if isinstance(record, (ProbeStarted, PairMeasurement))]
    same = FakeRanks(3, networks=2, net=0).probe("quick", done, before)
    assert of_kind(PairMeasurement, same) == []
    other = FakeRanks(3, networks=2, net=1).probe("quick", done, before)
    assert {(r.source, r.target) for r in of_kind(PairMeasurement, other) if r.stage.startswith("together/")} == {
        (a, b) for a in ("n1", "n2", "n3") for b in ("n1", "n2", "n3") if a != b
    }


@pytest.mark.parametrize("first", [False, True])
def test_all_reduces_on_gpus_exclude_hosts_without_gpus(first):
    """The first host may have no GPUs, such as one for parameter servers."""

    def answer(rank, task):
        reply = usual_reply(rank, task)
        if isinstance(task, AllReduceTask):
            made = usual_reply(0, task).collectives
            reply = msgspec.structs.replace(reply, collectives=made if rank == task.ranks[0] else ())
        return reply

    cluster = FakeRanks(3, ranks=2, answer=answer)
    apart = (0, 1) if first else (4, 5)
    on_gpus = tuple(rank for rank in range(6) if rank not in apart)
    for rank in on_gpus:
        cluster.hellos[rank] = msgspec.structs.replace(cluster.hellos[rank], on_gpu=True)
    records = cluster.probe()
    asked = [task for task in cluster.tasks if isinstance(task, AllReduceTask)]
    assert {(task.ranks, task.host_counts) for task in asked} == {(on_gpus, (2,))}
    assert len(asked) == (4 if first else 3)  # rank 0 also sends tasks to itself
    assert of_kind(CollectiveMeasurement, records)
    assert notes(records) == [f"all-reduce over GPUs only, without {'n1' if first else 'n3'}"]
    assert all(record.complete for record in of_kind(StageDone, records))
    # Ranks without torch would wait in MPI_Finalize for the others.
    assert [task.skip_finalize for task in cluster.tasks if isinstance(task, ShutdownTask)] == [True] * 5


@pytest.mark.parametrize(("level", "on"), [(None, True), ("SYS", True), ("LOC", False), ("0", False)])
def test_an_all_reduce_counts_as_gpudirect_only_if_nccl_may_use_it(monkeypatch, level, on):
    """The user may have limited GPUDirect with NCCL_NET_GDR_LEVEL."""
    if level is not None:
        monkeypatch.setenv("NCCL_NET_GDR_LEVEL", level)
    cluster = FakeRanks(2)
    gpu = GpuPcieLink(index=0, name="H100")
    for number, hello in enumerate(cluster.hellos):
        able = msgspec.structs.replace(hello.facts, gpus=(gpu,), rdma_bytes_per_second=25e9)
        cluster.hellos[number] = RankHello(facts=able)
    cluster.probe()
    assert {task.gpudirect for task in cluster.tasks if isinstance(task, AllReduceTask)} == {on}


def test_one_machine_has_an_all_reduce_over_its_ranks():
    cluster = FakeRanks(1, ranks=4)
    records = cluster.probe()
    assert [record.stage for record in of_kind(StageDone, records)] == ["inside", SECOND_PASS, "links", "all-reduce"]
    assert {task.host_counts for task in cluster.tasks if isinstance(task, AllReduceTask)} == {(1,)}
    assert of_kind(CollectiveMeasurement, records) and of_kind(IntraNodeMeasurement, records) and not notes(records)
    assert [r.stage for r in of_kind(StageDone, FakeRanks(1).probe())] == ["inside", SECOND_PASS]
