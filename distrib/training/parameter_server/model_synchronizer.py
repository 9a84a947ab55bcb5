"""Synchronization of models with their tables: module hooks wait for new values, and save, load or copy the servers' values."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from distrib.errors import TrainingError
from distrib.training.checksums import element_sum
from distrib.training.model_parameters import exclude_model, unwrap_model
from distrib.training.parameter_server.module_hooks import UncopiedHook, exclude_hooks_from_copies
from distrib.training.parameter_server.worker_table import WorkerTable


class _OwnChunks(NamedTuple):
    """The chunks of a module's own parameters, by table; None if some of the parameters are replaced."""

    parameters: list[int]
    """Identities of the parameters."""
    chunks: dict[WorkerTable, list[int]] | None


class ModelSynchronizer:
    """Synchronization of the prepared models with the servers, through hooks.

    `optimizer.step()` returns before the servers have answered. A module's forward pass waits for the new values of its own
    parameters. Evaluations, checkpoints and copies fetch all values exactly.
    """

    def __init__(self, is_main: Callable[[], bool], *, is_replacement: bool) -> None:
        self.tables: list[WorkerTable] = []
        self.owners: dict[torch.Tensor, tuple[WorkerTable, list[int]]] = {}
        """The table of each trained parameter, and its chunks there."""
        self.models: list[nn.Module] = []
        self.is_current = False
        """True if the models hold the servers' values exactly."""
        self.closed = False
        self._is_main, self._is_replacement = is_main, is_replacement
        self._own_parameters: weakref.WeakKeyDictionary[nn.Module, list[nn.Parameter]] = weakref.WeakKeyDictionary()
        self._hooked_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._first_sums: dict[nn.Module, dict[str, torch.Tensor]] = {}  # of parameters at a model's first call
        self._called: dict[WorkerTable, set[nn.Module]] = {}  # modules that ran since a table's last step
        # Cached between steps: a loop over all parameters takes longer than a small update.
        self._own_chunks: weakref.WeakKeyDictionary[nn.Module, _OwnChunks] = weakref.WeakKeyDictionary()
        # By table: the modules that ran in the last step, and the chunks with parameters of other modules.
        self._late: dict[WorkerTable, tuple[set[nn.Module], list[int]]] = {}
        self._root: nn.Module | None = None  # the module that is being saved or loaded
        self._inner: set[nn.Module] = set()  # the modules in it

    # -- models and tables ---------------------------------------------------------------------------------------------

    def add_model(self, model: nn.Module) -> None:
        """Register the hooks of a model with trainable parameters.

        Args:
            model: The model, perhaps prepared before.
        """
        self.models = [*exclude_model(self.models, model), model]
        self._forget_chunks()
        if model not in self._hooked_models:
            self._hooked_models.add(model)
            model.register_forward_pre_hook(self._hook(model, self._before_model))
        for module in unwrap_model(model).modules():  # checkpoints skip wrappers, and may be of a part
            had, self._own_parameters[module] = self._own_parameters.get(module), [*module.parameters(recurse=False)]
            if self._own_parameters[module] and not had:
                # First of all: hooks of torch.nn.utils.weight_norm and prune compute from parameters.
                module.register_forward_pre_hook(self._hook(module, self._before_forward), prepend=True)
            if had is not None:  # it was prepared before
                continue
            module.register_state_dict_pre_hook(self._hook(module, self._before_saving))
            module.register_load_state_dict_post_hook(self._hook(module, self._after_loading))
            # These two have public names only since torch 2.5.
            module._register_state_dict_hook(self._hook(module, self._leave))
            module._register_load_state_dict_pre_hook(self._hook(module, self._before_loading), with_module=True)
            exclude_hooks_from_copies(module, self._before_copy)
        exclude_hooks_from_copies(model, self._before_copy)

    def remove_model(self, model: nn.Module) -> None:
        """Remove a model that is not trained any more.

        Args:
            model: The model.
        """
        self.models = exclude_model(self.models, model)
        self._first_sums.pop(model, None)

    def add_table(self, table: WorkerTable) -> None:
        """Register a table.

        Args:
            table: The table, which has begun.
        """
        self.tables.append(table)
        self._called[table] = set()

    def own_parameters(self, table: WorkerTable) -> None:
        """Register the parameters of a table, whose values modules wait for.

        Args:
            table: The table.

        Raises:
            TrainingError: A parameter is in another table.
        """
        for parameter, chunks in table.chunks_of.items():
            if parameter in self.owners:
                raise TrainingError(
                    "a parameter is in two optimizers, expected one",
                    hint="give it to one of them",
                    code="parameter-in-two-optimizers",
                )
            self.owners[parameter] = table, chunks
        self._forget_chunks()

    def remove_table(self, table: WorkerTable) -> None:
        """Remove a table that is not trained any more.

        Args:
            table: The table.
        """
        self.tables.remove(table)
        del self._called[table]
        for model in self.models_of(table):
            self._first_sums.pop(model, None)  # its training so far was no update of the script itself
        for parameter in table.chunks_of:
            del self.owners[parameter]
        self._forget_chunks()

    def _forget_chunks(self) -> None:
        self._own_chunks.clear()
        self._late.clear()

    def models_of(self, table: WorkerTable) -> list[nn.Module]:
        """Return the models with parameters in a table.

        Args:
            table: The table.
        """
        return [model for model in self.models if not table.chunks_of.keys().isdisjoint(model.parameters())]

    def take_step(self, table: WorkerTable, *, skip: bool = False) -> None:
        """Push the gradients of a table. Wait for new values of parameters that are used without calling their module.

        Args:
            table: The table.
            skip: True to leave this step out.
        """
        late = self._late_chunks(table)
        table.take_step(skip=skip)
        self.is_current = False
        table.install_values(late)

    def _late_chunks(self, table: WorkerTable) -> list[int]:
        """Return the chunks of parameters that are used without their module. The record of modules that ran begins anew."""
        called, self._called[table] = self._called[table], set()
        if table not in self._late or self._late[table][0] != called:
            owned = {id(parameter) for module in called for parameter in module.parameters(recurse=False)}
            late = {c for parameter, chunks in table.chunks_of.items() if id(parameter) not in owned for c in chunks}
            self._late[table] = called, sorted(late)
        return self._late[table][1]

    def mark_outdated(self) -> None:
        """Let the next `refresh` fetch all parameters, because other workers may have changed them."""
        self.is_current = False

    def refresh(self) -> None:
        """Fetch all parameters, unless they were fetched since this worker's last step and the last collective."""
        if not self.is_current:
            for table in self.tables:
                table.pull()
            self.is_current = True

    def check_untrained(self) -> None:
        """Check that no model without a prepared optimizer has learned.

        Raises:
            TrainingError: The script has updated it itself: servers do not receive such updates, so ranks diverge.
        """
        for model, before in self._first_sums.items():
            if any(parameter in self.owners for parameter in model.parameters()):
                continue  # parameters that are not in its optimizer stay as they are
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and name in before and before[name] != element_sum(parameter):
                    raise TrainingError(
                        f"{name} was trained, but is in no prepared optimizer: in mode async every rank has its own values",
                        hint="let an optimizer make the update, and prepare it, too",
                        code="optimizer-not-prepared",
                    )

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _hook(self, owner: nn.Module, work: Callable[..., None]) -> UncopiedHook:
        return UncopiedHook(owner, lambda *args: None if self.closed else work(*args))

    def _before_copy(self) -> None:
        if not self.closed:
            self.refresh()

    def _before_model(self, model: nn.Module, _: Any) -> None:
        if model not in self._first_sums:
            self._first_sums[model] = {name: element_sum(parameter) for name, parameter in model.named_parameters()}
        if not model.training:
            self.refresh()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        present = [*map(id, module._parameters.values())]  # `parameters()` hashes each
        if (own := self._own_chunks.get(module)) is None or own.parameters != present:
            own = self._own_chunks[module] = _OwnChunks(present, self._find_own_chunks(module))
        if own.chunks is None:
            return  # torch.func.functional_call has replaced them by others, which were fetched before
        for called in self._called.values():
            called.add(module)
        for table, chunks in own.chunks.items():
            table.install_values(chunks)

    def _find_own_chunks(self, module: nn.Module) -> dict[WorkerTable, list[int]] | None:
        """Return the chunks of a module's own parameters in their order; None if some of the parameters are replaced."""
        present = [*module.parameters(recurse=False)]
        if not {*map(id, present)}.issuperset(map(id, self._own_parameters[module])):
            return None
        found: dict[WorkerTable, list[int]] = {}
        for table, chunks in filter(None, map(self.owners.get, present)):
            known = found.setdefault(table, [])
            known += [chunk for chunk in chunks if chunk not in known]
        return found

    # torch calls the hooks of all modules inside the one that is saved or loaded; only those of the outermost count.

    def _before_saving(self, module: nn.Module, prefix: str, _: Any) -> None:
        if self._enter(module, prefix):
            for table in self.tables:
                table.pull(table.chunks_with(module.parameters()))

    def _before_loading(self, module: nn.Module, _: Any, prefix: str, *__: Any) -> None:
        """Install replies first, which would overwrite loaded values; main fetches the values that it does not load."""
        if self._enter(module, prefix):
            for table in self.tables:
                chunks = table.chunks_with(module.parameters())
                if self._is_main():
                    table.pull(chunks)
                else:
                    table.install_values(chunks)

    def _after_loading(self, module: nn.Module, _: Any) -> None:
        """Send the main rank's values to the servers. A replacement worker fetches the servers' values instead."""
        if module is not self._root:
            return
        self._leave(module)
        self._first_sums.clear()
        self.is_current = False
        for table in self.tables:
            table.changes.clear()
            chunks = table.chunks_with(module.parameters())
            if self._is_main():
                table.give_values(chunks, replace=True)
            elif self._is_replacement:
                table.pull(chunks)

    def _enter(self, module: nn.Module, prefix: str) -> bool:
        """Return True for the outermost module. One before it may have failed, and never left."""
        if prefix and module in self._inner:
            return False
        self._root, self._inner = module, set(module.modules()) - {module}
        return True

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module is self._root:
            self._root, self._inner = None, set()
