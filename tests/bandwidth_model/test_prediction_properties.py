"""Properties of predictions over GPUs, networks, catalogued workloads, batches, hosts and strategies."""

from __future__ import annotations

import math
from typing import NamedTuple

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distrib.bandwidth_model.prediction import Prediction
from distrib.bandwidth_model.scaling import find_job, predict_on_fabric, predict_step
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
@given(case=cases)
def test_copies_through_host_memory_are_never_faster(case):
    links = GPUS["RTX-4090"]
    with_it, without = (
        case.predict(gpu="RTX-4090", links=f"{links}, peer_to_peer: {value}").step_seconds for value in ("yes", "no")
    )
    assert without >= with_it * (1 - ROUNDING)
