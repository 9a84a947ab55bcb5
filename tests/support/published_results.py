"""Published scaling results, each row with its source and its cluster.

A row uses the single-GPU speed that its source published, else that of the catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from distrib.bandwidth_model.scaling import predict_step
from distrib.bandwidth_model.workload import Workload
from distrib.bandwidth_model.workload_catalog import catalog_workload
from distrib.cluster.topology import parse_topology
from distrib.strategy import Gradients, Strategy

_CUBE_V100 = (
    "{0-1: 1, 0-2: 1, 0-3: 2, 0-4: 2, 1-2: 2, 1-3: 1, 1-5: 2, 2-3: 2, 2-6: 1, 3-7: 1, 4-5: 1, 4-6: 1, 4-7: 2, 5-6: 2, "
    "5-7: 1, 6-7: 2}"
)
_CUBE_P100 = (
    "{0-1: 1, 0-2: 1, 0-3: 1, 1-2: 1, 1-3: 1, 2-3: 1, 4-5: 1, 4-6: 1, 4-7: 1, 5-6: 1, 5-7: 1, 6-7: 1, 0-4: 1, 1-5: 1, "
    "2-6: 1, 3-7: 1}"
)
CLUSTERS = {
    "DGX-1 V100": f"{{gpus: {{kind: V100-SXM2-16GB, count: 8}}, links: {{nvlink: NVLink2 x6, pairs: {_CUBE_V100}}}, "
    "nics: [{name: 'mlx5_[0-3]', rate: EDR, gpudirect: yes}]}",
    "DGX A100": "{gpus: {kind: A100-SXM4-80GB, count: 8}, links: {nvlink: NVLink3 x12, nvswitch: yes}, "
    "nics: [{name: 'mlx5_[0-7]', rate: HDR, gpudirect: yes}]}",
    "DGX-1 P100": f"{{gpus: {{kind: P100-SXM2-16GB, count: 8}}, links: {{nvlink: NVLink1 x4, pairs: {_CUBE_P100}}}, "
    "nics: [{name: 'mlx5_[0-3]', rate: EDR, gpudirect: yes}]}",
    "4 Pascal, RoCE 25": "{gpus: {kind: P100-PCIe-16GB, count: 4}, links: {pcie: PCIe3 x16}, "
    "nics: [{name: eth0, kind: RoCE, rate: 25Gb/s, gpudirect: yes}]}",
    "8 P100, 50 GbE": f"{{gpus: {{kind: P100-SXM2-16GB, count: 8}}, links: {{nvlink: NVLink1 x4, pairs: {_CUBE_P100}}}, "
    "nics: [{name: eth0, rate: 50 GbE}]}",
    "8 V100, 100G RDMA": f"{{gpus: {{kind: V100-SXM2-32GB, count: 8}}, links: {{nvlink: NVLink2 x6, pairs: {_CUBE_V100}}}, "
    "nics: [{name: eth0, kind: RoCE, rate: 100Gb/s, gpudirect: yes}]}",
    "8 V100, 100 GbE TCP": f"{{gpus: {{kind: V100-SXM2-32GB, count: 8}}, links: {{nvlink: NVLink2 x6, pairs: {_CUBE_V100}}}, "
    "nics: [{name: eth0, rate: 100 GbE}]}",
    "p2.8xlarge, 10 GbE": "{gpus: {kind: K80, count: 8}, links: {pcie: PCIe3 x16}, nics: [{name: eth0, rate: 10 GbE}]}",
}

NVIDIA_BLOG = "developer.nvidia.com/blog/tensor-core-ai-performance-milestones"
DLE = "NVIDIA/DeepLearningExamples PyTorch/Classification/ConvNets/resnet50v1.5/README.md"
TENSORFLOW = "tensorflow/tensorflow@5984ffef tensorflow/docs_src/performance/benchmarks.md"
HOROVOD = "horovod/horovod@27743d08 docs/benchmarks.rst"
GOYAL = "Goyal et al. 2017, arXiv:1706.02677"
BYTEPS = "bytedance/byteps README.md"
ZHANG = "Zhang et al. 2020, arXiv:2006.10103"

PLAIN = Strategy()
FUSED = Strategy(bucket_bytes=64 << 20)
"""Size of Horovod's fusion buffer in bytes (default of HOROVOD_FUSION_THRESHOLD)."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A result: `published` is the efficiency per GPU against `base` (hosts x GPUs), `speed` samples/s of one GPU."""

    what: str
    source: str
    cluster: str
    network: str
    precision: str
    batch: int
    hosts: int
    gpus: int
    published: float
    speed: float | None = None
    base: tuple[int, int] = (1, 1)
    strategy: Strategy = PLAIN

    @property
    def predicted(self) -> float:
        topology = parse_topology(f"nodes:\n  - {{hosts: x, {CLUSTERS[self.cluster][1:]}\n", self.what)
        of = [
            predict_step(topology, self.workload, self.strategy, hosts=hosts, ranks_per_host=gpus).efficiency
            for hosts, gpus in ((self.hosts, self.gpus), self.base)
        ]
        return of[0] / of[1]

    @property
    def workload(self) -> Workload:
        gpu = self.cluster_gpu
        found = catalog_workload(self.network, gpu, self.batch, precision=self.precision)  # type: ignore[arg-type]
        if self.speed is None:
            return found
        factor = self.batch / self.speed / found.compute_seconds
        return msgspec.structs.replace(
            found,
            forward_seconds=found.forward_seconds * factor,
            backward_seconds=found.backward_seconds * factor,
            optimizer_seconds=found.optimizer_seconds * factor,
            gradients=tuple(
                msgspec.structs.replace(each, ready_seconds=each.ready_seconds * factor) for each in found.gradients
            ),
        )

    @property
    def cluster_gpu(self) -> str:
        return CLUSTERS[self.cluster].partition("kind: ")[2].partition(",")[0]


ROWS = (
    Row(what="8 x V100, ResNet-50, AMP", source=NVIDIA_BLOG, cluster="DGX-1 V100", network="ResNet-50", precision="amp",
        batch=256, hosts=1, gpus=8, published=7850 / 1075 / 8, speed=1075),
    Row(what="8 x V100, ResNet-50, AMP", source=DLE, cluster="DGX-1 V100", network="ResNet-50", precision="amp",
        batch=256, hosts=1, gpus=8, published=8322 / 1200 / 8, speed=1200),
    Row(what="8 x V100, ResNet-50, FP32", source=DLE, cluster="DGX-1 V100", network="ResNet-50", precision="fp32",
        batch=128, hosts=1, gpus=8, published=2855 / 367 / 8, speed=367),
    Row(what="8 x A100, ResNet-50, AMP", source=DLE, cluster="DGX A100", network="ResNet-50", precision="amp",
        batch=256, hosts=1, gpus=8, published=16621 / 2470 / 8, speed=2470),
    Row(what="8 x A100, ResNet-50, TF32", source=DLE, cluster="DGX A100", network="ResNet-50", precision="tf32",
        batch=256, hosts=1, gpus=8, published=7248 / 938 / 8, speed=938),
    Row(what="8 x P100, VGG-16, batch 64", source=TENSORFLOW, cluster="DGX-1 P100", network="VGG-16", precision="fp32",
        batch=64, hosts=1, gpus=8, published=1081 / 154 / 8, speed=154),
    Row(what="8 x P100, VGG-16, batch 32", source=TENSORFLOW, cluster="DGX-1 P100", network="VGG-16", precision="fp32",
        batch=32, hosts=1, gpus=8, published=820 / 144 / 8, speed=144),
    Row(what="8 x P100, ResNet-50, batch 64", source=TENSORFLOW, cluster="DGX-1 P100", network="ResNet-50",
        precision="fp32", batch=64, hosts=1, gpus=8, published=1734 / 219 / 8, speed=219),
    Row(what="64 x K80, ResNet-50, 10 GbE", source=TENSORFLOW, cluster="p2.8xlarge, 10 GbE", network="ResNet-50",
        precision="fp32", batch=64, hosts=8, gpus=8, published=2744 / 52.4 / 64, speed=52.4),
    Row(what="16 x K80, ResNet-50, 10 GbE", source=TENSORFLOW, cluster="p2.8xlarge, 10 GbE", network="ResNet-50",
        precision="fp32", batch=64, hosts=2, gpus=8, published=751 / 52.4 / 16, speed=52.4),
    Row(what="512 x P100, ResNet-101, RoCE 25G", source=HOROVOD, cluster="4 Pascal, RoCE 25", network="ResNet-101",
        precision="fp32", batch=64, hosts=128, gpus=4, published=0.90, strategy=FUSED),
    Row(what="512 x P100, VGG-16, RoCE 25G", source=HOROVOD, cluster="4 Pascal, RoCE 25", network="VGG-16",
        precision="fp32", batch=64, hosts=128, gpus=4, published=0.68, strategy=FUSED),
    Row(what="256 x P100 against 8, ResNet-50, 50 GbE", source=GOYAL, cluster="8 P100, 50 GbE", network="ResNet-50",
        precision="fp32", batch=32, hosts=32, gpus=8, published=0.90, base=(1, 8)),
    Row(what="256 x V100, BERT-large, Horovod + NCCL", source=BYTEPS, cluster="8 V100, 100G RDMA",
        network="BERT-large-128", precision="amp", batch=64, hosts=32, gpus=8, published=0.70, strategy=FUSED),
    Row(what="256 x V100, BERT-large, BytePS", source=BYTEPS, cluster="8 V100, 100G RDMA", network="BERT-large-128",
        precision="amp", batch=64, hosts=32, gpus=8, published=0.90,
        strategy=Strategy(bucket_bytes=4 << 20, all_reduce="hierarchical", gradients=Gradients("fp16"))),
    Row(what="64 x V100, ResNet-50, 100 GbE over TCP", source=ZHANG, cluster="8 V100, 100 GbE TCP", network="ResNet-50",
        precision="fp32", batch=32, hosts=8, gpus=8, published=0.76, strategy=FUSED),
    Row(what="64 x V100, VGG-16, 100 GbE over TCP", source=ZHANG, cluster="8 V100, 100 GbE TCP", network="VGG-16",
        precision="fp32", batch=32, hosts=8, gpus=8, published=0.60, strategy=FUSED),
)  # fmt: skip


def table() -> str:
    """Return the rows of docs/benchmarks/prediction.md."""
    lines = ["|what|published|predicted|error|source|", "|-|-|-|-|-|"]
    lines += [
        f"|{row.what}|{row.published:.1%}|{row.predicted:.1%}|{row.predicted / row.published - 1:+.1%}|{row.source}|"
        for row in ROWS
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
