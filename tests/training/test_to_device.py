"""Batches moved to the device of a rank."""

from __future__ import annotations

import collections
import dataclasses

import torch

from distrib.training.to_device import move_to_device


def test_nested_batches_are_moved():
    batch = {"a": [torch.ones(2), (torch.zeros(1), "text")], "b": 3}
    there = move_to_device(batch, torch.device("meta"))
    assert there["a"][0].is_meta and there["a"][1][0].is_meta
    assert (there["a"][1][1], there["b"]) == ("text", 3)


@dataclasses.dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    words: tuple[str, torch.Tensor]
    half: torch.Tensor = dataclasses.field(init=False, default=torch.ones(1))


class Graph:
    """Object with its own `to` method, which does not return the object."""

    def to(self, device):
        self.at = device


class Quantity:
    def to(self, unit):
        raise TypeError("not a unit")


def test_batches_of_user_classes_are_moved():
    meta = torch.device("meta")
    batch = collections.UserDict(ids=torch.ones(2, dtype=torch.long), pair=Pair(torch.ones(3), ("a", torch.ones(1))))
    quantity = Quantity()
    there = move_to_device([batch, Graph(), quantity], meta)
    assert isinstance(there[0], collections.UserDict) and there[0]["ids"].is_meta
    pair = there[0]["pair"]
    assert pair.x.is_meta and pair.half.is_meta and pair.words[0] == "a" and pair.words[1].is_meta
    assert there[1].at == meta and there[2] is quantity
    assert not batch["ids"].is_meta and not batch["pair"].x.is_meta  # the script's own batch is unchanged


@dataclasses.dataclass
class Unfinished:
    x: torch.Tensor
    cache: list[int] = dataclasses.field(init=False)


class Strict(list):
    """List that cannot be built from its items."""

    def __init__(self, first, second):
        super().__init__([first, second])


def test_batches_that_cannot_be_rebuilt():
    cpu, meta = torch.device("cpu"), torch.device("meta")
    unfinished = Unfinished(torch.ones(2))
    assert move_to_device(unfinished, cpu) is unfinished  # nothing is moved
    moved = move_to_device(unfinished, meta)
    assert moved.x.is_meta and not hasattr(moved, "cache") and not unfinished.x.is_meta
    strict = Strict("a", 2)
    assert move_to_device({"words": strict}, meta)["words"] is strict
