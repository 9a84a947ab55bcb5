"""Benchmarks of the probe: streams over loopback, copies inside a host, and records of an interrupted probe."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from distrib.cluster.measurements import Measurements
from distrib.cluster.measurements_writer import check_writable, write_measured
from distrib.errors import ConfigError, TrainingError
from distrib.probe import host_facts as facts_module
from distrib.probe.bench import allreduce, intra_node, tcp
from distrib.probe.bench.allreduce import plan_repetitions
from distrib.probe.bench.polling import ProbeTimeout, wait
from distrib.probe.host_facts import own_facts
from distrib.probe.journal import Journal
from distrib.probe.protocol import AllReduceTask, HostTask
from distrib.probe.records import HostFacts, ProbeEnded, ProbeStarted, StageDone, encode_record
from distrib.probe.settings import MODES
from distrib.probe.worker import Worker
from distrib.utils.cpus import CpuLoad
from distrib.utils.plotting import check_plot_path
from distrib.utils.rlimits import raise_open_files
from distrib_launch.cli import topo
from distrib_launch.cli.probe_progress import ProgressStreams
from distrib_launch.console import Console
from tests.support.inventories import interface, inventory

TOKEN = b"0123456789abcdef"


def stream(listener, *, token=TOKEN, task=7, streams=1, patience=5.0, **wanted):
    """Run one stream over loopback. Return the receiver's result and the sender's replies."""
    sent = []

    def send():
        with contextlib.suppress(OSError):
            deadline = time.monotonic() + patience
            sockets = tcp.connect_streams("127.0.0.1", ("127.0.0.1", listener.port), token, task, streams, deadline)
            sent.append(tcp.send_stream(sockets, memoryview(bytearray(tcp.SETTINGS.chunk_bytes)), deadline))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        deadline = time.monotonic() + patience
        sockets = listener.accept(TOKEN, 7, streams, deadline)
        return tcp.receive_stream(sockets, memoryview(bytearray(tcp.SETTINGS.chunk_bytes)), deadline, **wanted), sent
    finally:
        thread.join()


@pytest.fixture
def listener():
    listener = tcp.ProbeListener("127.0.0.1")
    yield listener
    listener.socket.close()


@pytest.mark.parametrize("streams", [1, 4])
def test_a_stream_over_loopback_has_a_rate_and_a_latency(listener, streams):
    seen, sent = stream(listener, streams=streams, pings=10, seconds=0.15)
    assert seen.rate.median > 50e6
    assert seen.rate.repetitions >= 3
    assert 0 < seen.latency_seconds < 0.1
    assert sent[0].path_mtu > 1000
    assert 0.2 < seen.busy <= 1.0 and 0.2 < sent[0].busy <= 1.0  # loopback runs through memory


def test_a_machine_that_stands_still_has_measured_all_the_same(monkeypatch, listener):
    selecting = tcp.selectors.DefaultSelector.select
    stands = iter([0.0, 1.0])  # the pause at the second poll covers six streams

    def select(self, timeout=None):
        if threading.current_thread() is threading.main_thread():  # the receiver
            time.sleep(next(stands, 0.0))
        return selecting(self, timeout)

    monkeypatch.setattr(tcp.selectors.DefaultSelector, "select", select)
    seen, _ = stream(listener, pings=0, seconds=0.12)
    assert next(stands, None) is None  # the pause happened
    assert seen.rate and seen.rate.repetitions >= 3


def test_a_stream_ends_early_once_it_is_sure_and_late_where_it_is_not(listener):
    begun = time.monotonic()
    stream(listener, pings=0, seconds=0.1, variation=100.0, max_seconds=30.0)
    assert time.monotonic() - begun < 15
    begun = time.monotonic()
    stream(listener, pings=0, seconds=0.1, variation=0.0, max_seconds=0.5)
    assert 0.4 < time.monotonic() - begun < 15


def test_strangers_are_hung_up_on(listener):
    with pytest.raises(ProbeTimeout):
        stream(listener, token=b"another token!!!", patience=0.5, pings=1, seconds=0.1)


def test_garbage_does_not_stop_the_one_who_is_waited_for(listener):
    with socket.create_connection(("127.0.0.1", listener.port)) as garbage:
        garbage.sendall(b"GET / HTTP/1.1\r\n" + bytes(64))
        seen, _ = stream(listener, pings=3, seconds=0.1)
    assert seen.latency_seconds > 0


def test_five_hundred_silent_connections_delay_no_stream(listener):
    raise_open_files(4096)
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        for _ in range(2):
            begun = time.monotonic()
            seen, _ = stream(listener, streams=4, pings=3, seconds=0.1)
            assert seen.latency_seconds > 0
            assert time.monotonic() - begun < 1.5


def test_a_receiver_whose_sender_cannot_connect_gives_up_soon():
    listener = tcp.ProbeListener("127.0.0.1", accept_seconds=0.2)
    begun = time.monotonic()
    with pytest.raises(ProbeTimeout, match="no connection came"):
        listener.accept(TOKEN, 7, 1, begun + 10.0)
    assert time.monotonic() - begun < 8
    listener.socket.close()


def test_a_sender_that_is_silent_costs_its_own_time_only(listener):
    with socket.create_connection(("127.0.0.1", listener.port)) as sock:
        sock.sendall(tcp._HELLO.pack(TOKEN, 7, 0))
        deadline = time.monotonic() + 0.4
        sockets = listener.accept(TOKEN, 7, 1, deadline)
        with pytest.raises((ProbeTimeout, OSError)):
            tcp.receive_stream(sockets, memoryview(bytearray(1 << 20)), deadline, pings=2, seconds=0.1)
    assert time.monotonic() < deadline + 4


def test_waiting_has_an_end_and_does_not_spin():
    cpu = time.process_time()
    with pytest.raises(ProbeTimeout, match="nothing"):
        wait(lambda: False, time.monotonic() + 0.5, "nothing", idle=True)
    assert time.process_time() - cpu < 0.15


def test_this_host_has_facts_and_a_load():
    facts = own_facts("here", "127.0.0.1")
    assert (facts.host, facts.interface) == ("here", "lo")
    assert facts.cpus >= 1
    assert 0.0 <= CpuLoad().busy_fraction() <= 1.0


def test_the_ends_of_containers_are_no_facts_of_a_host(monkeypatch):
    told = inventory(
        interfaces=(
            interface("v0", "fe80::1/64", kind="veth"),
            interface("eth0", "10.0.0.1/24", kind="veth"),
            interface("bond0", kind="bond"),
        )
    )
    monkeypatch.setattr(facts_module, "own_inventory", lambda question: told)
    assert [each.name for each in own_facts("here", "127.0.0.1").interfaces] == ["eth0", "bond0"]


# -- inside a host --------------------------------------------------------------------------------------------------------


def test_memory_copies_have_a_rate():
    (memory, *_), problems = intra_node.measure_host("here", 0.05)
    assert problems == ()
    assert (memory.host, memory.source, memory.target) == ("here", "memory", "memory")
    assert memory.bandwidth_bytes_per_second > 100e6


class FakeTorch:
    """GPUs whose copies take as long as on a link of this rate; the memory of some is full."""

    uint8 = "uint8"
    gpus = 2
    full = ""
    rates: ClassVar = {"between": 400e9, "memory": 50e9}

    class cuda:
        clock = 0.0

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                self.at = FakeTorch.cuda.clock

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return (end.at - self.at) * 1000

        @staticmethod
        def device_count():
            return FakeTorch.gpus

        @staticmethod
        def current_stream():
            return FakeTorch.cuda.Event(enable_timing=True)

        @staticmethod
        def can_device_access_peer(source, target):
            return False

        device = staticmethod(lambda index: contextlib.nullcontext())

    class Buffer:
        def __init__(self, size, where):
            self.size, self.where = size, where

        def copy_(self, source, non_blocking):
            between = self.where.startswith("cuda") and source.where.startswith("cuda")
            FakeTorch.cuda.clock += self.size / FakeTorch.rates["between" if between else "memory"]

    @staticmethod
    def empty(size, *, dtype, device="pinned", pin_memory=False):
        if device == FakeTorch.full:
            raise RuntimeError("CUDA out of memory\nTry this and that.")
        return FakeTorch.Buffer(size, device)


def test_copies_on_gpus_are_timed_with_events():
    found, problems = intra_node.measure_gpu_copies("here", FakeTorch, 0.1)
    links = {(link.source, link.target): link for link in found}
    assert (len(links), problems) == (8, ())
    assert (links["gpu1", "gpu1"].path, links["gpu1", "memory"].path) == ("its own memory", "PCIe")
    assert links["memory", "gpu0"].bandwidth_bytes_per_second == pytest.approx(50e9)
    assert links["gpu0", "gpu1"].bandwidth_bytes_per_second == pytest.approx(400e9)
    assert links["gpu0", "gpu1"].path == "through memory"


@pytest.mark.parametrize(("mode", "most"), [("default", 30.0), ("quick", 10.0)])
def test_eight_gpus_on_slow_slots_do_not_make_the_probe_last(monkeypatch, mode, most):
    monkeypatch.setattr(FakeTorch, "gpus", 8)
    monkeypatch.setattr(FakeTorch, "rates", {"between": 3e9, "memory": 6e9})
    begun = FakeTorch.cuda.clock
    found, _ = intra_node.measure_gpu_copies(
        "here", FakeTorch, MODES[mode].gpu_copy_seconds, both_directions=mode != "quick"
    )
    assert FakeTorch.cuda.clock - begun < most
    pairs = {frozenset((link.source, link.target)) for link in found}
    assert len(pairs) == 8 + 8 + 28
    assert len(found) == 16 + 8 + (28 if mode == "quick" else 56)
    for link in found:
        rate = 6e9 if "memory" in (link.source, link.target) else 3e9
        assert link.bandwidth_bytes_per_second == pytest.approx(rate)


def test_a_gpu_whose_memory_is_full_costs_its_own_ways(monkeypatch):
    monkeypatch.setattr(FakeTorch, "gpus", 3)
    monkeypatch.setattr(FakeTorch, "full", "cuda:1")
    found, problems = intra_node.measure_gpu_copies("here", FakeTorch, 0.1)
    assert {end for link in found for end in (link.source, link.target)} == {"memory", "gpu0", "gpu2"}
    assert len(found) == 8
    assert problems == ("gpu1: CUDA out of memory",)


def test_what_was_measured_in_time_is_kept():
    found, problems = intra_node.measure_gpu_copies("here", FakeTorch, 0.1, deadline=time.monotonic() - 1)
    assert found == []
    assert problems == ("GPUs: 8 of 8 copies were left out for lack of time",)


# -- time budget of an all-reduce -------------------------------------------------------------------------------------------


def test_errors_of_torchs_own_kind_cost_what_they_are_about_only(monkeypatch):
    error = torch.cuda.DeferredCudaCallError("CUDA call failed lazily\nmore of it")
    broken = SimpleNamespace(
        version=SimpleNamespace(cuda="13"), cuda=SimpleNamespace(init=mock.Mock(side_effect=error))
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with monkeypatch.context() as there:
        there.setitem(sys.modules, "torch", broken)
        there.setattr(intra_node.os.path, "exists", lambda path: True)
        (link,), problems = intra_node.measure_host("here", 0.05)
    assert link.source == "memory" and problems == ("GPUs: CUDA call failed lazily",)
    monkeypatch.setattr(intra_node, "measure_host", mock.Mock(side_effect=error))
    task = HostTask(number=3, seconds=0.1, both_directions=True, memory=True, timeout_seconds=1.0)
    reply = Worker(SimpleNamespace(rank=1), "here", {}).perform(task)
    assert (reply.number, reply.rank, reply.failed) == (3, 1, "CUDA call failed lazily")


@given(st.floats(1e-5, 10.0), st.floats(0.0, 100.0), st.integers(0, 18))
def test_larger_sizes_are_measured_before_smaller_ones_are_repeated(expected, left, larger):
    sizes = [2.0**n for n in range(1, larger + 1)]
    times = plan_repetitions(expected, left, sizes)
    if not times:
        assert expected > left
        return
    spent = expected * (times + (times > 1))
    assert spent <= left
    # Enough budget remains to measure each size once, if there was enough before.
    once, still = left - expected, left - spent
    for size in sizes:
        once, still = once - expected * size, still - expected * size
        assert (once >= -1e-9) == (still >= -1e-9) or times == 1


def test_a_rank_without_room_keeps_nobody_waiting(monkeypatch):
    def full(*args, **kwargs):
        raise RuntimeError("CUDA out of memory\nTry this and that.")

    def gather(into, own):
        into[:] = ["", own or "n2, rank 1: CUDA out of memory"]

    monkeypatch.setattr(allreduce.dist, "all_gather_object", gather)
    for rank in (0, 1):
        ranks = object.__new__(allreduce.AllReduceBenchmark)
        ranks.hosts, ranks.device, ranks.world = ["n1", "n2"], "cpu", SimpleNamespace(rank=rank, size=2)
        with monkeypatch.context() as there, pytest.raises(RuntimeError, match="n2, rank 1: CUDA"):
            if rank == 1:
                there.setattr(allreduce.torch, "zeros", full)
            ranks.allocate_data(1024)


def test_a_rank_that_cannot_use_its_gpu_keeps_nobody_waiting(monkeypatch):
    broken = "n2, rank 1: CUDA driver too old"
    monkeypatch.setattr(allreduce.rendezvous, "join", lambda *args: pytest.fail("it would wait for rank 1"))
    for rank in (0, 1):
        barrier = mock.Mock(return_value=SimpleNamespace(Test=lambda: True))
        comm = SimpleNamespace(rank=rank, size=2, Ibarrier=barrier, allgather=lambda own: ["", own or broken])
        with monkeypatch.context() as there, pytest.raises(RuntimeError, match=broken):
            if rank == 1:
                error = TrainingError("CUDA driver too old", hint="see to it")
                there.setattr(allreduce, "find_device", mock.Mock(side_effect=error))
            allreduce.AllReduceBenchmark(comm, f"n{rank + 1}", 1.0)
    gone = SimpleNamespace(rank=0, size=2, Ibarrier=lambda: SimpleNamespace(Test=lambda: False))
    with pytest.raises(ProbeTimeout, match="not every rank"):
        allreduce.AllReduceBenchmark(gone, "n1", 0.1)


@pytest.mark.parametrize("ranks", [(), (1, 2)])
def test_an_all_reduce_of_some_ranks_is_over_mpi_s_group_of_them(monkeypatch, ranks):
    """NCCL and Gloo use separate groups. Ranks outside the group get no task, and the group must not wait for them."""
    made = mock.Mock(return_value=SimpleNamespace(measure=lambda task: ()))
    monkeypatch.setattr(allreduce, "AllReduceBenchmark", made)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # Worker changes this variable
    group = SimpleNamespace(Incl=lambda of: ("group", of))
    comm = SimpleNamespace(rank=1, size=3, Get_group=lambda: group, Create_group=lambda of: ("comm", of))
    task = AllReduceTask(
        number=1, host_counts=(2,), gpudirect=None, ranks=ranks, sizes=(8,), seconds=0.1, timeout_seconds=1.0
    )
    worker = Worker(comm, "n2", {})
    assert worker.perform(task).failed is worker.perform(task).failed is None
    made.assert_called_once_with(("comm", ("group", ranks)) if ranks else comm, "n2", 1.0)


# -- the launcher's side --------------------------------------------------------------------------------------------------

START = ProbeStarted(when="2026-01-01T00:00:00+00:00", mode="quick", hosts=("a", "b"), primary="tcp", facts=())
DONE = StageDone(stage="together/tcp/0", title="", done_seconds=1.0, remaining_seconds=1.0)
UNFINISHED = StageDone(stage="together/tcp/1", title="", done_seconds=1.0, remaining_seconds=1.0, complete=False)


def test_an_interrupted_probe_is_gone_on_with(tmp_path):
    path = tmp_path / "t.yaml.partial.jsonl"
    lines = [encode_record(START), encode_record(DONE), encode_record(UNFINISHED), '{"type":"pair","sour']
    path.write_text("\n".join(lines))
    journal = Journal(path, ("a", "b"), "quick", None)
    assert journal.done_stages == ("together/tcp/0",)
    journal.write(encode_record(ProbeEnded(seconds=1.0)))
    assert journal.read() == [START, DONE, UNFINISHED, ProbeEnded(seconds=1.0)]
    journal.remove()
    assert not path.exists()


def test_steps_without_a_host_are_done_again_once_it_is_there(tmp_path):
    path = tmp_path / "t.yaml.partial.jsonl"
    path.write_text("\n".join(map(encode_record, (START, structs.replace(DONE, without=("b",)), UNFINISHED))) + "\n")
    journal = Journal(path, ("a", "b"), "quick", None)
    assert journal.done_with(("a",)) == ("together/tcp/0",) and journal.done_with(("a", "b")) == ()
    journal.write(encode_record(DONE))
    assert journal.done_with(("a", "b")) == ("together/tcp/0",)
    journal.remove()


def test_two_probes_do_not_write_the_same_file(tmp_path):
    path = tmp_path / "t.yaml.partial.jsonl"
    first = Journal(path, ("a", "b"), "quick", None)
    first.write(encode_record(START))
    with pytest.raises(ConfigError, match="another probe"):
        Journal(path, ("a", "b"), "quick", None)
    assert first.read() == [START]
    first.remove()
    Journal(path, ("a", "b"), "quick", None).remove()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_that_may_not_be_changed_is_not(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("nodes:\n  - hosts: a,b\n")
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="no permission"):
        check_writable(path)


@pytest.mark.parametrize(("flags", "why"), [(os.ST_RDONLY, "the file system is read-only"), (0, "no permission")])
def test_why_a_file_cannot_be_written_is_told(tmp_path, monkeypatch, flags, why):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flags))
    with pytest.raises(ConfigError, match=why):
        check_writable(tmp_path / "t.yaml")


@pytest.mark.parametrize("change", ["hosts", "mode", "way", "ended", "asked"])
def test_a_probe_that_does_not_fit_is_begun_anew(tmp_path, change):
    path = tmp_path / "t.yaml.partial.jsonl"
    lines = [
        encode_record(START),
        encode_record(DONE),
        *([encode_record(ProbeEnded(seconds=1.0))] if change == "ended" else []),
    ]
    path.write_text("\n".join(lines) + "\n")
    hosts = ("a", "c") if change == "hosts" else ("a", "b")
    mode = "full" if change == "mode" else "quick"
    way = "mpi" if change == "way" else None
    journal = Journal(path, hosts, mode, False if change == "asked" else None, way)
    assert journal.done_stages == ()
    assert journal.read() == []
    journal.remove()
    if change != "asked":
        path.write_text("\n".join(lines) + "\n")
        with pytest.raises(ConfigError, match="no probe"):
            Journal(path, hosts, mode, True, way)


def test_a_probe_of_another_network_is_begun_anew_and_says_so(tmp_path):
    path = tmp_path / "t.yaml.partial.jsonl"

    def at(address, interface):
        return structs.replace(START, facts=(HostFacts(host="a", address=address, interface=interface, cpus=1),))

    path.write_text(f"{encode_record(at('10.0.0.1', 'eth0'))}\n{encode_record(DONE)}\n")
    journal = Journal(path, ("a", "b"), "quick", None)
    assert "resuming the probe of 2026-01-01" in journal.write(encode_record(at("10.0.0.1", "eth0")))
    assert journal.done_stages == ("together/tcp/0",)
    said = journal.write(encode_record(at("10.1.0.1", "ib0")))
    assert "a had the address 10.0.0.1 (eth0), now 10.1.0.1 (ib0)" in said
    assert journal.read() == [at("10.1.0.1", "ib0")]
    journal.reload()
    assert journal.done_stages == ()
    assert journal.write(encode_record(at("10.1.0.1", "ib0"))) is None
    journal.remove()


def test_the_view_keeps_records_and_shows_everything_else(capsys):
    kept = []
    with ProgressStreams(kept.append) as (out, errors):
        out.write(f"[0@n1] {encode_record(DONE)[:20]}")
        out.write(f"{encode_record(DONE)[20:]}\n[0@n1] a word\n")
        errors.write("distrib-launch: note: so\n")
    assert kept == [encode_record(DONE)]
    err = capsys.readouterr().err
    assert "50%" in err and "1 s left" in err
    assert "a word" in err and "distrib-topo: note: so" in err


def test_the_facts_of_many_hosts_pass_as_one_line(capsys):
    facts = HostFacts(host="a", address="10.0.0.1", interface="eth0", cpus=1, software={"more": "x" * (2 << 20)})
    line, kept = encode_record(structs.replace(START, facts=(facts,))), []
    with ProgressStreams(kept.append) as streams:
        console = Console(["n1", "n2"], show_rank=0, streams=streams)
        data = f"{line}\n".encode()
        for at in range(0, len(data), 1 << 18):
            console.rank_output(0, 1, data[at : at + (1 << 18)])
        console.close()
    assert kept == [line]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["-H", "a,b", "--plot", "x.gif"], "unsupported file type"),
        (["-H", "a,b", "--baseline", "BASE"], "it has no measurements"),
        (["-H", "a,b", "--plot", "/nowhere/x.png"], "no folder /nowhere"),
        (["-H", "a,b", "--plot", "folder.png"], "this is a directory"),
        (["-H", "c,d", "--baseline", "MEASURED"], "other hosts: a, b"),
        (["-H", "a,b", "-o", "/nowhere/t.yaml"], "no folder /nowhere"),
        (["-H", "a,b", "-o", "folder.png"], "this is a directory"),
        (["-H", "a,b", "--resume", "-o", "t.yaml"], "no probe of these hosts"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(tmp_path, monkeypatch, capsys, words, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("nodes:\n  - hosts: a\n")
    write_measured(tmp_path / "measured.yaml", Measurements(when="2026-01-01", software={}, hosts=("a", "b")))
    (tmp_path / "folder.png").mkdir()
    files = {"BASE": str(tmp_path / "base.yaml"), "MEASURED": str(tmp_path / "measured.yaml")}
    words = [files.get(word, word) for word in words]
    assert topo.main(["probe", "--run-dir", str(tmp_path / "run"), *words]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("distrib-topo: error: ")
    assert what in err
    assert out == ""
    assert not list(tmp_path.glob("*.partial.jsonl"))


def test_pictures_of_every_kind_that_is_named():
    for name in ("a.png", "b.SVG", "c.pdf"):
        check_plot_path(name)


def test_json_names_have_units():
    words = json.loads(encode_record(DONE))
    assert {"done_seconds", "remaining_seconds"} <= set(words)
