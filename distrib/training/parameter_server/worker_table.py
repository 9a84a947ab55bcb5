"""One optimizer's parameters on a worker: pushes gradients and receives values, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from distrib.training.parameter_server.chunked_parameters import ChunkedParameters, refuse_sparse
from distrib.training.parameter_server.client import ParameterClient
from distrib.training.parameter_server.host_aggregation.host_group import HostTable
from distrib.training.parameter_server.optimizer_state_conversion import (
    state_by_parameter,
)
from distrib.training.parameter_server.parameter_changes import ParameterChangeCheck, PushedGradients
from distrib.training.parameter_server.server_table import (
    as_memoryview,
)
from distrib.training.parameter_server.transport import Frame, FrameFlag, FrameKind, decode


class WorkerTable(ChunkedParameters):
    """A table on a worker. Every rank creates the same tables in the same order.

    Args:
        counts_skipped_steps: True if other workers wait for this one's steps, also for those that it leaves out.
    """

    def __init__(
        self, number: int, optimizer: Optimizer, names: Mapping[torch.Tensor, str], client: ParameterClient,
        transfer_format: str, pushers: int, *, counts_skipped_steps: bool,
    ) -> None:  # fmt: skip
        super().__init__(number, optimizer, names, client, transfer_format, pushers)
        self.step = 0
        self.pushes_in_backward = True
        """True if the next backward pass is the last before a step."""
        self.changes = ParameterChangeCheck(self.parameters, self.name_of)
        self._counts_skipped_steps = counts_skipped_steps
        self._step_has_begun = False
        self._is_eager = True  # False if gradients change between backward and step, other than by a factor
        self._repeat_pushes = False  # True if the pushed gradients of this step may be outdated
        self._sent_options: list[dict[str, Any]] = list(self.description.options)
        self._missing = {chunk.number: len(chunk.pieces) for chunk in self.chunks}  # gradients of each chunk
        self._first_values: dict[int, torch.Tensor] = {}
        self._received: set[int] = set()  # chunks whose buffers have held the servers' value
        self._pushed: set[int] = set()  # chunks that were pushed in this step
        self._ready: set[int] = set()  # identities of the parameters whose gradients are complete in this step
        self._gradients = PushedGradients()

    # -- begin and end -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Describe the table to the servers, give them first values if they have none, and receive theirs."""
        self.client.descriptions[self.number] = self._frames_for_new_server
        description = msgspec.json.encode(self.description)
        replies = self.client.request_all(Frame(FrameKind.DESCRIBE, table=self.number), description)
        if any(decode(payload)["give"] for _, payload in replies):
            self._first_values = {chunk.number: self._flat_value(chunk) for chunk in self.chunks}
            self.give_values(range(len(self.chunks)), replace=False)
        self.pull()
        self._first_values = {}
        self.changes.on_step(first=True)
        if self.client.group:
            table = HostTable(self.buffers, self._arenas[0], self._sizes, self._create_server_buffers)
            self.client.group.add_table(self.number, table)
        elif self._arenas:
            self.client.loop.call_soon(lambda: self.client.offer_memory(self.number, self._arenas))

    def _frames_for_new_server(self, shard: int) -> list[tuple[Frame, Any]]:
        """Return the table and this worker's last values, for a server that has lost them. Its optimizer state is new."""
        description = msgspec.json.encode(self.description)
        frames: list[tuple[Frame, Any]] = [(Frame(FrameKind.DESCRIBE, table=self.number), description)]
        for chunk, buffer in zip(self.chunks, self.buffers, strict=True):
            value = buffer.value if chunk.number in self._received else self._first_values.get(chunk.number)
            if buffer.shard == shard and value is not None:
                value = value.to(getattr(torch, chunk.kind)).clone()
                frame = Frame(FrameKind.SET_VALUE, table=self.number, chunk=buffer.chunk)
                frames.append((frame, as_memoryview(value)))
        return frames

    def end(self) -> None:
        """Drop the table here and on the servers. The last call."""
        self.client.forget_table(self.number)  # gradients in flight would arrive after the end
        self.client.request_all(Frame(FrameKind.RETIRE, table=self.number))

    # -- values --------------------------------------------------------------------------------------------------------

    def give_values(self, numbers: Iterable[int], *, replace: bool) -> None:
        """Send the model's values of chunks to the servers.

        Args:
            numbers: Numbers of the chunks.
            replace: False to leave values that a server has.
        """
        futures = []
        for number in numbers:
            frame = Frame(FrameKind.SET_VALUE, FrameFlag.FINAL if replace else 0, self.number, number)
            value = as_memoryview(self._flat_value(self.chunks[number]))
            futures.append(self.client.request(self.buffers[number].shard, frame, value))
        for future in futures:
            self.client.result(future)

    def pull(self, numbers: Sequence[int] | None = None) -> None:
        """Give the model the servers' present values, exactly.

        Args:
            numbers: Numbers of the chunks; None for all.
        """
        self.wait()
        numbers = range(len(self.chunks)) if numbers is None else numbers
        self.changes.check()
        futures = []
        for number in numbers:
            frame = Frame(FrameKind.PULL, table=self.number, chunk=number)
            futures.append(self.client.request(self.buffers[number].shard, frame))
        for number, future in zip(numbers, futures, strict=True):
            chunk, buffer = self.chunks[number], self.buffers[number]
            frame, payload = self.client.result(future)
            buffer.is_fresh, buffer.version = False, frame.version
            value = torch.frombuffer(payload, dtype=getattr(torch, chunk.kind))
            buffer.value.copy_(value)
            self._received.add(number)
            self._install(chunk, self._parts(chunk, value))

    def install_values(self, numbers: Iterable[int]) -> None:
        """Give the model the replies to its last pushes, as soon as they are there.

        Args:
            numbers: Numbers of the chunks.
        """
        for number in numbers:
            buffer = self.buffers[number]
            if buffer.is_waiting and number not in self._pushed:
                self.client.wait([buffer])
            if buffer.is_fresh:
                buffer.is_fresh = False
                self.changes.check(piece.parameter for piece in self.chunks[number].pieces)
                self._install(self.chunks[number], self._value_parts[number])

    def wait(self) -> None:
        """Wait until all steps are answered. Pushes of the next step are answered after it is taken."""
        self.client.wait(buffer for buffer in self.buffers if buffer.chunk not in self._pushed)

    # -- a step --------------------------------------------------------------------------------------------------------

    def on_gradient_ready(self, parameter: torch.Tensor) -> None:
        """Push the chunks whose gradients are complete, in the backward pass.

        Args:
            parameter: The parameter whose gradient is ready.
        """
        if not self._is_eager or not self.pushes_in_backward:
            return
        assert parameter.grad is not None
        refuse_sparse(parameter.grad)
        if id(parameter) in self._ready:  # a second backward pass before the step
            self._push_after_backward()
            return
        self._ready.add(id(parameter))
        for number in self.chunks_of[parameter]:
            self._missing[number] -= 1
            if not self._missing[number]:
                self._gradients.record(self.parameters[piece.parameter] for piece in self.chunks[number].pieces)
                self._push(number, final=False)

    def expect_unscaling(self) -> None:
        """Prepare for a GradScaler, which divides the gradients after the backward pass."""
        if not self._may_scale:
            self._push_after_backward()

    def _push_after_backward(self) -> None:
        """Push after the backward pass from now on, as gradients change after it. This step's pushes are repeated."""
        self._is_eager, self._repeat_pushes = False, True

    def take_step(self, *, skip: bool = False) -> None:
        """Push the gradients that were not pushed yet, and let the servers apply all.

        Args:
            skip: True to leave this step out; servers count it if other workers wait for this one's steps.
        """
        if skip and self.client.group is None and not self._counts_skipped_steps:
            self._end_step()
            return
        self.changes.check()
        options = self._options()
        if options != self._sent_options:
            self.client.set_options(self.number, options)
            self._sent_options = options
        valid, scale = ([], 1.0) if self._repeat_pushes or skip else self._valid_pushes()
        for chunk in self.chunks:
            if chunk.number not in valid:
                self._push(chunk.number, final=True, empty=skip)
        self._begin_step()
        self.client.commit((self.buffers[number] for number in sorted(valid)), self.step + 1, scale)
        self.step += 1
        self.changes.on_step()
        self._step_has_begun = False
        self._pushed.clear()
        self._end_step()

    def _valid_pushes(self) -> tuple[list[int], float]:
        """Return the chunks whose push holds the gradient of this step up to a factor, and the factor."""
        unchanged = self._gradients.unchanged()
        valid = [
            chunk
            for chunk in self._pushed
            if all(id(self.parameters[piece.parameter]) in unchanged for piece in self.chunks[chunk].pieces)
        ]
        if len(valid) == len(self._pushed):
            return valid, 1.0
        factor = self._gradients.common_factor()
        if factor is not None and (factor == 1.0 or self._may_scale):
            return list(self._pushed), factor
        self._is_eager = False
        return valid, 1.0

    @property
    def _may_scale(self) -> bool:
        """True if servers may scale gradients. A group has sent the mean of several; half precision cuts large ones before they are scaled."""
        return self.client.group is None and torch.float16 not in self._dtypes

    def _end_step(self) -> None:
        self._repeat_pushes = False
        self._ready.clear()
        self._gradients.clear()
        self._missing = {chunk.number: len(chunk.pieces) for chunk in self.chunks}

    def _begin_step(self) -> None:
        """Join the other workers again before the first push of a step, if this worker was away."""
        if self._step_has_begun:
            return
        self._step_has_begun = True
        if self.client.must_rejoin:
            self.client.rejoin()
        if (group := self.client.group) and group.is_excluded(self.number):
            self.wait()
            self.step = max(self.step, group.join(self.number), *(of_group for _, of_group in self._last_steps()))

    def _last_steps(self) -> list[tuple[int, int]]:
        """Return by server the last step of any worker, and of this worker's group."""
        replies = self.client.request_all(Frame(FrameKind.LAST_STEP, table=self.number))
        return [decode(payload) for _, payload in replies]

    def join(self) -> None:
        """Make the servers wait for this worker again from its next step on."""
        self.wait()
        group = self.client.group
        if group and not group.is_leader:  # the leader knows the step; this only makes the worker a member
            self.client.request_all(Frame(FrameKind.JOIN, table=self.number))
            return
        before = self.step
        self.step = max(before, *(of_any for of_any, _ in self._last_steps()))
        self._repeat_pushes |= self.step != before and bool(self._pushed)  # they belong to a step that is not taken
        self.client.request_all(Frame(FrameKind.JOIN, table=self.number, version=self.step + 1))
        if group:
            group.restart(self.number, self.step)

    def _push(self, number: int, *, final: bool, empty: bool = False) -> None:
        self._begin_step()
        buffer, chunk = self.buffers[number], self.chunks[number]
        if number not in self._pushed:
            self.install_values([number])  # the reply to the last step, unless a forward pass has installed it
            self._pushed.add(number)
        self._copy_gradient(chunk, empty=empty)
        ready = _wait_for_copy(self.parameters[chunk.pieces[0].parameter])
        self.client.push(buffer, self.step + 1, final=final, weight=0 if empty else 1, ready=ready)

    # -- optimizer state -----------------------------------------------------------------------------------------------

    def optimizer_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the optimizer state of each parameter from the servers, after this worker's last step."""
        self.wait()
        futures = [
            self.client.request(buffer.shard, Frame(FrameKind.GET_STATE, table=self.number, chunk=buffer.chunk))
            for buffer in self.buffers
        ]
        contents = [self.client.result(future)[1] for future in futures]
        return state_by_parameter(self.parameters, self.chunks, contents)


def _wait_for_copy(parameter: torch.Tensor) -> Callable[[], None] | None:
    """Return a function that waits for the GPU's copy of a gradient; None on the CPU."""
    if parameter.device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # or a core would be busy waiting
    event.record()

    def wait() -> None:
        # The current device of another thread is the first GPU, on which each rank would allocate memory.
        with torch.cuda.device(parameter.device):
            event.synchronize()

    return wait
