"""Memory of a rank at the peak of a training step, and the changes with which it fits a device.

The peak is at the start of backward, when all activations are present, or in the optimizer's step, when all gradients are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import msgspec

from distrib.bandwidth_model.architectures import Checkpointing, NetworkArithmetic
from distrib.units import size_text

USABLE_FRACTION = 0.95
"""Part of a GPU's memory that tensors can have. CUDA's context takes 0.3 to 0.6 GB, and blocks between tensors are lost."""


class MemoryChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a script that lowers its memory, with the peak that it leads to."""

    batch: int
    """Samples of one forward pass."""
    accumulate: int = 1
    """Batches of a step, so that a step has as many samples as before."""
    half: bool = False
    """True for autocast to 16 bits where the script computes in 32."""
    checkpointing: bool = False
    """True to compute the activations of each block again in backward."""
    peak_bytes: int = 0

    @property
    def text(self) -> str:
        """The change in words: `16-bit autocast, batches of 4 with --accumulate 2`."""
        parts = ["16-bit autocast"] * self.half + ["activation checkpointing"] * self.checkpointing
        parts += [f"batches of {self.batch} with --accumulate {self.accumulate}"] * (self.accumulate > 1)
        return ", ".join(parts)


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one rank holds on its device in a training step.

    The parts may add up to more than the peak, because gradients replace activations during backward.
    """

    parameter_bytes: int
    """Parameters and buffers of the model."""
    gradient_bytes: int
    optimizer_bytes: int
    """State of the optimizer on the device, such as Adam's two moments."""
    bucket_bytes: int
    """Buckets in which DistributedDataParallel sends the gradients; 0 with one rank, and with sharding."""
    gathered_bytes: int = 0
    """With sharding: parameters of two blocks and the gradients of one, not sharded; with `--shard grads`, all parameters."""
    activation_bytes: int
    """Tensors that autograd keeps from forward for backward, with the batch itself and 16-bit copies of weights."""
    peak_bytes: int
    """The most at a time, with the temporary tensors of that moment."""
    device: str = ""
    """Name of the device that `device_bytes` belongs to."""
    device_bytes: int | None = None
    """Memory of the device; None if it is unknown."""
    changes: tuple[MemoryChange, ...] = ()
    """If it does not fit: changes with which it does."""

    @property
    def fits(self) -> bool | None:
        """True if the peak is at most the usable memory of the device; None if that is unknown."""
        return None if self.device_bytes is None else self.peak_bytes <= USABLE_FRACTION * self.device_bytes

    @property
    def parts(self) -> dict[str, int]:
        """The parts by name, in bytes."""
        parts = {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer state": self.optimizer_bytes,
            **({"gathered blocks": self.gathered_bytes} if self.gathered_bytes else {"buckets": self.bucket_bytes}),
            "activations": self.activation_bytes,
        }
        temporary = self.peak_bytes - sum(parts.values())
        return parts | {"temporary tensors": temporary} if temporary > 0 else parts

    @property
    def verdict(self) -> str:
        """The peak in words: `3.2 GB at the peak, of 80 GB (A100): it fits`."""
        peak = f"{size_text(self.peak_bytes)} at the peak"
        if self.device_bytes is None:
            return peak
        device = f" ({self.device})" if self.device else ""
        verdict = "it fits" if self.fits else "it does not fit"
        if self.fits is False and self.peak_bytes <= self.device_bytes:
            verdict += f", as {USABLE_FRACTION:.0%} are usable"
        return f"{peak}, of {size_text(self.device_bytes)}{device}: {verdict}"

    @property
    def advice(self) -> str:
        """Changes with which it fits, in words; empty if it fits already."""
        if self.fits is not False:
            return ""
        fitting = [f"{change.text} ({size_text(change.peak_bytes)})" for change in self.changes]
        return f"it would fit with {' or '.join(fitting)}" if fitting else "shard the model, as FSDP or DeepSpeed do"

    def __str__(self) -> str:
        return memory_table(self.parts, self.verdict, self.advice)


def memory_table(parts: Mapping[str, int], *remarks: str) -> str:
    """Format parts of a memory as a table.

    Args:
        parts: Bytes by name.
        remarks: Lines below the table; empty ones are left out.
    """
    rows = [f"{name:<16}{size_text(size):>9}" for name, size in parts.items()]
    return "\n  ".join(["memory of a rank:", *rows, *filter(None, remarks)])


def peak_bytes(*, kept: int, gradients: int, activations: int, backward: int = 0, step: int = 0) -> int:
    """Compute the peak of a step whose gradients are freed before the next forward pass.

    During backward, activations are freed in proportion as gradients appear, so the peak is at its start or after its end.

    Args:
        kept: Bytes of parameters, optimizer state and buckets.
        gradients: Bytes of all gradients.
        activations: Bytes that forward leaves for backward.
        backward: Bytes of temporary tensors at the start of backward, such as the gradients of the logits.
        step: Bytes of temporary tensors in the optimizer's step.
    """
    return kept + max(activations + backward, gradients + step)


def changes_that_fit(
    peak: Callable[[MemoryChange], float], device_bytes: int, *, batch: int, can_halve: bool, can_checkpoint: bool
) -> tuple[MemoryChange, ...]:
    """Find changes with which a step fits a device: each alone, or else all together.

    Args:
        peak: Computes the peak of the step after a change, in bytes; infinite if the change is not possible.
        device_bytes: Memory of the device.
        batch: Samples of a forward pass now.
        can_halve: False if the step computes in 16 bits already.
        can_checkpoint: False if the model has no repeated blocks.
    """

    def first(changes: Iterator[MemoryChange]) -> list[MemoryChange]:
        """Return the first change that fits, in a list; an empty list without one."""
        for change in changes:
            if (size := peak(change)) <= USABLE_FRACTION * device_bytes:
                return [msgspec.structs.replace(change, peak_bytes=int(size))]
        return []

    def smaller(half: bool, checkpointing: bool) -> Iterator[MemoryChange]:
        for power in range(1, batch.bit_length()):
            part = batch >> power
            yield MemoryChange(batch=part, accumulate=math.ceil(batch / part), half=half, checkpointing=checkpointing)

    found = first(iter([MemoryChange(batch=batch, half=True)] * can_halve))
    found += first(iter([MemoryChange(batch=batch, checkpointing=True)] * can_checkpoint))
    found += first(smaller(False, False))
    if not found and (can_halve or can_checkpoint):
        whole = MemoryChange(batch=batch, half=can_halve, checkpointing=can_checkpoint)
        found = first(iter([whole, *smaller(can_halve, can_checkpoint)]))
    return tuple(found)


def network_memory(
    network: NetworkArithmetic,
    *,
    batch: int,
    half: bool,
    moments: int,
    step_copies: int,
    ranks: int,
    checkpointing: Checkpointing = "none",
    shards: int = 1,
    gathered: int = 0,
) -> MemoryEstimate:
    """Estimate the memory of a network with parameters in 32 bits, whole or sharded.

    Sharded, 16 bytes per parameter are divided with Adam: parameter, gradient and two moments (ZeRO, arXiv:1910.02054, section 3.1, in
    32 bits). Gathered parameters and their gradients come in the type of the products.

    Args:
        network: The network.
        batch: Samples of a forward pass.
        half: True if products are computed in 16 bits (autocast).
        moments: Values that the optimizer keeps for each parameter.
        step_copies: Temporary values for each parameter in the optimizer's step.
        ranks: Ranks of the job.
        checkpointing: Activation checkpointing.
        shards: Ranks that share parameters, gradients and optimizer state.
        gathered: With sharding: parameters and gradients that are whole at a time.
    """
    if shards > 1:
        return _sharded_memory(
            network,
            batch=batch,
            half=half,
            moments=moments,
            shards=shards,
            gathered=gathered,
            checkpointing=checkpointing,
        )
    parameters = 4 * network.elements
    buckets = parameters if ranks > 1 else 0
    # Autocast keeps the 16-bit copy of each weight for backward.
    casts = 2 * network.product_elements if half else 0
    activations = batch * network.activation_bytes(2 if half else 4, checkpointing=checkpointing) + casts
    return MemoryEstimate(
        parameter_bytes=parameters,
        gradient_bytes=parameters,
        optimizer_bytes=moments * parameters,
        bucket_bytes=buckets,
        activation_bytes=activations,
        peak_bytes=peak_bytes(
            kept=(1 + moments) * parameters + buckets,
            gradients=parameters,
            activations=activations,
            backward=batch * 4 * network.backward_elements,
            step=step_copies * parameters,
        ),
    )


def _sharded_memory(
    network: NetworkArithmetic,
    *,
    batch: int,
    half: bool,
    moments: int,
    shards: int,
    gathered: int,
    checkpointing: Checkpointing,
) -> MemoryEstimate:
    """Estimate the memory of a rank with sharding. Gradients count beside the activations: those of several blocks overlap."""
    element_bytes = 2 if half else 4
    parameters = 4 * math.ceil(network.elements / shards)
    activations = batch * network.activation_bytes(element_bytes, checkpointing=checkpointing)
    whole = element_bytes * gathered
    backward = batch * 4 * network.backward_elements
    return MemoryEstimate(
        parameter_bytes=parameters,
        gradient_bytes=parameters,
        optimizer_bytes=moments * parameters,
        bucket_bytes=0,
        gathered_bytes=whole,
        activation_bytes=activations,
        peak_bytes=(2 + moments) * parameters + whole + activations + backward,
    )
