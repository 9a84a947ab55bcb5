"""Sharded data parallel: bytes, memory and timeline by hand, properties, and the choice of `--shard auto`."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrib.bandwidth_model import collective_cost
from distrib.bandwidth_model.described_workload import STEP_BLOCKS, MeasuredStep, measured_step
from distrib.bandwidth_model.fabric import Fabric, find_fabric
from distrib.bandwidth_model.hypothetical import catalog_gpu_name, hypothetical_cluster, parse_network_option
from distrib.bandwidth_model.parameter_blocks import gathered_elements, parameter_blocks
from distrib.bandwidth_model.scaling import predict_on_fabric, predict_step
from distrib.bandwidth_model.shard_choice import choose_shard, explain_choices
from distrib.bandwidth_model.sharding import sent_bytes, sharded_memory_bytes
from distrib.bandwidth_model.workload import Workload
from distrib.bandwidth_model.workload_catalog import WorkloadOptions, catalog_workload
from distrib.cluster.topology import Topology
from distrib.errors import ConfigError
from distrib.strategy import Gradients, Strategy, parse_gradients, validate_strategy

SHARDS = ("none", "grads", "host", "all")


def cluster(network: str = "8 x NDR", gpu: str = "H100") -> Topology:
    return hypothetical_cluster(("a", "b"), 8, catalog_gpu_name(gpu), parse_network_option(network, None))


def fabric_of(workload: Workload, hosts: int = 2, each: int = 8, network: str = "8 x NDR") -> Fabric:
    return find_fabric(cluster(network), workload, min(hosts, 2), each, hosts)


def llama(**options: object) -> Workload:
    return catalog_workload("Llama-3-8B", "H100", options=WorkloadOptions(**options))


def test_bytes_per_rank_are_those_of_zero_and_hsdp():
    parameters, hosts = 8_030_261_248, 4
    workload = llama()
    fabric = fabric_of(workload, hosts)
    m_c, m_r = 2 * parameters, 4 * parameters  # gathered in bfloat16, reduced in float32

    def sent(shard: str, **more: object) -> tuple[float, float]:
        found = sent_bytes(fabric, workload, Strategy(shard=shard, **more))
        return found.in_group, found.to_replicas

    assert sent("all") == (pytest.approx(31 / 32 * (2 * m_c + m_r)), 0)
    assert sent("grads") == (pytest.approx(31 / 32 * (m_c + m_r)), 0)
    assert sent("host") == (pytest.approx(7 / 8 * (2 * m_c + m_r)), pytest.approx(2 * 3 / 4 * m_r / 8))
    assert sent("none") == (0, pytest.approx(2 * 31 / 32 * m_r))
    assert sent("all", gradients=Gradients("bf16"))[0] == pytest.approx(31 / 32 * 3 * m_c)


def test_blocks_are_the_layers_and_the_rest_is_the_root():
    gradients = catalog_workload("Llama-3-8B", "H100").gradients
    blocks = parameter_blocks(gradients)
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096
    assert [block.elements for block in blocks] == [layer] * 32 + [2 * 128_256 * 4096 + 4096]
    root = blocks[-1].elements
    assert gathered_elements(gradients, all_at_once=True) == 8_030_261_248 + root
    assert gathered_elements(gradients, all_at_once=False) == 2 * root > root + 3 * layer
    tied = catalog_workload("GPT-2-XL", "H100").gradients
    root, layer = parameter_blocks(tied)[-1].elements, parameter_blocks(tied)[0].elements
    assert gathered_elements(tied, all_at_once=False) == max(2 * root, root + 3 * layer)


def test_memory_is_sixteen_bytes_per_parameter_of_the_shard_and_whole_blocks():
    workload = llama(batch=1, checkpointing="full")
    parameters, gathered = 8_030_261_248, gathered_elements(workload.gradients, all_at_once=False)

    def memory(hosts: int, shard: str) -> int:
        found = sharded_memory_bytes(fabric_of(workload, hosts), workload, Strategy(shard=shard))
        assert found is not None
        return found

    one, two = memory(1, "all"), memory(2, "all")
    assert one - two == pytest.approx(16 * parameters * (1 / 8 - 1 / 16))
    assert memory(2, "host") == one == memory(16, "host")
    whole = memory(2, "grads") - two
    assert whole == 2 * (gathered_elements(workload.gradients, all_at_once=True) - gathered)


@pytest.mark.parametrize(
    ("gpus", "gib"),
    # pytorch/torchtitan@31a17bfd benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: FSDP, selective, batches of 2.
    [(8, 82.4), (128, 67.0)],
)
def test_memory_is_near_that_of_torchtitan(gpus, gib):
    workload = llama(batch=2, checkpointing="selective")
    found = sharded_memory_bytes(fabric_of(workload, gpus // 8), workload, Strategy(shard="all"))
    assert found == pytest.approx(gib * 2**30, rel=0.10)


def test_memory_of_a_profile_is_that_of_its_shard():
    step = measured_step(MeasuredStep(seconds=0.1, gradient_bytes=4 * 10**9), "H100", 1)
    whole = msgspec.structs.replace(step, memory_bytes=20 * 10**9)
    fabric = fabric_of(whole)
    # 16 GB of state over 16 ranks, 4 GB of activations, and three of 32 blocks.
    expected = 10**9 + 4 * 10**9 + 3 * 4 * 10**9 / 32
    assert sharded_memory_bytes(fabric, whole, Strategy(shard="all")) == pytest.approx(expected)
    assert sharded_memory_bytes(fabric, step, Strategy(shard="all")) is None


def test_only_the_first_gather_and_the_last_reduction_are_exposed_on_a_fast_network():
    workload = measured_step(MeasuredStep(seconds=3.0, gradient_bytes=10**9), "H100", 1)
    fabric = fabric_of(workload)
    block = 10**9 / STEP_BLOCKS
    once = collective_cost.all_gather(fabric, block)
    step = predict_on_fabric(fabric, workload, Strategy(shard="all"))
    assert step.exposed_seconds == pytest.approx(2 * once, rel=0.01)
    # Forward gathers all blocks, backward all but the last; gradients are reduced once.
    assert step.communication_seconds == pytest.approx((3 * STEP_BLOCKS - 1) * once, rel=0.01)
    assert step.step_seconds == pytest.approx(3 + 2 * once + 0.08 * (step.communication_seconds - 2 * once), rel=0.01)
    kept = predict_on_fabric(fabric, workload, Strategy(shard="grads"))
    assert kept.communication_seconds == pytest.approx(2 * STEP_BLOCKS * once, rel=0.01)


def test_a_slow_network_sets_the_pace():
    workload = measured_step(MeasuredStep(seconds=1e-3, gradient_bytes=10**9), "H100", 1)
    step = predict_on_fabric(fabric_of(workload, network="10GbE"), workload, Strategy(shard="all"))
    assert step.step_seconds == pytest.approx(step.communication_seconds, rel=0.01)


def test_every_batch_of_an_accumulation_communicates():
    workload = measured_step(MeasuredStep(seconds=1e-3, gradient_bytes=10**9), "H100", 1)
    once, four = (
        predict_step(cluster("10GbE"), workload, Strategy(shard="all", accumulate=count), hosts=2, ranks_per_host=8)
        for count in (1, 4)
    )
    assert four.communication_seconds == pytest.approx(4 * once.communication_seconds)


def test_the_optimizer_updates_a_shard():
    workload = llama()
    alone, sharded = (
        predict_step(cluster(), workload, Strategy(shard=shard), hosts=2, ranks_per_host=8).compute_seconds
        for shard in ("none", "all")
    )
    assert alone - sharded == pytest.approx(15 / 16 * workload.optimizer_seconds)


cases = st.tuples(
    st.sampled_from(["Llama-3.2-1B", "Llama-3-8B", "GPT-2", "ResNet-50", "T5-base"]),
    st.sampled_from(SHARDS[1:]),
    st.integers(1, 64),
    st.sampled_from(["25GbE", "EDR", "8 x HDR", "8 x NDR"]),
    st.integers(1, 4),
)


@settings(max_examples=40, deadline=None)
@given(case=cases, factor=st.floats(1.01, 100))
def test_more_bandwidth_is_never_slower(case, factor):
    name, shard, hosts, network, batch = case
    workload = catalog_workload(name, "H100", batch)
    fabric = fabric_of(workload, hosts, network=network)
    strategy = Strategy(shard=shard)
    step = predict_on_fabric(fabric, workload, strategy)
    assert math.isfinite(step.step_seconds) and 0 < step.efficiency <= 1
    assert step.exposed_seconds <= step.communication_seconds * 1.000001
    faster = [
        fabric.with_network_bandwidth(factor * fabric.network.bytes_per_second) if fabric.network else fabric,
        fabric.with_intra_node_bandwidth(factor * fabric.intra_node.bytes_per_second),
    ]
    for each in faster:
        assert predict_on_fabric(each, workload, strategy).step_seconds <= step.step_seconds * 1.000001


@settings(max_examples=30, deadline=None)
@given(case=cases, more=st.integers(1, 64))
def test_more_hosts_never_raise_efficiency_nor_memory(case, more):
    name, shard, hosts, network, batch = case
    workload = catalog_workload(name, "H100", batch)
    strategy = Strategy(shard=shard)
    few, many = (fabric_of(workload, count, network=network) for count in (hosts, hosts + more))
    assert (
        predict_on_fabric(many, workload, strategy).efficiency
        <= predict_on_fabric(few, workload, strategy).efficiency * 1.001
    )
    assert sharded_memory_bytes(many, workload, strategy) <= sharded_memory_bytes(few, workload, strategy)


@pytest.mark.parametrize(
    ("name", "options", "hosts", "chosen"),
    [
        ("GPT-2", {}, 2, {"none", "grads"}),
        ("Llama-3-8B", {"batch": 1, "checkpointing": "full"}, 1, {"grads", "host", "all"}),
        ("Llama-3-70B", {}, 16, {"all"}),
    ],
)
def test_auto_is_the_fastest_that_fits(name, options, hosts, chosen):
    workload = catalog_workload(name, "H100", options=WorkloadOptions(**options))
    fabric = fabric_of(workload, hosts)
    choice = choose_shard(lambda strategy: predict_on_fabric(fabric, workload, strategy), Strategy())
    best = choice.chosen
    assert best.strategy.shard in chosen and best.fits_memory
    for each in choice.candidates:
        assert not each.fits_memory or each.samples_per_second <= best.samples_per_second
    (reason,) = explain_choices([choice])
    assert f"--shard auto: {best.strategy.shard} (" in reason and "the fastest that fits" in reason


def test_auto_says_that_nothing_fits():
    workload = catalog_workload("Llama-3-405B", "H100")
    fabric = fabric_of(workload, 2)
    choice = choose_shard(lambda strategy: predict_on_fabric(fabric, workload, strategy), Strategy())
    assert choice.chosen.strategy.shard == "all" and "no sharding fits on 2 hosts" in explain_choices([choice])[0]


def test_each_run_of_equal_choices_is_explained_once():
    workload = llama(batch=1, checkpointing="full")
    choices = []
    for hosts in (1, 2, 4, 8):
        fabric = fabric_of(workload, hosts)
        choices.append(choose_shard(lambda strategy, at=fabric: predict_on_fabric(at, workload, strategy), Strategy()))
    lines = explain_choices(choices)
    shards = [choice.chosen.strategy.shard for choice in choices]
    assert len(lines) == 1 + sum(one != other for one, other in itertools.pairwise(shards))
    assert "8 hosts" in lines[-1] and "none does not fit" in lines[-1]


@pytest.mark.parametrize(
    "settings",
    [
        {"gradients": parse_gradients("powersgd:4")},
        {"bucket_bytes": 1 << 20},
        {"all_reduce": "flat"},
        {"mode": "async"},
    ],
)
def test_settings_that_sharding_has_no_use_for_are_refused(settings):
    with pytest.raises(ConfigError, match="--"):
        validate_strategy(Strategy(shard="all", **settings))
