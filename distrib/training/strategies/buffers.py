"""A model's buffers as all ranks have them alike: what is sent between ranks must be laid out alike on all of them."""

from __future__ import annotations

import torch
from torch import nn

from distrib.training.strategies.synchronous import unwrapped


class Buffers:
    """Those that a model had when it was prepared, but for what DistributedDataParallel was told to ignore.

    One that a rank has replaced since by one of another shape, as a mask or a table of positions that grows with the longest
    sequence seen, is its own: in its place stands, for the others, what it was before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrapped(model)
        ignored = set(getattr(self._model, "_ddp_params_and_buffers_to_ignore", ()))
        self._held = {name: buffer for name, buffer in self._model.named_buffers() if name not in ignored}

    def present(self) -> list[torch.Tensor]:
        """In the same order, and of the same shapes and types, on every rank and at any time."""
        now = dict(self._model.named_buffers())
        for name, held in self._held.items():
            buffer = now.get(name)
            if buffer is not None and (buffer.shape, buffer.dtype) == (held.shape, held.dtype):
                if buffer.is_inference() and not torch.is_inference_mode_enabled():
                    # Made in an evaluation: nobody may write to it.
                    buffer = buffer.clone()
                    place, _, last = name.rpartition(".")
                    self._model.get_submodule(place)._buffers[last] = buffer
                self._held[name] = buffer
        return [*self._held.values()]
