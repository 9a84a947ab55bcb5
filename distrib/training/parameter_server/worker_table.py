"""One optimizer's parameters on a worker: gradients out, values in, chunk by chunk."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from distrib.environment import DISTRIB_ADDRESS
from distrib.errors import TrainingError
from distrib.training.parameter_server.client import Client, Slot
from distrib.training.parameter_server.host_aggregation.leader import GroupTable
from distrib.training.parameter_server.partitioning import Chunk, Parameter
from distrib.training.parameter_server.server_optimizer import PER_TENSOR, broadcasts, options_of, recipe_of
from distrib.training.parameter_server.server_table import Description, Wire, raw, wire_dtype
from distrib.training.parameter_server.shared_memory import Arena
from distrib.training.parameter_server.transport import FINAL, Frame, Kind, unpacked

WATCHED_STEPS = frozenset({1, 2, 10, 100, 1000})
"""After these of its steps a worker looks whether the script changes parameters itself."""
SMALL = 4096
"""At most so many elements has the parameter that it looks at after all the others."""


class HeldTable:
    """Table number `number` as a worker holds it. Every rank makes the same ones in the same order."""

    def __init__(
        self,
        number: int,
        optimizer: Optimizer,
        names: Mapping[torch.Tensor, str],
        client: Client,
        wire: Wire,
        *,
        counted: bool,
        pushers: int,
    ) -> None:
        """`counted`: whether other workers wait for this one's steps, also for those that it leaves out. `pushers`: how many push."""
        self.number, self.client, self.optimizer = number, client, optimizer
        self.parameters: list[torch.Tensor] = []
        self._names = names
        specs: list[Parameter] = []
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    name = names.get(parameter, f"number {len(specs)}")
                    specs.append(Parameter(name, tuple(parameter.shape), index, _kind(name, parameter)))
                    self.parameters.append(parameter)
        small = [parameter for parameter in self.parameters if 0 < parameter.numel() <= SMALL]
        self._one = sorted(small, key=torch.numel)[-1:]
        """The one that is looked at after every step: who puts an average's values in for an evaluation changes them all."""
        self._on_cpu = all(parameter.device.type == "cpu" for parameter in self.parameters)
        shared = self._on_cpu and DISTRIB_ADDRESS not in os.environ  # all on one host
        self.description = Description(
            recipe_of(optimizer), tuple(specs), tuple(self._settings()), len(client.addresses), wire, shared, pushers
        )
        self.chunks: Sequence[Chunk] = self.description.chunks()
        self._sizes = {chunk.number: chunk.elements * wire_dtype(wire, chunk.kind).itemsize for chunk in self.chunks}
        self._arenas: dict[int, Arena] = {}
        if client.group:
            arena = Arena(self._sizes)
            if not self._on_cpu:
                arena.pin()
            self._arenas = dict.fromkeys(range(len(client.addresses)), arena)
        elif self._on_cpu:
            self._arenas = self._arenas_of_servers()
        self.slots = self._slots_in(self._arenas)
        self.chunks_of: dict[torch.Tensor, list[int]] = {parameter: [] for parameter in self.parameters}
        for chunk in self.chunks:
            for piece in chunk.pieces:
                self.chunks_of[self.parameters[piece.parameter]].append(chunk.number)
        self._all = [slot.chunk for slot in self.slots]
        self.step = self._taken = 0
        self._counted = counted
        self.sending = True
        """Whether the next backward pass is the last before a step."""
        self._begun = False
        self._eager = True
        self._doubtful = False  # whether what was pushed before the step may be another gradient than that of the step
        self._settings_sent: list[dict[str, Any]] = list(self.description.options)
        self._missing = {chunk.number: len(chunk.pieces) for chunk in self.chunks}
        self._told = False  # that the script changes parameters
        self._first: dict[int, torch.Tensor] = {}  # the values that this worker gives the servers
        self._has: set[int] = set()  # the chunks of which it has the servers' values
        self._pushed: set[int] = set()
        self._seen: dict[torch.Tensor, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """Gradients that were pushed before the step, their versions and what they looked like then."""
        self._left: dict[torch.Tensor, torch.Tensor] = {}
        """What parameters looked like when they were last seen to, at times: the script may have changed them since."""

    def _slots_in(self, arenas: Mapping[int, Arena]) -> list[Slot]:
        return [Slot(self.number, c.number, c.server, *self._memory(c, arenas.get(c.server))) for c in self.chunks]

    def _memory(self, chunk: Chunk, arena: Arena | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the gradient and the value of a chunk: shared with others, or such as GPUs copy from and to."""
        dtype = wire_dtype(self.description.wire, chunk.kind)
        if arena:
            return arena.gradients[chunk.number].view(dtype), arena.values[chunk.number].view(dtype)
        made = [torch.zeros(chunk.elements, dtype=dtype, device="cpu", pin_memory=not self._on_cpu) for _ in range(2)]
        return made[0], made[1]

    def _arenas_of_servers(self) -> dict[int, Arena]:
        servers = {chunk.server for chunk in self.chunks}
        return {
            server: Arena({c.number: self._sizes[c.number] for c in self.chunks if c.server == server})
            for server in servers
        }

    def _to_servers(self) -> tuple[dict[int, Slot], dict[int, Arena]]:
        arenas = self._arenas_of_servers()
        return {slot.chunk: slot for slot in self._slots_in(arenas)}, arenas

    def _settings(self) -> list[dict[str, Any]]:
        return [options_of(group) for group in self.optimizer.param_groups]

    # -- the beginning ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Tells the servers what the table is, gives them the first values where they have none, and takes theirs."""
        self.client.tables[self.number] = self._all_we_know
        about = msgspec.json.encode(self.description)
        shards = range(len(self.client.addresses))
        answers = [self.client.ask(shard, Frame(Kind.DESCRIBE, table=self.number), about) for shard in shards]
        wanted = [unpacked(self.client.result(answer)[1])["give"] for answer in answers]
        if any(wanted):
            self._first = {chunk.number: self._flat(chunk) for chunk in self.chunks}
            self.give(self._all, replace=False)
        self.pull()
        self._first = {}
        self._remember(self.parameters)
        if self.client.group:
            self.client.group.add(self.number, GroupTable(self.slots, self._arenas[0], self._sizes, self._to_servers))
        elif self._arenas:
            self.client.share(self.number, self._arenas)

    def _all_we_know(self, shard: int) -> list[tuple[Frame, Any]]:
        """The table and the values that this worker had last, if any, for a server that has lost them; its state is new then."""
        told: list[tuple[Frame, Any]] = [
            (Frame(Kind.DESCRIBE, table=self.number), msgspec.json.encode(self.description))
        ]
        for chunk, slot in zip(self.chunks, self.slots, strict=True):
            value = slot.value if chunk.number in self._has else self._first.get(chunk.number)
            if slot.shard == shard and value is not None:
                value = value.to(getattr(torch, chunk.kind)).clone()
                told.append((Frame(Kind.SET, table=self.number, chunk=slot.chunk), raw(value)))
        return told

    def chunks_with(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """The chunks in which there is anything of these parameters, some of which may be of other tables."""
        return sorted({chunk for parameter in parameters for chunk in self.chunks_of.get(parameter, ())})

    def give(self, numbers: Iterable[int], *, replace: bool) -> None:
        """Sends the servers the model's values of these chunks."""
        flags = FINAL if replace else 0
        for answer in [
            self.client.ask(
                self.slots[n].shard, Frame(Kind.SET, flags, self.number, n), raw(self._flat(self.chunks[n]))
            )
            for n in numbers
        ]:
            self.client.result(answer)

    def pull(self, numbers: Sequence[int] | None = None) -> None:
        """Gives the model the servers' present values of these chunks, or of all, exactly."""
        self.wait()
        numbers = self._all if numbers is None else numbers
        self._tell_of_changes([*self._left])
        self._left.clear()
        answers = [self.client.ask(self.slots[n].shard, Frame(Kind.PULL, table=self.number, chunk=n)) for n in numbers]
        for number, answer in zip(numbers, answers, strict=True):
            chunk, slot = self.chunks[number], self.slots[number]
            frame, payload = self.client.result(answer)
            slot.fresh, slot.version = False, frame.version
            value = torch.frombuffer(payload, dtype=getattr(torch, chunk.kind))
            slot.value.copy_(value)
            self._has.add(number)
            self._install(chunk, value)

    def end(self) -> None:
        """Nobody trains this table any more: this worker and the servers forget it. The last call."""
        self.client.forget(self.number)  # gradients that are on their way would come after the end
        shards = range(len(self.client.addresses))
        for answer in [self.client.ask(shard, Frame(Kind.RETIRE, table=self.number)) for shard in shards]:
            self.client.result(answer)

    # -- a step -------------------------------------------------------------------------------------------------------

    def ready(self, parameter: torch.Tensor) -> None:
        """The backward pass has this parameter's gradient: chunks that are complete are on their way."""
        if not self._eager or not self.sending:
            return
        assert parameter.grad is not None
        _refuse_sparse(parameter.grad)
        if (
            parameter in self._seen
        ):  # a second backward pass before the step: what was pushed after the first was in vain
            self.distrust()
            return
        self._seen[parameter] = parameter.grad, parameter.grad._version, _look(parameter.grad)
        for number in self.chunks_of[parameter]:
            self._missing[number] -= 1
            if not self._missing[number]:
                self._push(number, final=False)

    def distrust(self) -> None:
        """Gradients are changed after the backward pass, and perhaps unseen: what was pushed before the step does not count."""
        self._eager, self._doubtful = False, True

    def check(self) -> None:
        """Raises TrainingError where a step would change what the servers do not have, or what is not to be changed any more,
        or would come to nobody."""
        self.client.check()
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            if parameter in self.chunks_of:
                if not parameter.requires_grad:
                    raise TrainingError(
                        f"{self._name(parameter)} was frozen after job.prepare, and its optimizer is on the servers, which "
                        "would go on with momentum and weight decay",
                        hint="freeze it before job.prepare, or give it a parameter group of its own and set lr to 0",
                    )
            elif parameter.grad is not None:
                raise TrainingError(
                    f"{self._name(parameter)} has a gradient, and the servers do not know of it: every rank would have its own",
                    hint="unfreeze what is to be trained, and give it to the optimizer, before job.prepare",
                )

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.get(parameter, f"a parameter {list(parameter.shape)}")

    def take(self, *, leave_out: bool = False) -> None:
        """The optimizer steps: sends what is not under way yet, and lets the servers apply it.

        Where others wait for this worker's gradients, they are told that there are none in a step that is left out.
        """
        if leave_out and not self._in_step:
            self._forget()
            return
        self._tell_of_changes([*self._left])
        settings = self._settings()
        if settings != self._settings_sent:
            self.client.options(self.number, settings)
            self._settings_sent = settings
        unchanged = self._unchanged()
        sure = [
            c for c in self._pushed if all(self.parameters[p.parameter] in unchanged for p in self.chunks[c].pieces)
        ]
        if self._doubtful or leave_out:
            sure = []
        elif len(sure) < len(self._pushed):  # they are clipped after the backward pass: do not send them before
            self._eager = False
        for chunk in self.chunks:
            if chunk.number not in sure:
                self._push(chunk.number, final=True, empty=leave_out)
        self._begin()
        self.client.commit((self.slots[number] for number in sorted(sure)), self.step + 1)
        self.step += 1
        self._taken += 1
        self._remember(self.parameters if self._taken in WATCHED_STEPS else self._one)
        self._begun = False
        self._pushed.clear()
        self._forget()

    def overlook(self) -> None:
        """Values were loaded."""
        self._left.clear()

    def _remember(self, parameters: Sequence[torch.Tensor]) -> None:
        if not self._told:
            self._left = {parameter: _look(parameter.detach()) for parameter in parameters}

    def _tell_of_changes(self, parameters: Iterable[torch.Tensor]) -> None:
        """Say, once, which of these parameters the script has changed since they were seen to: the servers' values come over them."""
        left = [(parameter, self._left.pop(parameter)) for parameter in parameters if parameter in self._left]
        changed = [parameter for parameter, look in left if _is_another(look, parameter.detach())]
        if changed and not self._told:
            self._told = True
            self._left.clear()
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            print(f"distrib: warning: {self._name(changed[0])}{more}: the script has changed values by itself, and those of the servers "
                  "come over them. In mode async what changes parameters is an optimizer that is prepared, or "
                  "load_state_dict; set values before job.prepare, and clip them under --mode sync",
                  file=sys.stderr, flush=True)  # fmt: skip

    def _unchanged(self) -> set[torch.Tensor]:
        """Parameters whose gradient is what was pushed before the step. What is written through `.data` has no version."""
        same = [
            (p, look) for p, (grad, version, look) in self._seen.items() if p.grad is grad and grad._version == version
        ]
        if not same:
            return set()
        unchanged = set()
        for device in {look.device for _, look in same}:
            mine = [(parameter, look) for parameter, look in same if look.device == device]
            before = torch.stack([look for _, look in mine])
            now = torch.stack([_look(parameter.grad) for parameter, _ in mine])
            changed = ((before != now) & ~(before.isnan() & now.isnan())).any(1).tolist()
            unchanged |= {parameter for (parameter, _), other in zip(mine, changed, strict=True) if not other}
        return unchanged

    def _forget(self) -> None:
        self._doubtful = False
        self._seen.clear()
        self._missing = {chunk.number: len(chunk.pieces) for chunk in self.chunks}

    @property
    def _in_step(self) -> bool:
        """Whether others wait for this worker's steps."""
        return self.client.group is not None or self._counted

    def _begin(self) -> None:
        """Before the first push of a step: whoever was away joins the others again."""
        if self._begun:
            return
        self._begun = True
        if self.client.outside:
            self.client.rejoin()
        if (group := self.client.group) and group.is_outside(self.number):
            self.wait()
            joined = group.join(self.number)
            # Whoever speaks for the host may have taken another's place, and not know how far that one had come.
            self.step = max(self.step, joined, *(of_host for _, of_host in self._newest()))

    def _newest(self) -> list[tuple[int, int]]:
        """By server, the last step of which any worker, and any of this host, has pushed anything."""
        shards = range(len(self.client.addresses))
        asked = [self.client.ask(shard, Frame(Kind.NEWEST, table=self.number)) for shard in shards]
        return [unpacked(self.client.result(answer)[1]) for answer in asked]

    def join(self) -> None:
        """Makes the servers wait for this worker again, from its next step on."""
        self.wait()
        shards = range(len(self.client.addresses))
        group = self.client.group
        if group and not group.speaks:  # who does knows the step; the servers shall only count this worker in
            for answer in [self.client.ask(shard, Frame(Kind.JOIN, table=self.number)) for shard in shards]:
                self.client.result(answer)
            return
        before = self.step
        self.step = max(before, *(of_any for of_any, _ in self._newest()))
        self._doubtful |= self.step != before and bool(self._pushed)  # of a step that will not be taken
        for answer in [
            self.client.ask(shard, Frame(Kind.JOIN, table=self.number, version=self.step + 1)) for shard in shards
        ]:
            self.client.result(answer)
        if group:
            group.restart(self.number, self.step)

    def _push(self, number: int, *, final: bool, empty: bool = False) -> None:
        self._begin()
        slot, chunk = self.slots[number], self.chunks[number]
        if number not in self._pushed:
            self.get([number])  # the answer to the step before, which no forward pass has asked for
            self._pushed.add(number)
        offset = 0
        for piece in chunk.pieces:
            size = piece.stop - piece.start
            target = slot.gradient[offset : offset + size]
            gradient = self.parameters[piece.parameter].grad
            if gradient is None or empty:
                if not self._on_cpu and target.is_pinned():
                    # What a GPU was told to copy there before must not come later.
                    torch.cuda.current_stream().synchronize()
                target.zero_()
            else:
                _refuse_sparse(gradient)
                part = gradient.reshape(-1)[piece.start : piece.stop]
                if target.dtype is torch.float16 and part.dtype is not torch.float16:
                    # What is larger would come as infinite, past all who look for such gradients.
                    largest = torch.finfo(torch.float16).max
                    part = part.to(torch.float16).clamp_(-largest, largest)
                target.copy_(part, non_blocking=True)
            offset += size
        ready = _when_copied(self.parameters[chunk.pieces[0].parameter])
        self.client.push(slot, self.step + 1, final=final, weight=0 if empty else 1, ready=ready)

    def wait(self) -> None:
        """Until all steps that were taken are answered. What was sent of the next one is answered when that is taken."""
        self.client.wait(slot for slot in self.slots if slot.chunk not in self._pushed)

    def get(self, numbers: Iterable[int]) -> None:
        """Gives the model the new values of these chunks, as soon as they are there."""
        for number in numbers:
            slot = self.slots[number]
            if slot.waits and number not in self._pushed:
                self.client.wait([slot])
            if slot.fresh:
                slot.fresh = False
                self._tell_of_changes(self.parameters[piece.parameter] for piece in self.chunks[number].pieces)
                self._install(self.chunks[number], slot.value)

    # -- between chunks and parameters ----------------------------------------------------------------------------------

    def _install(self, chunk: Chunk, value: torch.Tensor) -> None:
        offset = 0
        for piece in chunk.pieces:
            size = piece.stop - piece.start
            data = self.parameters[piece.parameter].data
            if data.is_contiguous():
                data.view(-1)[piece.start : piece.stop].copy_(value[offset : offset + size], non_blocking=True)
            else:  # such as channels last
                whole = data.reshape(-1)
                whole[piece.start : piece.stop] = value[offset : offset + size].to(data.device, non_blocking=True)
                data.copy_(whole.view(data.shape))
            offset += size

    def _flat(self, chunk: Chunk) -> torch.Tensor:
        parts = [self.parameters[p.parameter].data.reshape(-1)[p.start : p.stop] for p in chunk.pieces]
        return torch.cat([part.to("cpu", getattr(torch, chunk.kind)) for part in parts])

    # -- the optimizer's state ------------------------------------------------------------------------------------------

    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The optimizer's state of each parameter, gathered from the servers, after this worker's last step."""
        self.wait()
        asked = [self.client.ask(s.shard, Frame(Kind.GET_STATE, table=self.number, chunk=s.chunk)) for s in self.slots]
        found: dict[torch.Tensor, dict[str, Any]] = {}
        for chunk, answer in zip(self.chunks, asked, strict=True):
            saved = torch.load(io.BytesIO(self.client.result(answer)[1]), weights_only=True)
            offset = 0
            for piece in chunk.pieces:
                parameter = self.parameters[piece.parameter]
                mine, size = found.setdefault(parameter, {}), piece.stop - piece.start
                for name, value in saved.items():
                    if isinstance(value, torch.Tensor) and value.dim() and value.numel() == chunk.elements:
                        whole = mine.get(name)
                        if whole is None:  # zeros: a server that has lost its state tells of none
                            whole = mine[name] = torch.zeros(parameter.numel(), dtype=value.dtype, device="cpu")
                        whole[piece.start : piece.stop] = value.view(-1)[offset : offset + size]
                    elif value is not None or name not in mine:  # each has its own, as an optimizer counts up in place
                        mine[name] = value.clone() if isinstance(value, torch.Tensor) else value
                offset += size
        for parameter, state in found.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.numel() == parameter.numel():
                    state[name] = value.view(parameter.shape)
        return found

    def check_state(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Raises TrainingError where a state is not of its parameter's size: it is cut as the parameter is."""
        for parameter in self.parameters:
            for name, value in states.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor) or name in PER_TENSOR:
                    continue
                whole = self.description.recipe.whole
                if not (broadcasts(value, parameter) if whole else value.shape == parameter.shape):
                    raise TrainingError(
                        f"{name} of {self._name(parameter)} is {list(value.shape)} in the optimizer's state that was given, "
                        f"and the parameter {list(parameter.shape)}",
                        hint="restore the state of an optimizer of the same parameters, in the same order",
                    )

    def give_state(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Sends the servers an optimizer's state. A parameter that has none, as it was not trained yet, has zeros."""
        asked = []
        for chunk, slot in zip(self.chunks, self.slots, strict=True):
            pieces = [(self.parameters[p.parameter], p.start, p.stop) for p in chunk.pieces]
            known = [states[parameter] for parameter, _, _ in pieces if states.get(parameter)]
            # A chunk counts its steps once: as the parameter that has taken the most.
            most = max(known, key=lambda one: float(one.get("step", 0)), default={})
            state: dict[str, Any] = {}
            for name in dict.fromkeys(name for one in known for name in one):
                like = next((one[name] for one in known if one.get(name) is not None), None)
                if isinstance(like, torch.Tensor) and not self._is_of_tensor(name):
                    parts = [_part(states.get(p, {}).get(name), start, stop, like) for p, start, stop in pieces]
                    state[name] = torch.cat(parts)
                else:
                    value = most.get(name)
                    state[name] = value.cpu() if isinstance(value, torch.Tensor) else value  # servers have no GPU
            file = io.BytesIO()
            torch.save(state, file)
            frame = Frame(Kind.SET_STATE, table=self.number, chunk=slot.chunk)
            asked.append(self.client.ask(slot.shard, frame, file.getvalue()))
        for answer in asked:
            self.client.result(answer)

    def _is_of_tensor(self, name: str) -> bool:
        """Whether what an optimizer keeps under this name is of a tensor as a whole, not of each of its numbers."""
        return self.description.recipe.whole or name in PER_TENSOR


def _kind(name: str, parameter: torch.Tensor) -> str:
    if parameter.dtype == torch.float64:
        return "float64"
    if parameter.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return "float32"
    raise TrainingError(
        f"parameter {name} is {parameter.dtype}: mode async trains real floating point numbers only",
        hint="use --mode sync",
    )


def _look(values: torch.Tensor | None) -> torch.Tensor:
    """Sum and norm, which are others where the values are. In their own type, of which torch needs no copy."""
    assert values is not None
    wide = None if values.dtype in (torch.float32, torch.float64) else torch.float32
    return torch.stack((values.sum(dtype=wide), torch.linalg.vector_norm(values, dtype=wide)))


def _is_another(look: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether values are not those of `look`, but for the order in which they are added up: a layout may have changed."""
    before, now = look.double().cpu(), _look(values).double().cpu()
    close = max(1e-4, 1e-6 * values.numel() ** 0.5) * max(float(before[1]), float(now[1]))
    return bool(((before - now).abs() > close).any())


def _refuse_sparse(gradient: torch.Tensor) -> None:
    if gradient.is_sparse:
        raise TrainingError(
            "a gradient is sparse, which mode async does not send", hint="make the nn.Embedding with sparse=False"
        )


def _part(value: torch.Tensor | None, start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
    """Elements of a parameter's state, in host memory; zeros where there is none."""
    if value is None:
        return torch.zeros(stop - start, dtype=like.dtype, device="cpu")
    return value.reshape(-1)[start:stop].cpu()


def _when_copied(parameter: torch.Tensor) -> Callable[[], None] | None:
    """What to wait for before memory that a GPU was told to copy into is read."""
    if parameter.device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # or a core would be busy waiting
    event.record()

    def wait() -> None:
        # Another thread's device is the first GPU, on which each rank would take memory.
        with torch.cuda.device(parameter.device):
            event.synchronize()

    return wait
