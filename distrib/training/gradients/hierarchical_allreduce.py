"""Hierarchical all-reduce on CPU hosts, in a thread of each rank: inside the host, between hosts, inside again.

A bucket takes four stages. Every rank of the host copies its gradients into shared memory. Each rank of an inter-host group sums its
share of the bucket over the host. The group sums that share over the hosts. Once all groups are done, every rank reads the bucket
from shared memory. Groups and buckets overlap. Ranks beyond the size of the smallest host belong to no group: they copy and read.
"""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distrib.bandwidth_model.bucketing import AllReduceCost, even_bounds
from distrib.errors import TrainingError
from distrib.training.collectives import gather_objects
from distrib.training.gradients.compression import BucketInfo, Compressor, PendingCollectives
from distrib.training.gradients.host_shared_memory import HostSharedMemory, PeerListener, kernel_identity
from distrib.training.rendezvous import collective_timeout


class BucketCounter(enum.IntEnum):
    """Counters of each rank in the shared memory of its host."""

    COPIED = 0
    """Buckets that the rank has copied into shared memory."""
    SUMMED = 1
    """Buckets that it has summed between hosts."""


@dataclass(frozen=True, kw_only=True)
class CommBucket:
    """Bytes `start` to `end` of the step's gradients, which are all-reduced together; `number` counts within the step."""

    number: int
    start: int
    end: int
    dtype: torch.dtype
    info: BucketInfo | None = None

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """View the bucket in the memory of a step's gradients.

        Args:
            memory: uint8, all gradients of the step.

        Returns:
            The elements of the bucket.
        """
        return memory[self.start : self.end].view(self.dtype)


@dataclass(frozen=True, kw_only=True)
class _InterHostGroup:
    """Inter-host group `number` of `count`: one rank of each host. The ranks sum a share of each bucket between hosts."""

    number: int
    count: int
    hosts: int
    groups: list[dist.ProcessGroup]

    def share(self, bucket: CommBucket, whole: torch.Tensor, *, undivided: bool) -> torch.Tensor:
        """View this group's share of the elements `whole` of a bucket. If `undivided`, groups take whole buckets in turn."""
        if undivided:
            return whole if bucket.number % self.count == self.number else whole[:0]
        elements = whole.numel()
        return whole[elements * self.number // self.count : elements * (self.number + 1) // self.count]


@dataclass
class _InFlightBucket:
    collectives: PendingCollectives
    waiting: torch.futures.Future[object] | None = None
    stage: int = 0


@dataclass
class _PendingResult:
    buckets: int
    future: torch.futures.Future[torch.Tensor]
    value: torch.Tensor


class AllReduceThread:
    """Thread that sums the buckets given to `add`, in their order. The order must be the same on all ranks."""

    def __init__(
        self,
        memory: HostSharedMemory,
        inputs: list[torch.Tensor],
        result: torch.Tensor,
        group: _InterHostGroup | None,
        groups: int,
        compressor: Compressor,
    ) -> None:
        """Start the thread.

        Args:
            memory: The memory of this host's ranks.
            inputs: uint8, the gradients of each rank of the host.
            result: uint8, their sum over all ranks.
            group: The inter-host group of this rank, None if it has none.
            groups: Number of inter-host groups.
            compressor: The format between hosts.
        """
        self._memory, self._inputs, self._result = memory, inputs, result
        self._group, self._groups = group, groups
        self.compressor = compressor
        """Format between hosts. Every rank may replace it between steps by one with at most as many stages."""
        self._waiting: deque[CommBucket] = deque()
        self._in_flight: deque[_InFlightBucket] = deque()
        self._pending: deque[_PendingResult] = deque()
        self._errors: dict[tuple[int, int, int], torch.Tensor] = {}
        self.added = 0
        """Number of buckets given to `add` since the beginning."""
        self._begun = self._summed = 0
        self._failure: Exception | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="distrib-gradients", daemon=True)
        self._thread.start()

    def add(self, bucket: CommBucket) -> None:
        """Sum a bucket whose gradients this rank has copied into its input.

        Args:
            bucket: The next bucket.
        """
        self._waiting.append(bucket)
        self.added += 1
        self._memory.set_counter(BucketCounter.COPIED, self.added)
        self._memory.wake()

    def result_after(self, buckets: int, value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Return a future of a part of the result.

        Args:
            buckets: Number of buckets since the beginning that must be summed before.
            value: The part.

        Returns:
            A future of `value`.
        """
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._pending.append(_PendingResult(buckets, future, value))
        if self._failure is not None:
            self._release_pending()
        self._memory.wake()
        return future

    def check(self) -> None:
        """Raise the error that ended the thread. Results after it have not been summed."""
        if self._failure is not None:
            raise self._failure

    def reset(self) -> None:
        """Drop error feedback between steps, after bucket boundaries have changed."""
        self._errors.clear()
        self.compressor.reset()

    def rescale(self, factor: torch.Tensor) -> None:
        """Scale error feedback between steps, after a GradScaler has changed its scale.

        Args:
            factor: New scale by old scale.
        """
        for errors in self._errors.values():
            errors *= factor
        self.compressor.rescale(factor)

    def stop(self) -> None:
        """Stop the thread. Pending results are never delivered.

        A thread that still runs at exit is killed inside torch's destructors, which aborts the process.
        """
        self._stopped = True
        self._memory.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._memory.close()

    # Methods of the thread
    def _run(self) -> None:
        try:
            with torch.no_grad():
                while not self._stopped:
                    self._advance()
                    self._begin()
                    self._deliver()
                    if self._pending and self._memory.exited:
                        names = ", ".join(map(str, sorted(self._memory.exited)))
                        raise TrainingError(
                            f"local rank {names} of this host exited in the middle of a step",
                            hint="see that rank's log",
                            code="peer-exited",
                        )
                    self._memory.wait()
        except Exception as error:
            self._failure = error
            self._release_pending()

    def _begin(self) -> None:
        """Start the buckets that all ranks of the host have copied."""
        ready = self._memory.min_counter(BucketCounter.COPIED)
        while self._begun < ready and len(self._in_flight) < self.compressor.max_in_flight:
            bucket = self._waiting.popleft()
            self._begun += 1
            self._in_flight.append(begun := _InFlightBucket(self._sum(bucket)))
            self._step(begun)
            self._advance()

    def _sum(self, bucket: CommBucket) -> PendingCollectives:
        if self._group is None:
            return
        undivided = self.compressor.needs_whole_buckets
        result = self._group.share(bucket, bucket.view(self._result), undivided=undivided)
        if not result.numel():
            return
        if len(self._inputs) > 1:
            parts = [self._group.share(bucket, bucket.view(i), undivided=undivided) for i in self._inputs]
            torch.add(parts[0], parts[1], out=result)
            for part in parts[2:]:
                result += part
        if self._group.hosts > 1:

            def errors(stage: int, elements: int) -> torch.Tensor:
                key = bucket.number, stage, elements
                if key not in self._errors:
                    self._errors[key] = torch.zeros(elements, dtype=torch.float32, device=result.device)
                return self._errors[key]

            yield from self.compressor.all_reduce(result, self._group.groups, errors, bucket.info)

    def _step(self, bucket: _InFlightBucket) -> None:
        """Start the next collective of a bucket."""
        bucket.stage += 1
        bucket.waiting = next(bucket.collectives, None)
        if bucket.waiting is not None:
            bucket.waiting.add_done_callback(lambda _: self._memory.wake())

    def _advance(self) -> None:
        """Continue buckets whose collective has ended. No bucket overtakes an earlier one, because ranks must agree on the order."""
        max_stage = self.compressor.stages + 1
        for bucket in self._in_flight:
            while bucket.waiting is not None and bucket.waiting.done() and bucket.stage < max_stage:
                bucket.waiting.wait()  # raises its error
                self._step(bucket)
            max_stage = bucket.stage if bucket.waiting is not None else self.compressor.stages + 1
        summed = self._summed
        while self._in_flight and self._in_flight[0].waiting is None:
            self._in_flight.popleft()
            self._summed += 1
        if self._summed > summed:
            self._memory.set_counter(BucketCounter.SUMMED, self._summed)

    def _deliver(self) -> None:
        """Complete the results whose buckets all inter-host groups have summed."""
        done = self._memory.min_counter(BucketCounter.SUMMED, self._groups)
        while self._pending and self._pending[0].buckets <= done:
            pending = self._pending.popleft()
            pending.future.set_result(pending.value)

    def _release_pending(self) -> None:
        """Complete results after a failure, which `check` raises: DDP replaces an exception in a future by an error of its own."""
        while True:
            try:
                pending = self._pending.popleft()
            except IndexError:
                return
            pending.future.set_result(pending.value)


def _group_by_host(names: Sequence[Hashable]) -> list[list[int]]:
    """Return the ranks of each host, given the host of each rank."""
    hosts: dict[Hashable, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return list(hosts.values())


def _group_between_hosts(hosts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Form as many groups as the smallest host has ranks, each with one rank of every host."""
    return [[host[number] for host in hosts] for number in range(min(map(len, hosts)))]


class HierarchicalAllReduce:
    """Hierarchical all-reduce of one model's gradients: its shared memory, inter-host groups and thread."""

    def __init__(
        self, size_bytes: int, compressor: Compressor, *, flat: bool, hosts: Sequence[Hashable] | None = None
    ) -> None:
        """Connect the ranks. Collective.

        Args:
            size_bytes: Size of the model's gradients, a multiple of the page size.
            compressor: The format between hosts.
            flat: True to treat each rank as a host of its own.
            hosts: The host of each rank (default: detected).
        """
        rank = dist.get_rank()
        listener = PeerListener()
        own_host = rank if flat else hosts[rank] if hosts else kernel_identity()
        every = gather_objects((own_host, listener.address))
        members = _group_by_host([host for host, _ in every])
        mine = next(host for host in members if rank in host)
        groups = _group_between_hosts(members)
        self._size_bytes = size_bytes
        self.hosts, self.local_size = len(members), len(mine)
        index = mine.index(rank)
        peers = listener.connect_all([every[other][1] for other in mine], index, timeout_seconds=60.0)
        alone = self.local_size == 1
        # The input of each rank of the host, then the result. A rank alone on its host sums in place.
        self._memory = HostSharedMemory(
            peers, index, len(BucketCounter), size_bytes if alone else size_bytes * (self.local_size + 1)
        )
        self._result_start = 0 if alone else size_bytes * self.local_size
        inputs = [
            self._memory.tensor(size_bytes * i, size_bytes * (i + 1), torch.uint8) for i in range(self.local_size)
        ]
        result = self._memory.tensor(self._result_start, self._result_start + size_bytes, torch.uint8)
        self.own_input = inputs[index]
        own_group = None
        self.process_groups: list[dist.ProcessGroup] = []
        """Process groups of this rank's inter-host group, to be destroyed at the end."""
        for number, ranks in enumerate(groups):
            stages = range(compressor.stages if self.hosts > 1 else 0)
            made = [dist.new_group(ranks, backend="gloo", timeout=collective_timeout()) for _ in stages]
            if rank in ranks:
                self.process_groups = made
                own_group = _InterHostGroup(number=number, count=len(groups), hosts=self.hosts, groups=made)
        self.thread = AllReduceThread(self._memory, inputs, result, own_group, len(groups), compressor)

    def result(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """View a part of the sum over all ranks.

        Args:
            start: First byte.
            end: Byte after the last one.
            dtype: Element type.

        Returns:
            A tensor in shared memory.
        """
        return self._memory.tensor(self._result_start + start, self._result_start + end, dtype)

    def measure(self, *, few: int = 2, many: int = 16, trial_bytes: int = 4 << 20) -> AllReduceCost:
        """Measure the overhead of a bucket between steps. Overwrites the memory of the gradients. Collective.

        Args:
            few: Buckets of the first measurement.
            many: Buckets of the second one; the difference gives the overhead of a bucket.
            trial_bytes: Bytes that are averaged in each.

        Returns:
            The cost, the same on every rank.
        """
        size = min(trial_bytes, self._size_bytes)
        self.own_input.zero_()
        self._trial(size, few)  # warm-up
        source, copy = (torch.zeros(trial_bytes // 4, device="cpu") for _ in range(2))
        begun = time.perf_counter()
        for _ in range(2):  # before and after the network: into the bucket, and out of the result
            copy.copy_(source)
        copying = time.perf_counter() - begun
        own = [self._trial(size, few), self._trial(size, many), copying]
        times = torch.tensor(own, dtype=torch.float64, device="cpu")
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        few_seconds, many_seconds, copying = times.tolist()
        return AllReduceCost(
            overhead_seconds=max(
                20e-6, (many_seconds - few_seconds) / (many - few)
            ),  # at least a wake-up of the thread
            seconds_per_byte=max(few_seconds, 1e-9) / size,
            inside_seconds_per_byte=copying / trial_bytes,
        )

    def _trial(self, size: int, buckets: int) -> float:
        """Measure the seconds of an all-reduce of `size` bytes in the given number of buckets."""
        begun = time.perf_counter()
        for number, (start, end) in enumerate(itertools.pairwise((0, *even_bounds(size, -(-size // buckets))))):
            self.thread.add(CommBucket(number=number, start=start, end=end, dtype=torch.float32))
        self.thread.result_after(self.thread.added, self.result(0, 4, torch.float32)).wait()
        self.thread.check()
        return time.perf_counter() - begun
