"""Asynchronous training: workers and servers over real sockets in this process, and whole jobs in which some die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distrib.errors import TrainingError
from distrib.strategy import Gradients, Strategy
from distrib.training.parameter_server.server import Server
from distrib.training.parameter_server.worker import Asynchronous
from distrib.training.world import World

LAUNCH = Path(sys.executable).parent / "distrib-launch"
SCRIPT = Path(__file__).parent / "scripts" / "asynchronous.py"
SEEDING = threading.Lock()  # the workers of a test share torch's random numbers
CPU = torch.device("cpu")


class Cluster:
    """Servers in threads of this process, and workers that know them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, servers: int, workers: int, strategy: Strategy) -> None:
        self.workers, self.strategy = workers, strategy
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(servers)]
        addresses = [("127.0.0.1", sock.getsockname()[1]) for sock in sockets]
        for sock in sockets:
            sock.close()
        monkeypatch.setenv("DISTRIB_SERVERS", ",".join(f"{host}:{port}" for host, port in addresses))
        monkeypatch.setenv("DISTRIB_KEY", "key")
        self.servers = [Server(number, addresses, workers, b"key", strategy) for number in range(servers)]
        self.threads = [threading.Thread(target=server.run, daemon=True) for server in self.servers]
        for thread in self.threads:
            thread.start()
        self.backends: list[Asynchronous] = []

    def worker(self, rank: int) -> Asynchronous:
        world = World(rank=rank, size=self.workers, local_rank=rank, local_size=self.workers, source="environment")
        self.backends.append(Asynchronous(self.strategy, world, CPU))
        return self.backends[-1]

    def each(self, work: Callable[[Asynchronous], Any], hosts: str = "") -> list[Any]:
        """What `work` returns on every worker, all at once; raises what one of them raised. Threads are named `host rank`."""
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

    def stop(self) -> None:
        for backend in self.backends:
            backend.client.close()
        for server, thread in zip(self.servers, self.threads, strict=True):
            server.loop.call(lambda server=server: setattr(server.loop, "ended", True))  # type: ignore[misc]
            thread.join(5)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    monkeypatch.setenv("DISTRIB_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made: list[Cluster] = []

    def build(servers: int = 2, workers: int = 1, **strategy: Any) -> Cluster:
        made.append(Cluster(monkeypatch, servers, workers, Strategy(mode="async", **strategy)))
        return made[-1]

    yield build
    for cluster in made:
        cluster.stop()


def network(seed: int = 0) -> nn.Sequential:
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 700), nn.Tanh(), nn.Linear(700, 50), nn.Tanh(), nn.Linear(50, 2))


def prepared(backend: Asynchronous, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backend.model(model, find_unused_parameters=False)
    backend.optimizer(optimizer)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_staleness_zero_is_synchronous_sgd(make, name):
    def train(backend: Asynchronous) -> tuple[nn.Module, dict[str, Any]]:
        model = network(backend.world.rank)  # rank 0's counts
        optimizer = OPTIMIZERS[name](model.parameters())
        prepared(backend, model, optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        for step in range(12):
            optimizer.zero_grad()
            model(batch(step, backend.world.rank)).square().mean().backward()
            optimizer.step()
            schedule.step()
        return model.state_dict(), optimizer.state_dict()

    results = make(workers=3, staleness=0).each(train)
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for step in range(12):
        optimizer.zero_grad()
        model(torch.cat([batch(step, rank) for rank in range(3)])).square().mean().backward()
        optimizer.step()
        schedule.step()
    for parameters, state in results:
        for key, value in model.state_dict().items():
            assert torch.allclose(parameters[key], value, atol=1e-5), key
        expected = optimizer.state_dict()["state"]
        assert state["state"].keys() == expected.keys()
        for number, names in expected.items():
            for key, value in names.items():
                if value is not None:
                    assert torch.allclose(
                        torch.as_tensor(state["state"][number][key]), torch.as_tensor(value), atol=1e-5
                    )


def test_gradients_that_are_changed_after_the_backward_pass_count_as_they_are_then(make):
    backend = make().worker(0)
    model, alone = network(), network()
    optimizer, own = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(alone.parameters(), 0.1)
    prepared(backend, model, optimizer)
    for step in range(6):
        for net, opt in ((model, optimizer), (alone, own)):
            opt.zero_grad()
            for part in (0, 1):  # accumulated, too
                net(batch(step, part)).square().sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            if step != 3:  # a step that is left out
                opt.step()
    for mine, theirs in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_closures_evaluation_and_restored_states(make):
    backend = make(workers=1).worker(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    prepared(backend, model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch(0, 0)).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    kept, state = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    assert optimizer.step(closure) < first
    model.eval()
    after = model(batch(0, 0))
    model.load_state_dict(kept)
    optimizer.load_state_dict(state)
    model.train()
    optimizer.step(closure)
    model.eval()
    assert torch.allclose(model(batch(0, 0)), after, atol=1e-6)
    assert backend.staleness()["max"] == 0


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_half_precision_on_the_wire_and_fp32_on_the_servers(make, wire):
    backend = make(gradients=Gradients(wire)).worker(0)
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 2.0**-12)
    prepared(backend, model, optimizer)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.state_dict()["weight"], torch.full((1, 4), 1 - 3 * 2.0**-12))


def test_reductions_of_all_workers(make):
    def reduce(backend: Asynchronous) -> tuple[float, str, float]:
        value = torch.tensor(float(backend.world.rank))
        told = backend.from_main(lambda: f"from {backend.world.rank}")
        return backend.reduce(value, "mean").item(), told, backend.reduce(value, "max").item()

    assert make(workers=3).each(reduce) == [(1.0, "from 0", 2.0)] * 3


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (lambda p: Own(p, 0.1), "Own is not one of torch.optim's"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS cannot be"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam cannot be"),
    ],
)
def test_an_optimizer_that_servers_cannot_make(make, optimizer, says):
    backend = make().worker(0)
    model = network()
    with pytest.raises(TrainingError, match=says):
        prepared(backend, model, optimizer(list(model.parameters())))


def test_a_worker_with_another_model_is_told_what_differs(make):
    def begin(backend: Asynchronous) -> None:
        model = nn.Linear(3, 4 + backend.world.rank)
        prepared(backend, model, torch.optim.SGD(model.parameters(), 0.1))

    with pytest.raises(TrainingError, match=r"worker \d has another model .* parameter weight is float32 \[[45], 3\]"):
        make(workers=2).each(begin)


def test_sparse_gradients_are_refused(make):
    backend = make().worker(0)
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared(backend, model, optimizer)
    with pytest.raises(TrainingError, match="sparse"):
        model(torch.tensor([1])).sum().backward()
        optimizer.step()


def test_who_does_not_know_the_key_is_not_heard(make):
    cluster = make()
    host, port = cluster.servers[0].addresses[0]
    with socket.create_connection((host, port), timeout=5) as sock:
        sock.sendall(b"dps1" + bytes(16) + bytes(32) + bytes(100))
        sock.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):  # the greeting; then it hangs up
                pass
    assert cluster.servers[0].parts[0].tables == {}


# -- whole jobs -------------------------------------------------------------------------------------------------------


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A job of two workers that count their steps; returns when both have begun."""
    command = [str(LAUNCH), "--no-check", "--run-dir", str(folder / "run"), "-np", "2", "--mode", "async", *words]
    job = subprocess.Popen(
        [*command, str(SCRIPT), "counting", str(folder), "40", "0.05"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not all((folder / f"acknowledged.{rank}").exists() for rank in (0, 1)):
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()[0]
        time.sleep(0.05)
    return job


def killed(folder: Path, rank: int) -> None:
    """Kill the process of a rank, found by the mark that the launcher gives it."""
    job = json.loads((folder / "run/plan.json").read_text())["job"]
    for entry in Path("/proc").iterdir():
        try:
            if f"DISTRIB_MARK={job}.{rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except (OSError, ValueError):
            continue


def ended(folder: Path, job: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, _ = job.communicate(timeout=90)
    return json.loads((folder / "run/result.json").read_text()), out


def counts(folder: Path) -> list[tuple[float, float]]:
    """Of each worker the least and the largest number of its updates that any element holds."""
    values = torch.cat(list(torch.load(next(folder.glob("held.*.pt")), weights_only=True).values()))
    return [(values[rank::2].min().item(), values[rank::2].max().item()) for rank in (0, 1)]


def test_a_worker_dies_and_the_other_goes_on(tmp_path):
    job = started(tmp_path)
    killed(tmp_path, 0)
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded" and result["first_failure"] is None, out
    assert "worker rank 0" in result["warnings"][-1]
    assert result["ranks"][0]["signal"] == signal.SIGKILL
    steps = int((tmp_path / "acknowledged.0").read_text())
    low, high = counts(tmp_path)[0]
    assert steps <= low <= high <= steps + 1
    assert counts(tmp_path)[1] == (40, 40)


def test_a_server_dies_and_its_replica_has_every_update(tmp_path):
    job = started(tmp_path, "--servers", "2", "--replicas", "1")
    killed(tmp_path, 2)
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded", out
    assert "takes charge of shard 0" in out
    assert counts(tmp_path) == [(40, 40), (40, 40)]


def test_a_server_without_replica_is_started_again(tmp_path):
    job = started(tmp_path, "--servers", "2")
    killed(tmp_path, 3)
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded", out
    assert "was started again" in result["warnings"][-1] and "its shard comes from" in out
    for low, high in counts(tmp_path):
        assert 30 < low <= high == 40
