"""Worker of one rank: performs its part of each measurement and replies with the result or the failure."""

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
from distrib.probe.host_facts import gpu_pcie_links
from distrib.probe.protocol import (
    AllReduceTask,
    HostTask,
    Measurement,
    PairTask,
    RankSetup,
    ReceivedRate,
    TaskReply,
    first_line,
)
from distrib.probe.records import NEARLY_NOTHING
from distrib.probe.stages import COLLECTIVE_START_SECONDS
from distrib.utils.cpus import CpuLoad


class Worker:
    """The buffers, listeners and process group of one rank.

    Args:
        comm: MPI communicator of all ranks.
        host: Name of this host.
        listeners: TCP listeners by local address.
    """

    def __init__(self, comm: Any, host: str, listeners: Mapping[str, tcp.ProbeListener]) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.host = host
        self.listeners = listeners
        self.setup = RankSetup(token=b"", ports={})
        self._buffers: dict[str, memoryview] = {}
        self._all_reduce: Any = None
        self._abandoned: list[Any] = []
        """Failed exchanges: MPI may still write into their memory."""

    def perform(self, task: Measurement) -> TaskReply:
        """Perform this rank's part of a task.

        Args:
            task: The task.

        Returns:
            The result; an exception becomes its `failed`.
        """
        load = CpuLoad()
        begun = time.monotonic()
        deadline = begun + task.timeout_seconds
        try:
            if isinstance(task, HostTask):
                reply = self._measure_host(task, deadline)
            elif isinstance(task, AllReduceTask):
                reply = self._measure_all_reduce(task)
            else:
                reply = (
                    self._measure_mpi(task, deadline) if task.transport == "mpi" else self._measure_tcp(task, deadline)
                )
        except Exception as error:  # torch raises many types; each ends one measurement, not the probe
            reply = TaskReply(number=task.number, rank=self.rank, failed=first_line(error))
        busy = max(reply.busy, load.busy_fraction())
        return msgspec.structs.replace(reply, seconds=time.monotonic() - begun, busy=busy)

    def _measure_host(self, task: HostTask, deadline: float) -> TaskReply:
        links, problems = intra_node.measure_host(
            self.host, task.seconds, memory=task.memory, both_directions=task.both_directions, deadline=deadline
        )
        used = {end for link in links for end in (link.source, link.target)}
        gpus = tuple(gpu for gpu in gpu_pcie_links() if f"gpu{gpu.index}" in used) if len(links) > 1 else ()
        failed = "; ".join(problems) or None
        return TaskReply(number=task.number, rank=self.rank, copies=links, gpus=gpus, failed=failed)

    def _measure_all_reduce(self, task: AllReduceTask) -> TaskReply:
        begun = time.monotonic()
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of addresses without names
        comm = self.comm
        if task.ranks and self._all_reduce is None:  # before torch is loaded, so that all ranks come at the same time
            comm = comm.Create_group(comm.Get_group().Incl(task.ranks))
        from distrib.probe.bench import allreduce  # loads torch, which takes seconds

        if self._all_reduce is None:
            self._all_reduce = allreduce.AllReduceBenchmark(comm, self.host, task.timeout_seconds)
        late_seconds = max(0.0, time.monotonic() - begun - 2 * COLLECTIVE_START_SECONDS)
        seconds = max(task.seconds / 2, task.seconds - late_seconds)  # to keep the announced duration
        task = msgspec.structs.replace(task, seconds=seconds)
        return TaskReply(number=task.number, rank=self.rank, collectives=self._all_reduce.measure(task))

    def _buffer(self, name: str, size: int) -> memoryview:
        """Return a buffer of at least `size` bytes whose pages are mapped; one `name` for sending, one for receiving."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            memory = mmap.mmap(-1, max(size, 1 << 20))
            for page in range(0, len(memory), mmap.PAGESIZE):
                memory[page] = 1
            buffer = self._buffers[name] = memoryview(memory)
        return buffer

    def _measure_mpi(self, task: PairTask, deadline: float) -> TaskReply:
        largest = max(task.sizes)
        peer = task.source if task.target == self.rank else task.target
        sender = receiver = None
        try:
            if task.both_ways or task.source == self.rank:
                sender = mpi.MpiSender(self.comm, peer, task.number, self._buffer("send", largest))
            if sender and not task.both_ways:
                sender.serve(deadline)
                return TaskReply(number=task.number, rank=self.rank)
            receiver = mpi.MpiReceiver(self.comm, peer, task.number, self._buffer("receive", largest), deadline, sender)
            curve = receiver.measure_curve(task.sizes, task.pings, task.seconds, task.max_seconds, task.variation)
        except BaseException:
            self._abandoned.append((sender, receiver))
            raise
        assert curve.large is not None
        rate = msgspec.structs.replace(curve.large, median=largest / curve.large.median)
        received = msgspec.structs.replace(_received_rate(curve.latency_seconds, rate), curve=curve.points)
        return TaskReply(number=task.number, rank=self.rank, received=received)

    def _measure_tcp(self, task: PairTask, deadline: float) -> TaskReply:
        # Concurrent streams start 15 ms after the task: by then all pairs are connected and have pinged an idle network.
        starts = 0.0 if task.load == "alone" and not task.both_ways else time.monotonic() + 0.015
        sends = task.source == self.rank or task.both_ways
        receives = task.target == self.rank or task.both_ways
        own, peer = task.addresses if task.source == self.rank else task.addresses[::-1]
        sent: list[tcp.SentStream | Exception] = []

        def send() -> None:
            place = peer, self.setup.ports[peer]
            try:
                sockets = tcp.connect_streams(own, place, self.setup.token, task.number, task.streams, deadline)
                sent.append(tcp.send_stream(sockets, self._buffer("send", tcp.SETTINGS.chunk_bytes), deadline))
            except Exception as error:
                sent.append(error)

        thread = threading.Thread(target=send, name="send", daemon=True) if sends and receives else None
        if thread:
            thread.start()
        elif sends:
            send()
        received = None
        if receives:
            sockets = self.listeners[own].accept(self.setup.token, task.number, task.streams, deadline)
            received = tcp.receive_stream(
                sockets, self._buffer("receive", tcp.SETTINGS.chunk_bytes), deadline,
                pings=task.pings, seconds=task.seconds, variation=task.variation, max_seconds=task.max_seconds, starts=starts,
            )  # fmt: skip
        if thread:
            thread.join(max(0.0, deadline - time.monotonic()) + 1.0)
        result = sent[0] if sent else tcp.SentStream()
        if isinstance(result, Exception):
            raise result
        if received is not None and received.rate is None:
            raise ProbeTimeout(NEARLY_NOTHING)
        return TaskReply(
            number=task.number, rank=self.rank, retransmits=result.retransmits, path_mtu=result.path_mtu,
            busy=max(result.busy, received.busy if received else 0.0),
            received=_received_rate(received.latency_seconds, received.rate) if received and received.rate else None,
        )  # fmt: skip


def _received_rate(latency_seconds: float | None, rate: statistics.SampleSummary) -> ReceivedRate:
    return ReceivedRate(
        latency_seconds=latency_seconds, bandwidth_bytes_per_second=rate.median, variation=rate.variation,
        repetitions=rate.repetitions, outliers=rate.outliers,
    )  # fmt: skip
