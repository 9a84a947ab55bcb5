"""The parameters of an optimizer as chunks: their buffers on a worker, and copies between both."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from distrib.environment import DISTRIB_ADDRESS
from distrib.errors import TrainingError
from distrib.training.parameter_server.chunk_buffers import ChunkBuffer
from distrib.training.parameter_server.client import ParameterClient
from distrib.training.parameter_server.optimizer_state_conversion import (
    check_state_shapes,
    state_of_chunk,
)
from distrib.training.parameter_server.partitioning import Chunk, ParameterSpec, Piece
from distrib.training.parameter_server.server_optimizer import group_options, optimizer_spec
from distrib.training.parameter_server.server_table import (
    TableDescription,
    transfer_dtype,
)
from distrib.training.parameter_server.shared_memory import SharedArena
from distrib.training.parameter_server.transport import Frame, FrameKind


class ChunkedParameters:
    """The parameters of an optimizer as chunks, and a worker's buffers for them.

    Args:
        names: Names of the parameters of all models.
        transfer_format: Format in which gradients and values are sent.
        pushers: Number of host groups and of workers without one.
    """

    def __init__(
        self, number: int, optimizer: Optimizer, names: Mapping[torch.Tensor, str], client: ParameterClient,
        transfer_format: str, pushers: int,
    ) -> None:  # fmt: skip
        self.number, self.client, self.optimizer = number, client, optimizer
        self.parameters: list[torch.Tensor] = []
        self._names = names
        specs: list[ParameterSpec] = []
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    name = names.get(parameter, f"number {len(specs)}")
                    specs.append(ParameterSpec(name, tuple(parameter.shape), index, _server_dtype(name, parameter)))
                    self.parameters.append(parameter)
        self._on_cpu = all(parameter.device.type == "cpu" for parameter in self.parameters)
        shared = self._on_cpu and DISTRIB_ADDRESS not in os.environ  # all ranks on one host
        self.description = TableDescription(
            optimizer_spec(optimizer), tuple(specs), tuple(self._options()), len(client.addresses), transfer_format, shared,
            pushers,
        )  # fmt: skip
        self.chunks: Sequence[Chunk] = self.description.chunks()
        self._dtypes = [transfer_dtype(transfer_format, chunk.kind) for chunk in self.chunks]
        self._sizes = {chunk.number: chunk.elements * self._dtypes[chunk.number].itemsize for chunk in self.chunks}
        self._arenas: dict[int, SharedArena] = {}
        if client.group:
            arena = SharedArena(self._sizes)
            if not self._on_cpu:
                arena.pin()
            self._arenas = dict.fromkeys(range(len(client.addresses)), arena)
        elif self._on_cpu:
            self._arenas = self._arenas_by_server()
        self.buffers = self._create_buffers(self._arenas)
        self._gradient_parts = [self._parts(c, b.gradient) for c, b in zip(self.chunks, self.buffers, strict=True)]
        self._value_parts = [self._parts(c, b.value) for c, b in zip(self.chunks, self.buffers, strict=True)]
        self.chunks_of: dict[torch.Tensor, list[int]] = {parameter: [] for parameter in self.parameters}
        for chunk in self.chunks:
            for piece in chunk.pieces:
                self.chunks_of[self.parameters[piece.parameter]].append(chunk.number)
        self._is_divided = [len(self.chunks_of[parameter]) > 1 for parameter in self.parameters]
        self._ids = {id(parameter) for parameter in self.parameters}  # a tensor's hash is a slow Python function

    def _create_buffers(self, arenas: Mapping[int, SharedArena]) -> list[ChunkBuffer]:
        return [
            ChunkBuffer(self.number, c.number, c.server, *self._memory(c, arenas.get(c.server))) for c in self.chunks
        ]

    def _memory(self, chunk: Chunk, arena: SharedArena | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the gradient and the value of a chunk: shared, or pinned if parameters are on a GPU."""
        dtype = self._dtypes[chunk.number]
        if arena:
            return arena.gradients[chunk.number].view(dtype), arena.values[chunk.number].view(dtype)
        pinned = not self._on_cpu
        gradient, value = (torch.zeros(chunk.elements, dtype=dtype, device="cpu", pin_memory=pinned) for _ in range(2))
        return gradient, value

    def _arenas_by_server(self) -> dict[int, SharedArena]:
        servers = {chunk.server for chunk in self.chunks}
        return {
            server: SharedArena({c.number: self._sizes[c.number] for c in self.chunks if c.server == server})
            for server in servers
        }

    def _create_server_buffers(self) -> tuple[dict[int, ChunkBuffer], dict[int, SharedArena]]:
        arenas = self._arenas_by_server()
        return {buffer.chunk: buffer for buffer in self._create_buffers(arenas)}, arenas

    def _options(self) -> list[dict[str, Any]]:
        return [group_options(group) for group in self.optimizer.param_groups]

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter, or its shape if it has none.

        Args:
            parameter: The parameter.
        """
        return self._names.get(parameter, f"a parameter {list(parameter.shape)}")

    def chunks_with(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Return the chunks that hold any element of these parameters.

        Args:
            parameters: Parameters, perhaps of other tables, too.
        """
        return sorted({chunk for parameter in parameters for chunk in self.chunks_of.get(parameter, ())})

    def _parts(self, chunk: Chunk, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the pieces of a chunk; a piece that is a whole parameter has its shape."""
        parts = flat.split_with_sizes([piece.stop - piece.start for piece in chunk.pieces])
        shapes = [self.parameters[piece.parameter].shape for piece in chunk.pieces]
        return [
            part.view(shape) if part.numel() == shape.numel() else part
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def _part(self, values: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return a piece of a parameter or its gradient: the tensor itself, or a flat part of it."""
        return values.reshape(-1)[piece.start : piece.stop] if self._is_divided[piece.parameter] else values

    def _install(self, chunk: Chunk, values: Iterable[torch.Tensor]) -> None:
        targets, parts = [], []
        for piece, part in zip(chunk.pieces, values, strict=True):
            data = self.parameters[piece.parameter].data
            if not self._is_divided[piece.parameter] or data.is_contiguous():
                targets.append(self._part(data, piece))
                parts.append(part)
            else:  # such as channels last
                whole = data.reshape(-1)
                whole[piece.start : piece.stop] = part.to(data.device, non_blocking=True)
                data.copy_(whole.view(data.shape))
        if targets:
            torch._foreach_copy_(targets, parts, non_blocking=True)

    def _flat_value(self, chunk: Chunk) -> torch.Tensor:
        parts = [self.parameters[p.parameter].data.reshape(-1)[p.start : p.stop] for p in chunk.pieces]
        return torch.cat([part.to("cpu", getattr(torch, chunk.kind)) for part in parts])

    def _copy_gradient(self, chunk: Chunk, *, empty: bool) -> None:
        targets, parts = [], []
        for piece, target in zip(chunk.pieces, self._gradient_parts[chunk.number], strict=True):
            gradient = self.parameters[piece.parameter].grad
            if gradient is None or empty:
                if not self._on_cpu and target.is_pinned():
                    torch.cuda.current_stream().synchronize()  # an earlier copy of the GPU must not come later
                target.zero_()
                continue
            refuse_sparse(gradient)
            part = self._part(gradient, piece)
            if target.dtype is torch.float16 and part.dtype is not torch.float16:
                # Larger values would become infinite after all checks for infinite gradients.
                largest = torch.finfo(torch.float16).max
                part = part.to(torch.float16).clamp_(-largest, largest)
            targets.append(target)
            parts.append(part)
        if targets:
            torch._foreach_copy_(targets, parts, non_blocking=True)

    def check(self) -> None:
        """Check that the servers hold all parameters that a step would change.

        Raises:
            TrainingError: A parameter was frozen or unfrozen after `job.prepare`, or the client has failed.
        """
        self.client.check()
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            if id(parameter) in self._ids:
                if not parameter.requires_grad:
                    raise TrainingError(
                        f"{self.name_of(parameter)} was frozen after job.prepare: the optimizer on the servers would continue "
                        "with momentum and weight decay",
                        hint="freeze it before job.prepare, or give it a parameter group of its own and set lr to 0",
                        code="gradient-missing",
                    )
            elif parameter.grad is not None:
                raise TrainingError(
                    f"{self.name_of(parameter)} has a gradient, but was not trained at job.prepare: every rank would diverge",
                    hint="unfreeze parameters, and give them to the optimizer, before job.prepare",
                    code="gradient-not-reduced",
                )

    def give_optimizer_state(self, *, is_main: bool) -> None:
        """Move the state of the script's optimizer to the servers. A parameter without state gets zeros.

        Args:
            is_main: True on the main rank, whose state counts.

        Raises:
            TrainingError: A tensor has another shape than its parameter. Raised on every rank, so that all ranks fail together.
        """
        states, spec = self.optimizer.state, self.description.optimizer
        check_state_shapes(spec, self.parameters, states, self.name_of)
        futures = []
        for chunk, buffer in zip(self.chunks, self.buffers, strict=True) if is_main else ():
            content = state_of_chunk(spec, self.parameters, chunk, states)
            frame = Frame(FrameKind.SET_STATE, table=self.number, chunk=buffer.chunk)
            futures.append(self.client.request(buffer.shard, frame, content))
        for future in futures:
            self.client.result(future)
        states.clear()


def _server_dtype(name: str, parameter: torch.Tensor) -> str:
    if parameter.dtype == torch.float64:
        return "float64"
    if parameter.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return "float32"
    raise TrainingError(
        f"parameter {name} is {parameter.dtype}, expected a real floating point type in mode async",
        hint="use --mode sync",
    )


def refuse_sparse(gradient: torch.Tensor) -> None:
    """Raise TrainingError if a gradient is sparse.

    Args:
        gradient: The gradient.
    """
    if gradient.is_sparse:
        raise TrainingError(
            "a gradient is sparse, expected a dense one in mode async", hint="create the nn.Embedding with sparse=False"
        )
