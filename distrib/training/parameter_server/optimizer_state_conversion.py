"""Conversion of optimizer state between parameters, as scripts save it, and chunks, as servers store it."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from distrib.errors import TrainingError
from distrib.training.collectives import to_bytes
from distrib.training.parameter_server.partitioning import Chunk
from distrib.training.parameter_server.server_optimizer import PER_TENSOR, OptimizerSpec, is_broadcastable

State = Mapping[torch.Tensor, Mapping[str, Any]]


def state_by_parameter(
    parameters: Sequence[torch.Tensor], chunks: Sequence[Chunk], contents: Sequence[Any]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Assemble the state of each parameter from the state of the chunks.

    Args:
        parameters: The parameters of the table.
        chunks: Its chunks.
        contents: The servers' reply for each chunk.

    Returns:
        The state of each parameter, in the parameter's shape where it has as many elements.
    """
    found: dict[torch.Tensor, dict[str, Any]] = {}
    for chunk, content in zip(chunks, contents, strict=True):
        saved = torch.load(io.BytesIO(content), weights_only=True)
        offset = 0
        for piece in chunk.pieces:
            parameter = parameters[piece.parameter]
            state, size = found.setdefault(parameter, {}), piece.stop - piece.start
            for name, value in saved.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.numel() == chunk.elements:
                    whole = state.get(name)
                    if whole is None:  # zeros for the chunks of a server that has lost its state
                        whole = state[name] = torch.zeros(parameter.numel(), dtype=value.dtype, device="cpu")
                    whole[piece.start : piece.stop] = value.view(-1)[offset : offset + size]
                elif value is not None or name not in state:  # a copy each, as an optimizer counts in place
                    state[name] = value.clone() if isinstance(value, torch.Tensor) else value
            offset += size
    for parameter, state in found.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() == parameter.numel():
                state[name] = value.view(parameter.shape)
    return found


def check_state_shapes(
    spec: OptimizerSpec, parameters: Sequence[torch.Tensor], states: State, name_of: Callable[[torch.Tensor], str]
) -> None:
    """Check that state is divisible into chunks as its parameters are.

    Args:
        spec: The optimizer.
        parameters: The parameters of the table.
        states: State by parameter.
        name_of: Returns the name of a parameter.

    Raises:
        TrainingError: A tensor has another shape than its parameter.
    """
    for parameter in parameters:
        for name, value in states.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor) or name in PER_TENSOR:
                continue
            if not (is_broadcastable(value, parameter) if spec.whole else value.shape == parameter.shape):
                raise TrainingError(
                    f"optimizer state {name} of {name_of(parameter)} has shape {list(value.shape)}, "
                    f"expected {list(parameter.shape)}",
                    hint="restore the state of an optimizer of the same parameters, in the same order",
                    code="checkpoint-mismatch",
                )


def state_of_chunk(spec: OptimizerSpec, parameters: Sequence[torch.Tensor], chunk: Chunk, states: State) -> bytes:
    """Collect the state of a chunk. A parameter without state, as it was not trained yet, has zeros.

    Args:
        spec: The optimizer.
        parameters: The parameters of the table.
        chunk: The chunk.
        states: State by parameter.

    Returns:
        The state as a server restores it.
    """
    pieces = [(parameters[piece.parameter], piece.start, piece.stop) for piece in chunk.pieces]
    known = [states[parameter] for parameter, _, _ in pieces if states.get(parameter)]
    # A chunk counts its steps once: as the parameter that has taken the most.
    most_trained = max(known, key=lambda state: float(state.get("step", 0)), default={})
    content: dict[str, Any] = {}
    for name in dict.fromkeys(name for state in known for name in state):
        example = next((state[name] for state in known if state.get(name) is not None), None)
        if isinstance(example, torch.Tensor) and not spec.whole and name not in PER_TENSOR:
            parts = [_elements(states.get(p, {}).get(name), start, stop, example.dtype) for p, start, stop in pieces]
            content[name] = torch.cat(parts)
        else:
            value = most_trained.get(name)
            content[name] = value.cpu() if isinstance(value, torch.Tensor) else value  # servers have no GPU
    return to_bytes(content)


def _elements(value: torch.Tensor | None, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    if value is None:
        return torch.zeros(stop - start, dtype=dtype, device="cpu")
    return value.reshape(-1)[start:stop].cpu()
