"""Sharded data parallel, as FSDP2 and HSDP do it: bytes per rank and the timeline of a step.

Per rank and batch, with n ranks, S ranks of a shard group, R = n/S replicas, M_c bytes of parameters in the type of the products and M_r
bytes of gradients as they are reduced (ZeRO, arXiv:1910.02054, section 7; FSDP, arXiv:2304.11277, section 3):

- `all` (ZeRO-3) sends (n-1)/n (2 M_c + M_r): parameters are gathered for forward and again for backward, gradients reduce-scattered.
- `grads` (ZeRO-2) sends (n-1)/n (M_c + M_r): parameters stay gathered from forward to backward.
- `host` (HSDP) sends (S-1)/S (2 M_c + M_r) inside the host, and 2(R-1)/R M_r/S to the peers on other hosts.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from distrib.bandwidth_model import collective_cost
from distrib.bandwidth_model.fabric import Fabric
from distrib.bandwidth_model.parameter_blocks import ParameterBlock, gathered_elements, parameter_blocks
from distrib.bandwidth_model.prediction import Phase, Span
from distrib.bandwidth_model.step_timeline import Step
from distrib.bandwidth_model.workload import Workload
from distrib.bandwidth_model.workload_catalog import catalog_memory
from distrib.strategy import Strategy


class SentBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a rank sends for a batch, to ranks of its shard group and to its replicas on other hosts."""

    in_group: float
    to_replicas: float


class _BlockCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a block: its passes, and its collectives over the links of the shard group and of the replicas."""

    forward: float
    backward: float
    gather: float
    reduce: float
    replicate: float


def shard_group(fabric: Fabric, strategy: Strategy) -> int:
    """Count the ranks that share one copy of the parameters.

    Args:
        fabric: The links of the job.
        strategy: The strategy of the job.

    Returns:
        1 without sharding.
    """
    if strategy.shard == "none":
        return 1
    return fabric.ranks_per_host if strategy.shard == "host" else fabric.ranks


def gathered_bytes(elements: int, workload: Workload) -> int:
    """Return the bytes of parameters as they are gathered: in 16 bits with mixed precision, else in 32.

    Args:
        elements: Parameters.
        workload: One rank's step, with its precision.
    """
    return (2 if workload.software.get("precision") == "amp" else 4) * elements


def reduced_bytes(elements: int, strategy: Strategy) -> int:
    """Return the bytes of gradients as they are reduced: in 32 bits, or 16 with `--gradients` fp16 or bf16.

    Args:
        elements: Parameters.
        strategy: The strategy of the job.
    """
    return (4 if strategy.gradients.exact else 2) * elements


def sent_bytes(fabric: Fabric, workload: Workload, strategy: Strategy) -> SentBytes:
    """Compute the bytes that a rank sends for a batch.

    Args:
        fabric: The links of the job.
        workload: One rank's step.
        strategy: The strategy of the job, with `shard`.
    """
    elements = sum(gradient.elements for gradient in workload.gradients)
    group = shard_group(fabric, strategy)
    replicas = fabric.ranks // group
    gathers = 1 if strategy.shard == "grads" else 2
    parameters, gradients = gathered_bytes(elements, workload), reduced_bytes(elements, strategy)
    return SentBytes(
        in_group=(group - 1) / group * (gathers * parameters + gradients),
        to_replicas=2 * (replicas - 1) / replicas * gradients / group,
    )


def on_shard(fabric: Fabric, workload: Workload, strategy: Strategy) -> Workload:
    """Give a rank the optimizer of its shard only.

    Args:
        fabric: The links of the job.
        workload: One rank's step.
        strategy: The strategy of the job.
    """
    group = shard_group(fabric, strategy)
    return msgspec.structs.replace(workload, optimizer_seconds=workload.optimizer_seconds / group)


def sharded_memory_bytes(fabric: Fabric, workload: Workload, strategy: Strategy) -> int | None:
    """Estimate the peak memory of a rank from that of the whole model on one; None if that is unknown.

    Of a catalogued network the parts are known. Of a profile, four values per parameter are taken for the state that is sharded.

    Args:
        fabric: The links of the job.
        workload: One rank's step.
        strategy: The strategy of the job, with `shard`.
    """
    group = shard_group(fabric, strategy)
    if workload.has_network:
        gathers_all = strategy.shard == "grads"
        return catalog_memory(
            workload, ranks=fabric.ranks, device_bytes=None, shards=group, gathers_all=gathers_all
        ).peak_bytes
    if workload.memory_bytes is None:
        return None
    state = min(workload.memory_bytes, 4 * workload.parameter_bytes)
    whole = gathered_elements(workload.gradients, all_at_once=strategy.shard == "grads")
    return workload.memory_bytes - state + state // group + gathered_bytes(whole, workload)


def sharded_step(
    fabric: Fabric,
    workload: Workload,
    strategy: Strategy,
    *,
    slowness: float,
    overlap_slowdown: float,
    spans: bool = False,
) -> Step:
    """Predict a step: each block is gathered while the one before computes, and its gradients are reduced while the next does.

    The first gather and the last reduce-scatter are exposed. The collectives of a link run one after the other in the order in which
    FSDP2 issues them. Every batch of an accumulation gathers and reduces.

    Args:
        fabric: The links of the job.
        workload: One rank's step.
        strategy: The strategy of the job, with `shard`.
        slowness: The slowdown of the slowest rank.
        overlap_slowdown: Relative slowdown of computing while the network is busy.
        spans: True to record the timeline.
    """
    costs = _block_costs(fabric, workload, strategy, slowness)
    timeline = _Timeline(draws=spans)
    for _ in range(strategy.accumulate):
        timeline.compute("loader", "loader", workload.loader_seconds)
        _simulate_batch(timeline, costs, gathers_again=strategy.shard != "grads")
    timeline.join()
    computing = strategy.accumulate * (workload.loader_seconds + sum(cost.forward + cost.backward for cost in costs))
    exposed = max(0.0, timeline.now - computing)
    # Linear in the end of the timeline and in the busy time, each with a positive factor: a faster link never makes a step longer.
    overlapped = min(computing, timeline.busy - exposed)
    slowed = overlap_slowdown * max(0.0, overlapped)
    timeline.compute("optimizer", "optimizer", workload.optimizer_seconds * slowness)
    return Step(
        seconds=timeline.now + slowed,
        communication_seconds=timeline.busy,
        exposed_seconds=exposed,
        spans=tuple(timeline.spans),
    )


def _block_costs(fabric: Fabric, workload: Workload, strategy: Strategy, slowness: float) -> list[_BlockCost]:
    """List the blocks in the order of forward, the root first. The root's own passes are those that no block has."""
    blocks = parameter_blocks(workload.gradients)
    group = fabric if strategy.shard != "host" else collective_cost.one_host(fabric)
    found, before = [], 0.0
    for block in blocks:
        own = min(block.ready_seconds, workload.backward_seconds) - before
        before += max(0.0, own)
        found.append(_block_cost(fabric, group, workload, strategy, block, max(0.0, own) * slowness))
    left = max(0.0, workload.backward_seconds - before) * slowness
    if left:  # passes without parameters
        found[-1] = msgspec.structs.replace(
            found[-1],
            backward=found[-1].backward + left,
            forward=found[-1].forward + left * workload.forward_seconds / workload.backward_seconds,
        )
    if not workload.backward_seconds:
        found[-1] = msgspec.structs.replace(found[-1], forward=workload.forward_seconds * slowness)
    return found[::-1]


def _block_cost(
    fabric: Fabric, group: Fabric, workload: Workload, strategy: Strategy, block: ParameterBlock, backward: float
) -> _BlockCost:
    gradients = reduced_bytes(block.elements, strategy)
    ratio = workload.forward_seconds / workload.backward_seconds if workload.backward_seconds else 0.0
    return _BlockCost(
        forward=backward * ratio,
        backward=backward,
        gather=collective_cost.all_gather(group, gathered_bytes(block.elements, workload)),
        reduce=collective_cost.all_gather(group, gradients),
        replicate=collective_cost.between_hosts(fabric, gradients) if strategy.shard == "host" else 0.0,
    )


def _simulate_batch(timeline: _Timeline, costs: list[_BlockCost], *, gathers_again: bool) -> None:
    """Simulate forward and backward; `costs` begins with the root, which stays gathered until its gradients are reduced."""
    gathered = timeline.send(timeline.now, costs[0].gather, "gather root")
    for number, cost in enumerate(costs):
        timeline.wait_until(gathered)
        if number + 1 < len(costs):  # prefetched one block ahead
            gathered = timeline.send(timeline.now, costs[number + 1].gather, f"gather {number + 1}")
        timeline.compute("forward", f"forward {number}", cost.forward)
    order = [*range(1, len(costs))][::-1]
    # The last block stays gathered after forward; its backward follows at once.
    gathered = timeline.now
    for number in order:
        timeline.wait_until(gathered)
        if gathers_again and number > 1:
            gathered = timeline.send(timeline.now, costs[number - 1].gather, f"gather {number - 1}")
        timeline.compute("backward", f"backward {number}", costs[number].backward)
        timeline.reduce(costs[number], f"reduce {number}")
    timeline.compute("backward", "backward root", costs[0].backward)
    timeline.reduce(costs[0], "reduce root")


class _Timeline:
    """The clocks of computing, of the links of the shard group and of those to the replicas."""

    def __init__(self, *, draws: bool) -> None:
        self.now = 0.0
        self.busy = 0.0
        self.spans: list[Span] = []
        self._group_free = 0.0
        self._replicas_free = 0.0
        self._draws = draws

    def wait_until(self, seconds: float) -> None:
        self._draw("compute", "wait", "wait for parameters", self.now, seconds)
        self.now = max(self.now, seconds)

    def compute(self, phase: Phase, label: str, seconds: float) -> None:
        self._draw("compute", phase, label, self.now, self.now + seconds)
        self.now += seconds

    def send(self, ready: float, seconds: float, label: str) -> float:
        """Occupy the links of the shard group when they are free; returns the end."""
        start = max(ready, self._group_free)
        self._group_free = start + seconds
        self.busy += seconds
        self._draw("network", "communication", label, start, self._group_free)
        return self._group_free

    def reduce(self, cost: _BlockCost, label: str) -> None:
        """Reduce-scatter the gradients of a block, then all-reduce the shards between replicas."""
        end = self.send(self.now, cost.reduce, label)
        start = max(end, self._replicas_free)
        self._replicas_free = start + cost.replicate
        self.busy += cost.replicate
        self._draw("network", "communication", f"{label} between hosts", start, self._replicas_free)

    def join(self) -> None:
        """Wait for all gradients."""
        self.wait_until(max(self._group_free, self._replicas_free))

    def _draw(self, stream: Literal["compute", "network"], phase: Phase, label: str, start: float, end: float) -> None:
        if self._draws and end > start:
            self.spans.append(Span(stream=stream, phase=phase, label=label, start_seconds=start, end_seconds=end))
