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

import io
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distrib.environment import DISTRIB_ADDRESS, DISTRIB_RESTARTED
from distrib.errors import TrainingError
from distrib.strategy import Strategy
from distrib.training.checksums import content_digest, element_sum
from distrib.training.collectives import to_bytes
from distrib.training.model_parameters import exclude_model, move_optimizer_state, unwrap_model
from distrib.training.parameter_server.client import Client
from distrib.training.parameter_server.host_aggregation.local_socket import open_door
from distrib.training.parameter_server.host_aggregation.member import HostGroup, host_identity
from distrib.training.parameter_server.module_hooks import Hook, leave_no_trace
from distrib.training.parameter_server.server import servers_from
from distrib.training.parameter_server.server_table import raw
from distrib.training.parameter_server.transport import Frame, Kind, packed, unpacked
from distrib.training.parameter_server.worker_collectives import VIEW, Meeting
from distrib.training.parameter_server.worker_table import HeldTable
from distrib.training.strategies.base import ElasticStrategy
from distrib.training.world import World

T = TypeVar("T")


class ParameterServerStrategy(ElasticStrategy):
    """Parameters live on servers: a rank pushes gradients and takes what has become of them meanwhile."""

    exclusive_parameters = True

    def __init__(self, strategy: Strategy, world: World, device: torch.device) -> None:
        super().__init__(strategy, world, device)
        addresses, key = servers_from(os.environ)
        self.substitute = bool(os.environ.get(DISTRIB_RESTARTED))
        self.client = Client(world.rank, addresses, key, replicas=bool(strategy.replicas), again=self.substitute)
        self.client.rejoin = self._rejoin
        self._meeting = Meeting(self.client, world, substitute=self.substitute)
        self.tables: list[HeldTable] = []
        self._made = 0  # tables, with those of optimizers that were replaced
        self._pushing: dict[torch.Tensor, RemovableHandle] = {}
        self._handles: dict[Optimizer, list[RemovableHandle]] = {}
        self._models: list[nn.Module] = []
        self._own: weakref.WeakKeyDictionary[nn.Module, list[nn.Parameter]] = weakref.WeakKeyDictionary()
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that have their hook
        self._begun: dict[
            nn.Module, dict[str, torch.Tensor]
        ] = {}  # of each model, its parameters' totals at its first call
        self._holders: dict[torch.Tensor, tuple[HeldTable, list[int]]] = {}
        self._asked: nn.Module | None = None  # whose values are being saved or loaded
        self._inside: set[nn.Module] = set()  # and the modules in it
        self._called: dict[
            HeldTable, set[nn.Module]
        ] = {}  # modules whose forward was called since the table's last step
        self._exact = False  # the models hold the servers' values, all of them
        self._closed = False
        self._met = False  # the other workers of this host
        self._pushers = world.size  # hosts of which the workers push as one, and the other workers

    @property
    def waited_seconds(self) -> float:
        return self.client.waited_seconds

    @property
    def averaged_ranks(self) -> int:
        return self.world.size if self.settings.staleness == 0 else 1

    @property
    def ranks_per_step(self) -> int:
        if self.settings.stale_rate:  # learning rates mean what they do in mode sync
            return self.world.size
        together = self._reduces and not self._beside_all_servers and self.settings.staleness != 0
        return self.world.local_size if together else super().ranks_per_step

    @property
    def _reduces(self) -> bool:
        """Whether the ranks of a host may push as one: there are several hosts, or the address would not be told."""
        return self.settings.host_reduction and DISTRIB_ADDRESS in os.environ

    @property
    def _beside_all_servers(self) -> bool:
        """Whether what this host's ranks push crosses no wire."""
        return all(server == os.environ[DISTRIB_ADDRESS] for server, _ in self.client.addresses)

    @property
    def is_main(self) -> bool:
        """Whether this worker prints and saves: rank 0, or when it is lost the first of the others that are there."""
        return self.client.is_main()

    @property
    def seems_main(self) -> bool:
        """The same as far as it is known now: nothing is waited for."""
        return self.client.main[1] == self.client.rank and not self.client.again

    # -- models -------------------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, *, find_unused_parameters: bool, methods: Sequence[str] = ()
    ) -> nn.Module:
        model = super().prepare_model(model, find_unused_parameters=find_unused_parameters)
        # Also buffers that are not saved, and whatever a model's own state_dict leaves out.
        state: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._begin_as_main({name: value for name, value in state.items() if not value.requires_grad})
        if any(parameter.requires_grad for parameter in model.parameters()):
            self._models = [*exclude_model(self._models, model), model]
            if model not in self._watched:
                self._watched.add(model)
                model.register_forward_pre_hook(self._hook(model, self._before_model))
            for module in unwrap_model(model).modules():  # checkpoints look past wrappers, and may be of a part
                had, self._own[module] = self._own.get(module), [*module.parameters(recurse=False)]
                if self._own[module] and not had:
                    # First of all: others compute from parameters, as those of torch.nn.utils.weight_norm and prune do.
                    module.register_forward_pre_hook(self._hook(module, self._before_forward), prepend=True)
                if had is not None:  # it was prepared before
                    continue
                module.register_state_dict_pre_hook(self._hook(module, self._before_saving))
                module.register_load_state_dict_post_hook(self._hook(module, self._after_loading))
                # Those two have public names only since torch 2.5.
                module._register_state_dict_hook(self._hook(module, self._leave))
                module._register_load_state_dict_pre_hook(self._hook(module, self._before_loading), with_module=True)
                leave_no_trace(module, self._before_copying)
            leave_no_trace(model, self._before_copying)
        return model

    def _begin_as_main(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Gives these main's values on every rank. Only what is another on some rank travels, and stays with the servers."""
        own = [content_digest(value)[:16] if value.layout is torch.strided else "" for value in tensors.values()]
        told = [unpacked(part) for _, part in self._gather(f"{len(own)} values", packed(own))]
        all_told = len(told) == self.world.size
        alike = {n for n, *words in zip(tensors, *told, strict=True) if all_told and words[0] and len({*words}) == 1}
        content = self.from_main(lambda: to_bytes({n: v.detach() for n, v in tensors.items() if n not in alike}))
        with torch.no_grad():
            # In host memory, as a GPU may have no room for a second copy of all of them.
            for name, value in torch.load(io.BytesIO(content), weights_only=True, map_location="cpu").items():
                mine = tensors.get(name)
                if mine is None or mine.shape != value.shape:  # a buffer that has grown here
                    continue
                # What is the same is let be: it may be expanded, and not to be written.
                if mine.layout is not torch.strided or not torch.equal(mine, value.to(mine.device)):
                    mine.copy_(value)

    def _hook(self, owner: nn.Module, work: Callable[..., None]) -> Hook:
        return Hook(owner, lambda *told: None if self._closed else work(*told))

    def _before_copying(self) -> None:
        """What is copied or saved of a model, as by torch.save(model), has the servers' values, and needs no servers."""
        if not self._closed:
            self._refresh()

    def _before_model(self, model: nn.Module, _: Any) -> None:
        if model not in self._begun:
            self._begun[model] = {name: element_sum(parameter) for name, parameter in model.named_parameters()}
        if not model.training:
            self._refresh()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        present = {*module.parameters(recurse=False)}
        if not present.issuperset(self._own[module]):
            return  # torch.func.functional_call has put others in their place, which were taken before: a step waits for new values
        for called in self._called.values():
            called.add(module)
        for parameter in present:
            if (held := self._holders.get(parameter)) is not None:
                held[0].get(held[1])

    def _refresh(self) -> None:
        """Fetches all parameters, unless they were fetched since the last step of this worker and the last meeting of all."""
        if not self._exact:
            for table in self.tables:
                table.pull()
            self._exact = True

    # The values of a model, or of a module of it, are saved and loaded. Torch calls the hooks of its modules, too: within those of
    # the module that was asked, which is the one that counts.

    def _before_saving(self, module: nn.Module, prefix: str, _: Any) -> None:
        if self._enters(module, prefix):
            for table in self.tables:
                table.pull(table.chunks_with(module.parameters()))

    def _before_loading(self, module: nn.Module, _: Any, prefix: str, *__: Any) -> None:
        """Answers that were not put in place yet must not come over what is loaded; and what main does not load but gives, as it
        shares a chunk or is missing in the file, is to stay as the servers have it."""
        if self._enters(module, prefix):
            for table in self.tables:
                chunks = table.chunks_with(module.parameters())
                if self.is_main:
                    table.pull(chunks)
                else:
                    table.get(chunks)

    def _after_loading(self, module: nn.Module, _: Any) -> None:
        """Main's values are the servers' now. A substitute's are not what the others train."""
        if module is not self._asked:
            return
        self._leave(module)
        self._begun.clear()
        self._exact = False
        for table in self.tables:
            table.overlook()
            chunks = table.chunks_with(module.parameters())
            if self.is_main:
                table.give(chunks, replace=True)
            elif self.substitute:
                table.pull(chunks)

    def _enters(self, module: nn.Module, prefix: str) -> bool:
        """Whether the module was asked itself, and not one that it is in. What was asked before may have failed, and never left."""
        if prefix and module in self._inside:
            return False
        self._asked, self._inside = module, set(module.modules()) - {module}
        return True

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module is self._asked:
            self._asked, self._inside = None, set()

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        move_optimizer_state(optimizer)
        names: dict[torch.Tensor, str] = {
            parameter: name for model in self._models for name, parameter in model.named_parameters()
        }
        self._meet()
        wire: Any = self.settings.gradients.format
        counted = self.settings.staleness is not None  # others wait for this worker's steps
        table = HeldTable(self._made, optimizer, names, self.client, wire, counted=counted, pushers=self._pushers)
        self._made += 1
        had_state = {p: state for p, state in optimizer.state.items() if p in table.chunks_of}
        table.begin()
        self.tables.append(table)
        self._called[table] = set()
        if had_state:
            self._give_state(table)
        for parameter, chunks in table.chunks_of.items():
            if parameter in self._holders:
                raise TrainingError("a parameter belongs to two optimizers", hint="give it to one of them")
            self._holders[parameter] = table, chunks
            self._pushing[parameter] = parameter.register_post_accumulate_grad_hook(table.ready)  # type: ignore[no-untyped-call]
        self._begin_untrained(table)
        hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []

        def before(_: Optimizer, args: Any, kwargs: Any) -> Any:
            args, kwargs = _without_closure(args, kwargs)
            table.check()
            if hasattr(optimizer, "found_inf"):
                table.distrust()
            self._take(table, leave_out=not _unscaled(optimizer))
            hidden[:] = [(parameter, parameter.grad) for parameter in table.parameters]
            for parameter in table.parameters:
                parameter.grad = None  # so that the optimizer's own step changes nothing
            return args, kwargs

        def after(*_: Any) -> None:
            for parameter, gradient in hidden:
                parameter.grad = gradient
            hidden.clear()

        self._handles[optimizer] = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
            optimizer.register_state_dict_post_hook(lambda _, state: self._with_state(table, state)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._give_state(table)),
        ]

    def release_optimizer(self, optimizer: Optimizer) -> None:
        table = next(table for table in self.tables if table.optimizer is optimizer)
        table.wait()
        self._gather(f"the end of table {table.number}")  # when all are here, nobody pushes to it any more
        table.pull()
        for handle in self._handles.pop(optimizer):
            handle.remove()
        if self.is_main:
            optimizer.state.update(table.state())  # it may be saved, or prepared again
        table.end()
        self.tables.remove(table)
        del self._called[table]
        for model in self._models:
            if not table.chunks_of.keys().isdisjoint(model.parameters()):
                self._begun.pop(model, None)  # what the model has learnt so far was no change by hand
        for parameter in table.chunks_of:
            del self._holders[parameter]
            self._pushing.pop(parameter).remove()

    def release_model(self, model: nn.Module) -> None:
        self._models = exclude_model(self._models, model)
        self._begun.pop(model, None)

    def _meet(self) -> None:
        """The workers of one host push together from now on, where their gradients would cross the same wire several times."""
        if self._met or not self._reduces:
            return
        self._met = True
        door = open_door()
        host = f"rank {self.world.rank}" if self._beside_all_servers else host_identity()
        told = {who: unpacked(part) for who, part in self._gather("doors", packed([host, door.getsockname().hex()]))}
        doors = {who: bytes.fromhex(name) for who, (where, name) in told.items() if where == host}
        self._pushers = len({where for where, _ in told.values()})
        if len(doors) == 1 or self.world.rank not in doors:
            door.close()
            return
        number, in_step = self.world.size + min(doors), self.settings.staleness == 0
        self.client.join_group(HostGroup(self.client, number, door, doors, in_step=in_step))

    def _begin_untrained(self, table: HeldTable) -> None:
        """What a model learns beside this table's parameters begins as main's, too: perhaps no optimizer will train it."""
        models = [model for model in self._models if not table.chunks_of.keys().isdisjoint(model.parameters())]
        rest = [p for model in models for p in model.parameters() if p.requires_grad and p not in self._holders]
        if rest:
            self._begin_as_main({str(number): parameter for number, parameter in enumerate(rest)})

    def on_step_skipped(self, optimizer: Optimizer) -> None:
        for table in self.tables:
            if table.optimizer is optimizer:
                self._take(table, leave_out=True)

    def on_gradients_unscaled(self, optimizer: Optimizer) -> None:
        for table in self.tables:
            if table.optimizer is optimizer:
                table.distrust()

    def _take(self, table: HeldTable, *, leave_out: bool = False) -> None:
        # What is used without its module, for which no forward pass would wait.
        owners = {p for module in self._called[table] for p in module.parameters(recurse=False)}
        late = {chunk for p, chunks in table.chunks_of.items() if p not in owners for chunk in chunks}
        self._called[table].clear()
        table.take(leave_out=leave_out)
        self._exact = False
        table.get(sorted(late))

    def _with_state(self, table: HeldTable, state: dict[str, Any]) -> dict[str, Any]:
        """The state dict of an optimizer with what the servers know of it."""
        order = [p for group in table.optimizer.param_groups for p in group["params"]]
        found = table.state()
        return {**state, "state": {number: found[p] for number, p in enumerate(order) if found.get(p)}}

    def _give_state(self, table: HeldTable) -> None:
        table.check_state(table.optimizer.state)  # on every rank, so that none goes on alone
        if self.is_main:
            table.give_state(table.optimizer.state)
        table.optimizer.state.clear()

    def set_gradient_sync(self, optimizer: Optimizer, models: Sequence[nn.Module], on: bool) -> None:
        for table in self.tables:
            if table.optimizer is optimizer:
                table.sending = on

    def _rejoin(self) -> None:
        self.client.outside = False
        for table in self.tables:
            table.join()

    # -- between the ranks ----------------------------------------------------------------------------------------------

    def from_main(self, work: Callable[[], T]) -> T:
        """What `work` returns on main; what it raises is raised on every rank. It stays known: substitutes ask for it later."""
        self._exact = False
        return self._meeting.from_main(work)

    def reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """The reduction over the workers that are there; a new tensor."""
        own = tensor.cpu().contiguous().resolve_conj().resolve_neg()
        # All parts have the type and the shape of this one, or they would be of another place.
        parts = [_like(own, part) for _, part in self._gather(f"{op} {own.dtype} {list(own.shape)}", raw(own))]
        stacked = torch.stack(parts)
        if op == "mean":
            result = stacked.sum(0) / len(parts)
        elif op == "sum":
            result = stacked.sum(0, dtype=tensor.dtype)
        else:
            result = stacked.amax(0) if op == "max" else stacked.amin(0)
        return result.to(tensor.device)

    def _gather(self, what: str, part: Any = b"") -> list[tuple[int, Any]]:
        self._exact = False
        return self._meeting.gather(what, part)

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
        there = [who for who, _ in self._gather(VIEW)]
        self._refresh()  # a model's methods and parts fetch nothing
        if self.world.rank not in there:  # it was cut off, and comes too late for this one
            return 0, 1
        return there.index(self.world.rank), len(there)

    def staleness(self) -> dict[str, float]:
        """How late updates were so far: mean, median, 95th percentile and maximum, over all chunks; empty before any."""
        found: dict[int, int] = {}
        for shard in range(len(self.client.addresses)):
            told = unpacked(self.client.result(self.client.ask(shard, Frame(Kind.STATISTICS)))[1])
            for staleness, count in told.items():
                found[int(staleness)] = found.get(int(staleness), 0) + count
        return summary(found)

    def synchronize(self) -> None:
        """Waits until all that was sent is answered, and gives the models the servers' values."""
        self._exact = False
        self._refresh()
        self._check_trained()

    def _check_trained(self) -> None:
        """Raises TrainingError where the script itself changes what learns: the servers never hear of that."""
        for model, begun in self._begun.items():
            if any(parameter in self._holders for parameter in model.parameters()):
                continue  # what is left out of its optimizer is left as it is
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and name in begun and begun[name] != element_sum(parameter):
                    raise TrainingError(
                        f"{name} has learnt, but no prepared optimizer has it: in mode async every rank has its own",
                        hint="let an optimizer make the update, and prepare it too",
                    )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Comes after main has given the servers what was restored: nobody trains on before it has."""
        self._gather("restored")
        self._refresh()

    def close(self) -> None:
        for shard in range(len(self.client.addresses)):
            self.client.result(self.client.ask(shard, Frame(Kind.LEAVE)))
        self._closed = True  # the models keep the values that they have
        self.client.close()


def _like(own: torch.Tensor, part: Any) -> torch.Tensor:
    """The tensor of the type and shape of `own` that these bytes are."""
    return torch.frombuffer(part, dtype=own.dtype).view(own.shape) if own.numel() else own


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
