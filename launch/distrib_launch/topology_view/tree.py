"""Tree of `distrib-topo show`, for a terminal or as plain text."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from distrib.cluster.hardware_catalog import gpu_hint
from distrib.units import bit_rate_text, format_duration, format_size, rate_text
from distrib.utils.ranges import ranges
from distrib_launch.topology_view.model import GroupView, LinkView, NicView, SwitchView, View


def tree_text(view: View, *, colour: bool, width: int | None) -> str:
    """Format a view as a tree.

    Args:
        view: The cluster.
        colour: True to use the colours of terminals.
        width: Width in columns; None: long lines are not wrapped.
    """
    out = io.StringIO()
    console = Console(
        file=out, width=width or 1000, force_terminal=colour, color_system="standard" if colour else None, highlight=False,
        no_color=not colour,
    )  # fmt: skip
    console.print(_tree(view))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def _tree(view: View) -> Tree:
    counts = f"{view.hosts} host{_s(view.hosts)}" + (f", {view.gpus} GPU{_s(view.gpus)}" if view.gpus else "")
    source = " and ".join(name for name in (view.hostfile, view.topology) if name)
    title = _text((f"{view.name}: " if view.name else "", "bold"), (counts, "bold"), (f"  ({source})", "dim"))
    root = Tree(title, guide_style="dim")
    for group in view.groups:
        _add_group(root, group)
    if view.switches or view.between:
        _add_network(root, view)
    if view.measured_when:
        root.add(
            _text((f"measured {view.measured_when}, {view.measured_hosts} host{_s(view.measured_hosts)}", "green"))
        )
    return root


def _add_group(root: Tree, group: GroupView) -> None:
    count = len(group.names)
    facts = [
        f"{count} hosts" if count > 1 else "",
        _slots(group),
        "a parameter server" if group.role == "server" else "",
    ]
    branch = root.add(_text((group.hosts, "bold cyan"), ("".join(f", {fact}" for fact in facts if fact), "")))
    if not group.described:
        return
    if group.host_words:
        branch.add(_text((", ".join(group.host_words), "")))
    if group.gpus:
        branch.add(_gpu_line(group))
    for link in group.inside:
        twig = branch.add(
            _link_line(link, " through NVSwitch" if group.nvswitch and link.text.startswith("NVL") else "")
        )
        if link.text.startswith("NVLink") and group.nvlink_pairs:
            pairs = [pair for pair, links in group.nvlink_pairs.items() if link.text.endswith(f" x{links}")]
            if pairs:
                twig.add(_text((f"GPUs {' '.join(pairs)}", "dim")))
    for numa in group.numa:
        facts = [
            f"CPUs {numa.cpus}" if numa.cpus else "",
            f"GPU {ranges(numa.gpus)}" if numa.gpus else "",
            numa.memory or "",
        ]
        node = branch.add(_text((f"NUMA node {numa.index}", ""), ("".join(f", {fact}" for fact in facts if fact), "")))
        for nic in group.nics:
            if nic.numa == numa.index:
                node.add(_nic_line(nic))
    for nic in group.nics:
        if nic.numa is None or nic.numa >= len(group.numa):
            branch.add(_nic_line(nic))
    for rule in group.rules:
        branch.add(
            _text(
                ("ok   ", "green") if rule.kept else ("look ", "bold yellow"), (rule.text, "dim" if rule.kept else "")
            )
        )


def _add_network(root: Tree, view: View) -> None:
    branch = root.add(_text(("network", "bold cyan")))
    by_name = {switch.name: switch for switch in view.switches}
    for switch in view.switches:
        if switch.top:
            _add_switch(branch, switch, by_name)
    for link in view.between:
        twig = branch.add(_link_line(link, between_hosts=True))
        if link.oversubscription > 1 and link.shared_bytes_per_second:
            left = bit_rate_text(link.shared_bytes_per_second)
            twig.add(_text((f"{link.oversubscription:g}:1 oversubscribed: {left} a host when all send", "yellow")))


def _add_switch(branch: Tree, switch: SwitchView, by_name: dict[str, SwitchView]) -> None:
    up = f", {bit_rate_text(switch.uplink_bytes_per_second)} up" if switch.uplink_bytes_per_second else ""
    up += f", {switch.oversubscription:g}:1 oversubscribed" if switch.oversubscription > 1 else ""
    twig = branch.add(_text((switch.name, "bold"), (f": {switch.hosts}" if switch.names else "", ""), (up, "yellow")))
    for name in switch.switches:
        _add_switch(twig, by_name[name], by_name)


def _slots(group: GroupView) -> str:
    if group.slots is None:
        return ""
    return f"{group.slots} slot{_s(group.slots)}" + (" each" if len(group.names) > 1 else "")


def _gpu_line(group: GroupView) -> Text:
    facts = []
    if group.gpu_memory_bytes:
        memory = format_size(group.gpu_memory_bytes, digits=4)
        bandwidth = group.gpu_memory_bandwidth_bytes_per_second
        facts.append(f"{memory} at {rate_text(bandwidth)}" if bandwidth else memory)
    for kind in ("bf16", "fp16", "fp32"):
        if kind in group.gpu_tflops:
            facts.append(f"{group.gpu_tflops[kind]:g} TFLOPS {kind} dense")
            break
    unknown = f"  not in the catalogue; {gpu_hint(group.gpu_kind)}" if group.gpu_kind and not group.gpu_known else ""
    return _text((group.gpu_words, "bold"), ("".join(f", {fact}" for fact in facts), ""), (unknown, "yellow"))


def _nic_line(nic: NicView) -> Text:
    head = f"{nic.count} x {nic.text}" if nic.count > 1 else nic.text
    kind = "" if nic.kind == "Ethernet" and nic.text.endswith("bE") else f" {nic.kind}"
    rate = _unnamed_rate(nic)
    facts = [f"{rate} each" if nic.count > 1 else rate] if rate else []
    if nic.gpudirect is not None:
        facts.append("GPUDirect RDMA" if nic.gpudirect else "no GPUDirect RDMA")
    facts += [f"near GPU {ranges(nic.gpus)}"] if nic.gpus else []
    facts += [nic.pcie] if nic.pcie else []
    return _text((f"{nic.names}: ", ""), (head + kind, "bold"), ("".join(f", {fact}" for fact in facts), ""))


def _unnamed_rate(link: NicView | LinkView) -> str:
    """Return the nominal rate in bits, empty if it is unknown or in the text, as in `100Gb/s` and `25GbE`."""
    rate = bit_rate_text(link.rate_bytes_per_second) if link.rate_bytes_per_second else ""
    return rate if rate.partition(" ")[0] not in link.text else ""


def _link_line(link: LinkView, how: str = "", *, between_hosts: bool = False) -> Text:
    nominal = rate_text(link.rate_bytes_per_second) if link.rate_bytes_per_second else ""
    if between_hosts:
        nominal = _unnamed_rate(link)
    nominal = f", {nominal}" if nominal else ""
    name = f" {link.text}" if link.text and link.text != "memory" else ""
    delay = f", {format_duration(link.latency_seconds, digits=2)}" if link.latency_seconds else ""
    found = (bit_rate_text if between_hosts else rate_text)(link.bandwidth_bytes_per_second)
    many = f" (median of {link.links})" if link.origin == "measured" and link.links > 1 else ""
    got = (f"{found}{delay} measured{many}", "green") if link.origin == "measured" else (f"{found} usable{delay}", "")
    slow = (", SLOW" if link.slow else "", "bold yellow")
    return _text((f"{link.name}:", ""), (f"{name}{how}", "bold"), (f"{nominal}, " if name else " ", ""), got, slow)


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _text(*pieces: tuple[str, str]) -> Text:
    """Join pieces of text with their styles, without markup: a host's name may be `n[1]`."""
    return Text.assemble(*(piece for piece in pieces if piece[0]))
