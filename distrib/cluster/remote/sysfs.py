"""Reads of /proc and /sys: text, directory list_entries, PCIe links and NUMA nodes of devices.

This package runs in the Python of any host: standard library only, the syntax of old Pythons. It is sent as source text, see
`distrib.cluster.inventory`; imports between its modules stand on one line each, as they are removed there.
"""

from __future__ import annotations

import os


def read_proc_text(path: str, limit: int = 1 << 16) -> str:
    """Read a file, stripped; empty if it cannot be read.

    Args:
        path: The file.
        limit: The most bytes to read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def list_entries(path: str) -> list[str]:
    """List a folder.

    Args:
        path: The folder.

    Returns:
        The names in order; none if it cannot be read.
    """
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


PCIE_OF_SPEED = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
"""PCIe generations by GT/s, as /sys writes them."""
PCIE_WIDTHS = ("1", "2", "4", "8", "16", "32")


def current_pcie_width(device: str) -> int | None:
    """Read the current lanes of a PCIe device. Idle links lower their speed, not their width.

    Args:
        device: Its folder in /sys.

    Returns:
        The lanes; None if unknown.
    """
    width = read_proc_text(f"{device}/current_link_width")
    return int(width) if width in PCIE_WIDTHS else None


def pcie_link(device: str) -> str | None:
    """Read the fastest PCIe link that a device and its slot support, such as `PCIe4 x16`.

    Args:
        device: Its folder in /sys.

    Returns:
        The link; None if unknown.
    """
    generations, widths = [], []
    for folder in (device, os.path.dirname(os.path.realpath(device))):
        speed = read_proc_text(f"{folder}/max_link_speed").partition(" ")[0]
        width = read_proc_text(f"{folder}/max_link_width")
        generation = PCIE_OF_SPEED.get(speed[:-2] if speed.endswith(".0") else speed)
        if generation and width in PCIE_WIDTHS:
            generations.append(generation)
            widths.append(int(width))
    return f"PCIe{min(generations)} x{min(widths)}" if widths else None


def numa_node(device: str) -> int | None:
    """Read the NUMA node of a device.

    Args:
        device: Its folder in /sys.

    Returns:
        The node; None if unknown.
    """
    text = read_proc_text(f"{device}/numa_node")
    return int(text) if text.isdecimal() else None
