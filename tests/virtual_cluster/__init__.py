"""Cluster of virtual hosts on one machine, for tests and experiments; see `virtual.py`."""

from tests.virtual_cluster.virtual import Cluster, ClusterUnavailable, why_unavailable

__all__ = ["Cluster", "ClusterUnavailable", "why_unavailable"]
