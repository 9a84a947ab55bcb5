"""Topology files of two clusters, and builders of measurements."""

from __future__ import annotations

from distrib.cluster.measurements import LinkMeasurement, Measurements
from distrib.cluster.topology import Topology, parse_topology
from tests.conftest import ROOT

EXAMPLES = ROOT / "hostfiles"
NODE = "nodes:\n  - hosts: a\n"


DGX_AND_OLD_HOSTS = """\
nodes:
  - hosts: dgx[01-04]
    gpus: {kind: A100-SXM4-80GB, count: 8}
    links: {nvlink: NVLink3 x12, nvswitch: yes, pcie: PCIe4 x16}
    nics:
      - {name: "mlx5_[0-7]", rate: HDR, gpudirect: yes}
      - {name: eno1, rate: 10 GbE}
  - hosts: old1,old2
    gpus: {kind: Tesla V100-PCIE-16GB, count: 2}
    nics: [{name: eth0, rate: 25Gb/s, kind: ethernet}]
switches:
  - {name: rack1, hosts: "dgx[01-02]", oversubscription: 2:1}
  - {name: rack2, hosts: "dgx[03-04],old1", oversubscription: 3:2}
  - {name: spine, switches: [rack1, rack2]}
"""


def dgx_and_old_hosts(extra: str = "") -> Topology:
    return parse_topology(DGX_AND_OLD_HOSTS + extra, "eight.yaml")


def pair(source: str, target: str, rate: float, **other: object) -> LinkMeasurement:
    settings = {"transport": "mpi", "load": "alone", "variation": 0.01, "latency_seconds": 2e-5, **other}
    return LinkMeasurement(source=source, target=target, bandwidth_bytes_per_second=rate, **settings)


def measured(*pairs: LinkMeasurement, hosts: tuple[str, ...] = ("dgx01", "dgx02"), **other: object) -> Measurements:
    return Measurements(when="2026-11-20T05:00:00Z", software={"distrib": "0.1"}, hosts=hosts, pairs=pairs, **other)
