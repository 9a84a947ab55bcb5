"""Hardware checks of a topology: PCIe slots of GPUs and NICs, and GPUDirect RDMA."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from distrib.cluster.link_spec import LinkSpec
from distrib.cluster.node import NodeGroup
from distrib.units import bit_rate_text, rate_text


class HardwareCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A check of a group of hosts; `text` gives the figures, and the advice if it failed."""

    rule: str
    kept: bool
    text: str


def check_hardware(group: NodeGroup) -> tuple[HardwareCheck, ...]:
    """Run every check for which a group is described well enough.

    Args:
        group: Hosts of one kind.
    """
    return (*_check_gpu_slots(group), *_check_nic_slots(group), *_check_gpudirect(group))


def _check_gpu_slots(group: NodeGroup) -> Iterator[HardwareCheck]:
    slot = group.links.pcie_spec if group.links and group.gpus and group.gpus.count else None
    if slot is None:
        return
    best = group.catalog_pcie or slot.with_lanes(16)
    text = f"GPUs at {_slot_text(slot)}"
    kept = not _is_slower(slot, best)
    if not kept:
        text += f", though they support {_slot_text(best)}; use other slots, or look for the board's lane settings"
    yield HardwareCheck(rule="PCIe", kept=kept, text=text)


def _check_nic_slots(group: NodeGroup) -> Iterator[HardwareCheck]:
    slots = [(nic, nic.slot) for nic in group.nics if nic.slot]
    for nic, slot in slots:
        if _is_slower(slot, nic.link):
            text = f"{nic.name} supports {bit_rate_text(nic.link.rate_bytes_per_second)}, its slot {_slot_text(slot, bit_rate_text)}"
            yield HardwareCheck(rule="NIC slots", kept=False, text=f"{text}; give it a wider slot")
            return
    if slots:
        yield HardwareCheck(rule="NIC slots", kept=True, text="each NIC's slot is as fast as the NIC")


def _check_gpudirect(group: NodeGroup) -> Iterator[HardwareCheck]:
    nics = [nic for nic in group.nics if nic.link.kind in ("infiniband", "roce")]
    if not nics or not group.gpus or not group.gpus.count or any(nic.gpudirect is None for nic in nics):
        return
    without = [nic.name for nic in nics if not nic.gpudirect]
    text = "the NICs read GPU memory directly (GPUDirect RDMA)"
    if without:
        text = (
            f"{', '.join(without)} without GPUDirect RDMA: gradients go through host memory; load nvidia_peermem, "
            "and place GPU and NIC below one PCIe switch"
        )
    yield HardwareCheck(rule="GPUDirect", kept=not without, text=text)


def _is_slower(link: LinkSpec, other: LinkSpec) -> bool:
    """Compare nominal rates; within 1 % they count as equal, as data sheets round."""
    return link.rate_bytes_per_second < 0.99 * other.rate_bytes_per_second


def _slot_text(slot: LinkSpec, text: Callable[[float], str] = rate_text) -> str:
    return f"{slot.model.name} x{slot.lanes} ({text(slot.rate_bytes_per_second)})"
