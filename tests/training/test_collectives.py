"""Collectives of a job's ranks, which are threads here: objects, tensors, numbers, notes in the store."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distrib.errors import TrainingError
from distrib.training import collectives
from distrib.training.collectives import IS_AVERAGED, JobCollectives
from distrib.training.world import World


class ThreadedRanks:
    """Stand-in for torch.distributed whose ranks are threads. Like Gloo, it carries few types."""

    group = SimpleNamespace(WORLD=None)

    def __init__(self, size: int) -> None:
        self.size = size
        self.messages: list[str] = []
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size
        self._own = threading.local()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Return the results of `work` by rank, or the exception that it raised there."""
        results: list[Any] = [None] * self.size

        def act(rank: int) -> None:
            self._own.rank = rank
            try:
                results[rank] = work(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=act, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results

    def _exchange(self, name: str, own: Any) -> list[Any]:
        self._slots[self._own.rank] = own
        if self._own.rank == 0:
            self.messages.append(name)
        self._barrier.wait(10)
        slots = list(self._slots)
        self._barrier.wait(10)
        return slots

    def get_rank(self) -> int:
        rank: int = self._own.rank
        return rank

    def get_world_size(self) -> int:
        return self.size

    def all_gather_object(self, objects: list[Any], own: Any) -> None:
        objects[:] = self._exchange("all_gather_object", own)

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        objects[:] = self._exchange("broadcast_object_list", list(objects))[src]

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert tensor.dtype in collectives.TYPES_OF_BACKENDS and tensor.is_contiguous()
        tensor.copy_(self._exchange("broadcast", tensor.clone())[src])

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        assert tensor.dtype in collectives.TYPES_OF_BACKENDS - {torch.bool} and tensor.is_contiguous()
        values = torch.stack(self._exchange("all_reduce", tensor.clone()))
        reduced = {
            dist.ReduceOp.SUM: values.sum(0), dist.ReduceOp.MAX: values.amax(0), dist.ReduceOp.MIN: values.amin(0)
        }[op]  # fmt: skip
        tensor.copy_(reduced.to(tensor.dtype))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> ThreadedRanks:
    three = ThreadedRanks(3)
    monkeypatch.setattr(collectives, "dist", three)
    return three


def of_job(rank: int, size: int = 3, elastic: Any = None) -> JobCollectives:
    return JobCollectives(World(rank=rank, size=size, local_rank=rank, local_size=size), elastic)


def test_strings_that_differ_between_ranks_are_found(ranks):
    own = [["a", "", "x", ""], ["a", "b", "y", ""], ["a", "b", "x", ""]]
    assert ranks.run(lambda rank: collectives.find_differing(own[rank])) == [[False, False, True, False]] * 3


def test_objects_with_tensors_become_bytes():
    loaded = torch.load(io.BytesIO(collectives.to_bytes({"a": torch.ones(2), "b": 3})))
    assert loaded["a"].tolist() == [1, 1] and loaded["b"] == 3


def test_tensors_of_any_type_and_layout_are_broadcast_in_one_message(ranks):
    def tensors(rank: int) -> list[torch.Tensor]:
        value = rank + 1
        return [
            torch.full((3,), value, dtype=torch.uint8), torch.full((2, 3), float(value)).t(), torch.tensor(0.5 * value),
            torch.full((2,), complex(value, -value)), torch.full((2,), value, dtype=torch.int16), torch.empty(0),
            torch.nn.Parameter(torch.full((2,), float(value), dtype=torch.float64)), torch.tensor([value > 1]),
        ]  # fmt: skip

    def broadcast(rank: int) -> list[torch.Tensor]:
        collectives.broadcast_tensors(own := tensors(rank))
        return own

    for received in ranks.run(broadcast):
        for tensor, expected in zip(received, tensors(0), strict=True):
            assert torch.equal(tensor, expected) and tensor.dtype == expected.dtype
    assert ranks.messages == ["broadcast"]
    assert ranks.run(lambda rank: collectives.broadcast_tensors([torch.empty(0)])) == [None] * 3
    assert len(ranks.messages) == 1


def test_flat_tensors_are_divided_into_the_same_ones():
    wide = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    given = [wide, torch.tensor([5 + 6j]), torch.tensor(7.0, dtype=torch.float16)]
    flat = collectives.flatten_tensors(given)
    assert flat.tolist() == [1, 2, 3, 4, 5, 6, 7] and flat.dtype == torch.float32 and not flat.requires_grad
    assert collectives.flatten_tensors([torch.ones(2, dtype=torch.float16)]).dtype == torch.float32
    precise = collectives.flatten_tensors([torch.tensor(1e-300, dtype=torch.float64), torch.tensor(1.0)])
    assert precise.tolist() == [1e-300, 1.0] and precise.dtype == torch.float64
    collectives.unflatten_tensors(flat * 2, given)
    assert wide.tolist() == [[2, 4], [6, 8]] and given[1].tolist() == [10 + 12j] and given[2].item() == 14


def test_texts_of_ranks_are_read_from_the_store(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(collectives, "_get_default_store", lambda: store)
    collectives.publish("a", 0, "first")
    collectives.publish("a", 2, b"\xff")
    collectives.publish("b", 1, "of another topic")
    assert collectives.collect("a", [2, 1, 0], 0.01) == [b"\xff", None, b"first"]
    assert collectives.collect_if_complete("a", [0, 1]) == []
    collectives.publish("a", 1, "second")
    assert collectives.collect_if_complete("a", [1, 0]) == ["second", "first"]
    assert collectives.collect("a", [0, 1], 20) == [b"first", b"second"]
    collectives.discard("a", 1)
    collectives.discard("a", 1)
    assert collectives.collect_if_complete("a", [1]) == []
    assert store.check(["distrib/a/0"]), "the key, which ranks of other versions of a job share"


def test_a_text_that_comes_in_time_is_waited_for(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(collectives, "_get_default_store", lambda: store)
    later = threading.Timer(0.1, collectives.publish, ("a", 0, "late"))
    later.start()
    assert collectives.collect("a", [0], 20) == [b"late"]
    later.join()


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_without_a_store_nothing_is_published_or_read(monkeypatch, error):
    def no_store() -> None:
        raise error("Default process group has not been initialized")

    monkeypatch.setattr(collectives, "_get_default_store", no_store)
    collectives.publish("a", 0, "text")
    collectives.discard("a", 0)
    assert collectives.collect_if_complete("a", [0]) == [] and collectives.collect("a", [0, 1], 5) == [None, None]


@pytest.mark.parametrize(
    ("values", "op", "expected", "kind"),
    [
        ([1.0, 2.0, 6.0], "mean", 3.0, torch.float32),
        ([1.0, 2.0, 6.0], "sum", 9.0, torch.float32),
        ([1.0, 2.0, 6.0], "max", 6.0, torch.float32),
        ([1.0, -2.0, 6.0], "min", -2.0, torch.float32),
        ([1, 2, 4], "mean", 7 / 3, torch.float32),
        ([True, True, False], "sum", 2, torch.int64),
        ([True, True, False], "mean", 2 / 3, torch.float32),
    ],
)
def test_tensors_are_reduced(ranks, values, op, expected, kind):
    def reduce(rank: int) -> torch.Tensor:
        own = torch.tensor([[values[rank]] * 2] * 3).t()
        before = own.clone()
        result = of_job(rank).all_reduce(own, op)
        assert torch.equal(own, before)
        return result

    for result in ranks.run(reduce):
        torch.testing.assert_close(result, torch.full((2, 3), expected, dtype=kind))
        assert hasattr(result, IS_AVERAGED) == (op == "mean")


@pytest.mark.parametrize(
    ("kind", "op", "value", "expected", "expected_kind"),
    [
        (torch.float16, "mean", 60_000, 60_000, torch.float16),  # the sum is infinite in this type
        (torch.bfloat16, "mean", 3, 3, torch.bfloat16),
        (torch.uint8, "mean", 200, 200, torch.float32),
        (torch.int64, "mean", (1 << 53) - 1, float((1 << 53) - 1), torch.float32),
        (torch.int16, "sum", 5, 15, torch.int16),
        (torch.int16, "max", 5, 5, torch.int16),
        (torch.uint8, "max", 200, 200, torch.uint8),
        (torch.float64, "mean", 1e300, 1e300, torch.float64),
    ],
)
def test_types_are_kept_and_means_do_not_overflow(ranks, kind, op, value, expected, expected_kind):
    for result in ranks.run(lambda rank: of_job(rank).all_reduce(torch.tensor(value, dtype=kind), op)):
        torch.testing.assert_close(result, torch.tensor(expected, dtype=expected_kind))


def test_numbers_are_reduced_in_double_precision(ranks):
    assert ranks.run(lambda rank: of_job(rank).all_reduce(rank + 1e-12, "max")) == [2 + 1e-12] * 3
    assert ranks.run(lambda rank: of_job(rank).all_reduce(rank, "mean")) == [1.0] * 3
    with torch.device("meta"):  # the script's default device
        assert of_job(0, 1).all_reduce(5, "sum") == 5.0
    assert of_job(0, 1).all_reduce(torch.tensor([5.0]), "mean").tolist() == [5.0]


def test_what_cannot_be_reduced_is_refused():
    with pytest.raises(TrainingError, match="'avg'") as refused:
        of_job(0).all_reduce(1.0, "avg")
    assert refused.value.hint == "use mean, sum, max, min"
    with pytest.raises(TrainingError, match="of a list") as refused:
        of_job(0).all_reduce([1.0], "mean")
    assert "number or a tensor" in str(refused.value.hint)


class Servers:
    """Collectives of mode async, for which two ranks are present."""

    def reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return tensor * 2 if op == "sum" else tensor

    def gather(self, own: bytes) -> dict[int, bytes]:
        return {0: own, 2: b"other"}

    def from_main(self, work: Callable[[], Any]) -> Any:
        return work()


def test_in_mode_async_the_servers_reduce_and_gather():
    elastic = of_job(0, 3, Servers())
    assert elastic.all_reduce(4.0, "sum") == 8.0 and elastic.all_reduce(4.0, "mean") == 4.0
    assert elastic.all_reduce(torch.tensor([4]), "mean").tolist() == [4.0]
    assert elastic.gather(b"own") == [b"own", None, b"other"]
    assert elastic.from_main(lambda: 7) == 7
    content = elastic.broadcast_content(0, lambda: b"abc")
    assert content is not None and bytes(content) == b"abc" and elastic.broadcast_content(0, lambda: None) is None


def test_bytes_of_all_ranks_are_gathered(ranks):
    assert ranks.run(lambda rank: of_job(rank).gather(b"%d" % rank)) == [[b"0", b"1", b"2"]] * 3
    assert of_job(0, 1).gather(b"own") == [b"own"]


def test_all_ranks_have_the_result_of_main_or_its_error(ranks):
    assert ranks.run(lambda rank: of_job(rank).from_main(lambda: f"of rank {rank}")) == ["of rank 0"] * 3
    assert of_job(0, 1).from_main(lambda: 7) == 7
    for error in (FileNotFoundError("no file"), TrainingError("no file")):

        def fail(error: Exception = error) -> None:
            raise error

        main, *others = ranks.run(lambda rank, fail=fail: of_job(rank).from_main(fail))
        assert main is error
        assert all(isinstance(one, TrainingError) and one.code == "error-on-other-rank" for one in others)
        assert all("rank 0" in str(one) and "no file" in str(one) for one in others)


@pytest.mark.parametrize("content", [b"content of ten", b"", None])
def test_the_content_of_a_file_reaches_all_ranks_in_parts(ranks, monkeypatch, content):
    monkeypatch.setattr(collectives, "MESSAGE_BYTES", 4)

    def read(rank: int) -> bytes | None:
        assert rank == 1
        return content

    def broadcast(rank: int) -> memoryview | None:
        with torch.device("meta"):
            return of_job(rank).broadcast_content(1, lambda: read(rank))

    results = ranks.run(broadcast)
    assert [None if result is None else bytes(result) for result in results] == [content] * 3
    assert ranks.messages == ["broadcast_object_list", *["broadcast"] * (4 if content else 0)]
    alone = of_job(0, 1).broadcast_content(0, lambda: content)
    assert (None if alone is None else bytes(alone)) == content


def test_an_error_of_the_rank_that_reads_is_raised_everywhere(ranks):
    def read() -> bytes:
        raise OSError("cannot read")

    results = ranks.run(lambda rank: of_job(rank).broadcast_content(1, read))
    assert [type(one) for one in results] == [TrainingError, OSError, TrainingError]
    assert all("cannot read" in str(one) for one in results) and "rank 1" in str(results[0])
