"""Ranks that train alone for some steps and then agree on parameters: local SGD, DiLoCo and its streaming form.

After H steps of its own a rank has moved by some way from the parameters that all began with. The mean of these ways, over
the ranks, is a gradient to an outer SGD with Nesterov momentum, which takes the common parameters on from where they were:
DiLoCo (Douillard et al. 2023, arXiv:2311.08105: H = 500, outer learning rate 0.7, momentum 0.9). With an outer learning
rate of 1 and no momentum that is the mean of the ranks' parameters, local SGD (Stich 2018, arXiv:1805.09767).

In fragments (Streaming DiLoCo, arXiv:2501.18512) the parameters are exchanged part by part, at steps spread over the H, so that
the wire is never asked for all at once; overlapped, the ranks go on for some steps while a fragment travels, and mix what comes
back half and half with what they have become meanwhile.
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
from distrib.strategy import INNER_STEPS, OuterOptimizer, Strategy
from distrib.training.checksums import bit_sum
from distrib.training.collectives import broadcast_tensors, find_differing, flatten_tensors, unflatten_tensors
from distrib.training.gradients.compression import create_compressor
from distrib.training.model_parameters import exclude_model, optimizer_parameters, trainable_parameters
from distrib.training.strategies.all_reduce import SynchronizedBuffers, unprepared_parameter
from distrib.training.strategies.base import TrainingStrategy
from distrib.training.telemetry.device_timer import DeviceTimer
from distrib.utils.log import PLAIN, get_logger

log = get_logger("training")


MIXED = 0.5
"""The share of a rank's own parameters when an overlapped exchange comes back (Streaming DiLoCo's alpha)."""
FEW_STEPS = 8
"""Rounds of fewer are too short for an outer momentum on top of the optimizer's own (seen: docs/training.md)."""
LOOK_STEPS = 3 * FEW_STEPS
"""After which the rounds so far are counted."""


class LocalSgdStrategy(TrainingStrategy):
    """Every rank has its own parameters, which become the same on all every H steps and at the end of each epoch."""

    def prepare_model(
        self, model: nn.Module, *, find_unused_parameters: bool, methods: Sequence[str] = ()
    ) -> nn.Module:
        model = super().prepare_model(model, find_unused_parameters=find_unused_parameters)
        if all(one is not model for one in self._models):  # prepared again it keeps what each rank has learnt
            broadcast_tensors([*model.parameters(), *model.buffers()])
            self._models.append(model)
            self._buffers[model] = SynchronizedBuffers(model)
        return model

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._models: list[nn.Module] = []
        self._buffers: dict[nn.Module, SynchronizedBuffers] = {}
        self._rounds: dict[Optimizer, Round] = {}
        self._clock = DeviceTimer(self.device)
        self._waits: deque[tuple[Any, Any]] = deque()
        self._waited = 0.0

    @property
    def replicas_differ(self) -> bool:
        return any(round_.is_apart for round_ in self._rounds.values())

    @property
    def ranks_per_step(self) -> int:
        # The outer momentum takes the ranks on by itself; without it a rank's steps are as long as those of all together
        # (Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217).
        return 1 if self.settings.outer.momentum else self.world.size

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        super().prepare_optimizer(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TrainingError(
                f"{type(optimizer).__name__} cannot be used in mode local: it takes the change of parameters from one step to the next "
                "for its own, and every round ends with one that is all ranks'",
                hint="use --mode sync",
            )
        schedule_free = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
        if schedule_free:
            raise TrainingError(
                f"{type(optimizer).__name__} cannot be used in mode local: its eval() makes parameters of what it keeps beside them, which "
                "is each rank's own",
                hint="use --mode sync",
            )
        self._rounds[optimizer] = Round(optimizer, self.settings, self.world.size)

    def release_optimizer(self, optimizer: Optimizer) -> None:
        self._rounds.pop(optimizer).end()

    def release_model(self, model: nn.Module) -> None:
        self._models = exclude_model(self._models, model)
        self._buffers = {one: self._buffers[one] for one in self._models}

    def pair_models(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        self._rounds[optimizer].pair(models, [self._buffers[model] for model in models])

    def step(self, optimizer: Optimizer, update: Callable[[], Any]) -> Any:
        round_ = self._rounds[optimizer]
        if new := round_.begin():
            known = {parameter for model in self._models for parameter in model.parameters()}
            for parameter in new:
                if parameter not in known:
                    raise unprepared_parameter(parameter)
            own = {*trainable_parameters(optimizer)}  # some may be of a model that it did not train before
            self.pair_models(optimizer, [model for model in self._models if not own.isdisjoint(model.parameters())])
        result = update()
        begun = self._clock.mark()
        round_.go_on()
        if round_.is_too_short and self.world.rank == 0:
            longer = "" if (self.settings.inner_steps or INNER_STEPS) > FEW_STEPS else ", or --inner-steps 16 or more"
            log.info(
                f"mode local: there were {round_.rounds} rounds in {LOOK_STEPS} steps, too short ones for an outer momentum "
                f"on top of that of {type(optimizer).__name__}, which together may take parameters too far: use --outer average{longer}",
                extra=PLAIN,
            )
        self._waits.append((begun, self._clock.mark()))
        self._count_waits()
        return result

    @property
    def waited_seconds(self) -> float:
        self._count_waits()
        return self._waited

    def _count_waits(self) -> None:
        """A GPU waits for the others by itself, later than it was told to."""
        while self._waits and self._clock.has_happened(self._waits[0][1]):
            self._waited += self._clock.seconds(*self._waits.popleft())

    def finish_rounds(self) -> None:
        for round_ in self._rounds.values():
            round_.end()

    def synchronize(self) -> None:
        self.finish_rounds()
        self._check_others()

    def state_dict(self) -> dict[str, Any]:
        return {"local": [round_.state() for round_ in self._rounds.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        states = state.get(
            "local", [{}] * len(self._rounds)
        )  # of another mode, or not wanted: outer momenta begin anew
        if len(states) != len(self._rounds):
            raise TrainingError(
                f"the checkpoint is of {len(states)} optimizer(s) in mode local, the job has {len(self._rounds)}",
                hint="prepare the same optimizers before restoring",
            )
        for round_, one in zip(self._rounds.values(), states, strict=True):
            round_.restore(one)

    def _check_others(self) -> None:
        """Raises TrainingError where a parameter that learns by no prepared optimizer is another on each rank; what is frozen, such as
        a teacher that follows its model, and buffers become the mean. Every rank."""
        known = {id(parameter) for optimizer in self._rounds for parameter in optimizer_parameters(optimizer)}
        others: dict[str, torch.Tensor] = {}
        for number, model in enumerate(self._models):
            for name, parameter in model.named_parameters():
                if id(parameter) not in known or not parameter.requires_grad:
                    others[f"{number}.{name}"] = parameter
            buffers = self._buffers[model].current()  # of what is trained, too, where batches came without steps
            others.update((f"{number}.buffer {place}", buffer) for place, buffer in enumerate(buffers))
        own = {name: str(bit_sum(values)) for name, values in others.items()}
        apart = [
            name for name, differs in zip(own, find_differing([*own.values()]) if own else [], strict=True) if differs
        ]
        for name in apart:
            if others[name].requires_grad:
                raise TrainingError(
                    f"{name.partition('.')[2]} has learnt, but no prepared optimizer has it: in mode local every rank has its own",
                    hint="let an optimizer make the update, and prepare it too; freeze what only follows a model, such as an average",
                )
        _average([others[name] for name in apart], self.world.size)


class Round:
    """The steps of one optimizer between two times at which all ranks have the same parameters."""

    def __init__(self, optimizer: Optimizer, strategy: Strategy, ranks: int) -> None:
        self.models: list[nn.Module] = []
        self._buffers: list[SynchronizedBuffers] = []
        self._optimizer, self._ranks = optimizer, ranks
        self._steps = strategy.inner_steps or INNER_STEPS
        self._outer = strategy.outer
        self._dtype = create_compressor(strategy.gradients).value_dtype
        self._taken = 0
        self._settled = 0
        self.rounds = 0
        """How many have ended."""
        self._ended = 0  # with which step the last of them
        self._fragments: list[Fragment] = []
        self._trained: list[torch.Tensor] = []

    @property
    def is_apart(self) -> bool:
        """Whether this rank has taken steps since all had the same parameters."""
        return any(fragment.begun for fragment in self._fragments)

    def begin(self) -> list[torch.Tensor]:
        """A step is about to be taken: here the parameters are known that a round begins with. Returns those that are new.

        Every rank. When some were frozen or unfrozen, the round ends here: what each rank has learnt is what all have.
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

    def go_on(self) -> None:
        """A step was taken. Every rank."""
        self._taken += 1
        if (self._taken - self._settled) % self._steps == 0:
            self.rounds, self._ended = self.rounds + 1, self._taken
            _average_buffers(self._buffers, self._ranks)  # before what travels for long: NCCL takes one after the other
        for number, fragment in enumerate(self._fragments):
            if fragment.due is not None and self._taken >= fragment.due:
                fragment.finish(own_share=MIXED)
            if (self._taken - self._settled - self._offset(number)) % self._steps == 0:
                if fragment.due is not None:  # the wire is slower than the steps
                    fragment.finish(own_share=MIXED)
                fragment.send(self._taken + self._outer.overlap_steps)
                if not self._outer.overlap_steps:
                    fragment.finish(own_share=0.0)

    @property
    def is_too_short(self) -> bool:
        """Whether it is seen now that rounds are too short for the two momenta that there are."""
        if self._taken != LOOK_STEPS or self.rounds < LOOK_STEPS // FEW_STEPS or not self._outer.momentum:
            return False
        own = any(group.get("momentum") or group.get("betas", (0,))[0] for group in self._optimizer.param_groups)
        return own and self._ended < FEW_STEPS * self.rounds

    def end(self) -> None:
        """Makes the parameters the same on all ranks. Every rank, after as many steps on each."""
        if self._taken == self._settled:
            return
        for fragment in self._fragments:
            if fragment.due is not None:  # where it was sent after the latest step, nobody has trained since
                just_sent = fragment.due == self._taken + self._outer.overlap_steps
                fragment.finish(own_share=0.0 if just_sent else MIXED)
        apart = [fragment for fragment in self._fragments if fragment.begun]
        for fragment in apart:
            fragment.send(self._taken)
        for fragment in apart:
            fragment.finish(own_share=0.0)
        if apart:
            self.rounds, self._ended = self.rounds + 1, self._taken
            _average_buffers(self._buffers, self._ranks)
        self._settled = self._taken

    def state(self) -> dict[str, Any]:
        momenta = self._momenta()
        return {"momentum": [momenta.get(parameter) for parameter in self._trained] if momenta else []}

    def restore(self, state: dict[str, Any]) -> None:
        trained, momenta = trainable_parameters(self._optimizer), state.get("momentum", [])
        sizes = [_size(parameter) for parameter in trained]
        saved = [size if momentum is None else momentum.numel() for size, momentum in zip(sizes, momenta, strict=False)]
        if momenta and (len(momenta) != len(sizes) or saved != sizes):
            raise TrainingError(
                f"the checkpoint has the outer momentum of {len(momenta)} parameter(s), and the optimizer trains "
                f"{len(sizes)}, or of other sizes",
                hint="before job.restore, freeze what was frozen when it was saved",
            )
        self._settled = self._taken
        self._divide({p: momentum for p, momentum in zip(trained, momenta, strict=False) if momentum is not None})

    def _momenta(self) -> dict[torch.Tensor, torch.Tensor]:
        """The outer momentum of each parameter that has one."""
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
        """Fragments of about the same size, in the order of the parameters, which keep their momenta."""
        self._trained = trainable_parameters(self._optimizer)
        whole, gone = sum(p.numel() for p in self._trained), 0
        parts: list[list[torch.Tensor]] = [[] for _ in range(self._outer.fragments)]
        for parameter in self._trained:
            parts[min(gone * len(parts) // max(whole, 1), len(parts) - 1)].append(parameter)
            gone += parameter.numel()
        self._fragments = [Fragment(part, self._outer, self._ranks, self._dtype) for part in parts if part]
        for fragment in self._fragments:
            if any(parameter in momenta for parameter in fragment.parameters):
                still = [momenta.get(p, p.new_zeros(_size(p), dtype=torch.float32)) for p in fragment.parameters]
                fragment.momentum = torch.cat(still).to(flatten_tensors(fragment.parameters).dtype)

    def _offset(self, number: int) -> int:
        """At which step of a round fragment `number` is exchanged; the only one, at the last."""
        return number * self._steps // max(len(self._fragments), 1)

    def pair(self, models: Sequence[nn.Module], buffers: Sequence[SynchronizedBuffers]) -> None:
        """Learns which models the optimizer trains; again whenever there is another."""
        self.models, self._buffers = list(models), list(buffers)


class Fragment:
    """Some parameters, and the outer optimizer's momentum for them."""

    def __init__(
        self, parameters: list[torch.Tensor], outer: OuterOptimizer, ranks: int, dtype: torch.dtype | None
    ) -> None:
        self.parameters = parameters
        self.due: int | None = None
        """The step after which what is on its way is waited for; None when nothing is."""
        self.momentum: torch.Tensor | None = None
        self._outer, self._ranks, self._dtype = outer, ranks, dtype
        self._common: torch.Tensor | None = None
        self._way: torch.Tensor | None = None
        self._work: Any = None

    @property
    def begun(self) -> bool:
        """Whether ranks may have come apart since they last agreed."""
        return self._common is not None

    def begin(self) -> None:
        """Keeps the common parameters, from which this round begins."""
        if self._common is None:
            self._common = flatten_tensors(self.parameters)

    def send(self, due: int) -> None:
        """Sends how far this rank has come. Every rank."""
        assert self._common is not None
        self._way = flatten_tensors(self.parameters).neg_().add_(self._common)
        if self._dtype is not None:
            self._way = self._way.to(self._dtype)
        self._work = dist.all_reduce(self._way, async_op=True)
        self.due = due

    def finish(self, *, own_share: float) -> None:
        """Waits for the mean way of all ranks, and takes the outer step; of what this rank has now, `own_share` stays."""
        assert self._common is not None and self._way is not None
        self._work.wait()
        common = self._outer_step(self._way.to(self._common.dtype).div_(self._ranks))
        unflatten_tensors(
            torch.lerp(common, flatten_tensors(self.parameters), own_share) if own_share else common, self.parameters
        )
        # What is common is kept while it is not what the parameters are; otherwise it is read from them, which the
        # script may have changed.
        self._common = common if own_share else None
        self._way = self._work = self.due = None

    def _outer_step(self, way: torch.Tensor) -> torch.Tensor:
        """The common parameters after a step of SGD with Nesterov momentum, as torch.optim.SGD takes it.

        In the memory of those before and of `way`: at the end of a round a GPU has little left.
        """
        assert self._common is not None
        if self._outer.momentum:
            self.momentum = way.clone() if self.momentum is None else self.momentum.mul_(self._outer.momentum).add_(way)
            way.add_(self.momentum, alpha=self._outer.momentum)
        return self._common.sub_(way, alpha=self._outer.lr)


def _average_buffers(buffers: Sequence[SynchronizedBuffers], ranks: int) -> None:
    _average([buffer for kept in buffers for buffer in kept.current() if buffer.numel()], ranks)


def _average(values: Sequence[torch.Tensor], ranks: int) -> None:
    """Running means and the like become the mean of all ranks', what counts that of rank 0. Every rank."""
    means = [one for one in values if one.is_floating_point() or one.is_complex()]
    if means:
        flat = flatten_tensors(means).div_(
            ranks
        )  # before they are summed: some are masks of the largest number there is
        dist.all_reduce(flat)
        unflatten_tensors(flat, means)
    broadcast_tensors([one for one in values if not (one.is_floating_point() or one.is_complex())])


def _size(parameter: torch.Tensor) -> int:
    """The numbers that `flatten` makes of it."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)
