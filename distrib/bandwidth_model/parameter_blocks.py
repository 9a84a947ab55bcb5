"""Parameter blocks: the units that sharded data parallel gathers and reduces, from the names of the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from distrib.bandwidth_model.architectures import BLOCK_NAME
from distrib.bandwidth_model.workload import Gradient


class ParameterBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that are gathered together, one block of the model. `ready_seconds`: its gradients, since backward began."""

    elements: int
    ready_seconds: float


def parameter_blocks(gradients: Sequence[Gradient]) -> tuple[ParameterBlock, ...]:
    """Group parameters as FSDP does if each repeated block is wrapped; all others form the root, which comes last.

    Args:
        gradients: In the order in which they get ready.

    Returns:
        The blocks in the order of backward, then the root, perhaps empty: FSDP gathers it first, and reduces its gradients last.
    """
    elements: dict[str, int] = {"": 0}
    ready: dict[str, float] = {}
    for gradient in gradients:
        match = BLOCK_NAME.match(gradient.name)
        name = match[1] if match else ""
        elements[name] = elements.get(name, 0) + gradient.elements
        ready[name] = max(ready.get(name, 0.0), gradient.ready_seconds)
    ready[""] = max(ready.values(), default=0.0)
    names = [*sorted(filter(None, elements), key=ready.__getitem__), ""]
    return tuple(ParameterBlock(elements=elements[name], ready_seconds=ready[name]) for name in names)


def gathered_elements(gradients: Sequence[Gradient], *, all_at_once: bool) -> int:
    """Count the parameters and gradients of a rank that are whole at a time.

    Block by block: the root, which stays whole from forward to backward, two blocks, and the gradients of one; at the end the root
    with its gradients.

    Args:
        gradients: In the order in which they get ready.
        all_at_once: True if parameters stay gathered after forward: all of them, and the gradients of one block.
    """
    *sizes, root = (block.elements for block in parameter_blocks(gradients))
    largest = max(sizes, default=0)
    if all_at_once:
        return root + sum(sizes) + max(root, largest)
    return max(2 * root, root + min(sum(sizes), 2 * largest) + largest)
