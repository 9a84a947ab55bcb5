"""Host aggregation: the state machine in any order of events, and workers over real sockets."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn

from distrib.strategy import Gradients
from distrib.training.parameter_server.failover import FailoverTimeouts
from distrib.training.parameter_server.host_aggregation.aggregator import CommitMean, HostAggregator, PushMean
from distrib.training.parameter_server.host_aggregation.host_group import host_identity
from distrib.training.parameter_server.transport import Frame, FrameFlag, FrameKind, encode
from distrib.training.parameter_server.update_rules import ApplyUpdate, PushReply, UpdateController
from distrib.training.strategies import parameter_server as worker
from distrib.training.strategies.parameter_server import ParameterServerStrategy
from tests.support.parameter_server_cluster import (
    OPTIMIZERS,
    again,
    batch,
    comes_true,
    cut_off,
    make,
    network,
    prepared,
    straight,
    take_step,
    weight,
)

parameter_servers, started_again = make, again

HOST = 100  # number under which the host's workers push


class _Worker:
    def __init__(self, chunks: int) -> None:
        self.step = 0
        self.open: dict[int, bool] = {}  # chunk to final, of the step without a reply
        self.committed = True
        self.alive, self.outside = True, False


class OneHost(RuleBasedStateMachine):
    """Host with a leader (its first worker), other workers, which may die, and a server."""

    CHUNKS = 2

    @initialize(workers=st.integers(1, 4), ahead=st.integers(0, 2), between=st.booleans(), heard=st.booleans())
    def begin(self, workers: int, ahead: int, between: bool, heard: bool) -> None:
        self.workers = [_Worker(self.CHUNKS) for _ in range(workers)]
        self.server = UpdateController(range(self.CHUNKS), [HOST], None)
        self.applied: list[Counter[tuple[int, int]]] = [Counter() for _ in range(self.CHUNKS)]
        self.sure: set[tuple[int, int, int]] = set()
        self.up: deque[tuple[Any, ...]] = deque()
        self.down: deque[PushReply] = deque()
        self.pushed: dict[int, int] = {}  # chunk to step, of pushes without a reply
        self.merger = HostAggregator(range(self.CHUNKS), range(workers))
        if workers > 1 and ahead:
            self._last_waits_elsewhere(ahead, between, heard)

    def _last_waits_elsewhere(self, ahead: int, between: bool, heard: bool) -> None:
        """Let the last worker wait outside while the others continue.

        It may be between a gradient and its step. It may not have received that the others continue.
        """
        others, last = range(len(self.workers) - 1), len(self.workers) - 1
        if between:
            self._step(last, eager=True, again=False)
        self.workers[last].outside = heard
        self._carry_out(self.merger.remove_member(last, keep_pending=True))
        for _ in range(ahead):
            for number in others:
                self._step(number, eager=False, again=False)
            self._all_arrives()

    def _carry_out(self, orders: list[Any]) -> None:
        for order in orders:
            if isinstance(order, PushMean):
                assert len({update.step for update in order.updates}) == 1
                whose = tuple(update.gradient for update in order.updates)
                self.pushed[order.chunk] = order.step
                self.up.append(("push", order.chunk, order.step, whose, order.final))
            elif isinstance(order, CommitMean):
                if order.chunk in self.pushed:  # otherwise it has a reply already
                    self.up.append(("commit", order.chunk, order.step))
            else:
                worker = self.workers[order.worker]
                waits = worker.alive and order.step == worker.step and worker.open.pop(order.chunk, None) is not None
                if waits and order.applied:
                    self.sure.add((order.worker, order.step, order.chunk))

    def _idle(self) -> list[int]:
        return [n for n, w in enumerate(self.workers) if w.alive and not w.open]

    @precondition(lambda self: self._idle())
    @rule(data=st.data(), eager=st.booleans(), again=st.booleans())
    def step(self, data: st.DataObject, eager: bool, again: bool) -> None:
        self._step(data.draw(st.sampled_from(self._idle())), eager, again)

    def _step(self, number: int, eager: bool, again: bool) -> None:
        worker = self.workers[number]
        if worker.outside:
            worker.outside = False
            newest, orders = self.merger.join(number)
            worker.step = max(worker.step, newest, self.server.last_step(HOST))
            self._carry_out(orders)
        worker.step += 1
        worker.committed = not eager
        worker.open = dict.fromkeys(range(self.CHUNKS), not eager)
        for chunk in [*range(self.CHUNKS), *([0] if eager and again else [])]:
            self._carry_out(self.merger.push(number, chunk, worker.step, (number, worker.step), final=not eager))

    def _uncommitted(self) -> list[int]:
        return [n for n, w in enumerate(self.workers) if w.alive and not w.committed]

    @precondition(lambda self: self._uncommitted())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self._commit(data.draw(st.sampled_from(self._uncommitted())))

    def _commit(self, number: int) -> None:
        worker = self.workers[number]
        worker.committed = True
        worker.open = dict.fromkeys(worker.open, True)
        self._carry_out(self.merger.commit(number, worker.step, list(worker.open)))

    @rule(data=st.data())
    def step_aside(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(range(len(self.workers))))
        if self.workers[number].alive:
            self.workers[number].outside = True
            self._carry_out(self.merger.remove_member(number, keep_pending=True))

    @precondition(lambda self: sum(w.alive for w in self.workers) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([n for n, w in enumerate(self.workers) if w.alive and n]))
        self.workers[number].alive = False
        self._carry_out(self.merger.remove_member(number))

    @rule(arrives=st.booleans())
    def cut_off(self, arrives: bool) -> None:
        """Disconnect the host from the servers. The leader has all replies to its pushes before it rejoins."""
        alive = [n for n, w in enumerate(self.workers) if w.alive]
        if self.workers[alive[0]].open:
            return
        while arrives and self.up:
            self._deliver()
        self.up.clear()
        self.down.clear()
        self.pushed.clear()
        self._apply(self.server.remove_member(HOST))
        newest = self.server.last_step()
        self._apply(self.server.join(HOST, newest + 1))
        self.workers[alive[0]].step, self.workers[alive[0]].outside = newest, False
        self._carry_out(self.merger.restart(alive[0], newest))
        for number in alive[1:]:
            self.workers[number].outside = True

    @precondition(lambda self: self.up)
    @rule()
    def deliver(self) -> None:
        self._deliver()

    def _deliver(self) -> None:
        kind, chunk, step, *rest = self.up.popleft()
        if kind == "push":
            effects = self.server.push(HOST, chunk, step, 0, rest[0], final=rest[1], weight=len(rest[0]))
        else:
            effects = self.server.commit(HOST, step, [chunk])
        self._apply(effects)

    def _apply(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, ApplyUpdate):
                for update in effect.updates:
                    assert update.weight == len(update.gradient)
                    self.applied[effect.chunk].update(update.gradient)
            elif isinstance(effect, PushReply):
                self.down.append(effect)

    def _all_arrives(self) -> None:
        while self.up or self.down:
            if self.up:
                self._deliver()
            else:
                self.hear()

    @precondition(lambda self: self.down)
    @rule()
    def hear(self) -> None:
        answer = self.down.popleft()
        if self.pushed.get(answer.chunk) == answer.step:
            del self.pushed[answer.chunk]
            self._carry_out(self.merger.on_reply(answer.chunk, applied=answer.applied))

    @invariant()
    def nothing_twice_and_nothing_lost(self) -> None:
        for chunk, applied in enumerate(getattr(self, "applied", [])):
            assert not applied or max(applied.values()) == 1
            assert {(w, s) for w, s, c in self.sure if c == chunk} <= set(applied)

    def teardown(self) -> None:
        """Check that no worker hangs: every live worker can take more steps."""
        if not hasattr(self, "workers"):
            return
        alive = [n for n, w in enumerate(self.workers) if w.alive]
        goal = max(self.workers[n].step for n in alive) + 3
        for _ in count():
            before = self._progress()
            self._all_arrives()
            for number in alive:
                worker = self.workers[number]
                if not worker.committed:
                    self._commit(number)
                elif not worker.open and worker.step < goal:
                    self._step(number, eager=True, again=False)
                elif not worker.open and not worker.outside:
                    worker.outside = True
                    self._carry_out(self.merger.remove_member(number, keep_pending=True))
            if self._progress() == before:
                break
        assert all(self.workers[n].step >= goal and not self.workers[n].open for n in alive)
        self.nothing_twice_and_nothing_lost()

    def _progress(self) -> list[Any]:
        return [(w.step, len(w.open), w.committed, w.outside) for w in self.workers] + [len(self.up), len(self.down)]


def test_any_order_of_events():
    run_state_machine_as_test(
        OneHost, settings=settings(max_examples=150, stateful_step_count=50, deadline=None, database=None)
    )


def test_a_gradient_that_a_later_one_replaced_at_the_server_is_rejected():
    host = HostAggregator([0], {0})
    assert isinstance(*host.push(0, 0, 1, "first", final=False), PushMean)
    host.remove_member(0, keep_pending=True)
    assert host.join(1) == (1, [])
    assert isinstance(*host.push(1, 0, 2, "second", final=False), PushMean)
    host.remove_member(1)
    assert host.commit(0, 1, [0]) == [PushReply(chunk=0, worker=0, step=1, applied=False)]


# -- workers over real sockets, in one process ------------------------------------------------------------------------


@pytest.fixture
def several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name worker threads `host rank`. Workers with the same host find each other."""
    monkeypatch.setenv("DISTRIB_ADDRESS", "192.0.2.1")  # the servers run elsewhere
    monkeypatch.setattr(worker, "host_identity", lambda: threading.current_thread().name.split()[0])


def train(backend: ParameterServerStrategy, steps: int, make: Callable[[Any], torch.optim.Optimizer]) -> nn.Module:
    model = network(backend.world.rank)  # all ranks use rank 0's
    optimizer = make(model.parameters())
    prepared(backend, model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for step in range(steps):
        if step == 5:
            assert backend.reduce(torch.tensor(1.0), "sum") == backend.world.size  # a waiting rank blocks no other rank
        optimizer.zero_grad()
        model(batch(step, backend.world.rank)).square().mean().backward()
        optimizer.step()
        schedule.step()
    model.eval()
    model(batch(0, 0))
    return model


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("hosts", ["aab", "abba", "aaa"])
def test_staleness_zero_is_synchronous_sgd_however_many_ranks_a_host_has(parameter_servers, several_hosts, name, hosts):
    cluster = parameter_servers(workers=len(hosts), staleness=0)
    results = cluster.each(lambda backend: train(backend, 12, OPTIMIZERS[name]), hosts)
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for step in range(12):
        optimizer.zero_grad()
        model(torch.cat([batch(step, rank) for rank in range(len(hosts))])).square().mean().backward()
        optimizer.step()
        schedule.step()
    for trained in results:
        for mine, theirs in zip(trained.parameters(), model.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5)
    pushed = {who for at in cluster.servers[0].services[0].tables[0].controller.chunks.values() for who in at.clock}
    alone = {rank for rank, host in enumerate(hosts) if hosts.count(host) == 1}
    assert pushed == alone | {len(hosts) + hosts.index(host) for host in set(hosts) if hosts.count(host) > 1}


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_the_ranks_of_a_host_make_one_update_together(parameter_servers, several_hosts, wire):
    cluster = parameter_servers(workers=4, gradients=Gradients(wire))
    cluster.each(lambda backend: train(backend, 8, OPTIMIZERS["SGD"]), "aabb")
    for server in cluster.servers:
        table = server.services[server.number].tables[0]
        assert {table.controller.version(chunk) for chunk in table.chunks} == {2 * 8}
        # Values, updates in flight, and for each host a momentum and a gradient.
        assert table.memory_bytes() == (2 + 1 + 2 * 2) * sum(chunk.bytes for chunk in table.chunks.values())


def test_beside_all_servers_every_rank_makes_its_own(parameter_servers, several_hosts, monkeypatch):
    assert parameter_servers(workers=3).worker(0).ranks_per_step == 3
    monkeypatch.setenv("DISTRIB_ADDRESS", "127.0.0.1")  # the address of the servers
    assert parameter_servers(workers=3).worker(0).ranks_per_step == 1
    assert parameter_servers(workers=3, stale_rate=True).worker(0).ranks_per_step == 3  # late updates have a lower rate
    cluster = parameter_servers(workers=3)
    cluster.each(lambda backend: train(backend, 8, OPTIMIZERS["SGD"]), "aaa")
    shard = cluster.servers[0].services[0].tables[0].controller
    assert {shard.version(chunk) for chunk in shard.chunks} == {3 * 8}


def test_without_host_reduction_every_rank_makes_its_own(parameter_servers, several_hosts):
    cluster = parameter_servers(workers=3, host_reduction=False)
    cluster.each(lambda backend: train(backend, 8, OPTIMIZERS["SGD"]), "aaa")
    shard = cluster.servers[0].services[0].tables[0].controller
    assert {shard.version(chunk) for chunk in shard.chunks} == {3 * 8}


def test_two_optimizers_go_on_together_after_a_rank_was_left_out(parameter_servers, several_hosts):
    def train_both(backend: ParameterServerStrategy) -> list[int]:
        halves = [network(0), network(1)]
        optimizers = [torch.optim.SGD(half.parameters(), 0.01) for half in halves]
        for half, optimizer in zip(halves, optimizers, strict=True):
            prepared(backend, half, optimizer)
        for step in range(40):
            if step == (3 if backend.world.rank == 1 else 12):
                backend.reduce(torch.tensor(1.0), "sum")
            for half, optimizer in zip(halves, optimizers, strict=True):
                optimizer.zero_grad()
                half(batch(step, backend.world.rank)).square().mean().backward()
                optimizer.step()
        backend.synchronize()
        backend.close()
        return [sum(buffer.rejected for buffer in table.buffers) // len(table.buffers) for table in backend.tables]

    for refused in parameter_servers(workers=3).each(train_both, "aaa"):
        assert max(refused) <= 1, refused  # of 40 steps


def test_the_next_optimizer_counts_every_rank_though_one_was_left_out_at_the_end_of_the_last(
    parameter_servers, several_hosts
):
    def train_both(backend: ParameterServerStrategy) -> int:
        for last in (False, True):
            model = network()
            prepared(backend, model, optimizer := torch.optim.SGD(model.parameters(), 0.01))
            for step in range(6 if last or backend.world.rank else 8):
                optimizer.zero_grad()
                model(batch(step, backend.world.rank)).square().mean().backward()
                time.sleep(0.02 * (backend.world.rank == 1))
                optimizer.step()
            backend.synchronize()
            backend.reduce(torch.tensor(1.0), "sum")
        return max(buffer.rejected for buffer in backend.tables[-1].buffers)

    assert max(parameter_servers(workers=3).each(train_both, "aaa")) <= 1  # of 6 steps


@pytest.mark.parametrize("hosts", ["ab", "aa"])
def test_what_was_released_is_gone_from_workers_and_servers(parameter_servers, several_hosts, started_again, hosts):
    cluster = parameter_servers(workers=2, replicas=1)

    def fold(backend: ParameterServerStrategy) -> tuple[float, Any]:
        model, optimizer = straight(backend)
        take_step(model, optimizer)
        backend.release_optimizer(optimizer)
        backend.release_model(model)
        return weight(model), weakref.ref(model.weight)

    def is_gone() -> bool:
        return not any(part.tables for server in cluster.servers for part in server.services.values())

    def folds(backend: ParameterServerStrategy) -> list[tuple[float, Any]]:
        return [fold(backend) for _ in range(3)]

    trained = [one for worker in cluster.each(folds, hosts) for one in worker]
    gc.collect()
    assert [(value, left()) for value, left in trained] == [(-1.0 if hosts == "aa" else -2.0, None)] * 6
    assert comes_true(is_gone) and all(
        part.retired == {0, 1, 2} for s in cluster.servers for part in s.services.values()
    )
    cluster.backends[0].client.close()
    substitute = started_again(cluster, cluster.backends[0].world.rank)  # skips the tables that are retired
    assert fold(substitute)[0] == -1 and comes_true(is_gone)
    assert cluster.backends[1].staleness()


def test_a_member_that_dies_before_the_table_is_known_has_no_effect(parameter_servers, several_hosts):
    met, ready = threading.Barrier(2, timeout=20), threading.Event()

    def begin(backend: ParameterServerStrategy) -> float:
        backend.form_host_group()
        group, client = backend.client.group, backend.client
        met.wait()
        if backend.world.rank:  # the leader reads this rank's messages after its death
            dead = {"process": 4194303, "descriptor": 5, "token": "00"}
            early = (
                (Frame(FrameKind.SHARE_MEMORY, table=0), encode(dead)),
                (Frame(FrameKind.PUSH, FrameFlag.SHARED, step=1), b""),
            )
            client.loop.call_soon(lambda: [group.leader.send(*each) for each in early])
            backend.prepare_model(nn.Linear(4, 1, bias=False), find_unused_parameters=False)
            ready.wait(20)
            return -1.0
        assert group.is_leader and comes_true(lambda: len(group.early_frames) > 1)
        model, optimizer = straight(backend)
        ready.set()
        take_step(model, optimizer)
        return weight(model)

    assert parameter_servers(servers=1, workers=2).each(begin, "aa")[0] == -1.0


@pytest.mark.parametrize("bound", [None, 0])
def test_members_push_by_themselves_when_the_leader_dies(parameter_servers, several_hosts, bound):
    """Updates in flight are applied at most once."""
    cluster, met = parameter_servers(servers=1, workers=3, staleness=bound), threading.Barrier(3, timeout=20)

    def work(backend: ParameterServerStrategy) -> float:
        model, optimizer = straight(backend)
        take_step(model, optimizer)
        backend.synchronize()
        met.wait()
        if backend.world.rank == 0:
            backend.client.close()
            cluster.servers[0].loop.call_soon(lambda: cluster.servers[0].on_rank_event(0, dead=True))
            return 0.0
        assert comes_true(lambda: backend.world.rank == 2 or backend.client.group is None)
        for _ in range(3):
            take_step(model, optimizer)
        backend.synchronize()
        backend.reduce(torch.tensor(0.0), "sum")
        return weight(model)

    _, *values = cluster.each(work, "aab")
    together = -1.0 if bound == 0 else -2.0
    most = -3.0 if bound == 0 else -6.0
    assert len(set(values)) == 1 and together + most <= values[0] <= together + most / 2


def test_a_leader_that_closes_its_job_serves_its_members_to_the_end(parameter_servers, several_hosts):
    def work(backend: ParameterServerStrategy) -> int:
        model, optimizer = straight(backend)
        for number in range(6 if backend.world.rank else 2):
            take_step(model, optimizer)
            time.sleep(0.1 if number > 1 else 0.0)
        if backend.world.rank == 1:
            assert backend.client.group is not None
        table = backend.tables[0]
        table.wait()
        backend.close()
        return max(buffer.rejected for buffer in table.buffers)

    assert max(parameter_servers(servers=1, workers=2).each(work, "aa")) == 0


@pytest.mark.processes
def test_ranks_in_user_namespaces_of_their_own_see_no_memory_of_each_other():
    code = (
        "from distrib.training.parameter_server.host_aggregation import host_group; print(host_group.host_identity())"
    )
    run = subprocess.run(["unshare", "-U", sys.executable, "-c", code], check=False, capture_output=True, text=True)
    if "unshare:" in run.stderr:
        pytest.skip("no user namespaces here")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() != host_identity()


def test_who_evaluates_while_its_neighbour_still_trains_is_summed_up_though_a_server_is_lost(
    parameter_servers, several_hosts, monkeypatch
):
    cluster = parameter_servers(timeouts=FailoverTimeouts(report_away_seconds=0.3), workers=3)
    together = threading.Barrier(3, timeout=20)
    part = cluster.servers[0].services[0]

    def evaluate(backend: ParameterServerStrategy) -> float:
        rank = backend.world.rank
        take_step(*(trained := straight(backend)))
        if rank == 0:  # rank 0 leads rank 1, too
            assert comes_true(lambda: 1 in part.rounds.waiting)
            take_step(*trained)
        assert backend.view(0, training=False)[1] == 3
        together.wait()
        cut_off(backend, servers=[1])
        assert comes_true(lambda: not part.membership.members)
        together.wait()
        time.sleep(0.5 * (rank == 1))
        return backend.reduce(torch.tensor(1.0), "sum").item()

    assert cluster.each(evaluate, "aab") == [3.0] * 3


@pytest.mark.parametrize("bound", [None, 4])
def test_a_step_that_one_rank_leaves_out_holds_up_nobody(parameter_servers, several_hosts, bound):
    def leave_out(backend: ParameterServerStrategy) -> float:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        prepared(backend, model, optimizer)
        for step in range(6):
            optimizer.zero_grad()
            model(batch(step, backend.world.rank)).square().mean().backward()
            if step < 5 or backend.world.rank:
                optimizer.step()
        for table in backend.tables:
            table.wait()
        return backend.reduce(torch.tensor(1.0), "sum").item()

    assert parameter_servers(workers=3, staleness=bound).each(leave_out, "aab") == [3.0] * 3
