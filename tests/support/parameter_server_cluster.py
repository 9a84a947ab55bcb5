"""Parameter servers and workers in threads of a test's process, for the tests of mode async."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distrib.strategy import Strategy
from distrib.training.parameter_server.failover import DEFAULT_TIMEOUTS, FailoverTimeouts
from distrib.training.parameter_server.server import ParameterServer
from distrib.training.parameter_server.transport import Frame, FrameKind
from distrib.training.strategies.parameter_server import ParameterServerStrategy
from distrib.training.world import World

SEEDING = threading.Lock()  # the workers of a test share torch's random state


CPU = torch.device("cpu")


class Cluster:
    """Servers in threads of this process, and workers connected to them."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        servers: int,
        workers: int,
        strategy: Strategy,
        timeouts: FailoverTimeouts,
    ) -> None:
        self.workers, self.strategy, self.timeouts = workers, strategy, timeouts
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(servers)]
        addresses = [("127.0.0.1", sock.getsockname()[1]) for sock in sockets]
        for sock in sockets:
            sock.close()
        monkeypatch.setenv("DISTRIB_SERVERS", ",".join(f"{host}:{port}" for host, port in addresses))
        monkeypatch.setenv("DISTRIB_KEY", "key")
        self.servers = [
            ParameterServer(number, addresses, workers, b"key", strategy, timeouts) for number in range(servers)
        ]
        self.threads = [threading.Thread(target=server.run, daemon=True) for server in self.servers]
        for thread in self.threads:
            thread.start()
        self.backends: list[ParameterServerStrategy] = []

    def worker(self, rank: int) -> ParameterServerStrategy:
        world = World(rank=rank, size=self.workers, local_rank=rank, local_size=self.workers)
        self.backends.append(ParameterServerStrategy(self.strategy, world, CPU, self.timeouts))
        return self.backends[-1]

    def each(self, work: Callable[[ParameterServerStrategy], Any], hosts: str = "") -> list[Any]:
        """Run `work` on all workers at once, in threads named `host rank`. Raise the first error of a worker."""
        results: list[Any] = [None] * self.workers

        def run(rank: int) -> None:
            try:
                results[rank] = work(self.worker(rank))
            except Exception as error:
                results[rank] = error

        threads = [
            threading.Thread(target=run, args=(rank,), name=f"{hosts[rank : rank + 1]} {rank}")
            for rank in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a worker is stuck"
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def lose(self, number: int) -> None:
        """Kill a server: its connections break and its port closes."""
        lost = self.servers[number]

        def end() -> None:
            for peer in list(lost.peers):
                lost.close_peer(peer)
            for link in lost.replica_links.values():
                link.close()
            lost.loop.unwatch(lost.listener)
            lost.listener.close()
            lost.loop.ended = True

        if self.threads[number].is_alive():
            lost.loop.call_soon(end)
            self.threads[number].join(10)
        else:
            end()
        self.report(self.workers + number, dead=True)

    def report(self, rank: int, *, dead: bool) -> None:
        """Report to all servers that a rank died or was restarted, as the launcher does."""
        for server in self.servers:
            server.loop.call_soon(lambda server=server: server.on_rank_event(rank, dead=dead))  # type: ignore[misc]

    def start_again(self, number: int, monkeypatch: pytest.MonkeyPatch) -> ParameterServer:
        """Start a replacement of a server that died, as the launcher does."""
        with monkeypatch.context() as environment:
            environment.setenv("DISTRIB_RESTARTED", "1")
            addresses = self.servers[number].addresses
            server = ParameterServer(number, addresses, self.workers, b"key", self.strategy, self.timeouts)
        self.servers[number], self.threads[number] = server, threading.Thread(target=server.run, daemon=True)
        self.threads[number].start()
        self.report(self.workers + number, dead=False)
        return server

    def stop(self) -> None:
        for backend in self.backends:
            backend.client.close()
        for server, thread in zip(self.servers, self.threads, strict=True):
            server.loop.call_soon(lambda server=server: setattr(server.loop, "ended", True))  # type: ignore[misc]
            thread.join(5)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    monkeypatch.setenv("DISTRIB_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made: list[Cluster] = []

    def build(
        servers: int = 2, workers: int = 1, *, timeouts: FailoverTimeouts = DEFAULT_TIMEOUTS, **strategy: Any
    ) -> Cluster:
        counts = {"stale_rate": False}  # apply every update in full, so that the values show it
        made.append(Cluster(monkeypatch, servers, workers, Strategy(mode="async", **counts | strategy), timeouts))
        return made[-1]

    yield build
    for cluster in made:
        cluster.stop()


def network(seed: int = 0) -> nn.Sequential:
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 700), nn.Tanh(), nn.Linear(700, 50), nn.Tanh(), nn.Linear(50, 2))


def prepared(backend: ParameterServerStrategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backend.prepare_model(model, find_unused_parameters=False)
    backend.prepare_optimizer(optimizer)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


ADAFACTOR: type[Any] = getattr(torch.optim, "Adafactor", torch.optim.Adagrad)  # new in torch 2.5


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    # With the default epsilon, the smallest gradients, whose sign is rounding error, would cause full steps.
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3, eps=1e-3),
    "Adafactor": lambda p: ADAFACTOR(p, 1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, eps=1e-3),
}


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cluster, int], ParameterServerStrategy]:
    """Restart a worker of a cluster, as the launcher does."""

    def start(cluster: Cluster, rank: int) -> ParameterServerStrategy:
        with monkeypatch.context() as environment:
            environment.setenv("DISTRIB_RESTARTED", "1")
            return cluster.worker(rank)

    return start


def comes_true(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what()


def cut_off(backend: ParameterServerStrategy, servers: Sequence[int] = (0, 1)) -> None:
    """Break a worker's connections and point it at closed ports."""
    client = backend.client

    def cut() -> None:
        client.addresses = [("127.0.0.1", 9) if n in servers else at for n, at in enumerate(client.addresses)]
        for server in servers:
            client.links[server].disconnect()

    client.loop.call_soon(cut)


def reached(backend: ParameterServerStrategy, cluster: Cluster) -> None:
    backend.client.loop.call_soon(lambda: setattr(backend.client, "addresses", cluster.servers[0].addresses))


def straight(backend: ParameterServerStrategy, lr: float = 1.0) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """Return a model whose gradient is all ones, and its optimizer."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    prepared(backend, model, optimizer)
    return model, optimizer


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def weight(model: nn.Module) -> float:
    values = set(model.state_dict()["weight"].view(-1).tolist())
    assert len(values) == 1
    return float(values.pop())


def suspend(backend: ParameterServerStrategy, cluster: Cluster) -> None:
    """Suspend the connection, as a worker does that could not reach another server."""

    def away() -> None:
        backend.client.must_rejoin = True
        backend.client.links[0].send(Frame(FrameKind.SUSPEND))

    backend.client.loop.call_soon(away)
    assert comes_true(lambda: backend.world.rank not in cluster.servers[0].services[0].membership.members)
