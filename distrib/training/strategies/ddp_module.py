"""DistributedDataParallel that exposes the attributes, methods and state_dict names of the wrapped model."""

from __future__ import annotations

import copy
import functools
import re
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distrib.bandwidth_model.bucketing import ddp_bucket_bytes
from distrib.errors import TrainingError
from distrib.training.checks.cross_rank import list_names

_PREFIX = "module."
"""DistributedDataParallel's prefix of the names in its state_dict."""
_SET_LATER = (
    *("_authoritative_rank", "_join_config", "_lazy_init_ran", "_mp_stream", "_static_graph_delay_allreduce_enqueued"),
    *("_submodule_to_event", "buffer_hook", "device_mesh"),
)
"""Attributes that DistributedDataParallel sets after its __init__."""
_SAME_MEANING = "device", "no_sync"
"""Attributes of DistributedDataParallel that have the same meaning in a model."""

_NO_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank (\d+): ((?:\d+ ?)+)")
"""torch's message about missing gradients. The numbers are indices among the trainable parameters."""

_FORWARDED = (
    "register_buffer",
    "register_parameter",
    "add_module",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "_register_state_dict_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
    "state_dict",
    "__getitem__",
    "__contains__",
    "__len__",
)
"""Methods that call the wrapped model: those of DistributedDataParallel's base classes, and those that Python looks up on the class."""

torch.serialization.add_safe_globals([typing.cast])  # pickled models begin with it: see DdpModule.__reduce_ex__


class DdpModule(DistributedDataParallel):
    """Prepared model, which a script uses like the wrapped model.

    - Attributes are those of the wrapped model, except names that DistributedDataParallel has; see `hidden_attributes`.
    - Gradients are averaged after `model(...)` and after the methods declared with `job.prepare(model, methods=[...])`.
    - `state_dict` has the wrapped model's names. `load_state_dict` accepts those of DistributedDataParallel too.
    - `torch.save(model)` writes the wrapped model only.
    """

    _own: frozenset[str] | None = None
    """Attributes of the wrapper after its `__init__`; None before. All others are the wrapped model's."""
    _methods: frozenset[str] = frozenset()
    was_called = False
    """True after a forward pass with gradients."""
    _averages: ClassVar[bool] = False
    """True if the last forward pass averages the gradients of its backward pass."""
    _arrived: ClassVar[set[tuple[int, int]]] = set()
    """Models and parameters with a gradient since the last forward pass of any model. Class-wide, as models may share parameters."""
    _repeated: ClassVar[set[int]] = set()
    """Models that got gradients a second time since the last forward pass of any model."""

    def __init__(self, module: nn.Module, *, methods: Sequence[str] = (), **options: Any) -> None:
        """Wrap a model. Collective.

        Args:
            module: The model, on its device.
            methods: Names of methods that run as forward passes.
            **options: Options of DistributedDataParallel.

        Raises:
            TrainingError: The model has no such method, or DistributedDataParallel has one of that name.
        """
        super().__init__(module, **options)
        size = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
        # torch.compile splits a model where a bucket ends, and many small parts are slow.
        self.bucket_bytes_cap = max(self.bucket_bytes_cap, ddp_bucket_bytes(size))
        self._trainable = [
            (name.replace("_orig_mod.", ""), parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        ]
        self._methods = frozenset(methods)
        self._own = frozenset({*vars(self), *self._modules, *_SET_LATER, *dir(type(self))})
        for name in methods:
            if name in self._own or not callable(getattr(module, name, None)):
                raise TrainingError(
                    f"{type(module).__name__} has no method {name} that job.prepare could run as a forward pass"
                )
        self._watch_gradients()

    def _watch_gradients(self) -> None:
        """Watch the first and last parameter, which every backward pass reaches; all parameters if some may be unused."""
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        own = weakref.ref(self)

        def on_gradient(number: int, _: torch.Tensor) -> None:
            if (model := own()) is not None:
                if DdpModule._averages and (id(model), number) in DdpModule._arrived:
                    DdpModule._repeated.add(id(model))
                DdpModule._arrived.add((id(model), number))

        for number, parameter in enumerate(
            parameters if self.find_unused_parameters else parameters[:: max(1, len(parameters) - 1)]
        ):
            parameter.register_post_accumulate_grad_hook(functools.partial(on_gradient, number))

    def _pre_forward(self, *inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            self.was_called = True
            DdpModule._averages = self.require_backward_grad_sync
            DdpModule._arrived.clear()
            DdpModule._repeated.clear()
        try:
            return super()._pre_forward(*inputs, **named)  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # gradients of the last backward pass are missing
            if not (found := _NO_GRADIENT.search(str(error))):
                raise
            missing = self._by_index(found)
        if frozen := [name for name, parameter in missing if not parameter.requires_grad]:
            raise frozen_after_prepare(frozen, type(self.module).__name__)
        raise TrainingError(
            f"rank {found[1]}: {list_names([name for name, _ in missing])} got no gradient in the last backward pass of "
            f"{type(self.module).__name__}, and other ranks wait for it",
            hint="job.prepare(..., find_unused_parameters=True), or use all outputs of the model in the loss",
            code="gradient-missing",
        )

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return torch.is_grad_enabled() and bool(super()._check_sync_bufs_pre_fwd())  # type: ignore[no-untyped-call]  # one rank may evaluate alone

    def _by_index(self, indices: re.Match[str]) -> list[tuple[str, torch.Tensor]]:
        """Find the parameters that torch's message names."""
        return [self._trainable[index] for index in map(int, indices[2].split()) if index < len(self._trainable)]

    def has_local_gradients(self) -> bool:
        """Return True if gradients were computed without a forward pass of this wrapper, so that they are only this rank's."""
        return id(self) in DdpModule._repeated

    def missing_gradients(self) -> list[str] | None:
        """Return the parameters without a gradient in the last backward pass; None if none is missing."""
        try:
            self._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            found = _NO_GRADIENT.search(str(error))
            return [name for name, _ in self._by_index(found)] if found else []
        return None

    def _as_forward(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Run a method of the model as a forward pass of the wrapper."""

        @functools.wraps(method)
        def call(*inputs: Any, **named: Any) -> Any:
            had, model = "forward" in vars(self.module), self.module
            forward = model.forward

            def restore() -> None:
                if had:
                    model.forward = forward
                else:
                    vars(model).pop("forward", None)

            def run(*inputs: Any, **named: Any) -> Any:
                restore()  # the method may call the model itself
                output = method(*inputs, **named)
                if (
                    torch.is_grad_enabled()
                    and DdpModule._averages
                    and any(owner == id(self) for owner, _ in DdpModule._arrived)
                ):
                    raise TrainingError(
                        f"{type(model).__name__}.{method.__name__} calls backward() itself, before its forward pass has ended",
                        hint="return the loss, and call backward() on it",
                    )
                return output

            model.forward = run
            try:
                return self(*inputs, **named)
            finally:
                restore()

        return call

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **options: Any) -> Any:
        """Load a state into the wrapped model.

        Args:
            state_dict: A state with or without DistributedDataParallel's prefix.
            *arguments: As for `torch.nn.Module.load_state_dict`.
            **options: As for `torch.nn.Module.load_state_dict`.
        """
        return self.module.load_state_dict(self._without_prefix(state_dict, ""), *arguments, **options)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Load the state as a submodule of another module, for which torch expects DistributedDataParallel's prefix."""
        plain = self._without_prefix({name: state_dict.pop(name) for name in [*state_dict]}, prefix)
        state_dict.update({prefix + _PREFIX + name.removeprefix(prefix): value for name, value in plain.items()})
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _without_prefix(self, state: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
        inside = prefix + _PREFIX
        if hasattr(self.module, "module") or not all(name.startswith(inside) for name in state):
            return state
        return {prefix + name.removeprefix(inside): value for name, value in state.items()}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self._own is None or name in self._own:
                raise
        found = getattr(self.module, name)
        return self._as_forward(found) if name in self._methods else found

    def __setattr__(self, name: str, value: Any) -> None:
        if self._own is None or name in self._own:
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._own is None or name in self._own:
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)

    def __bool__(self) -> bool:
        return True  # also if the model has length 0

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the wrapper, so that the copy can be trained. Without trainable parameters, copy only the wrapped model."""
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            plain: nn.Module = copy.deepcopy(self.module, memo)
            return plain
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        own = state.pop("_own")
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]
        twin._own = own
        twin._watch_gradients()
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return typing.cast, (None, self.module)  # typing.cast returns its second argument: loading needs no distrib


def _forward_to_model(name: str) -> Callable[..., Any]:
    def forwarded(self: DdpModule, *arguments: Any, **options: Any) -> Any:
        return getattr(self.module, name)(*arguments, **options)

    return forwarded


for _name in _FORWARDED:
    setattr(DdpModule, _name, _forward_to_model(_name))


def frozen_after_prepare(names: list[str], model: str) -> TrainingError:
    """Make the error for parameters that were frozen after `job.prepare`.

    Args:
        names: The parameters.
        model: Class of the model.

    Returns:
        The error to raise.
    """
    return TrainingError(
        f"{list_names(names)} of {model} was frozen after job.prepare, and other ranks wait for its gradient",
        hint="freeze it before job.prepare, prepare the model again (model = job.prepare(job.unwrap(model))), "
        "or job.prepare(..., find_unused_parameters=True)",
        code="gradient-missing",
    )


def is_in_join(model: nn.Module) -> bool:
    """Detect DistributedDataParallel's `join()`, in which ranks take different numbers of steps.

    Args:
        model: A prepared model.

    Returns:
        True inside `join()` and after it.
    """
    return isinstance(model, DistributedDataParallel) and bool(model._join_config.enable)


def hidden_attributes(model: DdpModule) -> list[str]:
    """List the model's attributes that DistributedDataParallel's hide.

    Args:
        model: A prepared model.

    Returns:
        Public names, sorted.
    """
    names = (model._own or frozenset()) - {*dir(nn.Module()), *_SAME_MEANING}
    return sorted(name for name in names if not name.startswith("_") and hasattr(model.module, name))
