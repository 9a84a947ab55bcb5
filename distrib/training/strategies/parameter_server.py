"""Asynchronous training with parameter servers, which hold the parameters. The script keeps its model, optimizer and loader.

`optimizer.step()` pushes gradients and returns at once. The forward pass of a layer waits for its new values and installs them.
Between a step and the next forward pass the model holds the values of the step before.

Buffers, such as the running statistics of batch normalization, are broadcast from rank 0 at the start. Then each worker keeps its own,
as in DistributedDataParallel with `broadcast_buffers=False`. Checkpoints contain the main rank's buffers.

A replacement worker is one that the launcher started in place of a failed worker. It runs the script from the top with the servers'
parameters and pushes gradients. Collectives do not wait for it, and it is never the main rank.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distrib.environment import DISTRIB_ADDRESS, DISTRIB_RESTARTED
from distrib.strategy import Strategy
from distrib.training.checksums import content_digest
from distrib.training.collectives import to_bytes
from distrib.training.model_parameters import move_optimizer_state
from distrib.training.parameter_server.client import ParameterClient
from distrib.training.parameter_server.host_aggregation.host_group import host_identity
from distrib.training.parameter_server.host_aggregation.leader import HostLeader
from distrib.training.parameter_server.host_aggregation.local_socket import open_local_listener
from distrib.training.parameter_server.host_aggregation.member import HostMember
from distrib.training.parameter_server.model_synchronizer import ModelSynchronizer
from distrib.training.parameter_server.server import read_server_addresses
from distrib.training.parameter_server.server_table import as_memoryview
from distrib.training.parameter_server.transport import Frame, FrameKind, decode, encode
from distrib.training.parameter_server.worker_collectives import EVALUATION, WorkerCollectives
from distrib.training.parameter_server.worker_table import WorkerTable
from distrib.training.strategies.base import ElasticStrategy
from distrib.training.world import World

T = TypeVar("T")


class ParameterServerStrategy(ElasticStrategy):
    """Strategy of mode async: a rank pushes gradients to servers and receives updated parameters."""

    exclusive_parameters = True

    def __init__(self, strategy: Strategy, world: World, device: torch.device) -> None:
        """Connect to the servers.

        Args:
            strategy: The strategy chosen at launch.
            world: The planned ranks of the job.
            device: The device of this rank.
        """
        super().__init__(strategy, world, device)
        addresses, key = read_server_addresses(os.environ)
        is_replacement = bool(os.environ.get(DISTRIB_RESTARTED))
        self.client = ParameterClient(
            world.rank, addresses, key, replicas=bool(strategy.replicas), restarted=is_replacement
        )
        self.client.rejoin = self._rejoin
        self.models = ModelSynchronizer(self.client.is_main, is_replacement=is_replacement)
        self._collectives = WorkerCollectives(self.client, world, is_replacement=is_replacement)
        self._created_tables = 0
        self._gradient_hooks: dict[torch.Tensor, RemovableHandle] = {}
        self._optimizer_hooks: dict[Optimizer, list[RemovableHandle]] = {}
        self._has_grouped = False
        self._pushers = world.size  # host groups, and workers without one

    @property
    def tables(self) -> list[WorkerTable]:
        """The tables of the optimizers that are trained."""
        return self.models.tables

    @property
    def waited_seconds(self) -> float:
        return self.client.waited_seconds

    @property
    def averaged_ranks(self) -> int:
        return self.world.size if self.settings.staleness == 0 else 1

    @property
    def ranks_per_step(self) -> int:
        if self.settings.stale_rate:  # learning rates have the same meaning as in mode sync
            return self.world.size
        grouped = self._may_group and not self._is_beside_all_servers and self.settings.staleness != 0
        return self.world.local_size if grouped else super().ranks_per_step

    @property
    def _may_group(self) -> bool:
        """True if the ranks of a host may push together. A job on one host has no address, so its ranks push separately."""
        return self.settings.host_reduction and DISTRIB_ADDRESS in os.environ

    @property
    def _is_beside_all_servers(self) -> bool:
        """True if all servers are on this host, so that pushes cross no network."""
        return all(server == os.environ[DISTRIB_ADDRESS] for server, _ in self.client.addresses)

    @property
    def is_main(self) -> bool:
        return self.client.is_main()

    @property
    def seems_main(self) -> bool:
        return self.client.main[1] == self.client.rank and not self.client.restarted

    # -- models --------------------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, *, find_unused_parameters: bool, methods: Sequence[str] = ()
    ) -> nn.Module:
        """Move a model to the device, give it the main rank's buffers and frozen parameters, and register it. Collective.

        Args:
            model: The script's module.
            find_unused_parameters: True if a step may leave parameters without a gradient.
            methods: Names of methods that run as forward passes.

        Returns:
            The model.
        """
        model = super().prepare_model(model, find_unused_parameters=find_unused_parameters)
        # Includes non-persistent buffers, and values that a model's own state_dict omits.
        state: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._broadcast_from_main({name: value for name, value in state.items() if not value.requires_grad})
        if any(parameter.requires_grad for parameter in model.parameters()):
            self.models.add_model(model)
        return model

    def _broadcast_from_main(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set tensors to the main rank's values. Only tensors that differ are sent; they stay on the servers."""
        own = [content_digest(value)[:16] if value.layout is torch.strided else "" for value in tensors.values()]
        digests = [decode(data) for _, data in self._gather(f"{len(own)} values", encode(own))]
        all_present = len(digests) == self.world.size
        equal = {
            name
            for name, *found in zip(tensors, *digests, strict=True)
            if all_present and found[0] and len({*found}) == 1
        }
        content = self.from_main(lambda: to_bytes({n: v.detach() for n, v in tensors.items() if n not in equal}))
        with torch.no_grad():
            # In host memory: a GPU may lack room for a second copy.
            for name, value in torch.load(io.BytesIO(content), weights_only=True, map_location="cpu").items():
                target = tensors.get(name)
                if target is None or target.shape != value.shape:  # a buffer that has grown here
                    continue
                # An equal tensor is not written, as it may be an expanded view.
                if target.layout is not torch.strided or not torch.equal(target, value.to(target.device)):
                    target.copy_(value)

    # -- optimizers ----------------------------------------------------------------------------------------------------

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Create the server table of an optimizer, and replace its step by a push. Collective.

        Args:
            optimizer: The script's optimizer.
        """
        move_optimizer_state(optimizer)
        names: dict[torch.Tensor, str] = {
            parameter: name for model in self.models.models for name, parameter in model.named_parameters()
        }
        self._group_host()
        table = WorkerTable(
            self._created_tables, optimizer, names, self.client, self.settings.gradients.format,
            counts_skipped_steps=self.settings.staleness is not None, pushers=self._pushers,
        )  # fmt: skip
        self._created_tables += 1
        had_state = any(parameter in table.chunks_of for parameter in optimizer.state)
        table.begin()
        self.models.add_table(table)
        if had_state:
            self._give_optimizer_state(table)
        self.models.own_parameters(table)
        for parameter in table.chunks_of:
            hook = parameter.register_post_accumulate_grad_hook(table.on_gradient_ready)  # type: ignore[no-untyped-call]
            self._gradient_hooks[parameter] = hook
        untrained = [
            parameter
            for model in self.models.models_of(table)
            for parameter in model.parameters()
            if parameter.requires_grad and parameter not in self.models.owners
        ]
        if untrained:  # perhaps no optimizer will train them
            self._broadcast_from_main({str(number): parameter for number, parameter in enumerate(untrained)})
        hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []

        def before(_: Optimizer, args: Any, kwargs: Any) -> Any:
            args, kwargs = _call_closure(args, kwargs)
            table.check()
            if hasattr(optimizer, "found_inf"):
                table.disable_eager_pushes()
            self._take_step(table, skip=not _unscale_gradients(optimizer))
            hidden[:] = [(parameter, parameter.grad) for parameter in table.parameters]
            for parameter in table.parameters:
                parameter.grad = None  # so that the optimizer's own step changes nothing
            return args, kwargs

        def after(*_: Any) -> None:
            for parameter, gradient in hidden:
                parameter.grad = gradient
            hidden.clear()

        self._optimizer_hooks[optimizer] = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
            optimizer.register_state_dict_post_hook(lambda _, state: self._add_state(table, state)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._give_optimizer_state(table)),
        ]

    def release_optimizer(self, optimizer: Optimizer) -> None:
        """End the table of an optimizer, after its last values were pulled. Collective.

        Args:
            optimizer: A prepared optimizer.
        """
        table = next(table for table in self.tables if table.optimizer is optimizer)
        table.wait()
        self._gather(f"the end of table {table.number}")  # from now on no worker pushes to it
        table.pull()
        for handle in self._optimizer_hooks.pop(optimizer):
            handle.remove()
        if self.is_main:
            optimizer.state.update(table.optimizer_state())  # it may be saved or prepared again
        table.end()
        self.models.remove_table(table)
        for parameter in table.chunks_of:
            self._gradient_hooks.pop(parameter).remove()

    def release_model(self, model: nn.Module) -> None:
        """Remove a model that no prepared optimizer trains any more.

        Args:
            model: A prepared model.
        """
        self.models.remove_model(model)

    def _group_host(self) -> None:
        """Form a host group whose workers push together, if their gradients cross the network. Collective at the first call."""
        if self._has_grouped or not self._may_group:
            return
        self._has_grouped = True
        listener = open_local_listener()
        host = f"rank {self.world.rank}" if self._is_beside_all_servers else host_identity()
        gathered = self._gather("host groups", encode([host, listener.getsockname().hex()]))
        workers = {rank: decode(data) for rank, data in gathered}
        self._pushers = len({where for where, _ in workers.values()})
        sockets = {rank: bytes.fromhex(name) for rank, (where, name) in workers.items() if where == host}
        if len(sockets) == 1 or self.world.rank not in sockets:
            listener.close()
            return
        leader = min(sockets)
        push_id, synchronous = self.world.size + leader, self.settings.staleness == 0
        if leader == self.world.rank:
            self.client.join_group(HostLeader(self.client, push_id, listener, sockets, synchronous=synchronous))
        else:
            listener.close()
            self.client.join_group(HostMember(self.client, push_id, sockets[leader], synchronous=synchronous))

    def on_step_skipped(self, optimizer: Optimizer) -> None:
        """Report a skipped step to the servers.

        Args:
            optimizer: A prepared optimizer.
        """
        for table in self.tables:
            if table.optimizer is optimizer:
                self._take_step(table, skip=True)

    def on_gradients_unscaled(self, optimizer: Optimizer) -> None:
        """Disable pushes during backward, because a GradScaler changes gradients afterwards.

        Args:
            optimizer: A prepared optimizer.
        """
        for table in self.tables:
            if table.optimizer is optimizer:
                table.disable_eager_pushes()

    def _take_step(self, table: WorkerTable, *, skip: bool = False) -> None:
        late = self.models.late_chunks(table)
        table.take_step(skip=skip)
        self.models.is_current = False
        table.install_values(late)

    def _add_state(self, table: WorkerTable, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict of an optimizer with the servers' state."""
        order = [p for group in table.optimizer.param_groups for p in group["params"]]
        found = table.optimizer_state()
        return {**state, "state": {number: found[p] for number, p in enumerate(order) if found.get(p)}}

    def _give_optimizer_state(self, table: WorkerTable) -> None:
        table.check_optimizer_state(table.optimizer.state)  # on every rank, so that all ranks fail together
        if self.is_main:
            table.give_optimizer_state(table.optimizer.state)
        table.optimizer.state.clear()

    def set_gradient_sync(self, optimizer: Optimizer, models: Sequence[nn.Module], on: bool) -> None:
        """Switch pushes during the next backward passes.

        Args:
            optimizer: A prepared optimizer.
            models: The models that it trains.
            on: False while gradients accumulate on this rank.
        """
        for table in self.tables:
            if table.optimizer is optimizer:
                table.pushes_in_backward = on

    def _rejoin(self) -> None:
        self.client.must_rejoin = False
        for table in self.tables:
            table.join()

    # -- collectives ---------------------------------------------------------------------------------------------------

    def from_main(self, work: Callable[[], T]) -> T:
        """Call a function on the main rank and distribute its result. Collective.

        Args:
            work: A function whose result can be pickled.

        Returns:
            The result of `work` on the main rank. Its exception, if any, is raised on every rank.
        """
        self.models.is_current = False
        return self._collectives.from_main(work)

    def reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce a tensor over the present ranks. Collective.

        Args:
            tensor: A tensor of the same shape and type on every rank.
            op: `mean`, `sum`, `max` or `min`.

        Returns:
            A new tensor on the same device.
        """
        own = tensor.cpu().contiguous().resolve_conj().resolve_neg()
        # The tag contains type and shape, so that calls from different lines of the script do not match.
        gathered = self._gather(f"{op} {own.dtype} {list(own.shape)}", as_memoryview(own))
        tensors = [
            torch.frombuffer(data, dtype=own.dtype).view(own.shape) if own.numel() else own for _, data in gathered
        ]
        stacked = torch.stack(tensors)
        if op == "mean":
            result = stacked.sum(0) / len(tensors)
        elif op == "sum":
            result = stacked.sum(0, dtype=tensor.dtype)
        else:
            result = stacked.amax(0) if op == "max" else stacked.amin(0)
        return result.to(tensor.device)

    def _gather(self, tag: str, data: Any = b"") -> list[tuple[int, Any]]:
        self.models.is_current = False
        return self._collectives.gather(tag, data)

    def view(self, epoch: int, training: bool) -> tuple[int, int]:
        """Choose the share of an epoch that this rank reads.

        In training, shares rotate over the ranks, so that later epochs include the shares of lost workers. The number of steps stays the
        same. An evaluation begins once all present workers have reached it, and they share it. A replacement worker reads all of it.

        Args:
            epoch: Number of the epoch.
            training: True if every rank must take the same number of steps.

        Returns:
            The number of this rank's share, and the number of shares.
        """
        size = self.world.size
        if training:
            return (self.world.rank + epoch) % size, size
        for table in self.tables:
            table.wait()
        present = [rank for rank, _ in self._gather(EVALUATION)]
        self.models.refresh()  # calls of methods and submodules fetch no values
        if self.world.rank not in present:  # it was disconnected and missed the start of this evaluation
            return 0, 1
        return present.index(self.world.rank), len(present)

    def staleness(self) -> dict[str, float]:
        counts: dict[int, int] = {}
        for _, payload in self.client.request_all(Frame(FrameKind.STATISTICS)):
            for staleness, count in decode(payload).items():
                counts[int(staleness)] = counts.get(int(staleness), 0) + count
        return summarize_staleness(counts)

    def synchronize(self) -> None:
        self.models.is_current = False
        self.models.refresh()
        self.models.check_untrained()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Wait until the main rank has sent the restored values to the servers, and fetch them. Collective.

        Args:
            state: Not used.
        """
        self._gather("restored")
        self.models.refresh()

    def close(self) -> None:
        self.client.request_all(Frame(FrameKind.LEAVE))
        if self.client.group:
            self.client.group.wait_for_members()
        self.models.closed = True  # the models keep their values
        self.client.close()


def _call_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure of a step early, because its gradients are pushed. Returns arguments with a closure that returns the loss."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return (args[0],), {**{k: v for k, v in kwargs.items() if k != "closure"}, "closure": lambda: loss}


def _unscale_gradients(optimizer: Optimizer) -> bool:
    """Remove the scale that a GradScaler leaves to fused optimizers. Returns False if the step must be skipped."""
    found_inf = getattr(optimizer, "found_inf", None)
    scale = getattr(optimizer, "grad_scale", None)
    if found_inf is not None and bool(found_inf.item()):
        return False
    if scale is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
    return True


def summarize_staleness(counts: Mapping[int, int]) -> dict[str, float]:
    """Summarize counted staleness.

    Args:
        counts: Number of updates by staleness.

    Returns:
        `mean`, `median`, `p95` and `max`; empty without updates.
    """
    total = sum(counts.values())
    if not total:
        return {}
    found: dict[str, float] = {"mean": round(sum(n * count for n, count in counts.items()) / total, 3)}
    for name, fraction in (("median", 0.5), ("p95", 0.95)):
        seen = 0
        for number in sorted(counts):
            seen += counts[number]
            if seen >= fraction * total:
                found[name] = number
                break
    return {**found, "max": max(counts)}
