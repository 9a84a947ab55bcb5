"""A cluster of virtual hosts on one machine, for tests and for playing with; see `virtual.py`."""

from tests.cluster.virtual import Cluster, ClusterUnavailable, why_unavailable

__all__ = ["Cluster", "ClusterUnavailable", "why_unavailable"]
