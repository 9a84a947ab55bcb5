"""Rules of thumb: what a host should be so that its GPUs are kept busy, checked where the topology says enough.

Memory and cores: Dettmers, How To Build and Use a Multi GPU System. Slots: what a data sheet promises comes only through a slot
that lets it through.
"""

from __future__ import annotations

import msgspec

from distrib.cluster.link_spec import parse_bus
from distrib.cluster.node import NodeGroup
from distrib.units import format_rate, format_size


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule and whether the hosts of a group keep it; `text` says with which figures, and what to do if not."""

    rule: str
    kept: bool
    text: str


def rules_of_thumb(group: NodeGroup) -> tuple[Rule, ...]:
    """Every rule for which the group says enough."""
    return tuple(rule for check in (_memory, _cores, _pcie, _nic_slots, _gpudirect) if (rule := check(group)))


def _memory(group: NodeGroup) -> Rule | None:
    each = group.gpus.memory_bytes if group.gpus else None
    if not group.gpus or not group.gpus.count or not each or not group.memory_bytes:
        return None
    together = each * group.gpus.count
    kept = group.memory_bytes >= 2 * together
    text = (
        f"memory {_size(group.memory_bytes)} is {group.memory_bytes / together:.1f} times "
        f"the GPUs' {format_size(together, digits=3, binary=False)}"
    )
    return Rule(
        rule="memory", kept=kept, text=text + ("" if kept else "; give the host at least twice as much as its GPUs")
    )


def _cores(group: NodeGroup) -> Rule | None:
    if not group.gpus or not group.gpus.count or not group.cores:
        return None
    kept = group.cores >= group.gpus.count
    text = f"{group.cores} core{'s' if group.cores > 1 else ''} for {group.gpus.count} GPU(s)"
    return Rule(
        rule="cores", kept=kept, text=text + ("" if kept else "; each GPU's rank and its data loaders want one or more")
    )


def _pcie(group: NodeGroup) -> Rule | None:
    if not group.links or not group.links.pcie or not group.gpus or not group.gpus.count:
        return None
    slot = parse_bus(group.links.pcie)
    spec = group.gpus.spec
    best = parse_bus(spec.pcie) if spec and spec.pcie else None
    full = best.rate_bytes_per_second if best else slot.rate_bytes_per_second / slot.lanes * 16
    kept = slot.rate_bytes_per_second >= full * 0.99
    text = f"GPUs at {slot.spec.name} x{slot.lanes}, {_rate(slot.rate_bytes_per_second)}"
    if not kept:
        wanted = f"{best.spec.name} x{best.lanes}" if best else f"{slot.spec.name} x16"
        text += (
            f", though they could do {wanted}, {_rate(full)}; use other slots, or look for the board's lane settings"
        )
    return Rule(rule="PCIe", kept=kept, text=text)


def _nic_slots(group: NodeGroup) -> Rule | None:
    slots = [(nic, parse_bus(nic.pcie)) for nic in group.nics if nic.pcie]
    if not slots:
        return None
    for nic, slot in slots:
        if slot.rate_bytes_per_second < nic.link.rate_bytes_per_second * 0.99:
            text = (
                f"{nic.name} could do {_rate(nic.link.rate_bytes_per_second)}, but {slot.spec.name} x{slot.lanes} "
                f"lets only {_rate(slot.rate_bytes_per_second)} through; give it a wider slot"
            )
            return Rule(rule="NIC slots", kept=False, text=text)
    return Rule(rule="NIC slots", kept=True, text="each NIC's slot lets its whole rate through")


def _gpudirect(group: NodeGroup) -> Rule | None:
    able = [nic for nic in group.nics if nic.link.kind in ("infiniband", "roce")]
    if not able or not group.gpus or not group.gpus.count or any(nic.gpudirect is None for nic in able):
        return None
    without = [nic.name for nic in able if not nic.gpudirect]
    if not without:
        return Rule(rule="GPUDirect", kept=True, text="the NICs read GPU memory themselves (GPUDirect RDMA)")
    text = (
        f"{', '.join(without)} without GPUDirect RDMA: gradients go through the host's memory; load nvidia_peermem, "
        "and see that GPU and NIC share a PCIe switch"
    )
    return Rule(rule="GPUDirect", kept=False, text=text)


def _size(size_bytes: int) -> str:
    return format_size(size_bytes, digits=4, binary=True)


def _rate(rate: float) -> str:
    return format_rate(rate, digits=3)
