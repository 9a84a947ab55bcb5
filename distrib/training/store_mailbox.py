"""What each rank leaves in the store that they met in, for another to read later: none waits for the others, as in an exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from torch.distributed.distributed_c10d import _get_default_store


def leave(topic: str, rank: int, text: str) -> None:
    """`rank` says so of `topic`. Where the store is gone nothing is left: those who miss its rank tell that."""
    with contextlib.suppress(RuntimeError, ValueError):
        store, key = _get_default_store(), _key(topic, rank)
        store.set(key, text)
        store.check([key])  # is answered when the store has it, as set() is not


def all_left(topic: str, ranks: Iterable[int]) -> list[str]:
    """What each of `ranks` has left of `topic`, in their order; nothing until all have, and where the store is gone."""
    keys = [_key(topic, rank) for rank in ranks]
    with contextlib.suppress(RuntimeError, ValueError):
        store = _get_default_store()
        if store.check(keys):
            return [store.get(key).decode() for key in keys]
    return []


def _key(topic: str, rank: int) -> str:
    return f"distrib/{topic}/{rank}"
