"""State machines of the parameter server: partitioning and placement, and decisions in any order of events."""

from __future__ import annotations

import itertools
import socket
from collections import Counter, deque
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from distrib.bandwidth_model.server_throughput import CHUNKS
from distrib.errors import TrainingError
from distrib.training.parameter_server.event_loop import EventLoop
from distrib.training.parameter_server.failover import RebuildTimer
from distrib.training.parameter_server.partitioning import Chunk, ParameterSpec, Piece, item_bytes, partition
from distrib.training.parameter_server.server_optimizer import (
    ChunkOptimizer,
    OptimizerSpec,
    rate_share,
    with_own_momentum,
)
from distrib.training.parameter_server.update_rules import ApplyUpdate, PushReply, UpdateController

SHAPES = st.lists(st.integers(0, 3000), max_size=2).map(tuple)
KINDS = st.sampled_from(["float32", "float64"])


@given(st.lists(st.tuples(SHAPES, st.integers(0, 2), KINDS), min_size=1, max_size=20), st.integers(1, 9), st.booleans())
def test_every_element_is_in_one_chunk(specs, servers, whole):
    parameters = [ParameterSpec(f"p{n}", shape, group, kind) for n, (shape, group, kind) in enumerate(specs)]
    if not sum(parameter.elements for parameter in parameters):
        with pytest.raises(TrainingError, match="no parameters") as refused:
            partition(parameters, servers, whole=whole)
        assert "requires_grad" in str(refused.value.hint)
        return
    chunks = partition(parameters, servers, whole=whole)
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    covered: dict[int, int] = dict.fromkeys(range(len(parameters)), 0)
    begins: Counter[tuple[int, str]] = Counter()
    for chunk in chunks:
        assert whole or begins[chunk.group, chunk.kind] % 64 == 0
        begins[chunk.group, chunk.kind] += chunk.elements
        assert 0 <= chunk.server < servers
        assert whole or chunk.bytes <= CHUNKS.max_bytes + 64 * 8
        assert not whole or len(chunk.pieces) == 1
        for piece in chunk.pieces:
            assert piece.start == covered[piece.parameter] < piece.stop and type(piece.stop) is int
            covered[piece.parameter] = piece.stop
            of = parameters[piece.parameter]
            assert (of.group, of.kind) == (chunk.group, chunk.kind)
    assert covered == {n: parameter.elements for n, parameter in enumerate(parameters)}


@pytest.mark.parametrize(("shape", "servers"), [((1 << 40,), 1), ((-1,), 1), ((8,), 1 << 20), ((8,), 0)])
def test_numbers_that_no_job_has_are_refused_at_once(shape, servers):
    with pytest.raises(TrainingError, match=f"on {servers} servers"):
        partition([ParameterSpec("w", shape)], servers)


def test_no_server_is_hot():
    for case in itertools.product([1, 10, 100], [4, 161], [1, 2, 4, 7]):
        megabytes, tensors, servers = case
        parameters = [ParameterSpec(f"p{n}", (megabytes * 1_000_000 // 4 // tensors,)) for n in range(tensors)]
        chunks = partition(parameters, servers)
        loads = [sum(chunk.bytes for chunk in chunks if chunk.server == server) for server in range(servers)]
        assert max(loads) < 1.01 * min(loads), case
        assert len(chunks) >= 2 * servers, case


def test_sizes_of_elements_are_those_of_torch():
    for kind in ("float64", "float32", "float16", "bfloat16"):
        assert item_bytes(kind) == getattr(torch, kind).itemsize


def test_small_parameters_of_a_group_share_a_chunk():
    parameters = [ParameterSpec("a", (100,)), ParameterSpec("b", (10,), 1), ParameterSpec("c", (6, 10))]
    assert partition(parameters, 2) == (
        Chunk(0, 0, 0, "float32", (Piece(0, 0, 100), Piece(2, 0, 60))),
        Chunk(1, 1, 1, "float32", (Piece(1, 0, 10),)),
    )


def test_each_server_has_a_chunk_from_a_quarter_of_the_least_size_on():
    least = 3 * CHUNKS.min_bytes // 4
    assert [chunk.server for chunk in partition([ParameterSpec("a", (least // 4,))], 3)] == [0, 1, 2]
    assert len(partition([ParameterSpec("a", (least // 4 - 1,))], 3)) == 1
    assert len(partition([ParameterSpec("a", (35_000,))], 9)) == 3  # 140 kB in chunks of 64 KiB


def test_chunks_in_shared_memory_are_larger():
    parameters = [ParameterSpec("a", (10_000_000,))]
    assert len(partition(parameters, 2, shared=True)) < len(partition(parameters, 2)) / 2


def test_whole_tensors_are_spread_by_size():
    shapes = [(10,), (10,), (20,), (0,), (40,), (30,)]
    parameters = [
        ParameterSpec(f"p{n}", shape, kind="float64" if n < 2 else "float32") for n, shape in enumerate(shapes)
    ]
    chunks = partition(parameters, 2, whole=True)
    assert [(chunk.number, chunk.pieces[0], chunk.kind) for chunk in chunks] == [
        (at, Piece(n, 0, parameters[n].elements), parameters[n].kind) for at, n in enumerate((0, 1, 2, 4, 5))
    ]
    # 40 x 4 bytes, then 30 x 4, 20 x 4, 10 x 8, 10 x 8
    assert [chunk.server for chunk in chunks] == [0, 1, 1, 0, 1]


def test_an_embedding_beside_small_layers_is_shared_out():
    parameters = [ParameterSpec("embedding", (1_000_000, 16)), *(ParameterSpec(f"bias{n}", (10,)) for n in range(50))]
    loads = Counter()
    for chunk in partition(parameters, 4):
        loads[chunk.server] += chunk.bytes
    assert max(loads.values()) < 1.01 * min(loads.values())


# -- the state machine ------------------------------------------------------------------------------------------------


def applied(effects: list[Any]) -> list[list[tuple[int, int]]]:
    return [[(u.worker, u.step) for u in e.updates] for e in effects if isinstance(e, ApplyUpdate)]


def answered(effects: list[Any]) -> list[tuple[int, int, bool]]:
    return [(e.worker, e.step, e.applied) for e in effects if isinstance(e, PushReply)]


def push(shard: UpdateController, worker: int, step: int, final: bool = True) -> list[Any]:
    return shard.push(worker, 0, step, shard.version(0), (worker, step), final=final)


def test_unbounded_everyone_is_answered_at_once():
    shard = UpdateController([0], [0, 1], None)
    for step in range(1, 5):
        effects = push(shard, 0, step)
        assert applied(effects) == [[(0, step)]] and answered(effects) == [(0, step, True)]
    late = shard.push(1, 0, 1, 0, None, final=True)
    assert late[0].updates[0].staleness == 4


def test_staleness_zero_is_one_mean_of_all():
    shard = UpdateController([0], [0, 1, 2], 0)
    assert push(shard, 0, 1) == push(shard, 2, 1) == []
    effects = push(shard, 1, 1)
    assert applied(effects) == [[(0, 1), (1, 1), (2, 1)]]
    assert answered(effects) == [(0, 1, True), (1, 1, True), (2, 1, True)]


def test_a_bound_holds_back_the_fast_and_not_for_the_dead():
    shard = UpdateController([0], [0, 1], 2)
    assert answered(push(shard, 0, 1)) and answered(push(shard, 0, 2))
    assert not answered(push(shard, 0, 3))
    assert answered(push(shard, 1, 1)) == [(0, 3, True), (1, 1, True)]
    assert not answered(push(shard, 0, 4))
    assert answered(shard.remove_member(1)) == [(0, 4, True)]


def test_what_comes_twice_is_applied_once():
    shard = UpdateController([0], [0], None)
    push(shard, 0, 1)
    again = push(shard, 0, 1)
    assert not applied(again) and answered(again) == [(0, 1, True)]


def test_only_what_is_committed_counts():
    shard = UpdateController([0], [0], None)
    assert not applied(push(shard, 0, 1, final=False))
    assert not applied(push(shard, 0, 1, final=False))  # another gradient of the same step, after clipping
    assert not applied(shard.commit(0, 2, [0]))
    assert applied(shard.commit(0, 1, [0])) == [[(0, 1)]]


def test_a_round_that_is_over_refuses_who_comes_late():
    shard = UpdateController([0], [0, 1], 0)
    push(shard, 0, 1)
    assert applied(shard.remove_member(1)) == [[(0, 1)]]
    late = push(shard, 1, 1)
    assert not applied(late) and answered(late) == [(1, 1, False)]
    shard.join(1, shard.last_step() + 1)
    assert not applied(push(shard, 0, 2))
    assert applied(push(shard, 1, 2)) == [[(0, 2), (1, 2)]]


def test_an_answer_waits_for_the_replica():
    shard = UpdateController([0], [0], None)
    shard.set_replicated(0)
    assert applied(push(shard, 0, 1)) and not answered(shard.set_replicated(0))
    assert answered(shard.set_replicated(1)) == [(0, 1, True)]


def test_what_happened_to_a_socket_that_is_closed_is_told_to_nobody():
    """Two sockets are ready at once, and the handler of the first closes the second."""
    loop, told = EventLoop(), []
    pairs = [socket.socketpair() for _ in range(2)]
    for number, (near, far) in enumerate(pairs):
        far.send(b"!")

        def attend(_: int, number: int = number) -> None:
            told.append(number)
            other = pairs[1 - number][0]
            loop.unwatch(other)
            other.close()
            loop.ended = True

        loop.watch(near, attend)
    loop.run()
    assert len(told) == 1
    for near, far in pairs:
        near.close()
        far.close()


class _Server:
    """A shard, and the updates of its chunks as a counting optimizer would hold them."""

    def __init__(self, shard: UpdateController, chunks: int) -> None:
        self.controller = shard
        self.seen: list[list[tuple[int, int]]] = [[] for _ in range(chunks)]


class _Worker:
    def __init__(self, chunks: int) -> None:
        self.step = 0
        self.base = [0] * chunks
        self.open: dict[int, bool] = {}  # chunk -> final, for the step without a reply
        self.committed = True
        self.wire: deque[tuple[Any, ...]] = deque()  # to the server
        self.back: deque[PushReply] = deque()
        self.alive = True
        self.connected = True
        self.joining = False


class Anything(RuleBasedStateMachine):
    """Random events for workers, a primary and its replica: delays, broken connections and dead processes."""

    CHUNKS = 2

    @initialize(workers=st.integers(1, 4), bound=st.sampled_from([None, 0, 1, 3]), replica=st.booleans())
    def begin(self, workers: int, bound: int | None, replica: bool) -> None:
        self.bound = bound
        self.workers = [_Worker(self.CHUNKS) for _ in range(workers)]
        self.primary = _Server(UpdateController(range(self.CHUNKS), range(workers), bound), self.CHUNKS)
        self.replica: _Server | None = None
        self.log: deque[tuple[Any, ...]] = deque()
        self.acknowledgements: deque[int] = deque()
        self.sure: set[tuple[int, int, int]] = set()
        if replica:
            self._attach()

    def _attach(self) -> None:
        self.replica = _Server(UpdateController(range(self.CHUNKS), [], self.bound), self.CHUNKS)
        self.replica.controller.restore(self.primary.controller.state())
        self.replica.seen = [list(seen) for seen in self.primary.seen]
        self.log.clear()
        self.acknowledgements.clear()
        self._carry_out(self.primary.controller.set_replicated(self.primary.controller.index))

    def _carry_out(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, ApplyUpdate):
                updates = [(u.worker, u.step) for u in effect.updates]
                assert all(u.gradient == (u.worker, u.step, effect.chunk) for u in effect.updates)
                assert all(u.staleness >= 0 for u in effect.updates)
                self.primary.seen[effect.chunk] += updates
                if self.replica:
                    self.log.append((effect.chunk, updates, effect.version, effect.entry))
            elif isinstance(effect, PushReply):
                at = self.primary.controller.chunks[effect.chunk]
                behind = min((at.clock.get(m, 0) for m in self.primary.controller.members), default=effect.step)
                assert self.bound is None or effect.step - behind <= self.bound
                if self.workers[effect.worker].connected:
                    self.workers[effect.worker].back.append(effect)

    # workers

    def _ready(self) -> list[int]:
        return [n for n, w in enumerate(self.workers) if w.alive and not w.open and w.connected and not w.joining]

    def _send(self, number: int, chunk: int, final: bool) -> None:
        worker = self.workers[number]
        worker.open[chunk] = final
        worker.wire.append(("push", chunk, worker.step, worker.base[chunk], (number, worker.step, chunk), final))

    @precondition(lambda self: self._ready())
    @rule(data=st.data(), eager=st.booleans())
    def step(self, data: st.DataObject, eager: bool) -> None:
        number = data.draw(st.sampled_from(self._ready()))
        worker = self.workers[number]
        worker.step += 1
        worker.committed = not eager
        for chunk in range(self.CHUNKS):
            self._send(number, chunk, not eager)
            if eager and data.draw(st.booleans()):
                self._send(number, chunk, False)
        if eager and data.draw(st.booleans()):
            self._commit(number)

    def _commit(self, number: int) -> None:
        worker = self.workers[number]
        worker.committed = True
        worker.open = dict.fromkeys(worker.open, True)
        worker.wire.append(("commit", worker.step))

    @precondition(lambda self: any(w.alive and not w.committed for w in self.workers))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([n for n, w in enumerate(self.workers) if w.alive and not w.committed]))
        if self.workers[number].connected:
            self._commit(number)

    # network

    @precondition(lambda self: any(w.wire for w in self.workers))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self._deliver(data.draw(st.sampled_from([n for n, w in enumerate(self.workers) if w.wire])))

    def _deliver(self, number: int) -> None:
        kind, *rest = self.workers[number].wire.popleft()
        shard = self.primary.controller
        if kind == "push":
            chunk, step, base, gradient, final = rest
            self._carry_out(shard.push(number, chunk, step, base, gradient, final=final))
        elif kind == "commit":
            self._carry_out(shard.commit(number, rest[0], range(self.CHUNKS)))
        else:
            worker = self.workers[number]
            worker.step, worker.joining = max(worker.step, shard.last_step()), False
            self._carry_out(shard.join(number, worker.step + 1))

    @precondition(lambda self: any(w.back for w in self.workers))
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        self._hear(data.draw(st.sampled_from([n for n, w in enumerate(self.workers) if w.back])))

    def _hear(self, number: int) -> None:
        worker = self.workers[number]
        answer = worker.back.popleft()
        if answer.step == worker.step and worker.open.pop(answer.chunk, None) is not None:
            worker.base[answer.chunk] = self.primary.controller.version(answer.chunk)
            if answer.applied:
                self.sure.add((number, answer.step, answer.chunk))

    @precondition(lambda self: self.log)
    @rule()
    def replicate(self) -> None:
        assert self.replica
        chunk, updates, version, index = self.log.popleft()
        if self.replica.controller.follow(chunk, updates, version, index):
            self.replica.seen[chunk] += updates
        self.acknowledgements.append(self.replica.controller.index)

    @precondition(lambda self: self.acknowledgements)
    @rule()
    def acknowledge(self) -> None:
        self._carry_out(self.primary.controller.set_replicated(self.acknowledgements.popleft()))

    # faults

    @rule(data=st.data())
    def cut_off(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(range(len(self.workers))))
        worker = self.workers[number]
        worker.connected = worker.joining = False
        worker.wire.clear()
        worker.back.clear()

    @precondition(lambda self: any(not w.connected for w in self.workers))
    @rule(data=st.data())
    def give_up_waiting(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([n for n, w in enumerate(self.workers) if not w.connected]))
        self._carry_out(self.primary.controller.remove_member(number))

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.cut_off(data)
        for worker in self.workers:
            worker.alive = worker.alive and worker.connected

    @precondition(lambda self: any(not w.connected for w in self.workers))
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        self._come_back(data.draw(st.sampled_from([n for n, w in enumerate(self.workers) if not w.connected])))

    def _come_back(self, number: int) -> None:
        worker = self.workers[number]
        worker.connected = True
        if not worker.alive:
            worker.alive, worker.open, worker.committed, worker.step = True, {}, True, 0
            worker.base = [self.primary.controller.version(chunk) for chunk in range(self.CHUNKS)]
            self._carry_out(self.primary.controller.remove_member(number))
        for chunk, final in worker.open.items():
            self._send(number, chunk, final)
        if number not in self.primary.controller.members and not worker.open:
            self._join(number)

    def _join(self, number: int) -> None:
        self.workers[number].joining = True
        self.workers[number].wire.append(("join",))

    @precondition(lambda self: self.replica)
    @rule()
    def lose_the_primary(self) -> None:
        assert self.replica
        self.primary, self.replica = self.replica, None
        self.log.clear()
        self.acknowledgements.clear()
        for worker in self.workers:
            worker.connected = worker.joining = False
            worker.wire.clear()
            worker.back.clear()

    @precondition(lambda self: self.replica is None)
    @rule()
    def find_a_replica(self) -> None:
        self._attach()

    @invariant()
    def nothing_twice_and_nothing_lost(self) -> None:
        for chunk, seen in enumerate(self.primary.seen):
            assert len(set(seen)) == len(seen)
            assert {(w, s) for w, s, c in self.sure if c == chunk} <= set(seen)

    def teardown(self) -> None:
        """No worker is blocked: after all processes return, each worker can take further steps."""
        if not hasattr(self, "workers"):
            return
        for number, worker in enumerate(self.workers):
            if not worker.connected:
                self._come_back(number)
        goal = max(worker.step for worker in self.workers) + 3
        for _ in count():
            before = self._progress()
            for number, worker in enumerate(self.workers):
                while worker.wire:
                    self._deliver(number)
                while self.log:
                    self.replicate()
                while self.acknowledgements:
                    self.acknowledge()
                while worker.back:
                    self._hear(number)
                if not worker.open and number not in self.primary.controller.members:
                    self._join(number)
                elif not worker.committed:
                    self._commit(number)
                elif not worker.open and worker.step < goal:
                    worker.step += 1
                    for chunk in range(self.CHUNKS):
                        self._send(number, chunk, True)
            if self._progress() == before:
                break
        assert all(worker.step >= goal and not worker.open for worker in self.workers)
        self.nothing_twice_and_nothing_lost()

    def _progress(self) -> tuple[Any, ...]:
        return (
            [(w.step, len(w.open), w.committed, len(w.wire), len(w.back)) for w in self.workers],
            self.primary.controller.index,
            sorted(self.primary.controller.members),
        )


def test_any_order_of_events():
    run_state_machine_as_test(
        Anything, settings=settings(max_examples=40, stateful_step_count=50, deadline=None, database=None)
    )


def test_a_lost_shard_is_rebuilt_after_workers_have_asked_without_a_break():
    timer = RebuildTimer(servers=2, connect_seconds=2.0)
    repeat = 2.0 * 3
    assert timer.on_request(0, 3, {0}, 10.0) == 0.0
    assert timer.on_request(1, 2, set(), 10.0 + repeat) == repeat and timer.epoch == 3
    assert timer.silent == {0}  # server 0 has not replied to worker 0
    assert timer.on_request(1, 3, set(), 11.0 + repeat) == 1.0 + repeat
    assert timer.silent == set()  # worker 0 has no open request
    assert timer.on_request(0, 3, {1}, 50.0) == 0.0


# -- updates of an asynchronous optimizer -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_variable_of_torch(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


SGD = OptimizerSpec("SGD")
OPTIONS = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0.01, "nesterov": False, "maximize": False}


def alone(gradients: list[torch.Tensor], begun: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Return the change after each step of torch's SGD from `begun` with these gradients only."""
    parameter = torch.nn.Parameter(begun.clone())
    optimizer = torch.optim.SGD([parameter], **options)
    ways = []
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = gradient
        optimizer.step()
        ways.append(parameter.detach() - before)
    return ways


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-1, 1)), min_size=1, max_size=12))
def test_each_worker_has_a_momentum_of_its_own(pushed):
    """All updates together move the values as far as the workers' own Nesterov steps do."""
    options = {**OPTIONS, "weight_decay": 0.0}
    updater = ChunkOptimizer(SGD, torch.zeros(3), options)
    for worker, number in pushed:
        updater.apply(torch.full((3,), number), with_own_momentum(SGD, options, worker))
    way = sum(
        step
        for one in {worker for worker, _ in pushed}
        for step in alone(
            [torch.full((3,), number) for worker, number in pushed if worker == one],
            torch.zeros(3), lr=0.1, momentum=0.9, nesterov=True,
        )
    )  # fmt: skip
    torch.testing.assert_close(updater.value.detach(), way, rtol=1e-4, atol=1e-5)


def test_momenta_are_kept_together_and_one_by_one():
    updater, again, later = (ChunkOptimizer(SGD, torch.zeros(3), OPTIONS) for _ in range(3))
    updater.apply(torch.ones(3), OPTIONS)  # no other worker has joined yet
    for worker, number in ((0, 1.0), (1, -2.0), (0, 0.5)):
        updater.apply(torch.full((3,), number), with_own_momentum(SGD, OPTIONS, worker))
    momenta = updater.full_state()["momenta"]
    torch.testing.assert_close(updater.state()["momentum_buffer"], (momenta[0] + momenta[1]) / 2)
    again.restore_full_state(
        {name: dict(part) if isinstance(part, dict) else part for name, part in updater.full_state().items()}
    )
    again.value.data.copy_(updater.value.data)
    later.restore(updater.state())  # restores as from a checkpoint
    later.value.data.copy_(updater.value.data)
    for one in (updater, again):
        state = one.full_state()
        one.restore_full_state(state | {"momenta": {worker: own.clone() for worker, own in state["momenta"].items()}})
        one.apply(torch.ones(3), with_own_momentum(SGD, OPTIONS, 1))
    torch.testing.assert_close(again.value, updater.value)
    torch.testing.assert_close(again.full_state()["momenta"], updater.full_state()["momenta"])
    for worker in (0, 1):
        later.apply(torch.ones(3), with_own_momentum(SGD, OPTIONS, worker))
    assert len(later.full_state()["momenta"]) == 2
    updater.apply(torch.ones(3), OPTIONS)  # all other workers have left
    assert not updater.full_state()["momenta"]


@given(st.sampled_from(["SGD", "Adam", "Muon"]), st.floats(0, 1000))
def test_what_a_late_update_has_of_its_rate(name, staleness):
    share = rate_share(name, staleness)
    assert share == pytest.approx((1 + staleness) ** (-1 if name == "SGD" else -0.5))
    assert with_own_momentum(OptimizerSpec("Adam"), {"lr": 1.0}, 3) == {"lr": 1.0}
