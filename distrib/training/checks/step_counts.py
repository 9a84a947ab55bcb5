"""Verify with gradient accumulation that all ranks are in the same batch of a step.

Ranks exchange nothing while batches accumulate, so a script that skips `optimizer.step()` on one rank would mix different batches.
Each rank sends its counts before the batch that is exchanged, and reads those of the others after it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from distrib.errors import TrainingError


class StepCountCheck:
    """The comparison of one optimizer's batches between ranks."""

    def __init__(self, optimizer_name: str) -> None:
        """Create the check.

        Args:
            optimizer_name: The optimizer's class, for messages.
        """
        self._name = optimizer_name
        self._counts: list[torch.Tensor] = []
        self._work: dist.Work | None = None

    def send(self, backward_passes: int, calls: int, group: dist.ProcessGroup) -> None:
        """Send this rank's counts without waiting.

        Args:
            backward_passes: Backward passes so far.
            calls: Calls of `step()` so far.
            group: A group for step counts only.
        """
        own = torch.tensor([backward_passes, calls], device="cpu")
        self._counts = [torch.empty_like(own) for _ in range(group.size())]
        self._work = dist.all_gather(self._counts, own, group=group, async_op=True)

    def verify(self) -> None:
        """Compare the counts that were sent last, if any.

        Raises:
            TrainingError: On every rank, if one is in another batch.
        """
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        counts = [tuple(count.tolist()) for count in self._counts]
        if len(set(counts)) == 1:
            return
        skipped = [(passes - calls, passes) for passes, calls in counts]  # or one rank is ahead of the others
        most, least = skipped.index(max(skipped)), skipped.index(min(skipped))
        seen = [f"rank {rank} {counts[rank][1]} times in {counts[rank][0]} backward passes" for rank in (least, most)]
        raise TrainingError(
            f"step() of {self._name} was called by {', by '.join(seen)}: ranks would accumulate different batches",
            hint="call step() after every batch on every rank; on_nan='skip' skips bad steps on all ranks",
            code="step-counts-differ",
        )
