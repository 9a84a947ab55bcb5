"""DistributedDataParallel that the rest of a script does not notice: the model's own attributes, names and files."""

from __future__ import annotations

import copy
import functools
import re
import types
import typing
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distrib.bandwidth_model.bucketing import ddp_bucket_bytes
from distrib.errors import TrainingError
from distrib.training.checks.cross_rank import several

_INSIDE = "module."
"""What DistributedDataParallel puts before the names of what is in it."""
_LATER = (
    *("_authoritative_rank", "_join_config", "_lazy_init_ran", "_mp_stream", "_static_graph_delay_allreduce_enqueued"),
    *("_submodule_to_event", "buffer_hook", "device_mesh"),
)
"""What DistributedDataParallel sets later than it is made."""
_THE_SAME = "device", "no_sync"
"""What a model may have of the same meaning."""

_NO_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank (\d+): ((?:\d+ ?)+)")
"""In torch's message: the numbers of parameters, among those that learn."""

torch.serialization.add_safe_globals([typing.cast])  # which files of whole models begin with: see Wrapped.__reduce_ex__


class Wrapped(DistributedDataParallel):
    """A model whose gradients torch averages, and which else is for a script what it was before.

    - Gradients of what its methods compute, such as `model.loss(batch)`, are averaged like those of `model(...)`. Those of its
      parts by themselves, `model.encoder(...)`, are where `model(...)` or a method was called since the last backward.
    - `model.config`, `model.generate(...)`, `model[0]`, `model.dropout = 0.1`, `model.extra = nn.Linear(2, 2)` are of the model
      itself. Names that DistributedDataParallel had before are its own; see `hidden`.
    - `state_dict` has the names of before, so that what is trained on many GPUs is read on one; `load_state_dict` takes them,
      and those of DistributedDataParallel.
    - A file of `torch.save(model)` holds the model alone: to read it needs no ranks.
    """

    _own: frozenset[str] | None = None
    """Once torch has set it up, the names of what it has: what is set or read by other names is the model's."""

    _called = False
    """Whether it has computed as a whole, by `model(...)`."""

    _waits = False
    """Whether it has computed for a backward of which no gradient has come yet."""

    _arrivals = 0
    """How many gradients have come of the parameters that are watched."""

    _averages = False
    """Whether it has computed anything of which gradients are wanted: those it averages."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        size = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
        # torch.compile reads this, and parts a model where a bucket ends: it refuses small ones, and many parts are slow ones.
        self.bucket_bytes_cap = max(self.bucket_bytes_cap, ddp_bucket_bytes(size))
        self._learning = [
            (name.replace("_orig_mod.", ""), parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        ]
        """With the names of before torch.compile."""
        self._own = frozenset({*vars(self), *self._modules, *_LATER, *dir(type(self))})
        _backward.watch(self)

    def _pre_forward(self, *inputs: Any, **named: Any) -> Any:
        """What torch does before the model computes."""
        if torch.is_grad_enabled():  # an evaluation prepares for no backward
            self._called = self._averages = self._waits = True
            _backward.begins(averaged=self.require_backward_grad_sync)
        return self._begin(*inputs, **named)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        """Whether rank 0 sends its buffers before the model computes: not in an evaluation, which it may do alone."""
        return torch.is_grad_enabled() and bool(super()._check_sync_bufs_pre_fwd())  # type: ignore[no-untyped-call]

    def _begin(self, *inputs: Any, **named: Any) -> Any:
        """The same; torch refuses to where gradients of the last backward are still waited for."""
        try:
            return super()._pre_forward(*inputs, **named)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if not (found := _NO_GRADIENT.search(str(error))):
                raise
            without = self._numbered(found)
        if frozen := [name for name, parameter in without if not parameter.requires_grad]:
            raise frozen_later(frozen, type(self.module).__name__)
        names = [name for name, _ in without]
        raise TrainingError(
            f"rank {found[1]}: {several(names)} got no gradient in the last backward through {type(self.module).__name__}, and is "
            "waited for",
            hint="job.prepare(..., find_unused_parameters=True), or let the loss use all that the model gives back",
        )

    def _computed(self, output: Any) -> None:
        """A method of the model has computed `output`: the next backward is to average the gradients, as after `model(...)`."""
        if not torch.is_grad_enabled() or not (tensors := _with_gradients(output)):
            return
        self._averages = True
        if not self._called:
            self._begin(torch.empty(0, device=self.device))
        # Ranks may call methods that the others do not, where the model is called, too: nothing that they do together. And
        # which parameters are not used only one call before a backward can tell.
        elif self.find_unused_parameters and self._waits:
            return
        self._waits = True
        _backward.begins(averaged=self.require_backward_grad_sync)
        if self.require_backward_grad_sync:
            self.reducer.prepare_for_backward(tensors if self.find_unused_parameters else [])

    def _numbered(self, numbers: re.Match[str]) -> list[tuple[str, torch.Tensor]]:
        """The parameters of which torch tells the numbers."""
        return [self._learning[number] for number in map(int, numbers[2].split()) if number < len(self._learning)]

    def check_once(self) -> None:
        """Comes before a step. Raises TrainingError where a backward has given gradients that nobody averages."""
        if method := _backward.alone_in(self):
            raise TrainingError(
                f"{type(self.module).__name__}.{method} calls backward itself, which is not waited for: its gradients are this rank's own",
                hint="let it return the loss, and call backward there; or let it call what job.prepare made of the model",
            )
        if _backward.came_twice(self):
            raise TrainingError(
                f"a second backward through {type(self.module).__name__} with nothing computed between: its gradients are this "
                "rank's own, as they are averaged once after each model(...)",
                hint="add the losses and call backward once, or call the model again between",
            )

    def without_gradient(self) -> list[str] | None:
        """The parameters to which the latest backward gave none, and which are waited for; None where it gave all."""
        try:
            self._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            found = _NO_GRADIENT.search(str(error))
            return [name for name, _ in self._numbered(found)] if found else []
        return None

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return self.module.state_dict(*arguments, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **options: Any) -> Any:
        return self.module.load_state_dict(self._with_names_of_before(state_dict, ""), *arguments, **options)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """What torch calls where this is a part of the module that is loaded."""
        plain = self._with_names_of_before({name: state_dict.pop(name) for name in [*state_dict]}, prefix)
        state_dict.update({prefix + _INSIDE + name.removeprefix(prefix): value for name, value in plain.items()})
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _with_names_of_before(self, state: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
        """`state`, whose names begin with `prefix`, as it is without DistributedDataParallel."""
        inside = prefix + _INSIDE
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
        if isinstance(found, types.MethodType) and found.__self__ is getattr(self.module, "_orig_mod", self.module):
            return _Method(found, self)
        return found

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

    def register_buffer(self, *arguments: Any, **options: Any) -> None:
        self.module.register_buffer(*arguments, **options)

    def register_state_dict_pre_hook(self, *arguments: Any, **options: Any) -> Any:
        return self.module.register_state_dict_pre_hook(*arguments, **options)

    def register_state_dict_post_hook(self, *arguments: Any, **options: Any) -> Any:
        return self.module.register_state_dict_post_hook(*arguments, **options)

    def _register_state_dict_hook(self, *arguments: Any, **options: Any) -> Any:
        return self.module._register_state_dict_hook(*arguments, **options)

    def register_load_state_dict_pre_hook(self, *arguments: Any, **options: Any) -> Any:
        return self.module.register_load_state_dict_pre_hook(*arguments, **options)

    def register_load_state_dict_post_hook(self, *arguments: Any, **options: Any) -> Any:
        return self.module.register_load_state_dict_post_hook(*arguments, **options)

    def register_parameter(self, *arguments: Any, **options: Any) -> None:
        self.module.register_parameter(*arguments, **options)

    def add_module(self, *arguments: Any, **options: Any) -> None:
        self.module.add_module(*arguments, **options)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)

    def __contains__(self, thing: Any) -> bool:
        return thing in self.module

    def __len__(self) -> int:
        return len(self.module)

    def __bool__(self) -> bool:
        return True  # also where the model has no length

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """One more whose gradients are averaged, as a copy may be trained, too; of what does not learn, the model alone."""
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            plain: nn.Module = copy.deepcopy(self.module, memo)
            return plain
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        own = state.pop("_own")
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]
        twin._own = own
        _backward.watch(twin)
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return typing.cast, (None, self.module)  # gives back the second; found also where nobody has distrib


def frozen_later(names: list[str], model: str) -> TrainingError:
    """The error of parameters that learnt when they were prepared, and do not now."""
    return TrainingError(
        f"{several(names)} of {model} was frozen after job.prepare, and its gradient is waited for",
        hint="freeze it before job.prepare, prepare the model again (model = job.prepare(job.unwrap(model))), "
        "or job.prepare(..., find_unused_parameters=True)",
    )


class _Backward:
    """Sees where a second backward follows what models have computed, of which torch averages no gradient.

    Of each model the first and the last parameter are watched: a backward that is to give all gradients reaches both. Of one that
    may have unused parameters, all are. What any of the models computes allows another backward: they may share parameters, and a
    model may be prepared again.
    """

    def __init__(self) -> None:
        self._averaged = False
        self._arrived: set[tuple[int, int]] = set()
        self._twice: set[int] = set()
        self._alone: dict[int, str] = {}

    def watch(self, model: Wrapped) -> None:
        learning = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        if not model.find_unused_parameters:
            learning = learning[:1] + learning[1:][-1:]
        for number, parameter in enumerate(learning):
            parameter.register_post_accumulate_grad_hook(_Arrival(weakref.ref(model), number))

    def begins(self, *, averaged: bool) -> None:
        """A model has computed, and gradients of the next backward are `averaged`, or this rank's own."""
        self._averaged = averaged
        self._arrived.clear()
        self._twice.clear()
        self._alone.clear()

    def was_alone(self, model: Wrapped, method: str) -> None:
        """A method of a model that had computed nothing before has called backward."""
        self._alone[id(model)] = method

    def alone_in(self, model: Wrapped) -> str:
        """The method that has called the latest backward, with nothing that `model` had computed before; empty where none has."""
        return self._alone.get(id(model), "")

    def arrived(self, model: Wrapped, number: int) -> None:
        """A gradient has come."""
        model._waits = False
        model._arrivals += 1
        if self._averaged and (id(model), number) in self._arrived:
            self._twice.add(id(model))
        self._arrived.add((id(model), number))

    def came_twice(self, model: Wrapped) -> bool:
        """Whether gradients of `model` are those of a second backward, too: this rank's own."""
        return id(model) in self._twice


_backward = _Backward()


class _Arrival:
    """A hook that keeps no model alive."""

    def __init__(self, model: weakref.ref[Wrapped], number: int) -> None:
        self._model, self._number = model, number

    def __call__(self, _: torch.Tensor) -> None:
        if (model := self._model()) is not None:
            _backward.arrived(model, self._number)


class _Method:
    """A method of a model, which is told what it has computed."""

    def __init__(self, method: types.MethodType, model: Wrapped) -> None:
        functools.update_wrapper(self, method)
        self._method, self._model = method, model

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        model = self._model
        waited, arrivals = model._waits, model._arrivals
        output = self._method(*arguments, **named)
        alone = model._arrivals > arrivals and not waited and model.require_backward_grad_sync
        model._computed(output)
        if alone:
            _backward.was_alone(model, self._method.__name__)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_method"], name)

    def __eq__(self, other: object) -> bool:
        return self._method == (other._method if isinstance(other, _Method) else other)

    def __hash__(self) -> int:
        return hash(self._method)

    def __reduce__(self) -> Any:
        return self._method.__reduce__()  # for a loader's processes, which have no ranks


def _with_gradients(output: Any) -> list[torch.Tensor]:
    """What a gradient can be computed from: in lists, mappings and the attributes of objects, and of objects in these."""
    return [tensor for tensor in _tensors(output, set()) if tensor.grad_fn is not None]


OBJECTS_DEEP = 4
"""As `Independent(Normal(...))`, and a mixture of such, are."""


def _tensors(thing: Any, seen: set[int], *, deep: int = OBJECTS_DEEP) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (list, tuple, dict)):
        for item in thing.values() if isinstance(thing, dict) else thing:
            yield from _tensors(item, seen, deep=deep)
    elif deep and not isinstance(
        thing, (type, nn.Module, str, bytes, int, float, types.ModuleType, types.FunctionType)
    ):
        if id(thing) in seen:
            return
        seen.add(id(thing))
        slots = [name for kind in type(thing).__mro__ for name in _listed(getattr(kind, "__slots__", ()))]
        yield from _tensors(getattr(thing, "__dict__", None), seen, deep=deep - 1)
        yield from _tensors([getattr(thing, name, None) for name in slots], seen, deep=deep - 1)


def _listed(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def in_join(model: nn.Module) -> bool:
    """Whether `model` is in DistributedDataParallel's `join()`, where ranks take different numbers of steps, or was."""
    return isinstance(model, DistributedDataParallel) and bool(model._join_config.enable)


def hidden(model: Wrapped) -> list[str]:
    """What the module in `model` has, too, under names that are DistributedDataParallel's there."""
    names = (model._own or frozenset()) - {*dir(nn.Module()), *_THE_SAME}
    return sorted(name for name in names if not name.startswith("_") and hasattr(model.module, name))
