"""A run of the probe: rank 0 with given replies, and the command with jobs that fail."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import msgspec
import pytest

from distrib.cluster import hostfile
from distrib.cluster.inventory import Interface
from distrib.cluster.measurements import Collective, IntraNodeLinkMeasurement, LinkMeasurement, Measurements, Point
from distrib.cluster.measurements_writer import write_measured
from distrib.cluster.topology import read_topology
from distrib.errors import LaunchError, PreflightError
from distrib.probe import __main__ as rank_of_probe
from distrib.probe.coordinator import Coordinator
from distrib.probe.diagnosis.checks import check_records
from distrib.probe.matrix_plot import draw_probe
from distrib.probe.protocol import (
    AllReduceTask,
    HostTask,
    PairTask,
    ProbeSpec,
    RankHello,
    RankSetup,
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
    encode_record,
)
from distrib.probe.settings import DEFAULT, ProbeTimeouts
from distrib.probe.stages import LINKS_DONE, SECOND_PASS
from distrib_launch import plan_builder, results, run_directory, runner
from distrib_launch.cli import topo
from distrib_launch.console import Console
from distrib_launch.launch_options import LaunchOptions
from distrib_launch.rank_agent.control_channel import Kind
from distrib_launch.supervisor.supervisor import Supervisor
from tests.simulated_network import Network, facts

RATE = 100e6
OTHER_NETWORK = "10.1.0.0/16"
IMPATIENT = ProbeTimeouts(reply_seconds=-3.0, transfer_seconds=-3.0, copies_seconds=-3.0)
"""Timeout in seconds: a reply comes at once or never."""


# -- rank 0 -----------------------------------------------------------------------------------------------------------


class Cluster:
    """Hosts with these ranks, whose replies `answer` returns at once; None stands for a missing reply."""

    def __init__(self, hosts, *, ranks=1, answer=None, networks=1, net=0):
        self.hosts = tuple(f"n{n + 1}" for n in range(hosts))
        self.ranks = ranks
        self.size = hosts * ranks
        self.answer = answer or usual
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


def usual(rank, task, rate=RATE):
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


def of(kind, records):
    return [record for record in records if isinstance(record, kind)]


def notes(records):
    return [note for record in of(StageDone, records) for note in record.notes]


def test_the_memory_of_a_machine_is_measured_once_and_is_that_of_all_its_hosts():
    def answer(rank, task):
        if isinstance(task, HostTask) and not task.memory:
            return TaskReply(number=task.number, rank=rank)
        return usual(rank, task)

    cluster = Cluster(4, answer=answer)
    for number, machine in enumerate(("a", "b", "a", "")):
        facts = msgspec.structs.replace(cluster.hellos[number].facts, machine=machine)
        cluster.hellos[number] = RankHello(facts=facts)
    records = cluster.probe("quick")
    assert [task.memory for task in cluster.tasks if isinstance(task, HostTask)] == [
        True,
        False,
        True,
    ]  # rank 0 also sends tasks to itself
    assert sorted(record.link.host for record in of(IntraNodeMeasurement, records)) == ["n1", "n2", "n3", "n4"]


def test_what_an_all_reduce_failed_of_and_where_is_told():
    def answer(rank, task):
        if isinstance(task, AllReduceTask) and rank == 5:
            return TaskReply(number=task.number, rank=rank, failed="CUDA out of memory")
        return usual(rank, task)

    records = Cluster(3, ranks=2, answer=answer).probe()
    assert notes(records) == ["all-reduce failed: CUDA out of memory (n3)"]
    assert not next(record for record in of(StageDone, records) if record.stage == "all-reduce").complete
    assert of(CollectiveMeasurement, records)


def test_all_reduce_is_left_out_aloud_where_a_host_does_not_answer():
    def answer(rank, task):
        return None if rank == 2 and not isinstance(task, HostTask) else usual(rank, task)

    assert any(
        "all-reduce was left out" in n and "no reply from n3" in n for n in notes(Cluster(3, answer=answer).probe())
    )


def test_a_host_that_was_late_once_takes_part_in_all_reduce():
    def answer(rank, task):
        return None if rank == 2 and isinstance(task, HostTask) else usual(rank, task)

    records = Cluster(3, answer=answer).probe()
    assert of(CollectiveMeasurement, records)
    assert notes(records) == ["inside hosts, not everything was measured: no reply came in time (n3)"]


def test_an_answer_that_comes_late_is_waited_for_before_all_reduce():
    def answer(rank, task):
        last = isinstance(task, PairTask) and task.stage == "together/mpi/2" and task.source == 1
        if rank == 1 and last:
            cluster.late.append((usual(rank, task), False))
            return None
        return usual(rank, task)

    cluster = Cluster(3, answer=answer)
    assert of(CollectiveMeasurement, cluster.probe())


@pytest.mark.parametrize("answers", [0, 4])
def test_a_rank_that_freezes_is_not_asked_for_ever_and_its_host_is_blamed(answers):
    """Rank 0 stops sending tasks after several timeouts. Stages with missing measurements are incomplete."""
    given = []

    def answer(rank, task):
        if rank == 2 and isinstance(task, PairTask):
            given.append(task)
        return None if rank == 2 and len(given) > answers else usual(rank, task)

    records = Cluster(8, answer=answer, networks=2).probe("quick")
    assert len([task for task in given if task.stage.startswith("together")]) < 10
    mine = [r for r in of(PairMeasurement, records) if "n3" in (r.source, r.target)]
    assert {r.failed for r in mine if r.failed} == {"n3 did not reply"}
    assert {r.interface for r in mine if r.network} == {"eth1"}
    assert len({(r.source, r.target) for r in mine}) == 14
    failed = {r.stage for r in mine if r.failed}
    assert failed == {r.stage for r in of(StageDone, records) if not r.complete} - {"inside", "all-reduce"}
    found = {(f.kind, f.severity, f.hosts) for f in check_records(records) if f.severity == "error"}
    assert found == {("host_lost", "error", ("n3",))}
    assert of(ProbeEnded, records)[0].notes[-1] == "no reply came from n3 to the last task"


def test_a_rank_that_was_slow_twice_is_asked_again_once_it_has_answered():
    given, held = [], []

    def answer(rank, task):
        if rank == 2:
            given.append(task)
            if len(given) <= 2:
                held.append(usual(rank, task))
                return None
        elif rank == 1 and len(given) == 2:  # in a later round
            cluster.replies += held
            held.clear()
        return usual(rank, task)

    cluster = Cluster(8, answer=answer)
    records = cluster.probe()
    assert len(given) > 20 and of(CollectiveMeasurement, records)
    assert not [finding for finding in check_records(records) if finding.kind == "host_lost"]


def test_rank_0_knows_who_is_silent_at_the_end():
    def silent_after(answer):
        cluster = Cluster(3, answer=answer)
        spec = ProbeSpec(hosts=cluster.hosts, present=cluster.hosts, mode="quick")
        found = []
        (
            coordinator := Coordinator(cluster, cluster.perform, spec, cluster.hellos, found.append, timeouts=IMPATIENT)
        ).run()
        return coordinator.silent_hosts, of(ProbeEnded, found)[0].notes

    assert silent_after(usual) == ("", ())
    silent = lambda rank, task: None if rank == 2 else usual(rank, task)  # noqa: E731
    assert silent_after(silent) == ("n3", ("no reply came from n3 to the last task",))
    once = lambda rank, task: None if rank == 2 and isinstance(task, HostTask) else usual(rank, task)  # noqa: E731
    assert silent_after(once) == ("", ())


def test_ways_inside_a_host_are_kept_when_others_fail():
    def answer(rank, task):
        reply = usual(rank, task)
        return (
            msgspec.structs.replace(reply, failed="gpu3: no memory") if isinstance(task, HostTask) and rank else reply
        )

    records = Cluster(2, answer=answer).probe("quick")
    assert {record.link.host for record in of(IntraNodeMeasurement, records)} == {"n1", "n2"}
    assert notes(records) == ["inside hosts, not everything was measured: gpu3: no memory (n2)"]


def fails_on(network, where):
    """Return replies in which pairs fail on this network, if `where` is true of their host numbers."""

    def answer(rank, task):
        on_it = isinstance(task, PairTask) and task.addresses[0].startswith(network)
        if on_it and where(task.source, task.target):
            return TaskReply(number=task.number, rank=rank, failed="timed out")
        return usual(rank, task)

    return answer


def test_a_further_network_on_which_nothing_passes_is_given_up():
    records = Cluster(6, networks=2, answer=fails_on("10.1.", lambda a, b: True)).probe()
    assert len([record for record in of(PairMeasurement, records) if record.network == OTHER_NETWORK]) == 3
    [note] = notes(records)
    assert note.startswith(f"{OTHER_NETWORK} was given up") and "timed out" in note
    assert not any(
        record.complete for record in of(StageDone, records) if record.stage.startswith(f"alone/{OTHER_NETWORK}")
    )
    assert len({(r.source, r.target) for r in of(PairMeasurement, records) if r.network is None}) == 30


def test_a_way_that_does_not_judge_the_links_is_given_up_where_nothing_passes():
    def answer(rank, task):
        if isinstance(task, PairTask) and task.transport == "mpi":
            return TaskReply(number=task.number, rank=rank, failed="no answer to a ping")
        return usual(rank, task)

    records = Cluster(4, answer=answer).probe()
    assert len([record for record in of(PairMeasurement, records) if record.transport == "mpi"]) < 6
    assert notes(records)[0].startswith("mpi was given up")


@pytest.mark.parametrize("hosts", [3, 4, 6])
def test_a_network_is_not_given_up_for_one_host(hosts):
    records = Cluster(hosts, networks=2, answer=fails_on("10.1.", lambda a, b: 1 in (a, b))).probe()
    seen = {(r.source, r.target) for r in of(PairMeasurement, records) if r.network and not r.failed}
    assert len(seen) == (hosts - 1) * (hosts - 2)
    assert notes(records) == []


def uplink(rank, task):
    """Return replies of two halves of hosts, between which parallel streams have half the rate."""
    alone = isinstance(task, PairTask) and task.load == "alone"
    crosses = isinstance(task, PairTask) and (task.source < 4) != (task.target < 4)
    return usual(rank, task, RATE / 2 if crosses and not alone else RATE)


@pytest.mark.parametrize("mode", ["quick", "default"])
def test_a_probe_that_was_interrupted_in_its_second_look_looks_again(mode):
    first = Cluster(8, answer=uplink).probe(mode)
    finished = [record for record in of(StageDone, first) if not record.stage.startswith(("again", SECOND_PASS, "all"))]
    before = [
        record
        for record in first
        if isinstance(record, ProbeStarted)
        or (isinstance(record, PairMeasurement) and record.stage in {s.stage for s in finished})
    ]
    second = Cluster(8, answer=uplink)
    records = second.probe(mode, tuple(record.stage for record in finished), before)
    assert [
        record.stage for record in of(PairMeasurement, records) if not record.stage.startswith(("again", "sharing"))
    ] == []
    assert any(record.stage.startswith("sharing") for record in of(PairMeasurement, records))
    assert of(SharedLinkSides, records) or notes(records)
    # The probe does not repeat it after the second pass.
    done = tuple(record.stage for record in of(StageDone, first))
    third = Cluster(8, answer=uplink).probe(mode, tuple(step for step in done if step != "all-reduce"), before)
    assert of(PairMeasurement, third) == []
    # The probe reports the start of the all-reduces each time.
    assert [record.stage for record in of(StageDone, third)] == (["links", "all-reduce"] if mode == "default" else [])


def test_what_was_measured_over_another_network_does_not_count():
    first = Cluster(3, networks=2, net=0).probe("quick")
    done = tuple(record.stage for record in of(StageDone, first))
    before = [record for record in first if isinstance(record, (ProbeStarted, PairMeasurement))]
    same = Cluster(3, networks=2, net=0).probe("quick", done, before)
    assert of(PairMeasurement, same) == []
    other = Cluster(3, networks=2, net=1).probe("quick", done, before)
    assert {(r.source, r.target) for r in of(PairMeasurement, other) if r.stage.startswith("together/")} == {
        (a, b) for a in ("n1", "n2", "n3") for b in ("n1", "n2", "n3") if a != b
    }


@pytest.mark.parametrize("first", [False, True])
def test_all_reduces_of_gpus_are_without_hosts_that_have_none(first):
    """The first host may have no GPUs, such as one for parameter servers."""

    def answer(rank, task):
        reply = usual(rank, task)
        if isinstance(task, AllReduceTask):
            made = usual(0, task).collectives
            reply = msgspec.structs.replace(reply, collectives=made if rank == task.ranks[0] else ())
        return reply

    cluster = Cluster(3, ranks=2, answer=answer)
    apart = (0, 1) if first else (4, 5)
    on_gpus = tuple(rank for rank in range(6) if rank not in apart)
    for rank in on_gpus:
        cluster.hellos[rank] = msgspec.structs.replace(cluster.hellos[rank], on_gpu=True)
    records = cluster.probe()
    asked = [task for task in cluster.tasks if isinstance(task, AllReduceTask)]
    assert {(task.ranks, task.host_counts) for task in asked} == {(on_gpus, (2,))}
    assert len(asked) == (4 if first else 3)  # rank 0 also sends tasks to itself
    assert of(CollectiveMeasurement, records)
    assert notes(records) == [f"all-reduce over GPUs only, without {'n1' if first else 'n3'}"]
    assert all(record.complete for record in of(StageDone, records))
    # Ranks without torch would wait in MPI_Finalize for the others.
    assert [task.skip_finalize for task in cluster.tasks if isinstance(task, ShutdownTask)] == [True] * 5


@pytest.mark.parametrize(("level", "on"), [(None, True), ("SYS", True), ("LOC", False), ("0", False)])
def test_an_all_reduce_without_gpudirect_is_not_called_one_with_it(monkeypatch, level, on):
    """The user may have limited GPUDirect with NCCL_NET_GDR_LEVEL."""
    if level is not None:
        monkeypatch.setenv("NCCL_NET_GDR_LEVEL", level)
    cluster = Cluster(2)
    gpu = GpuPcieLink(index=0, name="H100")
    for number, hello in enumerate(cluster.hellos):
        able = msgspec.structs.replace(hello.facts, gpus=(gpu,), rdma_bytes_per_second=25e9)
        cluster.hellos[number] = RankHello(facts=able)
    cluster.probe()
    assert {task.gpudirect for task in cluster.tasks if isinstance(task, AllReduceTask)} == {on}


def test_one_machine_has_an_all_reduce_over_its_ranks():
    cluster = Cluster(1, ranks=4)
    records = cluster.probe()
    assert [record.stage for record in of(StageDone, records)] == ["inside", SECOND_PASS, "links", "all-reduce"]
    assert {task.host_counts for task in cluster.tasks if isinstance(task, AllReduceTask)} == {(1,)}
    assert of(CollectiveMeasurement, records) and of(IntraNodeMeasurement, records) and not notes(records)
    assert [r.stage for r in of(StageDone, Cluster(1).probe())] == ["inside", SECOND_PASS]


# -- a rank ------------------------------------------------------------------------------------------------------------


class Comm:
    """MPI communicator of rank 1, which receives these tasks from rank 0, each after a delay."""

    def __init__(self, size, *words):
        self.rank, self.size, self.words, self.looks = 1, size, list(words), 0

    def send(self, words, rank, tag):
        pass

    def iprobe(self, *, source, tag):
        self.looks += 1
        return self.looks % 3 == 0

    def recv(self, *, source, tag):
        return msgspec.msgpack.encode(self.words.pop(0))


@pytest.fixture
def run_rank(monkeypatch):
    """Return a function that runs `python -m distrib.probe` with a given communicator."""

    def run(comm):
        spec = msgspec.json.encode(ProbeSpec(hosts=("n1", "n2"), present=("n1", "n2"))).decode()
        monkeypatch.setattr(rank_of_probe.sys, "argv", ["probe", spec])
        monkeypatch.setattr(rank_of_probe, "_init_mpi", lambda: SimpleNamespace(COMM_WORLD=comm))
        monkeypatch.setattr(rank_of_probe, "_exit", lambda mpi, skip_finalize: None)  # would end the process
        for name, value in {"WORLD_SIZE": 3, "GROUP_RANK": 1, "LOCAL_RANK": 1}.items():
            monkeypatch.setenv(name, str(value))
        return rank_of_probe.main()

    return run


@pytest.mark.parametrize(
    ("variable", "do"), [("SLURM_PROCID", "no PMIx: use --engine mpirun"), ("OMPI_COMM_WORLD_RANK", "another MPI's")]
)
def test_ranks_that_mpi_started_each_alone_measure_nothing(run_rank, monkeypatch, capsys, variable, do):
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    monkeypatch.setenv(variable, "1")
    assert run_rank(Comm(1)) == 1
    err = capsys.readouterr().err
    assert "MPI started 1 of 3 ranks" in err and do in err


def test_a_rank_is_more_patient_than_rank_0_which_knows_who_is_missing(run_rank, monkeypatch):
    monkeypatch.setattr(rank_of_probe, "TIMEOUTS", ProbeTimeouts(hello_seconds=-1.0))
    assert run_rank(Comm(3, RankSetup(token=b"", ports={}), ShutdownTask())) == 0


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """Replace jobs by fakes that print the records of `jobs.records`."""
    monkeypatch.chdir(tmp_path)
    made = SimpleNamespace(
        specs=[],
        inputs=[],
        plans=[],
        records=lambda spec: [*Network(len(spec.hosts)).records(), ProbeEnded(seconds=1.0)],
    )

    def launch(plan, options, *, streams, script_input=b"", input_ranks=None):
        spec = msgspec.json.decode(plan.script[-1], type=ProbeSpec)
        made.specs.append(spec)
        made.plans.append(plan)
        made.inputs.append((script_input, input_ranks))
        for record in made.records(spec):
            streams[0].write(f"[0@{spec.present[0]}] {encode_record(record)}\n")
        whole = made.records(spec) and isinstance(made.records(spec)[-1], ProbeEnded)
        failure = results.Failure(
            rank=1, host="unknown", time=0.0, exit_code=1, signal=None, message="rank 1 died", traceback="", log=""
        )
        return results.Result(
            status="succeeded" if whole else "failed", exit_code=0, world_size=1, hosts=spec.present, seconds=1.0,
            restarts=0, ranks=(), first_failure=None if whole else failure, warnings=(),
        )  # fmt: skip

    monkeypatch.setattr(runner, "launch", launch)
    return made


def probe(*words):
    return topo.main(["probe", "--quick", *map(str, words)])


def earlier(path, hosts):
    """Write a file of a complete probe."""
    names = [f"n{n + 1}" for n in range(hosts)]
    pairs = tuple(
        LinkMeasurement(source=a, target=b, transport="tcp", load="alone", bandwidth_bytes_per_second=1e8, variation=0.0)
        for a in names for b in names if a != b
    )  # fmt: skip
    write_measured(path, Measurements(when="2025-05-05", software={}, hosts=tuple(names), pairs=pairs))


def test_hosts_for_parameter_servers_are_probed_too(jobs, tmp_path):
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2\nn3 role=server\n")
    assert probe("-H", "hosts", "-o", "t.yaml") == 0
    assert [spec.hosts for spec in jobs.specs] == [("n1", "n2", "n3")]
    assert len(read_topology("t.yaml").measured.pairs) == 6
    # Hosts without GPUs are valid beside hosts with GPUs.
    assert {(rank.host, rank.device) for rank in jobs.plans[0].ranks} == {("n1", "auto"), ("n2", "auto"), ("n3", "cpu")}
    (tmp_path / "hosts").write_text("n1 role=server\nn2 role=server\n")
    assert probe("-H", "hosts") == 0
    assert {rank.device for rank in jobs.plans[1].ranks} == {"auto"}


def test_the_one_rank_of_a_quick_probe_sees_all_gpus_that_were_chosen(jobs, tmp_path):
    (tmp_path / "hosts").write_text("n1 slots=8\nn2 slots=8\n")
    assert probe("-H", "hosts", "--include", "n1:4,5@n2") == 0
    assert [(host.name, host.ranks, host.chosen) for host in jobs.plans[0].hosts] == [
        ("n1", 1, (4, 5)),
        ("n2", 1, None),
    ]
    assert probe("-H", "hosts", "--exclude", "n1:0-5") == 0
    assert [(host.ranks, host.chosen) for host in jobs.plans[1].hosts] == [(1, (6, 7)), (1, None)]


def test_the_logs_of_a_job_that_is_running_are_left_alone(jobs, capsys, tmp_path):
    with run_directory.locked_run_dir(tmp_path / "run"):
        (tmp_path / "run/plan.json").write_text('{"job": "4f"}')
        assert probe("-H", "n1,n2", "--run-dir", "run") == 2
    assert "another job is running in" in capsys.readouterr().err
    assert (tmp_path / "run/plan.json").exists() and not jobs.specs


def test_a_probe_without_its_end_does_not_replace_a_whole_one(jobs, capsys):
    earlier("t.yaml", 4)
    jobs.records = lambda spec: Network(4).records()
    assert probe("-H", "n[1-4]", "-o", "t.yaml") == 1
    out, err = capsys.readouterr()
    assert "bandwidth over tcp" in out
    assert "t.yaml was not changed: the probe was not completed" in err
    assert "error: the probe was not completed: rank 1 died" in err
    assert read_topology("t.yaml").measured.when == "2025-05-05"


def test_that_no_link_was_measured_is_not_passed_off_as_none_that_is_slow(jobs, capsys):
    jobs.records = lambda spec: [Network(2).records()[0], ProbeEnded(seconds=1.0)]
    assert probe("-H", "n1,n2") == 0
    assert "no findings: no link was measured" in capsys.readouterr().out


def test_a_probe_that_measured_next_to_nothing_does_not_replace_a_whole_one(jobs, capsys, tmp_path):
    earlier("t.yaml", 4)
    start, *pairs = Network(4).records()
    failed = [
        msgspec.structs.replace(r, failed="timed out")
        for r in of(PairMeasurement, pairs)
        if {r.source, r.target} != {"n1", "n2"}
    ]
    kept = [r for r in of(PairMeasurement, pairs) if {r.source, r.target} == {"n1", "n2"}]
    jobs.records = lambda spec: [start, *kept, *failed, ProbeEnded(seconds=1.0)]
    assert probe("-H", "n[1-4]", "-o", "t.yaml") == 1
    out, err = capsys.readouterr()
    assert "could not be measured" in out
    assert "t.yaml was not changed: only 2 of its 12 links" in err
    assert (tmp_path / "t.yaml.partial.jsonl").exists()
    assert read_topology("t.yaml").measured.when == "2025-05-05"


def test_a_probe_of_a_few_hosts_does_not_replace_one_of_many(jobs, capsys):
    earlier("t.yaml", 4)
    assert probe("-H", "n[1-2]", "-o", "t.yaml") == 2
    assert "-o t.yaml: it has 12 links of 2025-05-05, and these hosts have 2 of them" in capsys.readouterr().err
    assert jobs.specs == []
    assert probe("-H", "n[1-3]", "-o", "t.yaml") == 0  # half of the hosts
    assert read_topology("t.yaml").measured.hosts == ("n1", "n2", "n3")


def test_that_nothing_became_worse_is_said(jobs, capsys):
    jobs.records = lambda spec: [*Network(4).records(), ProbeEnded(seconds=1.0)]
    assert probe("-H", "n[1-4]", "-o", "t.yaml") == 0
    assert probe("-H", "n[1-4]", "--baseline", "t.yaml") == 0
    assert "compared with the probe of 2026-01-01T00:00:00+00:00: 12 of 12 directions" in capsys.readouterr().out


def test_several_pictures_are_drawn(jobs, tmp_path):
    jobs.records = lambda spec: [*Network(2).records(), ProbeEnded(seconds=1.0)]
    assert probe("-H", "n[1-2]", "--plot", "a.png", "--plot", "b.svg") == 0
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert (tmp_path / "b.svg").stat().st_size > 1000


def test_the_axes_of_a_picture_are_no_formulas(tmp_path):
    """A name may contain a $, and matplotlib must not parse it as a formula."""
    curve = tuple(Point(8 * 4**n, 8e-6 * (n + 1)) for n in range(8))
    pairs = tuple(
        LinkMeasurement(source=a, target=b, transport="mpi", load="alone", bandwidth_bytes_per_second=999.7e6 / 8, variation=0.0, curve=curve)
        for a, b in (("n1", "n2"), ("n2", "n1"))
    )  # fmt: skip
    draw_probe(tmp_path / "a.svg", Measurements(when="2026", software={}, hosts=("n1", "n2"), pairs=pairs), "mpi")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "a.svg").read_text())
    assert {"10 us", "20 us", "50 us", "999.7"} <= set(words) and not any("$" in word for word in words)


@pytest.mark.parametrize("text", ["{nodes: [{hosts: 'n[1-2]'}]}\n", "  nodes:\n    - hosts: n[1-2]\n"])
def test_a_file_that_cannot_take_what_is_measured_is_refused_before_the_probe(jobs, capsys, tmp_path, text):
    (tmp_path / "t.yaml").write_text(text)
    assert probe("-H", "n[1-2]", "-o", "t.yaml") == 2
    assert "write `nodes:` in block style" in capsys.readouterr().err
    assert jobs.specs == []


def test_findings_are_shown_whatever_becomes_of_the_file(jobs, capsys, tmp_path):
    def records(spec):
        (tmp_path / "t.yaml").write_text("{nodes: [{hosts: 'n[1-4]'}]}\n")
        return [*Network(4, slow={2: 0.5}).records(), ProbeEnded(seconds=1.0)]

    jobs.records = records
    assert probe("-H", "n[1-4]", "-o", "t.yaml") == 2
    out, err = capsys.readouterr()
    assert "n3: slow link" in out
    assert "section cannot be inserted" in err
    assert (tmp_path / "t.yaml.partial.jsonl").stat().st_size > 100


def test_the_results_outlive_a_failure_of_the_look_without_gpudirect(jobs, capsys):
    curve = (Point(1 << 20, 1.0),)
    made = Collective(name="all_reduce", backend="nccl", hosts=("n1", "n2"), ranks=2, gpudirect=True, curve=curve)

    def records(spec):
        if not spec.gpudirect:
            raise LaunchError("mpirun did not start")
        return [*Network(2).records(), CollectiveMeasurement(collective=made), ProbeEnded(seconds=1.0)]

    jobs.records = records
    assert probe("-H", "n1,n2", "-o", "t.yaml") == 0
    assert "without GPUDirect RDMA was not completed: mpirun did not start" in capsys.readouterr().out
    assert read_topology("t.yaml").measured.collectives == (made,)


def fails_in_all_reduce(monkeypatch, host):
    """Fail in an all-reduce as NCCL's watchdog does, by SIGABRT on any rank."""
    launch = runner.launch

    def failing(*plan, **to):
        result = launch(*plan, **to)
        failure = results.Failure(
            rank=0, host=host, time=0.0, exit_code=None, signal=6, message="killed by SIGABRT", traceback="", log=""
        )
        return msgspec.structs.replace(result, status="failed", first_failure=failure)

    monkeypatch.setattr(runner, "launch", failing)


@pytest.mark.parametrize("resumed", [False, True])
def test_an_all_reduce_that_ends_its_ranks_costs_no_link_and_no_host(jobs, monkeypatch, capsys, tmp_path, resumed):
    fails_in_all_reduce(monkeypatch, "n2")
    begins = StageDone(stage=LINKS_DONE, title="", done_seconds=1.0, remaining_seconds=1.0)
    start, *seen = Network(3).records(DEFAULT)
    jobs.records = lambda spec: [start, *seen, begins]
    if resumed:  # all stages except the all-reduces are complete
        kept = (start, *seen, msgspec.structs.replace(begins, stage=SECOND_PASS), begins)
        (tmp_path / "t.yaml.partial.jsonl").write_text("".join(encode_record(record) + "\n" for record in kept))
        jobs.records = lambda spec: [start, begins]
    assert topo.main(["probe", "-H", "n[1-3]", "-o", "t.yaml"]) == 1
    assert len(jobs.specs) == 1
    out, err = capsys.readouterr()
    assert "note: all-reduce failed: killed by SIGABRT (n2)" in out and "lost" not in out
    assert "was not completed: all-reduce failed: killed by SIGABRT (n2)" in err and "t.yaml.partial.jsonl" in err
    measured = read_topology("t.yaml").measured
    assert len(measured.pairs) == 6 and measured.hosts == ("n1", "n2", "n3")


def test_a_rank_that_ends_while_links_are_measured_gets_a_second_try(jobs, monkeypatch, tmp_path):
    fails_in_all_reduce(monkeypatch, "n2")
    begins = StageDone(stage=LINKS_DONE, title="", done_seconds=1.0, remaining_seconds=1.0)
    start, *seen = Network(3).records(DEFAULT)
    done = StageDone(stage="together/tcp/0", title="", done_seconds=1.0, remaining_seconds=1.0)
    (tmp_path / "t.yaml.partial.jsonl").write_text(
        "".join(encode_record(record) + "\n" for record in (start, *seen, begins))
    )
    jobs.records = lambda spec: [start, done]  # measures the failed parts again
    assert topo.main(["probe", "-H", "n[1-3]", "-o", "t.yaml"]) == 1
    assert [spec.present for spec in jobs.specs][:3] == [("n1", "n2", "n3")] * 2 + [("n1", "n3")]


def test_an_all_reduce_that_fails_inside_one_machine_leaves_what_is_measured_there(jobs, monkeypatch, capsys):
    fails_in_all_reduce(monkeypatch, "localhost")
    start = ProbeStarted(when="2026-01-01", mode="default", hosts=("localhost",), primary="tcp", facts=())
    link = IntraNodeLinkMeasurement(
        host="localhost", source="memory", target="memory", bandwidth_bytes_per_second=1e9, variation=0.0
    )
    begins = StageDone(stage=LINKS_DONE, title="", done_seconds=1.0, remaining_seconds=1.0)
    jobs.records = lambda spec: [start, IntraNodeMeasurement(link=link), begins]
    assert topo.main(["probe", "-H", "localhost:4", "-o", "t.yaml"]) == 1
    assert "all-reduce failed: killed by SIGABRT (localhost)" in capsys.readouterr().out
    assert len(jobs.specs) == 1 and read_topology("t.yaml").measured.inside == (link,)


def test_the_look_without_gpudirect_is_without_it_whatever_was_set(jobs):
    curve = (Point(1 << 20, 1.0),)
    made = Collective(name="all_reduce", backend="nccl", hosts=("n1", "n2"), ranks=2, gpudirect=True, curve=curve)
    jobs.records = lambda spec: [*Network(2).records(), CollectiveMeasurement(collective=made), ProbeEnded(seconds=1.0)]
    assert probe("-H", "n1,n2", "-x", "NCCL_NET_GDR_LEVEL=SYS") == 0
    assert [plan.ranks[0].environment["NCCL_NET_GDR_LEVEL"] for plan in jobs.plans] == ["SYS", "LOC"]


@pytest.mark.parametrize("how", ["here", "there"])
def test_an_interruption_of_the_look_without_gpudirect_keeps_the_results_and_is_one(jobs, monkeypatch, capsys, how):
    """Either this process or the job's supervisor receives Ctrl-C."""
    curve = (Point(1 << 20, 1.0),)
    made = Collective(name="all_reduce", backend="nccl", hosts=("n1", "n2"), ranks=2, gpudirect=True, curve=curve)
    whole = [*Network(2).records(), CollectiveMeasurement(collective=made), ProbeEnded(seconds=1.0)]
    jobs.records = lambda spec: whole
    launch = runner.launch

    def interrupted(plan, options, **streams):
        result = launch(plan, options, **streams)
        if jobs.specs[-1].gpudirect:
            return result
        if how == "here":
            raise KeyboardInterrupt
        return msgspec.structs.replace(result, status="stopped", exit_code=143)

    monkeypatch.setattr(runner, "launch", interrupted)
    assert probe("-H", "n1,n2", "-o", "t.yaml") == (130 if how == "here" else 143)
    assert "without GPUDirect RDMA was not completed: interrupted" in capsys.readouterr().out
    assert read_topology("t.yaml").measured.collectives == (made,)


def test_a_probe_without_records_cannot_be_resumed(jobs, capsys):
    assert probe("-H", "n1,n2", "--resume", "-o", "t.yaml") == 2
    assert "no probe of these hosts in this mode" in capsys.readouterr().err
    assert jobs.specs == []


def test_what_a_probe_found_is_shown_though_a_rank_had_to_end_it(jobs, monkeypatch, capsys):
    """Rank 0 fails because another rank is frozen. The command must report the frozen rank."""
    start, *seen = Network(2).records()
    failed = [msgspec.structs.replace(r, failed="n2 did not reply") for r in seen if isinstance(r, PairMeasurement)]
    jobs.records = lambda spec: [
        start,
        *failed,
        ProbeEnded(seconds=1.0, notes=("no answer came from n2 when last asked",)),
    ]
    launch = runner.launch
    monkeypatch.setattr(
        runner, "launch", lambda *plan, **to: msgspec.structs.replace(launch(*plan, **to), status="failed")
    )
    assert probe("-H", "n1,n2") == 0
    out = capsys.readouterr().out
    assert "n2 did not reply" in out and "note: no answer came from n2 when last asked" in out
    assert len(jobs.specs) == 1


def test_a_host_that_is_not_fit_can_be_left_out(jobs, capsys):
    def records(spec):
        if "n3" in spec.present:
            raise PreflightError("n3: no route to host", hosts={"n3": "no route to host"})
        seen = [r for r in of(PairMeasurement, Network(4).records()) if "n3" not in (r.source, r.target)]
        return [Network(4).records()[0], *seen, ProbeEnded(seconds=1.0)]

    jobs.records = records
    assert probe("-H", "n[1-4]") == 3
    assert "probes the 3 other hosts" in capsys.readouterr().err
    assert probe("-H", "n[1-4]", "--drop-bad-hosts", "--json") == 0
    out, err = capsys.readouterr()
    output = json.loads(out)
    assert (output["left_out_hosts"], output["lost_hosts"], output["findings"]) == (["n3"], [], [])
    assert output["notes"] == ["n3 was left out from the beginning: no route to host"]
    assert "n3 is left out: no route to host" in err
    assert probe("-H", "n[1-4]", "--exclude", "n3") == 0
    assert jobs.specs[-1].hosts == jobs.specs[-1].present == ("n1", "n2", "n4")


def test_what_was_measured_of_a_host_that_became_unfit_is_kept(jobs, capsys, tmp_path):
    start, *seen = Network(3).records()
    start = msgspec.structs.replace(start, facts=tuple(facts(f"n{n + 1}") for n in range(3)))
    done = StageDone(stage="together/tcp/0", title="", done_seconds=1.0, remaining_seconds=1.0)
    (tmp_path / "t.yaml.partial.jsonl").write_text("".join(encode_record(r) + "\n" for r in (start, *seen, done)))

    def records(spec):
        if "n3" in spec.present:
            raise PreflightError("n3: no route to host", hosts={"n3": "no route to host"})
        return [msgspec.structs.replace(start, facts=start.facts[:2]), ProbeEnded(seconds=1.0)]

    jobs.records = records
    assert probe("-H", "n[1-3]", "-o", "t.yaml", "--drop-bad-hosts") == 0
    assert "n3 was left out when the probe was resumed: no route to host" in capsys.readouterr().out
    kept = read_topology("t.yaml").measured
    assert kept.hosts == ("n1", "n2", "n3") and len(kept.pairs) == 6


def test_hosts_that_only_the_file_knows_are_told_of(jobs, capsys, tmp_path):
    earlier("t.yaml", 4)
    assert probe("-H", "n[1-3]", "-o", "t.yaml") == 0
    err = capsys.readouterr().err
    assert "$.nodes[0].hosts: n4 is not in -H" in err
    assert "2025-05-05 in t.yaml (links), and leaves out n4" in err


@pytest.mark.parametrize("words", [(), ("-H", "localhost")])
def test_this_machine_alone_can_be_probed(jobs, capsys, words):
    start = ProbeStarted(when="2026-01-01", mode="quick", hosts=("localhost",), primary="tcp", facts=())
    link = IntraNodeLinkMeasurement(
        host="localhost", source="memory", target="memory", bandwidth_bytes_per_second=1e9, variation=0.0
    )
    jobs.records = lambda spec: [start, IntraNodeMeasurement(link=link), ProbeEnded(seconds=1.0)]
    assert probe(*words, "-o", "t.yaml") == 0
    out = capsys.readouterr().out
    assert (
        "inside hosts" in out
        and "1 host(s) probed" in out
        and not any(line.startswith("links") for line in out.splitlines())
    )
    assert [spec.hosts for spec in jobs.specs] == [("localhost",)]
    assert read_topology("t.yaml").measured.inside == (link,)


def test_an_interrupted_probe_is_gone_on_with_aloud_and_its_records_go_to_rank_0_alone(jobs, capsys, tmp_path):
    start, *seen = Network(2).records()
    done = StageDone(stage="together/tcp/0", title="", done_seconds=1.0, remaining_seconds=1.0)
    (tmp_path / "t.yaml.partial.jsonl").write_text("".join(encode_record(r) + "\n" for r in (start, *seen, done)))
    assert probe("-H", "n1,n2", "-o", "t.yaml") == 0
    err = capsys.readouterr().err
    assert "resuming the probe of 2026-01-01T00:00:00+00:00 from t.yaml.partial.jsonl" in err
    assert "--no-resume" in err
    assert jobs.specs[0].done == ("together/tcp/0",)
    [(known, ranks)] = jobs.inputs
    assert ranks == (0,)
    assert known.startswith(b'{"type":"started"') and b'"type":"pair"' in known


def test_input_goes_to_the_ranks_that_want_it(tmp_path):
    plan = plan_builder.build_plan(
        LaunchOptions(script="x", directory="/", run_dir=str(tmp_path), engine="mpirun"),
        hostfile.parse_host_list("a:2,b:2"), None,
    )  # fmt: skip
    for wanted, ranks in (((0,), [0]), (None, [0, 1, 2, 3])):
        supervisor = Supervisor(plan, Console([]), script_input=b"words", input_ranks=wanted)
        sent = []
        supervisor._connections.send = lambda state, kind, payload, sent=sent: sent.append((state.plan.rank, kind))
        for state in supervisor.job.ranks:
            state.hello = {"port": 1}
        supervisor.assign()
        assert [rank for rank, kind in sent if kind is Kind.INPUT] == ranks
        supervisor.selector.close()
