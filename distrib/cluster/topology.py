"""The topology file: what the hosts are made of.

nodes:
  - hosts: gpu[01-04]
    gpus: {kind: A100-SXM4-80GB, count: 8}
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import yaml

from distrib.errors import TopologyError


class Gpus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPUs of one host, all of one kind."""

    count: int
    kind: str | None = None

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("a count of GPUs is zero or more")


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts that are built alike; `hosts` is a name or a range such as `gpu[01-04]`."""

    hosts: str
    gpus: Gpus | None = None


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the cluster is made of."""

    nodes: tuple[NodeGroup, ...]

    def gpus_of(self, host: str) -> Gpus | None:
        """The GPUs of a host, or None where the file does not say."""
        return self._by_host().get(host)

    def _by_host(self) -> dict[str, Gpus | None]:
        from ClusterShell.NodeSet import NodeSet

        return {host: group.gpus for group in self.nodes for host in NodeSet(group.hosts)}


def read_topology(path: str | os.PathLike[str]) -> Topology:
    """Read a topology file; `TopologyError` names the file and the path inside it."""
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"cannot read it: {error.strerror}", source=source) from None
    except UnicodeDecodeError:
        raise TopologyError("is no text file", source=source) from None
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "is no YAML"
        raise TopologyError(str(problem), source=source, line=mark.line + 1 if mark else 0) from None
    try:
        return msgspec.convert(document, Topology)
    except msgspec.ValidationError as error:
        raise TopologyError(str(error), source=source, hint="see hostfiles/ for commented examples") from None
