"""Asynchronous training as a script sees it: the same model, optimizer and loader, with the parameters on servers.

`optimizer.step()` sends gradients and comes back at once. The new values of a layer are waited for, and put in place, when the
forward pass comes to it; so what the model holds between a step and the next forward pass is of the step before.
Before a model is evaluated or saved, all of its parameters are fetched anew, exactly.

Buffers, such as the running statistics of batch normalization, begin as rank 0's; then each worker keeps its own, from the
samples that it has seen, as in DistributedDataParallel with `broadcast_buffers=False`. Main's are saved.

A **substitute** is a worker that the launcher has started again in the place of one that died. It begins the script from the top
with the servers' parameters and trains beside the others. It gives the servers gradients and nothing else, nobody waits for it in
what all workers do together, and it is never main.
"""

from __future__ import annotations

import concurrent.futures
import io
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from distrib.errors import DistribError, TrainingError
from distrib.strategy import Strategy
from distrib.training.backend import Backend
from distrib.training.parameter_server.client import Client
from distrib.training.parameter_server.held import HeldTable
from distrib.training.parameter_server.hostgroup import HostGroup, host_identity
from distrib.training.parameter_server.line import open_door
from distrib.training.parameter_server.server import servers_from
from distrib.training.parameter_server.wire import Frame, Kind, packed, unpacked
from distrib.training.synchronous import follow_parameters
from distrib.training.world import World

T = TypeVar("T")


class Asynchronous(Backend):
    """Parameters live on servers: a rank pushes gradients and takes what has become of them meanwhile."""

    def __init__(self, strategy: Strategy, world: World, device: torch.device) -> None:
        super().__init__(strategy, world, device)
        addresses, key = servers_from(os.environ)
        self.substitute = bool(os.environ.get("DISTRIB_STARTED_AGAIN"))
        self.client = Client(world.rank, addresses, key, replicas=bool(strategy.replicas), again=self.substitute)
        self.client.rejoin = self._rejoin
        self.tables: list[HeldTable] = []
        self._models: list[nn.Module] = []
        self._holders: dict[torch.Tensor, tuple[HeldTable, list[int]]] = {}
        self._called: set[nn.Module] = set()  # modules whose forward has been called
        self._late: dict[HeldTable, list[int]] = {}  # chunks that no forward pass would wait for
        self._exact = False  # the models hold the servers' values, all of them
        self._met = False  # the other workers of this host
        self._kept = 0

    @property
    def waited_seconds(self) -> float:
        return self.client.waited_seconds

    @property
    def averaged(self) -> int:
        return self.world.size if self.strategy.staleness == 0 else 1

    @property
    def ranks_in_step(self) -> int:
        together = self._reduces and not self._beside_all_servers and self.strategy.staleness != 0
        return self.world.local_size if together else super().ranks_in_step

    @property
    def _reduces(self) -> bool:
        """Whether the ranks of a host may push as one: there are several hosts, or the address would not be told."""
        return self.strategy.host_reduction and "DISTRIB_ADDRESS" in os.environ

    @property
    def _beside_all_servers(self) -> bool:
        """Whether what this host's ranks push crosses no wire."""
        return all(server == os.environ["DISTRIB_ADDRESS"] for server, _ in self.client.addresses)

    @property
    def is_main(self) -> bool:
        """Whether this worker prints and saves: rank 0, or when it is lost the first of the others that are there."""
        return self.client.is_main()

    # -- models -------------------------------------------------------------------------------------------------------

    def model(self, model: nn.Module, *, find_unused_parameters: bool) -> nn.Module:
        model = super().model(model, find_unused_parameters=find_unused_parameters)
        state = {
            name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)
        }

        def pack() -> bytes:
            file = io.BytesIO()
            torch.save({name: value.detach() for name, value in state.items() if not value.requires_grad}, file)
            return file.getvalue()

        fixed = torch.load(io.BytesIO(self.from_main(pack)), weights_only=True, map_location=self.device)
        with torch.no_grad():
            for name, value in fixed.items():
                if name in state:
                    state[name].copy_(value)
        if any(parameter.requires_grad for parameter in model.parameters()):
            self._models.append(model)
            model.register_forward_pre_hook(self._before_model)
            for module in model.modules():
                if next(module.parameters(recurse=False), None) is not None:
                    module.register_forward_pre_hook(self._before_forward)
            model.register_state_dict_pre_hook(lambda *_: self._refresh())  # type: ignore[no-untyped-call]
            model.register_load_state_dict_post_hook(lambda *_: self._restored())  # type: ignore[no-untyped-call]
        return model

    def _before_model(self, model: nn.Module, _: Any) -> None:
        if not model.training:
            self._refresh()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        self._called.add(module)
        for parameter in module.parameters(recurse=False):
            if (held := self._holders.get(parameter)) is not None:
                held[0].get(held[1])

    def _refresh(self) -> None:
        """Fetches all parameters, unless nothing was trained since."""
        if not self._exact:
            for table in self.tables:
                table.pull()
            self._exact = True

    def _restored(self) -> None:
        """A model was given other values: main's are the servers' now. A substitute's are not what the others train."""
        if self.is_main:
            for table in self.tables:
                table.wait()
                table.give(replace=True)
        elif self.substitute:
            self._exact = False
            self._refresh()

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def optimizer(self, optimizer: Optimizer) -> None:
        follow_parameters(optimizer)
        names: dict[torch.Tensor, str] = {
            parameter: name for model in self._models for name, parameter in model.named_parameters()
        }
        self._meet()
        wire: Any = self.strategy.gradients.format
        in_step = self.strategy.staleness == 0
        table = HeldTable(len(self.tables), optimizer, names, self.client, wire, synchronous=in_step)
        had_state = {p: state for p, state in optimizer.state.items() if p in table.chunks_of}
        table.begin()
        self.tables.append(table)
        if had_state:
            self._give_state(table)
        for parameter, chunks in table.chunks_of.items():
            if parameter in self._holders:
                raise TrainingError("a parameter belongs to two optimizers", hint="give it to one of them")
            self._holders[parameter] = table, chunks
            parameter.register_post_accumulate_grad_hook(table.ready)  # type: ignore[no-untyped-call]
        hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []

        def before(_: Optimizer, args: Any, kwargs: Any) -> Any:
            args, kwargs = _without_closure(args, kwargs)
            if hasattr(optimizer, "found_inf"):
                table.distrust()
            if _unscaled(optimizer):
                self._take(table)
            hidden[:] = [(parameter, parameter.grad) for parameter in table.parameters]
            for parameter in table.parameters:
                parameter.grad = None  # so that the optimizer's own step changes nothing
            return args, kwargs

        def after(*_: Any) -> None:
            for parameter, gradient in hidden:
                parameter.grad = gradient
            hidden.clear()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        optimizer.register_state_dict_post_hook(lambda _, state: self._with_state(table, state))
        optimizer.register_load_state_dict_post_hook(lambda _: self._give_state(table))

    def _meet(self) -> None:
        """The workers of one host push together from now on, where their gradients would cross the same wire several times."""
        if self._met or not self._reduces:
            return
        self._met = True
        door = open_door()
        host = host_identity()
        told = {who: unpacked(part) for who, part in self._gather(packed([host, door.getsockname().hex()]))}
        doors = {who: bytes.fromhex(name) for who, (where, name) in told.items() if where == host}
        if len(doors) == 1 or self.world.rank not in doors or self._beside_all_servers:
            door.close()
            return
        number, in_step = self.world.size + min(doors), self.strategy.staleness == 0
        self.client.join_group(HostGroup(self.client, number, door, doors, in_step=in_step))

    def left_out(self, optimizer: Optimizer) -> None:
        for table in self.tables:
            if table.optimizer is optimizer:
                table.take(leave_out=True)

    def rescaled(self, optimizer: Optimizer) -> None:
        for table in self.tables:
            if table.optimizer is optimizer:
                table.distrust()

    def _take(self, table: HeldTable) -> None:
        if table not in self._late:
            owners = {p for module in self._called for p in module.parameters(recurse=False)}
            late = {chunk for p, chunks in table.chunks_of.items() if p not in owners for chunk in chunks}
            self._late[table] = sorted(late)
        table.take()
        self._exact = False
        table.get(self._late[table])

    def _with_state(self, table: HeldTable, state: dict[str, Any]) -> dict[str, Any]:
        """The state dict of an optimizer with what the servers know of it."""
        order = [p for group in table.optimizer.param_groups for p in group["params"]]
        found = table.state()
        return {**state, "state": {number: found[p] for number, p in enumerate(order) if found.get(p)}}

    def _give_state(self, table: HeldTable) -> None:
        if self.is_main:
            table.give_state(table.optimizer.state)
        table.optimizer.state.clear()

    def exchange(self, models: Sequence[nn.Module], on: bool) -> None:
        for table in self.tables:
            table.sending = on

    def _rejoin(self) -> None:
        self.client.outside = False
        for table in self.tables:
            table.join()

    # -- between the ranks ----------------------------------------------------------------------------------------------

    def from_main(self, work: Callable[[], T]) -> T:
        """What `work` returns on main; what it raises is raised on every rank. It stays known: substitutes ask for it later."""
        self._step_aside()
        number, self._kept = self._kept, self._kept + 1
        problem: Exception | None = None
        kept = self._fetched(number)
        if kept is None:
            try:
                answer: tuple[Any, str | None] = work(), None
            except (OSError, DistribError) as error:
                problem, answer = error, (None, str(error))
            kept = self.client.result(self.client.ask(0, Frame(Kind.KEEP, version=number), pickle.dumps(answer)))[1]
        value, why = pickle.loads(kept)  # written by a rank of this job, whose key it proved
        if why is not None:
            raise problem or TrainingError(f"on the main rank: {why}")
        result: T = value
        return result

    def _step_aside(self) -> None:
        """Others of this host may be in another step, and must not wait for one who waits for them."""
        if self.client.group:
            self.client.group.leave()

    def _fetched(self, number: int) -> Any:
        """What main has kept under this number; None where this worker is main, or becomes it while it waits."""
        asked = None if self.is_main else self.client.ask(0, Frame(Kind.FETCH, version=number))
        while asked and not self.is_main:
            concurrent.futures.wait([asked], timeout=0.2)
            if asked.done():
                return asked.result()[1]
            self.client.check()
        return None

    def reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """The reduction over the workers that are there; a new tensor."""
        file = io.BytesIO()
        torch.save(tensor.cpu(), file)
        parts = [torch.load(io.BytesIO(part), weights_only=True) for _, part in self._gather(file.getvalue())]
        stacked = torch.stack(parts)
        if op == "mean":
            result = stacked.sum(0) / len(parts)
        elif op == "sum":
            result = stacked.sum(0, dtype=tensor.dtype)
        else:
            result = stacked.amax(0) if op == "max" else stacked.amin(0)
        return result.to(tensor.device)

    def _gather(self, part: bytes) -> list[tuple[int, bytes]]:
        """What every worker that is there has brought, and who brought it; a substitute, which is elsewhere in the script, is alone."""
        if self.substitute:
            return [(self.world.rank, part)]
        self._step_aside()
        number, self.client.round = self.client.round, self.client.round + 1
        asked = self.client.ask(0, Frame(Kind.GATHER, version=number), part)
        answer = self.client.result(asked)[1]
        offset = 4 + int.from_bytes(answer[:4], "big")
        parts = []
        for who, size in unpacked(answer[4:offset]):
            parts.append((who, bytes(answer[offset : offset + size])))
            offset += size
        return parts

    def view(self, epoch: int, training: bool) -> tuple[int, int]:
        """Which share of how many this rank reads in an epoch of a loader.

        While training, shares go round, so that those of workers that are gone are read by the others in other epochs, and an
        epoch keeps the length that schedules count with. An evaluation begins when all who are there have come to it, and is
        shared by them: as nobody trains then, they evaluate the same parameters. A substitute reads all of it.
        """
        size = self.world.size
        if training:
            return (self.world.rank + epoch) % size, size
        for table in self.tables:
            table.wait()
        there = [who for who, _ in self._gather(b"")]
        self._exact = False
        if self.world.rank not in there:  # it was cut off, and comes too late for this one
            return 0, 1
        return there.index(self.world.rank), len(there)

    def staleness(self) -> dict[str, float]:
        """How late updates were so far: mean, median, 95th percentile and maximum, over all chunks; empty before any."""
        found: dict[int, int] = {}
        for shard in range(len(self.client.addresses)):
            told = unpacked(self.client.result(self.client.ask(shard, Frame(Kind.STATISTICS)))[1])
            for counts in told["staleness"].values():
                for staleness, count in counts.items():
                    found[int(staleness)] = found.get(int(staleness), 0) + count
        return summary(found)

    def settle(self) -> None:
        """Waits until all that was sent is answered, and gives the models the servers' values."""
        for table in self.tables:
            table.wait()
        self._refresh()

    def close(self) -> None:
        for shard in range(len(self.client.addresses)):
            self.client.result(self.client.ask(shard, Frame(Kind.LEAVE)))
        self.client.close()


def _without_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step with the closure called already, as its gradients are needed before."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return (args[0],), {**{k: v for k, v in kwargs.items() if k != "closure"}, "closure": lambda: loss}


def _unscaled(optimizer: Optimizer) -> bool:
    """Takes off the scale that a GradScaler leaves to fused optimizers; False where the step is to be left out."""
    found = getattr(optimizer, "found_inf", None)
    scale = getattr(optimizer, "grad_scale", None)
    if found is not None and bool(found.item()):
        return False
    if scale is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
    return True


def summary(staleness: dict[int, int]) -> dict[str, float]:
    """Mean, median, 95th percentile and maximum of counted staleness."""
    total = sum(staleness.values())
    if not total:
        return {}
    found: dict[str, float] = {"mean": round(sum(n * count for n, count in staleness.items()) / total, 3)}
    for name, share in (("median", 0.5), ("p95", 0.95)):
        seen = 0
        for number in sorted(staleness):
            seen += staleness[number]
            if seen >= share * total:
                found[name] = number
                break
    return {**found, "max": max(staleness)}
