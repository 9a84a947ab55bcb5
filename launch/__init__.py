"""The two commands, `distrib-launch` and `distrib-topo`. Nothing here imports torch."""

from __future__ import annotations
