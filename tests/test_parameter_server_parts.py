"""The parameter server's pure parts: how parameters are cut and placed, and what a server decides in any order of events."""

from __future__ import annotations

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

from distrib.bandwidth_model.server_throughput import MAX_CHUNK_BYTES
from distrib.errors import TrainingError
from distrib.training.parameter_server.failover import CALL_SECONDS, Ballot, patience_seconds
from distrib.training.parameter_server.partitioning import Parameter, cut, item_bytes
from distrib.training.parameter_server.server_optimizer import Recipe, Updater, by_own_momentum, share_of_rate
from distrib.training.parameter_server.transport import Loop
from distrib.training.parameter_server.update_rules import Answer, Apply, Shard

SHAPES = st.lists(st.integers(0, 3000), max_size=2).map(tuple)
KINDS = st.sampled_from(["float32", "float64"])


@given(st.lists(st.tuples(SHAPES, st.integers(0, 2), KINDS), min_size=1, max_size=20), st.integers(1, 9), st.booleans())
def test_every_element_is_in_one_chunk(specs, servers, whole):
    parameters = [Parameter(f"p{n}", shape, group, kind) for n, (shape, group, kind) in enumerate(specs)]
    if not sum(parameter.elements for parameter in parameters):
        with pytest.raises(TrainingError, match="no parameters"):
            cut(parameters, servers, whole=whole)
        return
    chunks = cut(parameters, servers, whole=whole)
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    covered: dict[int, int] = dict.fromkeys(range(len(parameters)), 0)
    for chunk in chunks:
        assert 0 <= chunk.server < servers
        assert whole or chunk.bytes <= MAX_CHUNK_BYTES + 64 * 8
        assert not whole or len(chunk.pieces) == 1
        for piece in chunk.pieces:
            assert piece.start == covered[piece.parameter] < piece.stop
            covered[piece.parameter] = piece.stop
            of = parameters[piece.parameter]
            assert (of.group, of.kind) == (chunk.group, chunk.kind)
    assert covered == {n: parameter.elements for n, parameter in enumerate(parameters)}


@pytest.mark.parametrize("megabytes", [1, 10, 100])
@pytest.mark.parametrize("tensors", [4, 161])
@pytest.mark.parametrize("servers", [1, 2, 4, 7])
def test_no_server_is_hot(megabytes, tensors, servers):
    parameters = [Parameter(f"p{n}", (megabytes * 1_000_000 // 4 // tensors,)) for n in range(tensors)]
    chunks = cut(parameters, servers)
    loads = [sum(chunk.bytes for chunk in chunks if chunk.server == server) for server in range(servers)]
    assert max(loads) < 1.01 * min(loads)
    assert len(chunks) >= 2 * servers
    assert item_bytes("bfloat16") == 2


def test_an_embedding_beside_small_layers_is_shared_out():
    parameters = [Parameter("embedding", (1_000_000, 16)), *(Parameter(f"bias{n}", (10,)) for n in range(50))]
    loads = Counter()
    for chunk in cut(parameters, 4):
        loads[chunk.server] += chunk.bytes
    assert max(loads.values()) < 1.01 * min(loads.values())


# -- the state machine ------------------------------------------------------------------------------------------------


def applied(effects: list[Any]) -> list[list[tuple[int, int]]]:
    return [[(u.worker, u.step) for u in e.updates] for e in effects if isinstance(e, Apply)]


def answered(effects: list[Any]) -> list[tuple[int, int, bool]]:
    return [(e.worker, e.step, e.applied) for e in effects if isinstance(e, Answer)]


def push(shard: Shard, worker: int, step: int, final: bool = True) -> list[Any]:
    return shard.push(worker, 0, step, shard.version(0), (worker, step), final=final)


def test_unbounded_everyone_is_answered_at_once():
    shard = Shard([0], [0, 1], None)
    for step in range(1, 5):
        effects = push(shard, 0, step)
        assert applied(effects) == [[(0, step)]] and answered(effects) == [(0, step, True)]
    late = shard.push(1, 0, 1, 0, None, final=True)
    assert late[0].updates[0].staleness == 4


def test_staleness_zero_is_one_mean_of_all():
    shard = Shard([0], [0, 1, 2], 0)
    assert push(shard, 0, 1) == push(shard, 2, 1) == []
    effects = push(shard, 1, 1)
    assert applied(effects) == [[(0, 1), (1, 1), (2, 1)]]
    assert answered(effects) == [(0, 1, True), (1, 1, True), (2, 1, True)]


def test_a_bound_holds_back_the_fast_and_not_for_the_dead():
    shard = Shard([0], [0, 1], 2)
    assert answered(push(shard, 0, 1)) and answered(push(shard, 0, 2))
    assert not answered(push(shard, 0, 3))
    assert answered(push(shard, 1, 1)) == [(0, 3, True), (1, 1, True)]
    assert not answered(push(shard, 0, 4))
    assert answered(shard.drop(1)) == [(0, 4, True)]


def test_what_comes_twice_is_applied_once():
    shard = Shard([0], [0], None)
    push(shard, 0, 1)
    again = push(shard, 0, 1)
    assert not applied(again) and answered(again) == [(0, 1, True)]


def test_only_what_is_committed_counts():
    shard = Shard([0], [0], None)
    assert not applied(push(shard, 0, 1, final=False))
    assert not applied(push(shard, 0, 1, final=False))  # another gradient of the same step, after clipping
    assert not applied(shard.commit(0, 2, [0]))
    assert applied(shard.commit(0, 1, [0])) == [[(0, 1)]]


def test_a_round_that_is_over_refuses_who_comes_late():
    shard = Shard([0], [0, 1], 0)
    push(shard, 0, 1)
    assert applied(shard.drop(1)) == [[(0, 1)]]
    late = push(shard, 1, 1)
    assert not applied(late) and answered(late) == [(1, 1, False)]
    shard.join(1, shard.newest() + 1)
    assert not applied(push(shard, 0, 2))
    assert applied(push(shard, 1, 2)) == [[(0, 2), (1, 2)]]


def test_an_answer_waits_for_the_replica():
    shard = Shard([0], [0], None)
    shard.replicate(0)
    assert applied(push(shard, 0, 1)) and not answered(shard.replicate(0))
    assert answered(shard.replicate(1)) == [(0, 1, True)]


def test_what_happened_to_a_socket_that_is_closed_is_told_to_nobody():
    """Two are ready at once, and whoever is told first closes the other."""
    loop, told = Loop(), []
    pairs = [socket.socketpair() for _ in range(2)]
    for number, (near, far) in enumerate(pairs):
        far.send(b"!")

        def attend(_: int, number: int = number) -> None:
            told.append(number)
            other = pairs[1 - number][0]
            loop.forget(other)
            other.close()
            loop.ended = True

        loop.watch(near, attend)
    loop.run()
    assert len(told) == 1
    for near, far in pairs:
        near.close()
        far.close()


class _Server:
    """A shard, and the updates that its chunks have seen: what a counting optimizer would hold."""

    def __init__(self, shard: Shard, chunks: int) -> None:
        self.shard = shard
        self.seen: list[list[tuple[int, int]]] = [[] for _ in range(chunks)]


class _Worker:
    def __init__(self, chunks: int) -> None:
        self.step = 0
        self.base = [0] * chunks
        self.open: dict[int, bool] = {}  # chunk to final, of the step that is not yet answered
        self.committed = True
        self.wire: deque[tuple[Any, ...]] = deque()  # to the server
        self.back: deque[Answer] = deque()
        self.alive = True
        self.connected = True
        self.joining = False


class Anything(RuleBasedStateMachine):
    """Workers, a primary and its replica, with messages under way; connections break and processes die at any time."""

    CHUNKS = 2

    @initialize(workers=st.integers(1, 4), bound=st.sampled_from([None, 0, 1, 3]), replica=st.booleans())
    def begin(self, workers: int, bound: int | None, replica: bool) -> None:
        self.bound = bound
        self.workers = [_Worker(self.CHUNKS) for _ in range(workers)]
        self.primary = _Server(Shard(range(self.CHUNKS), range(workers), bound), self.CHUNKS)
        self.replica: _Server | None = None
        self.log: deque[tuple[Any, ...]] = deque()
        self.acknowledgements: deque[int] = deque()
        self.sure: set[tuple[int, int, int]] = set()
        if replica:
            self._attach()

    def _attach(self) -> None:
        self.replica = _Server(Shard(range(self.CHUNKS), [], self.bound), self.CHUNKS)
        self.replica.shard.restore(self.primary.shard.state())
        self.replica.seen = [list(seen) for seen in self.primary.seen]
        self.log.clear()
        self.acknowledgements.clear()
        self._carry_out(self.primary.shard.replicate(self.primary.shard.index))

    def _carry_out(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Apply):
                updates = [(u.worker, u.step) for u in effect.updates]
                assert all(u.gradient == (u.worker, u.step, effect.chunk) for u in effect.updates)
                assert all(u.staleness >= 0 for u in effect.updates)
                self.primary.seen[effect.chunk] += updates
                if self.replica:
                    marked = [(u.worker, u.step, u.mark) for u in effect.updates]
                    self.log.append((effect.chunk, marked, effect.version, effect.entry))
            elif isinstance(effect, Answer):
                at = self.primary.shard._chunks[effect.chunk]
                behind = min((at.clock.get(m, 0) for m in self.primary.shard.members), default=effect.step)
                assert self.bound is None or effect.step - behind <= self.bound
                if self.workers[effect.worker].connected:
                    self.workers[effect.worker].back.append(effect)

    # what workers do

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

    # what the network does

    @precondition(lambda self: any(w.wire for w in self.workers))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self._deliver(data.draw(st.sampled_from([n for n, w in enumerate(self.workers) if w.wire])))

    def _deliver(self, number: int) -> None:
        kind, *rest = self.workers[number].wire.popleft()
        shard = self.primary.shard
        if kind == "push":
            chunk, step, base, gradient, final = rest
            self._carry_out(shard.push(number, chunk, step, base, gradient, final=final))
        elif kind == "commit":
            self._carry_out(shard.commit(number, rest[0], range(self.CHUNKS)))
        else:
            worker = self.workers[number]
            worker.step, worker.joining = max(worker.step, shard.newest()), False
            self._carry_out(shard.join(number, worker.step + 1))

    @precondition(lambda self: any(w.back for w in self.workers))
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        self._hear(data.draw(st.sampled_from([n for n, w in enumerate(self.workers) if w.back])))

    def _hear(self, number: int) -> None:
        worker = self.workers[number]
        answer = worker.back.popleft()
        if answer.step == worker.step and worker.open.pop(answer.chunk, None) is not None:
            worker.base[answer.chunk] = self.primary.shard.version(answer.chunk)
            if answer.applied:
                self.sure.add((number, answer.step, answer.chunk))

    @precondition(lambda self: self.log)
    @rule()
    def replicate(self) -> None:
        assert self.replica
        chunk, updates, version, index = self.log.popleft()
        if self.replica.shard.follow(chunk, updates, version, index):
            self.replica.seen[chunk] += [(worker, step) for worker, step, _ in updates]
        self.acknowledgements.append(self.replica.shard.index)

    @precondition(lambda self: self.acknowledgements)
    @rule()
    def acknowledge(self) -> None:
        self._carry_out(self.primary.shard.replicate(self.acknowledgements.popleft()))

    # what goes wrong

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
        self._carry_out(self.primary.shard.drop(number))

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
            worker.base = [self.primary.shard.version(chunk) for chunk in range(self.CHUNKS)]
            self._carry_out(self.primary.shard.drop(number))
        for chunk, final in worker.open.items():
            self._send(number, chunk, final)
        if number not in self.primary.shard.members and not worker.open:
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
        """Nobody is stuck: with everybody back, all can take as many steps more as they like."""
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
                if not worker.open and number not in self.primary.shard.members:
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
            self.primary.shard.index,
            sorted(self.primary.shard.members),
        )


def test_any_order_of_events():
    run_state_machine_as_test(
        Anything, settings=settings(max_examples=40, stateful_step_count=50, deadline=None, database=None)
    )


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3072)), max_size=60), st.sets(st.integers(0, 4)))
def test_who_takes_charge_has_been_asked_by_more_than_half_all_the_time(asked, dead):
    ballot, now, calls = Ballot(servers=2), 0.0, []
    voices = set(range(5)) - dead
    for worker, pause in asked:
        now += pause / 1024  # of which sums and differences are exact
        calls.append((now, worker))
        seconds = ballot.ask(worker, 0, {worker}, voices, now)
        again = CALL_SECONDS * (1 + 2)
        assert ballot.silent == {one for at, one in calls if now - at <= again}
        if seconds is None:
            assert len({one for at, one in calls if now - at <= again} & voices) * 2 <= len(voices)
            continue
        for moment in [at for at, _ in calls if at >= now - seconds]:
            there = {one for at, one in calls if moment - again <= at <= moment}
            assert len(there & voices) * 2 > len(voices)


def test_who_stops_asking_has_to_begin_anew():
    ballot = Ballot(servers=2)
    assert ballot.ask(0, 3, set(), {0}, 10.0) == 0.0 and ballot.ask(0, 2, set(), {0}, 12.0) == 2.0 and ballot.epoch == 3
    assert ballot.ask(0, 3, set(), {0}, 30.0) == 0.0


def test_who_has_more_of_a_shard_comes_first():
    assert patience_seconds("whole", 3) == 0 < patience_seconds("partial", 1) < patience_seconds("none", 0)
    assert patience_seconds("none", 0) < patience_seconds("none", 1)


# -- what asynchrony does to an update --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_variable_of_torch(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


SGD = Recipe("SGD")
OPTIONS = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0.01, "nesterov": False, "maximize": False}


def alone(gradients: list[torch.Tensor], begun: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """How far each step of torch's SGD goes that sees these gradients alone, from `begun`."""
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
    """All updates together go as far as the workers' own Nesterov steps do."""
    options = {**OPTIONS, "weight_decay": 0.0}
    updater = Updater(SGD, torch.zeros(3), options)
    for worker, number in pushed:
        updater.apply(torch.full((3,), number), by_own_momentum(SGD, options, worker))
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
    updater, again, later = (Updater(SGD, torch.zeros(3), OPTIONS) for _ in range(3))
    updater.apply(torch.ones(3), OPTIONS)  # nobody else is there yet
    for worker, number in ((0, 1.0), (1, -2.0), (0, 0.5)):
        updater.apply(torch.full((3,), number), by_own_momentum(SGD, OPTIONS, worker))
    momenta = updater.parts()["momenta"]
    torch.testing.assert_close(updater.state()["momentum_buffer"], (momenta[0] + momenta[1]) / 2)
    again.take_over({name: dict(part) if isinstance(part, dict) else part for name, part in updater.parts().items()})
    again.value.data.copy_(updater.value.data)
    later.restore(updater.state())  # as from a checkpoint
    later.value.data.copy_(updater.value.data)
    for one in (updater, again):
        one._momenta = {worker: momentum.clone() for worker, momentum in one._momenta.items()}
        one.apply(torch.ones(3), by_own_momentum(SGD, OPTIONS, 1))
    torch.testing.assert_close(again.value, updater.value)
    torch.testing.assert_close(again.parts()["momenta"], updater.parts()["momenta"])
    for worker in (0, 1):
        later.apply(torch.ones(3), by_own_momentum(SGD, OPTIONS, worker))
    assert len(later.parts()["momenta"]) == 2
    updater.apply(torch.ones(3), OPTIONS)  # all others have left
    assert not updater.parts()["momenta"]


@given(st.sampled_from(["SGD", "Adam", "Muon"]), st.floats(0, 1000))
def test_what_a_late_update_has_of_its_rate(name, staleness):
    share = share_of_rate(name, staleness)
    assert share == pytest.approx((1 + staleness) ** (-1 if name == "SGD" else -0.5))
    assert by_own_momentum(Recipe("Adam"), {"lr": 1.0}, 3) == {"lr": 1.0}
