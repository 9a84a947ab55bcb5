"""Topologies and a training job for the tests of the bandwidth model."""

from __future__ import annotations

import msgspec

from distrib.bandwidth_model.workload import Gradient, Workload
from distrib.cluster.topology import Topology, parse_topology

MB = 1_000_000
POD = """
nodes:
  - hosts: a[1-8]
    gpus: {kind: V100, count: 8}
    links: {nvlink: NVLink2 x6, nvswitch: yes, pcie: PCIe3 x16}
    nics: [{name: "mlx5_[0-3]", rate: EDR, gpudirect: yes}]
"""
LAB = """
nodes:
  - hosts: n[1-4]
    gpus: {kind: RTX A6000, count: 2}
    links: {pcie: PCIe4 x16}
    nics: [{name: eno1, rate: RATE}]
"""


def lab(rate: str = "10 GbE") -> Topology:
    return parse_topology(LAB.replace("RATE", rate), "lab.yaml")


def job(
    megabytes: float = 100, tensors: int = 20, backward: float = 0.1, forward: float = 0.05, device: str = "RTX A6000"
) -> Workload:
    size = max(4, int(megabytes * MB / tensors / 4) * 4)
    return Workload(
        name="job", origin="measured", device=device, batch=32, forward_seconds=forward, backward_seconds=backward,
        optimizer_seconds=0.002, parameter_bytes=size * tensors, memory_bytes=10**10,
        gradients=tuple(
            Gradient(name=f"w{n}", elements=size // 4, size_bytes=size, ready_seconds=backward * (n + 1) / tensors)
            for n in range(tensors)
        ),
    )  # fmt: skip


def measured_lab(
    seconds_per_megabyte: float = 0.016,
    ranks: tuple[int, ...] = (2, 4),
    each: int = 1,
    machines: tuple[tuple[tuple[str, ...], int], ...] = (),
) -> Topology:
    """Return a cluster of CPU hosts with measured all-reduces: 1 ms of latency plus a fixed time per 10^6 bytes.

    `machines`: for each machine the hosts that run on it, and its number of CPUs.
    """
    curve = [[4**k, 0.001 + 4**k / MB * seconds_per_megabyte, 0.0] for k in range(4, 14)]
    found = [
        {
            "name": "all_reduce",
            "backend": "gloo",
            "hosts": [f"n{i + 1}" for i in range(n)],
            "ranks": n * each,
            "curve": curve,
        }
        for n in ranks
    ]
    pairs = [
        {"source": f"n{a}", "target": f"n{b}", "way": "tcp", "load": "alone", "bandwidth_bytes_per_second": 120e6,
         "variation": 0.001, "latency_seconds": 1e-4}
        for a in range(1, 5) for b in range(1, 5) if a != b
    ]  # fmt: skip
    text = msgspec.json.encode(
        {
            "nodes": [{"hosts": "n[1-4]", "nics": [{"name": "eth0", "rate": "1 GbE"}]}],
            "measured": {"when": "2026-01-01T00:00:00Z", "software": {}, "hosts": ["n1", "n2", "n3", "n4"],
                         "machines": [{"hosts": hosts, "processors": count} for hosts, count in machines],
                         "pairs": pairs, "collectives": found},
        }
    ).decode()  # fmt: skip
    return parse_topology(text, "measured.yaml")
