"""What a piece of the gradients is turned into before it crosses the wire, and how the ranks then sum it.

Every way of summing is a generator: it yields what it waits for, and sums into the tensor that it was given. Collectives
of stage s go to `groups[s]`, so that pieces on their way together keep their order in each group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from distrib.strategy import Gradients

gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
BLOCK = 256
"""Elements of 8-bit gradients that share a scale: 1.6 % more bytes, and one large value spoils few others."""

EXACT_STEPS = 10
"""Steps before PowerSGD begins: the first gradients are large and DDP has settled its buckets by then."""

DUST = 1e-10
"""How large the random numbers are that keep PowerSGD's matrices from becoming nothing; beside others they are not noticed."""

Waits = Iterator[torch.futures.Future[Any]]
Errors = Callable[[int, int], torch.Tensor]
"""Given a stage and how many elements are this rank's there, what it has left out of them so far: to be read, and overwritten with what
is left out now."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The bucket of DDP that a piece is, where the way wants whole buckets."""

    index: int
    shapes: tuple[torch.Size, ...]
    step: int
    """How many steps were averaged before this one."""


class Way(Protocol):
    """A way of summing over the ranks of `groups`, one group for each stage of a sum."""

    stages: int
    window: int
    """How many pieces may be on their way at once."""
    whole: bool
    """Whether a piece must be a whole bucket of DDP, of which the way is told the `Origin`."""
    keeps_errors: bool = False
    """Whether what is left out of a piece comes with the same piece of the next step."""
    exact_steps: int = 0
    """How many steps it begins with that leave nothing out."""

    def sum(
        self, piece: torch.Tensor, groups: list[dist.ProcessGroup], errors: Errors, origin: Origin | None
    ) -> Waits: ...
    def sent_bytes(self, elements: int, element_bytes: int, hosts: int, origin: Origin | None) -> int:
        """What a rank sends for a piece of so many elements."""

    def rescale(self, factor: torch.Tensor) -> None:
        """Gradients come so many times as large from now on: what the way itself has put aside must follow."""
        return

    def forget(self) -> None:
        """Pieces are cut otherwise from now on."""
        return


class Exact(Way):
    """The sum of the gradients as they are. Two pieces at once, as many as Gloo has threads: more would wait there, out of step
    with the other lanes."""

    stages, window, whole = 1, 2, False

    def sum(self, piece: torch.Tensor, groups: list[dist.ProcessGroup], errors: Errors, origin: Origin | None) -> Waits:
        yield dist.all_reduce(piece, group=groups[0], async_op=True).get_future()

    def sent_bytes(self, elements: int, element_bytes: int, hosts: int, origin: Origin | None) -> int:
        return 2 * (hosts - 1) * elements * element_bytes // hosts


class Halved(Way):
    """The sum in 16 bits, `torch.float16` or `torch.bfloat16`: each rank sums a share of the piece that all sent to it, and sends
    the sum back in 16 bits. Two crossings, as in a ring, yet every value is rounded only once on each.

    What travels lies in memory that is kept from step to step: pages that are new each time cost more than the conversion.
    """  # fmt: skip

    stages, window, whole = 2, 8, False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._kept: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        """Memory that no piece uses at present, by its elements: powers of 2, so that pieces of about one size share it."""

    def sum(self, piece: torch.Tensor, groups: list[dist.ProcessGroup], errors: Errors, origin: Origin | None) -> Waits:
        ranks = groups[0].size()
        share = math.ceil(piece.numel() / ranks)
        kept = [self._memory(ranks * share, self.dtype), self._memory(ranks * share, self.dtype)]
        kept.append(self._memory(share, torch.float32))
        sent, received, total = kept[0][: ranks * share], kept[1][: ranks * share], kept[2][:share]
        sent[: piece.numel()].copy_(piece)
        yield dist.all_to_all_single(_raw(received), _raw(sent), group=groups[0], async_op=True).get_future()
        own, *others = received.view(ranks, share)
        total.copy_(own)
        for other in others:
            total += other
        own.copy_(total)
        yield gather(_raw(sent), _raw(own), group=groups[1], async_op=True).get_future()
        piece.copy_(sent[: piece.numel()])
        for memory in kept:
            self._kept[memory.numel(), memory.dtype].append(memory)

    def _memory(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Of so many elements at least."""
        room = 1 << (elements - 1).bit_length()
        kept = self._kept.setdefault((room, dtype), [])
        return kept.pop() if kept else torch.zeros(room, dtype=dtype, device="cpu")

    def sent_bytes(self, elements: int, element_bytes: int, hosts: int, origin: Origin | None) -> int:
        return 2 * (hosts - 1) * 2 * math.ceil(elements / hosts)

    def forget(self) -> None:
        self._kept.clear()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: Gloo knows no bfloat16."""
    return tensor.view(torch.uint8)


class Blocks(Way):
    """The sum in 8 bits and a scale for every `BLOCK`: the greatest magnitude there is 127 (Dettmers et al. 2022, arXiv:2110.02861,
    quantize blockwise). As in `Halved` each rank sums a share; both crossings keep their errors, as in Tang et al. 2021,
    arXiv:2102.02888."""  # fmt: skip

    stages, window, whole, keeps_errors = 2, 8, False, True

    def sum(self, piece: torch.Tensor, groups: list[dist.ProcessGroup], errors: Errors, origin: Origin | None) -> Waits:
        ranks, rank = groups[0].size(), groups[0].rank()
        share = self.padded(math.ceil(piece.numel() / ranks))
        rows = torch.zeros(ranks, share, dtype=torch.float32, device=piece.device)
        flat = rows.view(-1)[: piece.numel()]
        flat.copy_(piece)
        left_out = errors(0, piece.numel())
        flat += left_out
        sent = self.encode(rows)
        _keep(left_out, flat, self.decode(sent, share).view(-1)[: piece.numel()])
        received = torch.empty_like(sent)
        yield dist.all_to_all_single(received, sent, group=groups[0], async_op=True).get_future()
        total = self.decode(received, share).sum(dim=0, keepdim=True)
        length = max(0, min((rank + 1) * share, piece.numel()) - rank * share)
        left_out = errors(1, length)
        total[0, :length] += left_out
        own = self.encode(total)
        _keep(left_out, total[0, :length], self.decode(own, share)[0, :length])
        everyones = torch.empty(ranks, own.shape[1], dtype=own.dtype, device=own.device)
        yield gather(everyones.view(-1), own.view(-1), group=groups[1], async_op=True).get_future()
        piece.copy_(self.decode(everyones, share).view(-1)[: piece.numel()])

    def sent_bytes(self, elements: int, element_bytes: int, hosts: int, origin: Origin | None) -> int:
        share = self.padded(math.ceil(elements / hosts))
        return 2 * (hosts - 1) * (share + 4 * (share // BLOCK))

    @staticmethod
    def padded(elements: int) -> int:
        return BLOCK * math.ceil(elements / BLOCK)

    @staticmethod
    def encode(rows: torch.Tensor) -> torch.Tensor:
        blocks = rows.view(len(rows), -1, BLOCK)
        scales = torch.linalg.vector_norm(blocks, ord=math.inf, dim=2, keepdim=True) / 127
        values = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        return torch.cat(
            [values.view(len(rows), -1).view(torch.uint8), scales.view(len(rows), -1).view(torch.uint8)], dim=1
        )

    @staticmethod
    def decode(rows: torch.Tensor, elements: int) -> torch.Tensor:
        values = rows[:, :elements].view(torch.int8).view(len(rows), -1, BLOCK).float()
        scales = rows[:, elements:].contiguous().view(torch.float32).view(len(rows), -1, 1)
        return (values * scales).view(len(rows), elements)


def _keep(errors: torch.Tensor, wanted: torch.Tensor, sent: torch.Tensor) -> None:
    """What was left out is for the next step; not so after gradients that were no numbers, which must not stay for ever."""
    _without_nan(torch.sub(wanted, sent, out=errors))


def _without_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


class Largest(Way):
    """The fraction that is largest in magnitude, with its places; the rest is kept for later steps.

    Stich, Cordonnier, Jaggi 2018 (arXiv:1809.07599).
    """

    stages, window, whole, keeps_errors = 1, 8, False, True

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def kept(self, elements: int) -> int:
        """How many of so many elements are sent."""
        return max(1, math.ceil(self.fraction * elements)) if elements else 0

    def sum(self, piece: torch.Tensor, groups: list[dist.ProcessGroup], errors: Errors, origin: Origin | None) -> Waits:
        ranks, kept = groups[0].size(), self.kept(piece.numel())
        wanted = errors(0, piece.numel())
        wanted += piece
        places = torch.topk(wanted.abs(), kept, sorted=False).indices
        values = wanted[places]
        wanted[places] = 0
        _without_nan(wanted)  # see _keep
        sent = torch.cat([values.view(torch.uint8), places.to(torch.int32).view(torch.uint8)])
        received = torch.empty(ranks * sent.numel(), dtype=torch.uint8, device=sent.device)
        yield gather(received, sent, group=groups[0], async_op=True).get_future()
        rows = received.view(ranks, 2, 4 * kept)
        piece.zero_()
        # Rank by rank: a GPU adds what meets at one place in any order, and ranks would no longer have the same parameters.
        for values, places in rows:
            piece.index_add_(0, places.view(torch.int32), values.view(torch.float32).to(piece.dtype))

    def sent_bytes(self, elements: int, element_bytes: int, hosts: int, origin: Origin | None) -> int:
        return 8 * (hosts - 1) * self.kept(elements)


class PowerSgd:
    """torch's own PowerSGD (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727), with its error feedback and warm start.

    The first `EXACT_STEPS` steps are exact. What it keeps from one step to the next stays numbers: torch adds what it has left
    out to all later gradients, and begins with the matrices of the step before, which once they are nan or nothing stay so.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup | None) -> None:
        self.state = PowerSGDState(
            group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=EXACT_STEPS,
            orthogonalization_epsilon=1e-8,  # a layer without gradients must not become NaN
        )
        self._dust: dict[int, torch.Tensor] = {}

    @property
    def is_exact(self) -> bool:
        """Whether it leaves nothing out yet."""
        return bool(self.state.iter < EXACT_STEPS)

    def average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The mean of the gradients of a bucket of DDP, or of what looks like one, over the group."""
        index = bucket.index()

        def tidied(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            if index in self.state.error_dict:
                _without_nan(self.state.error_dict[index])
                # All ranks have the same matrix here, and must keep the same one.
                start = _without_nan(self.state.q_memory_dict[index])
                start += self._dust_for(index, start)
            return done.value()

        # torch seeds the first matrix of a bucket, and with it the random numbers of all GPUs: dropout would be the same on all ranks.
        buffer = bucket.buffer()
        seeded = [buffer.device.index] if buffer.is_cuda and index not in self.state.q_memory_dict else []
        with torch.random.fork_rng(devices=seeded, enabled=bool(seeded)):
            future = powerSGD_hook(self.state, _Rows(bucket))
        return future.then(tidied)

    def rescale(self, factor: torch.Tensor) -> None:
        for errors in self.state.error_dict.values():
            errors *= factor

    def forget(self) -> None:
        """What was put aside is of no use any more."""
        self.state.error_dict.clear()

    def _dust_for(self, index: int, start: torch.Tensor) -> torch.Tensor:
        """Random numbers, the same on every rank, with which what has become nothing begins anew."""
        if index not in self._dust:
            numbers = torch.randn(start.shape, generator=torch.Generator().manual_seed(index), device="cpu")
            self._dust[index] = (max(DUST, torch.finfo(start.dtype).tiny) * numbers).to(start)
        return self._dust[index]


class _Rows:
    """A bucket whose scalars, such as CLIP's temperature, are vectors of one, without what is empty: torch's hook asks each gradient
    for its rows."""

    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def gradients(self) -> list[torch.Tensor]:
        filled = (gradient for gradient in self._bucket.gradients() if gradient.numel())
        return [gradient if gradient.dim() else gradient.view(1) for gradient in filled]


class LowRank(Way):
    """`PowerSgd` on CPU hosts.

    Its callbacks wait for collectives inside Gloo's threads: two buckets at once would wait for each other for ever.
    """

    stages, window, whole = 1, 1, True
    exact_steps = EXACT_STEPS

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._hook: PowerSgd | None = None

    def sum(self, piece: torch.Tensor, groups: list[dist.ProcessGroup], errors: Errors, origin: Origin | None) -> Waits:
        assert origin is not None
        if self._hook is None:
            self._hook = PowerSgd(self.rank, groups[0])
        # torch counts steps by last buckets, which not every rank is given: lanes take turns with them.
        self._hook.state.iter = origin.step
        piece.mul_(groups[0].size())  # it averages over the group; what comes here is to be summed
        yield self._hook.average(_Bucket(piece, origin))

    def rescale(self, factor: torch.Tensor) -> None:
        if self._hook is not None:
            self._hook.rescale(factor)

    def forget(self) -> None:
        if self._hook is not None:
            self._hook.forget()

    def sent_bytes(self, elements: int, element_bytes: int, hosts: int, origin: Origin | None) -> int:
        assert origin is not None
        sent = 0
        for shape in origin.shapes:
            if not math.prod(shape):
                continue
            rows = shape[0] if shape else 1
            columns = math.prod(shape) // rows
            rank = min(rows, columns, self.rank)
            low = (rows + columns) * rank
            sent += low if 2 * low < rows * columns else rows * columns
        return 2 * (hosts - 1) * sent * element_bytes // hosts


class _Bucket:
    """As much of DDP's bucket as torch's hook asks for, over a piece of our own."""

    def __init__(self, piece: torch.Tensor, origin: Origin) -> None:
        self._piece, self._origin = piece, origin

    def index(self) -> int:
        return self._origin.index

    def buffer(self) -> torch.Tensor:
        return self._piece

    def is_last(self) -> bool:
        return False  # see LowRank.sum

    def gradients(self) -> list[torch.Tensor]:
        parts = torch.split(self._piece, [shape.numel() for shape in self._origin.shapes])
        return [part.view(shape) for part, shape in zip(parts, self._origin.shapes, strict=True)]


class Units:
    """The scale of the gradients, which a GradScaler changes from step to step: what is put aside is in units of it."""

    def __init__(self) -> None:
        self._scaler: torch.amp.GradScaler | None = None
        self._scale = torch.ones((), device="cpu")

    def follow(self, scaler: torch.amp.GradScaler) -> None:
        """The gradients of this step are times the present scale of `scaler`."""
        if scaler is self._scaler or not scaler.is_enabled():
            return
        scale = scaler._get_scale_async()  # without waiting for the GPU
        if scale is not None:
            self._scaler, self._scale = scaler, scale.clone()

    def growth(self) -> torch.Tensor | None:
        """How many times as large as before gradients now come; None where that is known to be 1."""
        scale = self._scaler._get_scale_async() if self._scaler else None
        if scale is None or (scale.device.type == "cpu" and bool(scale == self._scale)):
            return None
        growth = scale / self._scale
        self._scale = scale.clone()
        return growth


def way_of(gradients: Gradients) -> Way:
    """The way of summing that a strategy's format asks for."""
    if gradients.format == "fp16":
        return Halved(torch.float16)
    if gradients.format == "bf16":
        return Halved(torch.bfloat16)
    if gradients.format == "int8":
        return Blocks()
    if gradients.format == "topk":
        return Largest(gradients.fraction or 1.0)
    if gradients.format == "powersgd":
        return LowRank(gradients.rank or 1)
    return Exact()
