"""Properties of predictions over GPUs, networks, catalogued workloads, batches, hosts and strategies."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distrib.bandwidth_model.hypothetical import changed_cluster, known_networks, parse_network_option
from distrib.bandwidth_model.prediction import Prediction
from distrib.bandwidth_model.scaling import (
    find_job,
    find_needed_network,
    predict_limit,
    predict_on_fabric,
    predict_step,
)
from distrib.bandwidth_model.workload_catalog import catalog_workload
from distrib.cluster.topology import parse_topology
from distrib.strategy import Gradients, Strategy

ROUNDING = 1e-6
GPUS = {
    "V100-SXM2-16GB": "nvlink: NVLink2 x6, nvswitch: yes",
    "A100-SXM4-80GB": "nvlink: NVLink3 x12, nvswitch: yes",
    "H100-SXM5-80GB": "nvlink: NVLink4 x18, nvswitch: yes",
    "B200": "nvlink: NVLink5 x18, nvswitch: yes",
    "RTX-4090": "pcie: PCIe4 x16",
    "L40S": "pcie: PCIe4 x16",
}
RDMA = [
    "name: 'mlx5_[0-7]', rate: NDR",
    "name: 'tcpx[0-3]', rate: 200Gb/s, kind: RoCE",
    "name: mlx5_0, rate: EDR",
    "name: 'efa[0-31]', rate: 100Gb/s, kind: RoCE",
]
TCP = ["name: eth0, rate: 25 GbE", "name: eth0, rate: 100 GbE"]


class Case(NamedTuple):
    gpu: str
    nic: str
    network: str
    batch: int
    hosts: int
    each: int
    strategy: Strategy
    links: str = ""

    def predict(self, **changed: object) -> Prediction:
        case = self._replace(**changed)
        workload = catalog_workload(case.network, case.gpu, case.batch)
        return predict_step(
            case.topology, workload, case.strategy, hosts=min(case.hosts, 2), nodes=case.hosts, ranks_per_host=case.each
        )

    @property
    def topology(self):
        links = self.links or GPUS[self.gpu]
        text = f"nodes: [{{hosts: 'n[1-2]', gpus: {{kind: {self.gpu}, count: 8}}, links: {{{links}}}, nics: [{{{self.nic}}}]}}]"
        return parse_topology(text, "case")


STRATEGIES = [
    Strategy(),
    Strategy(all_reduce="hierarchical"),
    Strategy(bucket_bytes=4 << 20),
    Strategy(gradients=Gradients("bf16")),
    Strategy(accumulate=4),
    Strategy(mode="local", inner_steps=10),
    Strategy(mode="async"),
]
cases = st.builds(
    Case,
    gpu=st.sampled_from(list(GPUS)),
    nic=st.sampled_from([f"{nic}, gpudirect: yes" for nic in RDMA] + TCP),
    network=st.sampled_from(["ResNet-50", "VGG-16", "BERT-large", "GPT-2-XL"]),
    batch=st.integers(1, 512),
    hosts=st.integers(1, 200),
    each=st.sampled_from([1, 2, 4, 8]),
    strategy=st.sampled_from(STRATEGIES),
    links=st.just(""),
)


@settings(max_examples=60, deadline=None)
@given(case=cases, factor=st.floats(1, 20))
def test_more_bandwidth_is_never_slower_and_results_are_finite(case, factor):
    told = case.predict()
    assert 0 < told.step_seconds < math.inf and 0 < told.samples_per_second < math.inf
    assert 0 < told.efficiency <= 1
    fabric, workload = find_job(
        case.topology, catalog_workload(case.network, case.gpu, case.batch), min(case.hosts, 2), case.each, case.hosts
    )
    if fabric.network:
        faster = fabric.with_network_bandwidth(factor * fabric.network.bytes_per_second)
        assert predict_on_fabric(faster, workload, case.strategy).step_seconds <= told.step_seconds * (1 + ROUNDING)
    if fabric.intra_node:
        faster = fabric.with_intra_node_bandwidth(factor * fabric.intra_node.bytes_per_second)
        assert predict_on_fabric(faster, workload, case.strategy).step_seconds <= told.step_seconds * (1 + ROUNDING)


@settings(max_examples=60, deadline=None)
@given(case=cases, more=st.integers(1, 200))
def test_more_hosts_never_raise_efficiency(case, more):
    few = case.predict()
    assume(not any("mode async on one host" in note for note in few.notes))  # it says why one host is slower
    assert case.predict(hosts=case.hosts + more).efficiency <= few.efficiency * (1 + ROUNDING)


@settings(max_examples=60, deadline=None)
@given(case=cases, more=st.integers(1, 512))
def test_a_larger_batch_never_lowers_efficiency(case, more):
    assert case.predict(batch=case.batch + more).efficiency >= case.predict().efficiency * (1 - ROUNDING)


@settings(max_examples=60, deadline=None)
@given(case=cases, nic=st.sampled_from(RDMA))
def test_gpudirect_off_is_never_faster(case, nic):
    with_it, without = (case.predict(nic=f"{nic}, gpudirect: {value}").step_seconds for value in ("yes", "no"))
    assert without >= with_it * (1 - ROUNDING)


@settings(max_examples=60, deadline=None)
@given(
    case=cases,
    count=st.sampled_from([1, 4, 8]),
    name=st.sampled_from(known_networks()),
    target=st.floats(0.5, 0.99),
    shard=st.sampled_from(["none", "none", "all", "host"]),
)
def test_the_needed_network_and_the_limit_agree_with_every_network_of_the_catalogue(case, count, name, target, shard):
    case = case._replace(hosts=max(2, case.hosts))
    strategy = msgspec.structs.replace(case.strategy, shard=shard) if case.strategy == Strategy() else case.strategy
    workload = catalog_workload(case.network, case.gpu, case.batch)
    place = {"hosts": 2, "nodes": case.hosts, "ranks_per_host": case.each}
    other = changed_cluster(case.topology, None, parse_network_option(f"{count} x {name}", None), None)
    reached = predict_step(other, workload, strategy, **place).efficiency
    needed = find_needed_network(case.topology, workload, strategy, **place, efficiency=target)
    if needed is None:
        limit = predict_limit(case.topology, workload, strategy, **place).efficiency
        assert reached <= limit * (1 + ROUNDING) and limit < target
        return
    link = find_job(other, workload, 2, case.each, case.hosts)[0].network
    is_enough = link.bytes_per_second >= needed.bytes_per_second and link.ports >= min(needed.ports, case.each)
    is_same_type = link.network_text.endswith(needed.network.split(" ports of ")[-1])
    if is_enough and is_same_type and link.curve.latency_seconds <= needed.latency_seconds:
        assert reached >= target * (1 - ROUNDING)


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_copies_through_host_memory_are_never_faster(case):
    links = GPUS["RTX-4090"]
    with_it, without = (
        case.predict(gpu="RTX-4090", links=f"{links}, peer_to_peer: {value}").step_seconds for value in ("yes", "no")
    )
    assert without >= with_it * (1 - ROUNDING)
