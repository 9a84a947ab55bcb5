"""What a rank does when rank 0 says so: its part of one measurement, and an answer however that went."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from distrib.probe.bench import intra_node, mpi, statistics, tcp
from distrib.probe.bench.polling import ProbeTimeout
from distrib.probe.host_facts import gpu_links
from distrib.probe.protocol import AllReduce, Arrived, Inside, Leave, Reply, Setup, Task, Transfer, first_line
from distrib.probe.records import NEARLY_NOTHING
from distrib.probe.stages import COLLECTIVE_START_SECONDS
from distrib.utils.cpus import CpuLoad

BEGIN_SECONDS = 0.015
"""After an order, when streams beside others begin: all have heard it, are connected, and have pinged a network that is still."""


class Worker:
    """One rank's hands: its buffers, its listeners by address, and what it must know of the others."""

    def __init__(self, comm: Any, host: str, listeners: Mapping[str, tcp.Listener]) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.host = host
        self.listeners = listeners
        self.setup = Setup(token=b"", ports={})
        self._buffers: dict[str, memoryview] = {}
        self._collective: Any = None
        self._abandoned: list[Any] = []
        """Exchanges that were given up: MPI may still write into their memory."""

    def perform(self, task: Task) -> Reply:
        """Do this rank's part of a task. What goes wrong is in the answer."""
        assert not isinstance(task, Leave)
        load = CpuLoad()
        begun = time.monotonic()
        deadline = begun + task.patience_seconds
        try:
            reply = self._do(task, deadline)
        except Exception as error:  # torch's are of many kinds; each costs one measurement and not the probe
            reply = Reply(number=task.number, rank=self.rank, failed=first_line(error))
        busy = max(reply.busy, load.busy_fraction())
        return msgspec.structs.replace(reply, seconds=time.monotonic() - begun, busy=busy)

    def _do(self, task: Task, deadline: float) -> Reply:
        if isinstance(task, Inside):
            links, problems = intra_node.measure(
                self.host, task.seconds, memory=task.memory, backwards=task.backwards, deadline=deadline
            )
            failed = "; ".join(problems) or None
            used = {end for link in links for end in (link.source, link.target)}
            gpus = tuple(gpu for gpu in gpu_links() if f"gpu{gpu.index}" in used) if len(links) > 1 else ()
            return Reply(number=task.number, rank=self.rank, inside=links, gpus=gpus, failed=failed)
        if isinstance(task, AllReduce):
            begun = time.monotonic()
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of addresses that have no names
            comm = self.comm
            if task.ranks and self._collective is None:  # before torch is loaded, so that they come at once
                comm = comm.Create_group(comm.Get_group().Incl(task.ranks))
            from distrib.probe.bench import allreduce

            if self._collective is None:
                self._collective = allreduce.Ranks(comm, self.host, task.patience_seconds)
            late_seconds = max(0.0, time.monotonic() - begun - 2 * COLLECTIVE_START_SECONDS)
            seconds = max(task.seconds / 2, task.seconds - late_seconds)  # so that the probe ends when it has said
            task = msgspec.structs.replace(task, seconds=seconds)
            return Reply(number=task.number, rank=self.rank, collectives=self._collective.measure(task))
        assert isinstance(task, Transfer)
        return self._mpi(task, deadline) if task.transport == "mpi" else self._tcp(task, deadline)

    def _buffer(self, name: str, size: int) -> memoryview:
        """Memory of at least `size` bytes, touched before anything is timed; `name` keeps what is read and written apart."""
        have = self._buffers.get(name)
        if have is None or len(have) < size:
            memory = mmap.mmap(-1, max(size, 1 << 20))
            for page in range(0, len(memory), mmap.PAGESIZE):
                memory[page] = 1
            have = self._buffers[name] = memoryview(memory)
        return have

    # -- MPI ----------------------------------------------------------------------------------------------------------

    def _mpi(self, task: Transfer, deadline: float) -> Reply:
        largest = max(task.sizes)
        peer = task.source if task.target == self.rank else task.target
        sender = receiver = None
        try:
            if task.both_ways or task.source == self.rank:
                sender = mpi.Sender(self.comm, peer, task.number, self._buffer("out", largest))
            if sender and not task.both_ways:
                mpi.obey(sender, deadline)
                return Reply(number=task.number, rank=self.rank)
            receiver = mpi.Receiver(self.comm, peer, task.number, self._buffer("in", largest), deadline, sender)
            curve = mpi.sweep(receiver, task.sizes, task.pings, task.seconds, task.longest, task.variation)
            receiver.finish()
        except BaseException:
            self._abandoned.append((sender, receiver))
            raise
        assert curve.large is not None
        rate = msgspec.structs.replace(curve.large, median=largest / curve.large.median)
        reached = _arrived(curve.latency_seconds, rate)
        return Reply(number=task.number, rank=self.rank, arrived=msgspec.structs.replace(reached, curve=curve.points))

    # -- TCP ----------------------------------------------------------------------------------------------------------

    def _tcp(self, task: Transfer, deadline: float) -> Reply:
        begins = 0.0 if task.load == "alone" and not task.both_ways else time.monotonic() + BEGIN_SECONDS
        sends = task.source == self.rank or task.both_ways
        receives = task.target == self.rank or task.both_ways
        own, peer = task.addresses if task.source == self.rank else task.addresses[::-1]
        sent: list[tcp.Sent | Exception] = []

        def send() -> None:
            place = peer, self.setup.ports[peer]
            try:
                sockets = tcp.connect(own, place, self.setup.token, task.number, task.streams, deadline)
                sent.append(tcp.send(sockets, self._buffer("out", tcp.CHUNK_BYTES), deadline))
            except Exception as error:
                sent.append(error)

        thread = threading.Thread(target=send, name="send", daemon=True) if sends and receives else None
        if thread:
            thread.start()
        elif sends:
            send()
        seen = None
        if receives:
            sockets = self.listeners[own].accept(self.setup.token, task.number, task.streams, deadline)
            seen = tcp.receive(
                sockets, self._buffer("in", tcp.CHUNK_BYTES), deadline,
                pings=task.pings, seconds=task.seconds, variation=task.variation, longest=task.longest, begins=begins,
            )  # fmt: skip
        if thread:
            thread.join(max(0.0, deadline - time.monotonic()) + 1.0)
        told = sent[0] if sent else tcp.Sent()
        if isinstance(told, Exception):
            raise told
        if seen is not None and seen.rate is None:
            raise ProbeTimeout(NEARLY_NOTHING)
        return Reply(
            number=task.number, rank=self.rank, retransmits=told.retransmits, path_mtu=told.path_mtu,
            busy=max(told.busy, seen.busy if seen else 0.0),
            arrived=_arrived(seen.latency_seconds, seen.rate) if seen and seen.rate else None,
        )  # fmt: skip


def _arrived(latency_seconds: float | None, rate: statistics.Summary) -> Arrived:
    return Arrived(
        latency_seconds=latency_seconds, bandwidth_bytes_per_second=rate.median, variation=rate.variation,
        repetitions=rate.repetitions, outliers=rate.outliers,
    )  # fmt: skip
