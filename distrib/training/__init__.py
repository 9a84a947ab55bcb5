"""API of training scripts: `init` returns a `Job`. Imports torch."""

from __future__ import annotations

from distrib.training.data.sharded_loader import ShardedLoader
from distrib.training.job import Job, init

__all__ = ["Job", "ShardedLoader", "init"]
