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
from collections.abc import Callable, Iterator, Sequence
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
    # With their own epsilon the smallest gradients, of which rounding alone decides the sign, would make whole steps.
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3, eps=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, eps=1e-3),
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


# -- workers that are lost, and started again -------------------------------------------------------------------------


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cluster, int], Asynchronous]:
    """Starts a worker of a cluster again, as the launcher does."""

    def start(cluster: Cluster, rank: int) -> Asynchronous:
        with monkeypatch.context() as environment:
            environment.setenv("DISTRIB_STARTED_AGAIN", "1")
            return cluster.worker(rank)

    return start


def comes_true(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what()


def cut_off(backend: Asynchronous, servers: Sequence[int] = (0, 1)) -> None:
    """The worker's connections break, and there is nobody where it looks for the servers."""
    client = backend.client

    def cut() -> None:
        client.addresses = [("127.0.0.1", 9) if n in servers else at for n, at in enumerate(client.addresses)]
        for server in servers:
            client._links[server].hang_up()

    client.loop.call(cut)


def reached(backend: Asynchronous, cluster: Cluster) -> None:
    backend.client.loop.call(lambda: setattr(backend.client, "addresses", cluster.servers[0].addresses))


def straight(backend: Asynchronous, lr: float = 1.0) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A model whose gradient is all ones, with its optimizer."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    prepared(backend, model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def weight(model: nn.Module) -> float:
    values = set(model.state_dict()["weight"].view(-1).tolist())
    assert len(values) == 1
    return float(values.pop())


def test_the_next_worker_is_main_when_rank_0_is_lost_and_stays_it(make, monkeypatch):
    monkeypatch.setattr("distrib.training.parameter_server.part.DROP_SECONDS", 0.4)
    cluster = make(workers=3)
    first, second, third = backends = cluster.each(lambda backend: straight(backend) and backend)
    assert [backend.is_main for backend in backends] == [True, False, False]
    cut_off(first)
    assert comes_true(lambda: second.is_main)
    waits = threading.Thread(target=lambda: told.append(first.is_main))
    told: list[bool] = []
    waits.start()
    time.sleep(0.3)
    assert not told  # it does not know
    reached(first, cluster)
    waits.join(10)
    assert told == [False] and second.is_main and not third.is_main
    second.client.close()
    assert comes_true(lambda: third.is_main) and not first.is_main  # which has not joined the others again


def test_main_stays_who_it_is_when_it_leaves(make, monkeypatch):
    monkeypatch.setattr("distrib.training.parameter_server.part.DROP_SECONDS", 0.4)
    first, second = make(workers=2).each(lambda backend: straight(backend) and backend)
    first.close()
    time.sleep(1.5)
    assert first.is_main and not second.is_main


def test_a_server_that_takes_over_hears_from_the_workers_who_is_main(make):
    cluster = make(workers=2)
    first, second = cluster.each(lambda backend: straight(backend) and backend)
    second.client.main = (1, 1)  # as the server before has told it, but not rank 0
    cut_off(second)
    assert comes_true(lambda: not second.client._links[0].welcomed)
    reached(second, cluster)
    assert comes_true(lambda: second.is_main and not first.is_main)


def test_the_last_worker_that_is_cut_off_is_main_again(make, monkeypatch):
    monkeypatch.setattr("distrib.training.parameter_server.part.DROP_SECONDS", 0.4)
    cluster = make(workers=1)
    backend = cluster.worker(0)
    model, optimizer = straight(backend)
    step(model, optimizer)
    cut_off(backend)
    assert comes_true(lambda: not cluster.servers[0].parts[0].members)
    reached(backend, cluster)
    step(model, optimizer)
    assert weight(model) == -2 and backend.is_main


def test_a_worker_that_comes_back_is_main_when_rank_0_was_lost_meanwhile(make, monkeypatch):
    monkeypatch.setattr("distrib.training.parameter_server.part.DROP_SECONDS", 0.4)
    cluster = make(workers=2)
    (first, *_), (second, model, optimizer) = cluster.each(lambda backend: (backend, *straight(backend)))
    cut_off(second)
    assert comes_true(lambda: cluster.servers[0].parts[0].members == {0})
    first.client.close()
    assert comes_true(lambda: not cluster.servers[0].parts[0].members)
    reached(second, cluster)
    assert comes_true(lambda: second.is_main)
    step(model, optimizer)
    assert weight(model) == -1


def test_a_worker_that_cannot_reach_another_server_stays_main_until_it_is_lost(make, monkeypatch):
    monkeypatch.setattr("distrib.training.parameter_server.part.DROP_SECONDS", 0.4)
    monkeypatch.setattr("distrib.training.parameter_server.client.SUSPEND_SECONDS", 0.3)
    cluster = make(workers=2)
    first, second = cluster.each(lambda backend: straight(backend) and backend)
    cut_off(first, servers=[1])
    assert comes_true(lambda: cluster.servers[0].parts[0].members == {1})
    time.sleep(1.0)
    assert first.is_main and not second.is_main
    first.client.close()
    assert comes_true(lambda: second.is_main)


def test_what_others_wait_for_is_done_by_the_next_worker(make, monkeypatch):
    monkeypatch.setattr("distrib.training.parameter_server.part.DROP_SECONDS", 0.4)
    cluster = make(workers=2)
    first, second = cluster.worker(0), cluster.worker(1)
    assert first.from_main(lambda: "of rank 0") == second.from_main(lambda: "of rank 1") == "of rank 0"
    told: list[str] = []
    waits = threading.Thread(target=lambda: told.append(second.from_main(lambda: "of rank 1")))
    waits.start()
    time.sleep(0.3)
    assert not told
    first.client.close()
    waits.join(10)
    assert told == ["of rank 1"]


def test_what_main_has_kept_is_on_the_replica(make):
    cluster = make(workers=1, replicas=1)
    backend = cluster.worker(0)
    straight(backend)  # its buffers are kept, too
    backend.from_main(lambda: 5)
    part, copies = cluster.servers[0].parts[0], cluster.servers[1].parts
    assert len(part._kept) == 2 and comes_true(lambda: 0 in copies and copies[0]._kept == part._kept)


def test_a_worker_that_is_started_again_gives_gradients_and_nothing_else(make, again):
    cluster = make(workers=2)
    (first, model, optimizer), (second, _, _) = cluster.each(lambda backend: (backend, *straight(backend)))
    for _ in range(3):
        step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    step(model, optimizer)
    assert weight(model) == -3.5
    second.client.close()
    second = again(cluster, 1)
    own = nn.Linear(4, 1, bias=False)
    other = torch.optim.SGD(own.parameters(), 100.0)
    prepared(second, own, other)
    assert weight(own) == -3.5
    own.load_state_dict({"weight": torch.full((1, 4), 7.0)})
    other.load_state_dict(other.state_dict())
    assert weight(own) == -3.5
    other.param_groups[0]["lr"] = 10.0
    for _ in range(2):
        step(own, other)
    assert weight(own) == -4.5
    optimizer.param_groups[0]["lr"] = 0.25
    step(model, optimizer)
    assert weight(model) == -4.75
    step(own, other)
    assert weight(own) == -5.0
    # No part in what all workers do: neither waits for the other.
    assert second.reduce(torch.tensor(5.0), "mean") == 5.0 and second.view(3, training=False) == (0, 1)
    assert first.reduce(torch.tensor(3.0), "mean") == 3.0 and first.view(3, training=False) == (0, 1)
    assert first.is_main and not second.is_main


def test_rank_0_that_is_started_again_is_not_main_and_gets_what_was_kept(make, again):
    cluster = make(workers=2)
    first, second = cluster.each(lambda backend: straight(backend) and backend)
    assert first.from_main(lambda: 5) == 5
    first.client.close()
    first = again(cluster, 0)
    model = nn.Linear(4, 1, bias=False)
    prepared(first, model, torch.optim.SGD(model.parameters(), 1.0))
    assert weight(model) == 0  # and not its own
    assert first.from_main(lambda: 7) == 5
    assert comes_true(lambda: second.is_main) and not first.is_main
    assert second.from_main(lambda: 6) == 5  # it asks after the others


def test_synchronous_steps_wait_for_a_worker_that_was_started_again_once_it_has_joined(make, again):
    cluster = make(workers=2, staleness=0)

    def train(backend: Asynchronous) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = straight(backend)
        for _ in range(3):
            step(model, optimizer)
        return model, optimizer

    (model, optimizer), _ = cluster.each(train)
    cluster.backends[1 if cluster.backends[1].world.rank else 0].client.close()
    second = again(cluster, 1)
    own, other = straight(second, lr=5.0)
    assert weight(own) == -3
    step(model, optimizer)  # does not wait
    assert weight(model) == -4
    step(own, other)
    assert not comes_true(lambda: cluster.servers[0].parts[0].tables[0].shard.newest() > 5, 0.3)
    step(model, optimizer)
    assert weight(model) == weight(own) == -5  # one step, the mean of both


# -- whole jobs -------------------------------------------------------------------------------------------------------


def launched(folder: Path, lesson: list[str], *words: str) -> subprocess.Popen[str]:
    """A job of two workers that do a lesson."""
    command = [str(LAUNCH), "--no-check", "--run-dir", str(folder / "run"), "-np", "2", "--mode", "async", *words]
    return subprocess.Popen(
        [*command, str(SCRIPT), *lesson], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def started(folder: Path, *words: str, until: str = "") -> subprocess.Popen[str]:
    """A job of two workers that count their steps; returns when both have begun."""
    job = launched(folder, ["counting", str(folder), "40", "0.05", until], *words)
    reaches(job, lambda: noted(folder).keys() == {0, 1})
    return job


def reaches(job: subprocess.Popen[str], what: Callable[[], bool]) -> None:
    """Wait until something is true of a job, which goes on meanwhile."""
    deadline = time.monotonic() + 60
    while not what():
        if job.poll() is not None or time.monotonic() > deadline:
            job.terminate()
            pytest.fail(job.communicate(timeout=30)[0])
        time.sleep(0.05)


def noted(folder: Path) -> dict[int, int]:
    return {int(path.suffix[1:]): int(path.read_text()) for path in folder.glob("acknowledged.*")}


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


def test_a_worker_dies_and_the_other_goes_on_to_the_end(tmp_path):
    job = started(tmp_path)
    killed(tmp_path, 0)
    result, out = ended(tmp_path, job)  # before or soon after it would have been started again
    assert result["status"] == "succeeded" and result["first_failure"] is None, out
    assert "worker rank 0" in result["warnings"][-1]
    low, high = counts(tmp_path)[0]
    before, after = json.loads((tmp_path / "noted.1").read_text())
    assert before["0"] <= low <= high <= after["0"] + len((tmp_path / "lives.0").read_text())
    assert counts(tmp_path)[1] == (40, 40)


def test_a_worker_that_died_is_started_again_and_trains_with_the_others(tmp_path):
    job = started(tmp_path, until="enough")
    killed(tmp_path, 1)
    dead = noted(tmp_path)[1]
    reaches(job, lambda: noted(tmp_path)[1] >= dead + 10)
    before = noted(tmp_path)[0]
    reaches(job, lambda: noted(tmp_path)[0] >= before + 10)
    (tmp_path / "enough").touch()
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded" and result["exit_code"] == 0 and result["first_failure"] is None, out
    name = result["ranks"][1]["host"]
    assert result["warnings"] == [f"worker rank 1 on {name} died (SIGKILL) and was started again"]
    assert (result["ranks"][1]["signal"], result["ranks"][1]["stopped_by"]) == (signal.SIGTERM, "launcher")
    first, second = json.loads((tmp_path / "noted.0").read_text())
    low, high = counts(tmp_path)[1]
    assert dead + 10 <= first["1"] <= low <= high <= second["1"] + 2  # each of its lives may have noted one less
    assert counts(tmp_path)[0] == (first["0"], first["0"])


def test_the_job_fails_when_every_worker_has_failed_though_one_was_started_again(tmp_path):
    job = started(tmp_path, until="never")
    killed(tmp_path, 1)
    dead = noted(tmp_path)[1]
    reaches(job, lambda: noted(tmp_path)[1] > dead + 1)
    killed(tmp_path, 0)
    result, out = ended(tmp_path, job)
    assert (result["status"], result["exit_code"]) == ("failed", 128 + signal.SIGKILL), out
    first = result["first_failure"]
    assert (first["rank"], first["message"]) == (1, "killed by SIGKILL")
    assert len(result["warnings"]) == 1 and "was started again" in result["warnings"][0]
    assert [rank["signal"] for rank in result["ranks"][:2]] == [signal.SIGKILL, signal.SIGTERM]


def test_another_worker_prints_and_saves_when_rank_0_dies(tmp_path):
    job = launched(tmp_path, ["telling", str(tmp_path), "enough"])
    reaches(job, lambda: (tmp_path / "saved.pt").exists() and (tmp_path / "steps.1").exists())
    killed(tmp_path, 0)
    reaches(job, lambda: (tmp_path / "steps.0 again").exists())
    (tmp_path / "saved.pt").unlink()
    reaches(job, (tmp_path / "saved.pt").exists)
    (tmp_path / "enough").touch()
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded", out
    assert result["warnings"][0].endswith("died (SIGKILL) and was started again; the next worker prints and saves now")
    assert torch.load(tmp_path / "saved.pt", weights_only=True)["values"]["who"] == "1"
    assert "told by 0" in out and "told by 1" in out and "by 0 again" not in out
    assert out.count("the end by 1") == 1 and "the end by 0" not in out
    said = [json.loads(line)["metrics"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    tellers = [told["who"] for told in said if "who" in told]
    assert tellers == sorted(tellers) and set(tellers) == {"0", "1"}


def test_a_job_can_be_stopped_while_a_worker_waits_to_be_started_again(tmp_path):
    job = started(tmp_path, until="never")
    killed(tmp_path, 1)
    time.sleep(0.7)
    job.send_signal(signal.SIGINT)
    result, out = ended(tmp_path, job)
    assert (result["status"], result["exit_code"], result["warnings"]) == ("stopped", 130, []), out
    assert result["ranks"][1]["signal"] == signal.SIGKILL and (tmp_path / "lives.1").read_text() == "."


def test_a_bug_of_all_workers_does_not_run_twice(tmp_path):
    result, out = ended(tmp_path, launched(tmp_path, ["failing"]))
    assert result["status"] == "failed" and result["exit_code"] == 1, out
    assert result["first_failure"]["message"] == "ValueError: a bug" and result["warnings"] == []
    for rank in (0, 1):
        assert (tmp_path / f"run/ranks/{rank}.err").read_text().count("ValueError: a bug") == 1
        assert result["ranks"][rank]["exit_code"] == 1


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


@pytest.mark.parametrize("words", [("-np", "1"), ("-np", "2", "--staleness", "0")])
def test_only_the_gradients_of_the_step_count(tmp_path, words):
    command = [LAUNCH, "--no-check", "--run-dir", tmp_path / "run", *words, "--mode", "async", SCRIPT, "left_out"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nobody_waits_long_for_a_rank_that_died_before_it_began(tmp_path):
    command = [LAUNCH, "--no-check", "--run-dir", tmp_path / "run", "-np", "2", "--mode", "async", SCRIPT]
    begun = time.monotonic()
    done = subprocess.run(
        [*command, "one_dies_at_once"], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "worker rank 0 on localhost" in done.stderr
    assert time.monotonic() - begun < 60  # servers by themselves would wait for two minutes
