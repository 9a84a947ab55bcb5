"""Local SGD and DiLoCo: ranks train separately for H inner steps and then synchronize parameters.

After H inner steps, the difference between the common start parameters and a rank's parameters is its pseudo-gradient. An outer
SGD with Nesterov momentum applies the mean of all pseudo-gradients to the common parameters: DiLoCo (Douillard et al. 2023,
arXiv:2311.08105: H = 500, outer learning rate 0.7, momentum 0.9). With outer learning rate 1 and no momentum, the result is the
mean of the ranks' parameters: local SGD (Stich 2018, arXiv:1805.09767).

With several fragments (Streaming DiLoCo, arXiv:2501.18512), parts of the parameters are exchanged at steps spread over the H steps,
which lowers the peak traffic. With overlap, ranks continue to train while a fragment is in flight. Afterwards they average the
received parameters with their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distrib.errors import TrainingError
from distrib.strategy import OuterOptimizer, Strategy
from distrib.training.checksums import bit_sum
from distrib.training.collectives import broadcast_tensors, find_differing, flatten_tensors, unflatten_tensors
from distrib.training.gradients.compression import create_compressor
from distrib.training.model_parameters import exclude_model, optimizer_parameters, trainable_parameters
from distrib.training.strategies.all_reduce import SynchronizedBuffers, unprepared_parameter
from distrib.training.strategies.base import TrainingStrategy
from distrib.training.telemetry.device_timer import DeviceTimer
from distrib.utils.log import get_logger

log = get_logger("training")


OWN_SHARE = 0.5
"""Weight of a rank's own parameters after an overlapped exchange (alpha of Streaming DiLoCo)."""


class LocalSgdStrategy(TrainingStrategy):
    """Strategy of mode local: each rank trains its own parameters, which are synchronized every H steps and after each epoch."""

    def prepare_model(
        self, model: nn.Module, *, find_unused_parameters: bool, methods: Sequence[str] = ()
    ) -> nn.Module:
        """Move a model to the device and broadcast rank 0's parameters at its first preparation. Collective.

        A model that is prepared again keeps this rank's parameters.

        Args:
            model: The script's module.
            find_unused_parameters: True if a step may leave parameters without a gradient.
            methods: Names of methods that run as forward passes.
        """
        model = super().prepare_model(model, find_unused_parameters=find_unused_parameters)
        if all(one is not model for one in self._models):  # a model that is prepared again keeps this rank's parameters
            broadcast_tensors([*model.parameters(), *model.buffers()])
            self._models.append(model)
            self._buffers[model] = SynchronizedBuffers(model)
        return model

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._models: list[nn.Module] = []
        self._buffers: dict[nn.Module, SynchronizedBuffers] = {}
        self._rounds: dict[Optimizer, _Round] = {}
        self._clock = DeviceTimer(self.device)
        self._waits: deque[tuple[Any, Any]] = deque()
        self._waited = 0.0
        self._has_warned = False

    @property
    def replicas_differ(self) -> bool:
        return any(round_.has_diverged for round_ in self._rounds.values())

    @property
    def ranks_per_step(self) -> int:
        # Outer momentum scales with the number of ranks. Without it, each rank uses the learning rate of the global batch
        # (Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217).
        return 1 if self.settings.outer.momentum else self.world.size

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Create the rounds of an optimizer. Collective.

        Args:
            optimizer: The script's optimizer.

        Raises:
            TrainingError: The optimizer cannot be used in mode local: LBFGS, or a schedule-free optimizer.
        """
        super().prepare_optimizer(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TrainingError(
                f"{type(optimizer).__name__} cannot be used in mode local: it estimates curvature from changes of the parameters, and "
                "each synchronization changes them",
                hint="use --mode sync",
            )
        schedule_free = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
        if schedule_free:
            raise TrainingError(
                f"{type(optimizer).__name__} cannot be used in mode local: its eval() computes parameters from state that differs "
                "between ranks",
                hint="use --mode sync",
            )
        self._rounds[optimizer] = _Round(optimizer, self.settings, self.world.size)
        has_momentum = any(group.get("momentum") or group.get("betas", (0,))[0] for group in optimizer.param_groups)
        inner_steps, outer = self.settings.steps_per_round, self.settings.outer
        if has_momentum and outer.momentum and inner_steps < 8 and not self._has_warned and not self.world.rank:
            self._has_warned = True
            log.warning(
                f"training may diverge: outer momentum and momentum of {type(optimizer).__name__} in rounds of {inner_steps} steps\n"
                "  use --outer average, or --inner-steps 16 or more"
            )

    def release_optimizer(self, optimizer: Optimizer) -> None:
        """Synchronize the parameters of an optimizer that takes no more steps. Collective.

        Args:
            optimizer: A prepared optimizer.
        """
        self._rounds.pop(optimizer).end()

    def release_model(self, model: nn.Module) -> None:
        """Stop synchronizing the buffers of a model.

        Args:
            model: A prepared model.
        """
        self._models = exclude_model(self._models, model)
        self._buffers = {one: self._buffers[one] for one in self._models}

    def pair_models(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        """Record the models that an optimizer trains, whose buffers are averaged at the end of its rounds.

        Args:
            optimizer: A prepared optimizer.
            models: All models of which it has parameters.
        """
        self._rounds[optimizer].pair(models, [self._buffers[model] for model in models])

    def step(self, optimizer: Optimizer, update: Callable[[], Any]) -> Any:
        """Take an inner step, and exchange the fragments that are due. Collective.

        Args:
            optimizer: A prepared optimizer.
            update: The optimizer's own step.

        Raises:
            TrainingError: The optimizer has a parameter that belongs to no prepared model.
        """
        round_ = self._rounds[optimizer]
        if new := round_.begin():
            known = {parameter for model in self._models for parameter in model.parameters()}
            for parameter in new:
                if parameter not in known:
                    raise unprepared_parameter(parameter)
            own = {*trainable_parameters(optimizer)}  # new parameters may be of another model
            self.pair_models(optimizer, [model for model in self._models if not own.isdisjoint(model.parameters())])
        result = update()
        begun = self._clock.mark()
        round_.count_step()
        self._waits.append((begun, self._clock.mark()))
        self._count_waits()
        return result

    @property
    def waited_seconds(self) -> float:
        self._count_waits()
        return self._waited

    def _count_waits(self) -> None:
        """Add the waits that the device has completed: a GPU waits asynchronously."""
        while self._waits and self._clock.has_happened(self._waits[0][1]):
            self._waited += self._clock.seconds(*self._waits.popleft())

    def finish_rounds(self) -> None:
        for round_ in self._rounds.values():
            round_.end()

    def synchronize(self) -> None:
        self.finish_rounds()
        self._average_differing()

    def state_dict(self) -> dict[str, Any]:
        return {"local": [round_.state() for round_ in self._rounds.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the outer momenta of a checkpoint. A checkpoint of another mode resets them.

        Args:
            state: The result of `state_dict` on rank 0.

        Raises:
            TrainingError: The checkpoint is of another number of optimizers, or of other parameter sizes.
        """
        states = state.get("local", [{}] * len(self._rounds))  # without this entry, outer momenta start at zero
        if len(states) != len(self._rounds):
            raise TrainingError(
                f"the checkpoint is of {len(states)} optimizer(s) in mode local, the job has {len(self._rounds)}",
                hint="prepare the same optimizers before restoring",
                code="checkpoint-mismatch",
            )
        for round_, one in zip(self._rounds.values(), states, strict=True):
            round_.restore(one)

    def _average_differing(self) -> None:
        """Average parameters and buffers that differ between ranks, such as those that the script changed itself. Collective.

        Raises TrainingError if a trainable parameter differs that no prepared optimizer has.
        """
        known = {id(parameter) for optimizer in self._rounds for parameter in optimizer_parameters(optimizer)}
        values: dict[str, torch.Tensor] = {}
        for number, model in enumerate(self._models):
            for name, parameter in model.named_parameters():
                values[f"{number}.{name}"] = parameter
            buffers = self._buffers[model].current()  # also of trained models: batches without steps change them
            values.update((f"{number}.buffer {place}", buffer) for place, buffer in enumerate(buffers))
        own = {name: str(bit_sum(tensor)) for name, tensor in values.items()}
        diverged = [
            name for name, differs in zip(own, find_differing([*own.values()]) if own else [], strict=True) if differs
        ]
        for name in diverged:
            if values[name].requires_grad and id(values[name]) not in known:
                raise TrainingError(
                    f"{name.partition('.')[2]} differs between ranks, and no prepared optimizer has it",
                    hint="prepare the optimizer that updates it, or freeze it if it only follows a model, such as an average",
                    code="weights-differ",
                )
        _average([values[name] for name in diverged], self.world.size)


class _Round:
    """Steps of one optimizer between two synchronizations of its parameters."""

    def __init__(self, optimizer: Optimizer, strategy: Strategy, ranks: int) -> None:
        """Create the rounds of an optimizer."""
        self.models: list[nn.Module] = []
        self._buffers: list[SynchronizedBuffers] = []
        self._optimizer, self._ranks = optimizer, ranks
        self._steps = strategy.steps_per_round
        self._outer = strategy.outer
        self._dtype = create_compressor(strategy.gradients).value_dtype
        self._taken = 0
        self._synchronized = 0
        self._fragments: list[_Fragment] = []
        self._trained: list[torch.Tensor] = []

    @property
    def has_diverged(self) -> bool:
        """True if this rank has taken steps since the last synchronization."""
        return any(fragment.begun for fragment in self._fragments)

    def begin(self) -> list[torch.Tensor]:
        """Record the parameters at the start of a round, before a step. Collective.

        If the script froze or unfroze parameters, the present round ends first.

        Returns:
            Parameters that the optimizer trains for the first time.
        """
        trained = trainable_parameters(self._optimizer)
        known = set(self._trained)
        new = [parameter for parameter in trained if parameter not in known]
        if new or len(trained) != len(known):
            self.end()
            self._divide(self._momenta())
        for fragment in self._fragments:
            fragment.begin()
        return new

    def count_step(self) -> None:
        """Count a step, and exchange the fragments that are due. Collective."""
        self._taken += 1
        if (self._taken - self._synchronized) % self._steps == 0:
            _average_buffers(self._buffers, self._ranks)  # before fragments: NCCL runs one at a time
        for number, fragment in enumerate(self._fragments):
            if fragment.due is not None and self._taken >= fragment.due:
                fragment.finish(own_share=OWN_SHARE)
            if (self._taken - self._synchronized - self._offset(number)) % self._steps == 0:
                if fragment.due is not None:  # the network is slower than the steps
                    fragment.finish(own_share=OWN_SHARE)
                fragment.send(self._taken + self._outer.overlap_steps)
                if not self._outer.overlap_steps:
                    fragment.finish(own_share=0.0)

    def end(self) -> None:
        """Synchronize the parameters. Collective, after the same number of steps on each rank."""
        if self._taken == self._synchronized:
            return
        for fragment in self._fragments:
            if fragment.due is not None:  # if it was sent after the latest step, no rank has trained since
                just_sent = fragment.due == self._taken + self._outer.overlap_steps
                fragment.finish(own_share=0.0 if just_sent else OWN_SHARE)
        diverged = [fragment for fragment in self._fragments if fragment.begun]
        for fragment in diverged:
            fragment.send(self._taken)
        for fragment in diverged:
            fragment.finish(own_share=0.0)
        if diverged:
            _average_buffers(self._buffers, self._ranks)
        self._synchronized = self._taken

    def state(self) -> dict[str, Any]:
        """Return the outer momenta, for a checkpoint."""
        momenta = self._momenta()
        return {"momentum": [momenta.get(parameter) for parameter in self._trained] if momenta else []}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the outer momenta of a checkpoint (empty: reset them), and begin a new round."""
        trained, momenta = trainable_parameters(self._optimizer), state.get("momentum", [])
        sizes = [_size(parameter) for parameter in trained]
        saved = [size if momentum is None else momentum.numel() for size, momentum in zip(sizes, momenta, strict=False)]
        if momenta and (len(momenta) != len(sizes) or saved != sizes):
            raise TrainingError(
                f"the checkpoint has the outer momentum of {len(momenta)} parameter(s), and the optimizer trains "
                f"{len(sizes)}, or of other sizes",
                hint="before job.restore, freeze what was frozen when it was saved",
                code="checkpoint-mismatch",
            )
        self._synchronized = self._taken
        self._divide({p: momentum for p, momentum in zip(trained, momenta, strict=False) if momentum is not None})

    def _momenta(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the outer momentum of each parameter that has one."""
        return {
            parameter: momentum
            for fragment in self._fragments
            if fragment.momentum is not None
            for parameter, momentum in zip(
                fragment.parameters,
                torch.split(fragment.momentum, [_size(p) for p in fragment.parameters]),
                strict=True,
            )
        }

    def _divide(self, momenta: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Divide the parameters, in their order, into fragments of similar size. Momenta are kept."""
        self._trained = trainable_parameters(self._optimizer)
        whole, assigned = sum(p.numel() for p in self._trained), 0
        parts: list[list[torch.Tensor]] = [[] for _ in range(self._outer.fragments)]
        for parameter in self._trained:
            parts[min(assigned * len(parts) // max(whole, 1), len(parts) - 1)].append(parameter)
            assigned += parameter.numel()
        self._fragments = [_Fragment(part, self._outer, self._ranks, self._dtype) for part in parts if part]
        for fragment in self._fragments:
            if any(parameter in momenta for parameter in fragment.parameters):
                still = [momenta.get(p, p.new_zeros(_size(p), dtype=torch.float32)) for p in fragment.parameters]
                fragment.momentum = torch.cat(still).to(flatten_tensors(fragment.parameters).dtype)

    def _offset(self, number: int) -> int:
        """Return the step within a round at which a fragment is exchanged. A single fragment is exchanged at the end."""
        return number * self._steps // max(len(self._fragments), 1)

    def pair(self, models: Sequence[nn.Module], buffers: Sequence[SynchronizedBuffers]) -> None:
        """Record the models that the optimizer trains, and the buffers of each; called again after each change."""
        self.models, self._buffers = list(models), list(buffers)


class _Fragment:
    """Parameters that are exchanged together, and their outer optimizer state."""

    def __init__(
        self, parameters: list[torch.Tensor], outer: OuterOptimizer, ranks: int, dtype: torch.dtype | None
    ) -> None:
        """Create a fragment. Pseudo-gradients are sent in `dtype`, None for that of the parameters."""
        self.parameters = parameters
        self.due: int | None = None
        """Step after which the exchange in flight is awaited; None if there is none."""
        self.momentum: torch.Tensor | None = None
        self._outer, self._ranks, self._dtype = outer, ranks, dtype
        self._common: torch.Tensor | None = None
        self._pseudo_gradient: torch.Tensor | None = None
        self._work: Any = None

    @property
    def begun(self) -> bool:
        """True if ranks may have different parameters since the last synchronization."""
        return self._common is not None

    def begin(self) -> None:
        """Copy the common parameters at the start of a round. Collective.

        Where the script changed parameters differently on each rank since the last round, their mean is common.
        """
        if self._common is None:
            self._common = flatten_tensors(self.parameters)
            if self._ranks > 1 and _differs(self._common):
                _average([self._common], self._ranks)

    def send(self, due: int) -> None:
        """Start the all-reduce of the pseudo-gradients, which is awaited after step `due`. Collective."""
        assert self._common is not None
        self._pseudo_gradient = flatten_tensors(self.parameters).neg_().add_(self._common)
        if self._dtype is not None:
            self._pseudo_gradient = self._pseudo_gradient.to(self._dtype)
        self._work = dist.all_reduce(self._pseudo_gradient, async_op=True)
        self.due = due

    def finish(self, *, own_share: float) -> None:
        """Wait for the mean pseudo-gradient, and take the outer step. `own_share` is the weight of this rank's parameters. Collective."""
        assert self._common is not None and self._pseudo_gradient is not None
        self._work.wait()
        common = self._outer_step(self._pseudo_gradient.to(self._common.dtype).div_(self._ranks))
        unflatten_tensors(
            torch.lerp(common, flatten_tensors(self.parameters), own_share) if own_share else common, self.parameters
        )
        # Common parameters are stored only while they differ from the model's. Otherwise `begin` reads them from the model,
        # which the script may have changed.
        self._common = common if own_share else None
        self._pseudo_gradient = self._work = self.due = None

    def _outer_step(self, gradient: torch.Tensor) -> torch.Tensor:
        """Apply a step of SGD with Nesterov momentum to the common parameters, as torch.optim.SGD does.

        Works in place on the common parameters and on the pseudo-gradient, because GPU memory is scarce at the end of a round.
        """
        assert self._common is not None
        outer = self._outer
        if outer.momentum:
            self.momentum = (
                gradient.clone() if self.momentum is None else self.momentum.mul_(outer.momentum).add_(gradient)
            )
            gradient.add_(self.momentum, alpha=outer.momentum)
        return self._common.sub_(gradient, alpha=outer.lr)


def _average_buffers(buffers: Sequence[SynchronizedBuffers], ranks: int) -> None:
    _average([buffer for kept in buffers for buffer in kept.current() if buffer.numel()], ranks)


def _average(values: Sequence[torch.Tensor], ranks: int) -> None:
    """Average floating-point buffers over all ranks; set others, such as counters, to those of rank 0. Collective."""
    means = [one for one in values if one.is_floating_point() or one.is_complex()]
    if means:
        flat = flatten_tensors(means).div_(
            ranks
        )  # before the sum, which would overflow for masks of the largest representable number
        dist.all_reduce(flat)
        unflatten_tensors(flat, means)
    broadcast_tensors([one for one in values if not (one.is_floating_point() or one.is_complex())])


def _differs(values: torch.Tensor) -> bool:
    """Test if a tensor differs between ranks. Collective."""
    own = bit_sum(values) % 2**62
    largest = torch.tensor([own, -own], device=values.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest[0]) != -int(largest[1])


def _size(parameter: torch.Tensor) -> int:
    """Return the number of real elements that `flatten_tensors` makes of a parameter."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)
