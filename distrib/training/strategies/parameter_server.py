"""Asynchronous training with parameter servers, which hold the parameters. The script keeps its model, optimizer and loader.

`optimizer.step()` pushes gradients. The forward pass of a layer waits for its new values and installs them.
Between a step and the next forward pass the model holds the values of the step before.

Buffers, such as the running statistics of batch normalization, are broadcast from rank 0 at the start. Then each worker keeps its own,
as in DistributedDataParallel with `broadcast_buffers=False`. Checkpoints contain the main rank's buffers.

A replacement worker is one that the launcher started in place of a failed worker. It runs the script from the top with the servers'
parameters and pushes gradients. Collectives do not wait for it, and it is never the main rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from distrib.environment import DISTRIB_ADDRESS, DISTRIB_RESTARTED
from distrib.strategy import Strategy
from distrib.training.model_parameters import move_optimizer_state
from distrib.training.parameter_server.client import ParameterClient
from distrib.training.parameter_server.failover import DEFAULT_TIMEOUTS, FailoverTimeouts
from distrib.training.parameter_server.host_aggregation.group_formation import form_host_group
from distrib.training.parameter_server.host_aggregation.host_group import host_identity
from distrib.training.parameter_server.model_synchronizer import ModelSynchronizer
from distrib.training.parameter_server.optimizer_hooks import OptimizerHooks
from distrib.training.parameter_server.server import read_server_addresses
from distrib.training.parameter_server.transport import Frame, FrameKind, decode
from distrib.training.parameter_server.worker_collectives import EVALUATION, WorkerCollectives
from distrib.training.parameter_server.worker_table import WorkerTable
from distrib.training.strategies.base import ElasticStrategy
from distrib.training.world import World

T = TypeVar("T")


class ParameterServerStrategy(ElasticStrategy):
    """Strategy of mode async: a rank pushes gradients to servers and receives updated parameters."""

    exclusive_parameters = True
    gradients_are_revocable = False

    def __init__(
        self, strategy: Strategy, world: World, device: torch.device, timeouts: FailoverTimeouts = DEFAULT_TIMEOUTS
    ) -> None:
        """Connect to the servers.

        Args:
            strategy: The strategy chosen at launch.
            world: The planned ranks of the job.
            device: The device of this rank.
            timeouts: Times after which this rank reacts to a lost server.
        """
        super().__init__(strategy, world, device)
        addresses, key = read_server_addresses(os.environ)
        is_replacement = bool(os.environ.get(DISTRIB_RESTARTED))
        self.client = ParameterClient(
            world.rank, addresses, key, replicas=bool(strategy.replicas), restarted=is_replacement, timeouts=timeouts
        )
        self.client.rejoin = self._rejoin
        self.models = ModelSynchronizer(self.client.is_main, is_replacement=is_replacement)
        self.collectives = WorkerCollectives(
            self.client, world, is_replacement=is_replacement, on_collective=self.models.mark_outdated
        )
        self._created_tables = 0
        self._hooks: dict[Optimizer, OptimizerHooks] = {}
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
        self.collectives.broadcast({name: value for name, value in state.items() if not value.requires_grad})
        if any(parameter.requires_grad for parameter in model.parameters()):
            self.models.add_model(model)
        return model

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
        self.form_host_group()
        table = WorkerTable(
            self._created_tables, optimizer, names, self.client, self.settings.gradients.format, self._pushers,
            counts_skipped_steps=self.settings.staleness is not None,
        )  # fmt: skip
        self._created_tables += 1
        had_state = any(parameter in table.chunks_of for parameter in optimizer.state)
        table.begin()
        self.models.add_table(table)
        if had_state:
            table.give_optimizer_state(is_main=self.is_main)
        self.models.own_parameters(table)
        self._hooks[optimizer] = OptimizerHooks(table, self.models, self.client.is_main)
        untrained = [
            parameter
            for model in self.models.models_of(table)
            for parameter in model.parameters()
            if parameter.requires_grad and parameter not in self.models.owners
        ]
        if untrained:  # perhaps no optimizer will train them
            self.collectives.broadcast({str(number): parameter for number, parameter in enumerate(untrained)})

    def release_optimizer(self, optimizer: Optimizer) -> None:
        """End the table of an optimizer, after its last values were pulled. Collective.

        Args:
            optimizer: A prepared optimizer.
        """
        table = next(table for table in self.tables if table.optimizer is optimizer)
        table.wait()
        self.collectives.gather(f"the end of table {table.number}")  # from now on no worker pushes to it
        table.pull()
        self._hooks.pop(optimizer).remove()
        if self.is_main:
            optimizer.state.update(table.optimizer_state())  # it may be saved or prepared again
        table.end()
        self.models.remove_table(table)

    def release_model(self, model: nn.Module) -> None:
        """Remove a model that no prepared optimizer trains any more.

        Args:
            model: A prepared model.
        """
        self.models.remove_model(model)

    def form_host_group(self) -> None:
        """Form a host group whose workers push together, if their gradients cross the network. Collective at the first call."""
        if not self._has_grouped and self._may_group:
            self._has_grouped = True
            self._pushers = form_host_group(
                self.client,
                f"rank {self.world.rank}" if self._is_beside_all_servers else host_identity(),
                lambda data: self.collectives.gather("host groups", data),
                size=self.world.size,
                synchronous=self.settings.staleness == 0,
            )

    def on_step_skipped(self, optimizer: Optimizer) -> None:
        """Report a skipped step to the servers.

        Args:
            optimizer: A prepared optimizer.
        """
        for table in self._tables_of(optimizer):
            self.models.take_step(table, skip=True)

    def on_gradients_unscaled(self, optimizer: Optimizer) -> None:
        """Prepare for gradients that a GradScaler divides after backward.

        Args:
            optimizer: A prepared optimizer.
        """
        for table in self._tables_of(optimizer):
            table.expect_unscaling()

    def set_gradient_sync(self, optimizer: Optimizer, models: Sequence[nn.Module], on: bool) -> None:
        """Switch pushes during the next backward passes.

        Args:
            optimizer: A prepared optimizer.
            models: The models that it trains.
            on: False while gradients accumulate on this rank.
        """
        for table in self._tables_of(optimizer):
            table.pushes_in_backward = on

    def _tables_of(self, optimizer: Optimizer) -> list[WorkerTable]:
        return [table for table in self.tables if table.optimizer is optimizer]

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
        return self.collectives.from_main(work)

    def reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce a tensor over the present ranks. Collective.

        Args:
            tensor: A tensor of the same shape and type on every rank.
            op: `mean`, `sum`, `max` or `min`.

        Returns:
            A new tensor on the same device.
        """
        return self.collectives.reduce(tensor, op)

    def gather(self, own: bytes) -> dict[int, bytes]:
        """Gather the bytes of the present ranks. Collective.

        Args:
            own: This rank's bytes.

        Returns:
            The bytes by rank.
        """
        return {rank: bytes(data) for rank, data in self.collectives.gather("bytes", own)}

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
        present = [rank for rank, _ in self.collectives.gather(EVALUATION)]
        self.models.refresh()  # calls of methods and submodules fetch no values
        if self.world.rank not in present:  # it was disconnected and missed the start of this evaluation
            return 0, 1
        return present.index(self.world.rank), len(present)

    def staleness(self) -> dict[str, float]:
        counts: dict[int, int] = {}
        for _, payload in self.client.request_all(Frame(FrameKind.STATISTICS)):
            for staleness, count in decode(payload).items():
                counts[int(staleness)] = counts.get(int(staleness), 0) + count
        return _summarize_staleness(counts)

    def synchronize(self) -> None:
        self.models.mark_outdated()
        self.models.refresh()
        self.models.check_untrained()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Wait until the main rank has sent the restored values to the servers, and fetch them. Collective.

        Args:
            state: Not used.
        """
        self.collectives.gather("restored")
        self.models.refresh()

    def close(self) -> None:
        self.client.request_all(Frame(FrameKind.LEAVE))
        if self.client.group:
            self.client.group.wait_for_members()
        self.models.closed = True  # the models keep their values
        self.client.close()


def _summarize_staleness(counts: Mapping[int, int]) -> dict[str, float]:
    """Return `mean`, `median`, `p95` and `max` of counted staleness; empty without updates."""
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
