"""GPU tests: streams, NCCL with one rank and with two on one GPU, pinned memory, NVML. Run with `pytest -m gpu`."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distrib
from distrib.cluster.inventory import InventoryQuery, own_inventory
from distrib.errors import TrainingError
from distrib.probe.bench import intra_node
from distrib.probe.host_facts import own_facts
from distrib.strategy import OuterOptimizer, Strategy, parse_gradients
from distrib.training import collectives, rendezvous
from distrib.training import job as job_module
from distrib.training.gradients.power_sgd import POWER_SGD_WARMUP_STEPS
from distrib.training.nan_guard import NanGuard
from distrib.training.parameter_server.shared_memory import SharedArena
from distrib.training.strategies.ddp import wrap_model
from distrib.training.strategies.local_sgd import _Round
from distrib.training.telemetry.device_timer import DeviceTimer
from tests.conftest import ROOT, SCRIPTS, TOPO
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu

ON_ONE = SCRIPTS / "on_one_gpu.py"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path) -> torch.device:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # the first optimizer sets it
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture
def group(device: torch.device) -> Iterator[None]:
    """Initialize a process group of this process alone, as distrib does on GPUs."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
        device_id=device,
    )
    rendezvous.compat.unbind_device()
    yield
    dist.destroy_process_group()


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 10)).to(device)


def test_the_inventory_and_the_probe_know_the_gpu(device):
    facts = own_inventory(InventoryQuery())
    assert facts.nvml_error is None and facts.driver
    assert len(facts.gpus) >= torch.cuda.device_count()
    gpu = facts.gpus[0]
    assert gpu.kind and gpu.bus_id and gpu.memory_bytes and gpu.memory_bytes > 1 << 30
    (told, *_) = own_facts("here", "127.0.0.1").gpus
    assert told.name and told.pcie_width and told.pcie_width_possible


def test_ways_inside_are_those_of_torch(device):
    """Rates agree within a tenth. benchmarks/gpu.py compares more precisely."""
    links, problems = intra_node.measure_host("here", 0.2)
    assert problems == ()
    rates = {(link.source, link.target): link.bandwidth_bytes_per_second for link in links}
    pinned = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device=device)
    own = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(8):
            there.copy_(pinned, non_blocking=True)
        end.record()
        end.synchronize()
        own.append(8 * pinned.numel() / (begin.elapsed_time(end) / 1e3))
    name = next(source for source, target in rates if target == "memory" and source != "memory")
    assert rates["memory", name] == pytest.approx(max(own), rel=0.1)
    assert rates[name, name] > rates["memory", name]


def test_this_machine_is_probed(device, tmp_path):
    command = [str(TOPO), "probe", "--quick", "--json", "--no-preflight", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done
    inside_ = json.loads(done.stdout)["measured"]["inside"]
    assert any(link["source"].startswith("gpu") for link in inside_), inside_


@pytest.mark.parametrize("gradients", ["fp32", "fp16", "bf16", "int8", "topk:1", "powersgd:4"])
def test_what_hooks_average_over_one_rank_are_its_own_gradients(group, device, gradients):
    """PowerSGD stays accurate after its exact steps, because gradients of four samples have rank four."""
    plain = network(device)
    strategy = Strategy(gradients=parse_gradients(gradients), bucket_bytes=50_000)
    wrapped = wrap_model(copy.deepcopy(plain), device, 2, find_unused_parameters=False, settings=strategy)
    for step in range(POWER_SGD_WARMUP_STEPS + 4):
        x = torch.randn(4, 64, device=device, generator=torch.Generator(device).manual_seed(step))
        for model in (plain, wrapped):
            model.zero_grad()
            model(x).square().mean().backward()
        largest = max(parameter.grad.abs().max().item() for parameter in plain.parameters())
        for mine, theirs in zip(wrapped.module.parameters(), plain.parameters(), strict=True):
            scale = theirs.grad.abs().max().item() + 1e-6
            # A block of int8 has one scale across parameters and rounds by 1/254. The remainder follows one step later.
            off = 0.01 * largest if gradients == "int8" else 0.05 * scale
            assert torch.allclose(mine.grad, theirs.grad, atol=off), (gradients, step)


@pytest.mark.parametrize(
    "outer", [OuterOptimizer(lr=1.0, momentum=0.0), OuterOptimizer(lr=1.0, momentum=0.0, fragments=3, overlap_steps=2)]
)
def test_rounds_of_one_rank_are_those_of_a_cpu(group, device, outer):
    """Without overlap, a rank keeps its own result."""
    learnt = []
    for place in (device, torch.device("cpu"), None):
        model = network(torch.device("cpu")).to(place)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        round_ = _Round(optimizer, Strategy(mode="local", inner_steps=6, outer=outer), 1) if place else None
        if round_:
            round_.models = [model]
        for step in range(20):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
            if round_:
                round_.begin()
            optimizer.zero_grad()
            model(x.to(place)).square().mean().backward()
            optimizer.step()
            if round_:
                round_.count_step()
        if round_:
            round_.end()
        learnt.append(torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()]))
    here, cpu, alone = learnt
    torch.testing.assert_close(here, cpu, rtol=1e-2, atol=1e-3)
    assert torch.allclose(here, alone, rtol=1e-2, atol=1e-3) == (not outer.overlap_steps)


@pytest.mark.parametrize(
    ("way", "strategy"),
    [
        ("nccl", {}),
        ("gloo", {}),
        ("nccl", {"accumulate": 2}),
        ("nccl", {"mode": "local", "inner_steps": 4}),
        ("gloo", {"mode": "local", "inner_steps": 4}),
    ],
    ids=["sync", "sync by Gloo", "accumulate", "local", "local by Gloo"],
)
def test_two_ranks_on_one_gpu_learn_what_two_on_cpus_do(device, way, strategy):
    told = []
    for place in ("cuda:0", "cpu"):
        words = {"DISTRIB_DEVICE": place, "DISTRIB_STRATEGY": json.dumps(strategy)}
        in_step = ["nan"] if strategy.get("mode") != "local" else []
        run = run_ranks(2, SCRIPTS / "shared_gpu.py", way, *in_step, seconds=100, **words)
        assert run.returncode == 0, run
        learnt, *nan = run.stdout.splitlines()
        assert len(nan) == len(in_step) and all("is nan or infinite on rank 1" in line for line in nan), nan
        told.append(json.loads(learnt))
    here, cpu = told
    assert here["state"] == pytest.approx(cpu["state"], rel=1e-2, abs=1e-2)
    assert here["means"] == pytest.approx(here["state"], rel=1e-5, abs=1e-5)  # identical on both


@pytest.mark.parametrize(
    "mode", [[], ["--mode", "local", "--inner-steps", "4"], ["--mode", "async"]], ids=["sync", "local", "async"]
)
def test_ranks_share_gpus_if_the_user_allows_it(device, launch, mode):
    """One rank more than GPUs: NCCL would refuse two ranks of a host on one GPU."""
    ranks = torch.cuda.device_count() + 1
    refused = launch("-np", ranks, SCRIPTS / "steps.py", 4, 0, 1600)
    assert refused.code and "--share-gpus" in refused.err, refused
    run = launch("-np", ranks, "--share-gpus", *mode, SCRIPTS / "steps.py", 8, 0, 1600)
    assert run.code == 0 and "after 8 steps" in run.out, run
    assert [one["device"] for one in run.result["ranks"] if one["role"] == "worker"][-1] == "cuda:0"
    assert "note: --share-gpus" in run.err


@pytest.mark.parametrize(
    ("strategy", "lessons"),
    [
        ({}, "apart exact wrapped several scaled nan mistakes unused targets"),
        ({}, "itself compiled averaged normalized ported unfrozen frozen methods"),
        ({}, "in_evaluation released fused late unwrapped again refrozen in_turn closures handed_out unequal"),
        ({"balance": True}, "exact"),
        ({"gradients": {"format": "bf16"}}, "released stepped"),
        ({"accumulate": 3}, "sharpness exact scaled fused thrown_away uncounted again one_model two_optimizers stepped"),
        ({"mode": "local", "inner_steps": 4, "outer": {"lr": 1.0, "momentum": 0.0}},
         "wrapped itself compiled several scaled streamed targets averaged ported unfrozen"),
        ({"mode": "local", "inner_steps": 7}, "outer unfrozen momentum"),
        ({"mode": "local", "inner_steps": 8, "gradients": {"format": "bf16"},
          "outer": {"lr": 0.7, "momentum": 0.5, "fragments": 3, "overlap_steps": 2}}, "streamed scaled"),
        ({"mode": "local", "inner_steps": 4, "outer": {"overlap_steps": 2}}, "one_outer_step"),
    ],
)  # fmt: skip
def test_lessons_over_nccl(device, strategy, lessons, tmp_path):
    words = json.dumps(strategy)
    run = run_ranks(2, ON_ONE, SCRIPTS / "modes.py", tmp_path, *lessons.split(), seconds=100, DISTRIB_STRATEGY=words)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines() == [f"{lesson}: learnt" for lesson in lessons.split()]
    assert run.stderr.count("replicas diverge") == len({"apart", "unequal"} & {*lessons.split()})


@pytest.mark.parametrize(
    ("strategy", "lessons"),
    [
        ({}, "methods frozen_later inferred_buffers growing_buffers looked_at_alone gathered_batches two_models_in_turns"),
        ({}, "begins_as_main warmed_in_no_step has_its_turn_again compiled_step scaler_lets_go weights_alone values_of_each_rank"),
        ({}, "compiled second_backward unused_zeros step_in_backward closure_numbers reduced"),
        ({"gradients": {"format": "topk", "fraction": 0.1}}, "wide_default"),
        ({"mode": "local", "inner_steps": 2},
         "growing_buffers has_its_turn_again restored_within_a_round weights_alone values_of_each_rank followers"),
    ],
)  # fmt: skip
def test_habits_over_nccl(device, strategy, lessons):
    words = json.dumps(strategy)
    run = run_ranks(2, ON_ONE, SCRIPTS / "habits.py", *lessons.split(), seconds=100, DISTRIB_STRATEGY=words)
    assert run.returncode == 0, run.stdout + run.stderr
    assert sorted(run.stdout.splitlines()) == sorted(f"done: {lesson}" for lesson in lessons.split() for _ in range(2))


@pytest.mark.parametrize(
    "lessons", ["exact", "formats", "halves", "numbers,begins,seldom,scales", "restored", "arrives"]
)
def test_averages_over_nccl(device, lessons):
    run = run_ranks(2, ON_ONE, SCRIPTS / "averages.py", lessons, "0,1", seconds=100)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("done") == 1 + lessons.count(",")


def test_workers_that_share_a_gpu_learn_without_a_common_step(device, launch):
    hidden = ("-np", "2", "-x", "CUDA_VISIBLE_DEVICES=", "--mode", "async")
    lessons = "begins_as_main has_its_turn_again weights_alone values_of_each_rank evaluated_by_a_method averages_put_in large_gradients"
    run = launch(*hidden, ON_ONE, SCRIPTS / "habits.py", *lessons.split())
    assert run.code == 0, run
    for rank in range(2):
        told = (run.run_dir / "ranks" / f"{rank}.out").read_text()
        assert re.findall("^done: (.+)$", told, re.MULTILINE) == lessons.split(), run
    run = launch(*hidden, "--staleness", "0", ON_ONE, SCRIPTS / "asynchronous.py", "left_out")
    assert run.code == 0, run


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("kill", r"rank 1 on localhost failed first: .*SIGKILL"),
        ("raise", r"rank 1 on localhost failed first: ValueError: a bug"),
        ("sleep", r"error: no progress for 10 s: rank 1 on localhost is in its own code \(beside_nccl"),
    ],
)
def test_a_rank_that_ends_or_stands_still_beside_nccl_is_named(device, launch, order, says):
    hidden = ("-np", "2", "-x", "CUDA_VISIBLE_DEVICES=", "--hang-timeout", "10s", ON_ONE)
    run = launch(*hidden, SCRIPTS / "beside_nccl.py", order, timeout=100)
    assert run.code == {"kill": 137}.get(order, 1), run
    assert re.search(says, run.err), run
    assert run.seconds < 60, run


def test_all_reduce_of_the_probe_by_nccl(device):
    run = run_ranks(2, ON_ONE, SCRIPTS / "beside_nccl.py", "measure", seconds=100)
    assert run.returncode == 0, run
    (told,) = json.loads(run.stdout)
    assert told["backend"] == "nccl" and told["ranks"] == 2 and len(told["curve"]) == 3, told
    assert all(seconds > 0 for _, seconds, _ in told["curve"]), told


def test_a_nan_is_told_a_step_late_and_nobody_waits(device):
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = NanGuard(optimizer, "raise", averaged=False)
    guard.watch({parameter: name for name, parameter in model.named_parameters()})
    x = torch.randn(8, 64, device=device)
    for step in (1, 2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        assert guard.check(step)
    model[3].weight.grad[0, 0] = float("nan")
    assert guard.check(3)
    with pytest.raises(TrainingError, match=r"step 3: .* 3\.weight"):
        guard.check_pending()


def test_what_an_optimizer_has_learnt_follows_a_model_that_is_prepared_after_it(device, monkeypatch):
    monkeypatch.setattr(job_module, "current_job", None)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with distrib.init() as job:
        optimizer, model = job.prepare(optimizer, model)
        model(torch.ones(1, 2, device=device)).sum().backward()
        optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].device == device


def test_buffers_of_all_types_are_sent(group, device):
    tensors = [
        torch.ones(3, dtype=kind, device=device) for kind in (torch.float32, torch.int64, torch.bool, torch.bfloat16)
    ]
    collectives.broadcast_tensors(tensors)
    collectives.broadcast_tensors([*tensors, torch.ones(3, dtype=torch.int16, device=device)])  # NCCL has no int16
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_marks_are_in_the_order_of_the_gpu(device):
    clock = DeviceTimer(device)
    begin = clock.mark()
    torch.cuda._sleep(50_000_000)
    end = clock.mark()
    clock.synchronize()
    assert clock.has_happened(end) and clock.seconds(begin, end) > 0.001


def test_shared_memory_is_pinned_once(device):
    arena = SharedArena({0: 1 << 20})
    arena.pin()
    assert arena.values[0].is_pinned()
    arena.pin()  # CUDA rejects a second pinning; the next call must not report it
    assert torch.ones(4, device=device).sum().item() == 4


@pytest.mark.parametrize("words", [[], ["--mode", "async"], ["--mode", "local"], ["--accumulate", "2"]])
def test_the_example_learns_on_one_gpu(device, tmp_path, words):
    launch = [sys.executable, "-m", "distrib_launch.cli.launch", "-np", "1", "--run-dir", str(tmp_path / "run"), *words]
    done = subprocess.run(
        [*launch, str(ROOT / "examples/train_cnn.py")], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done
    assert json.loads((tmp_path / "run/result.json").read_text())["ranks"][0]["device"] == "cuda:0"
    last = done.stdout.splitlines()[-1]
    assert float(last.rpartition("validation accuracy ")[2].split()[0]) >= 94


@pytest.mark.parametrize("mode", [[], ["--mode", "async"]], ids=["sync", "async"])
def test_a_script_may_make_everything_on_its_gpu(device, tmp_path, mode):
    launch = [
        sys.executable,
        "-m",
        "distrib_launch.cli.launch",
        "-np",
        "1",
        *mode,
        str(ROOT / "tests/scripts/default_device.py"),
    ]
    done = subprocess.run([*launch, str(tmp_path), "cuda"], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done
    told = json.loads(next(line for line in done.stdout.splitlines() if "first" in line).partition("] ")[2])
    assert told["device"].startswith("cuda") and told["last"] < told["first"]


def test_what_nvml_tells_of_health(device):
    health = own_inventory(InventoryQuery()).gpus[0].health
    assert health.power_limit_watts and health.temperature_celsius, health
    told = subprocess.run([str(TOPO), "show", "--ask"], capture_output=True, text=True, timeout=100)
    assert told.returncode == 0 and "GPUs as they are" in told.stdout, told
