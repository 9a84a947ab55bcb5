"""Report of a probe for the terminal: the findings, a heat map of the links, and tables."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from distrib.cluster.measurements import Collective, LinkMeasurement, Measurements
from distrib.probe.diagnosis.finding import Finding
from distrib.probe.records import PairMeasurement, ProbeStarted, Record
from distrib.units import bit_rate_text, count_text, duration_text, format_duration, format_rate, format_size

CELL_WIDTH = 6
SEVERITY_STYLE = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def print_report(
    console: Console, measured: Measurements, records: Sequence[Record], findings: Sequence[Finding]
) -> None:
    """Print all results of a probe.

    Args:
        console: The terminal.
        measured: The measurements.
        records: The records, the first of which is the start.
        findings: The findings, ranked.
    """
    start = next(record for record in records if isinstance(record, ProbeStarted))
    parts: list[RenderableType] = [_findings_text(findings, measured, console.width)]
    if len(measured.hosts) > 1:
        parts += [heat_map(measured, start.primary, console.width), links_table(measured, records)]
    if curves := curve_table(measured):
        parts.append(curves)
    if measured.collectives:
        parts.append(_collective_table(measured))
    if measured.inside:
        parts.append(_copies_table(measured))
    for part in parts:
        if isinstance(part, Table) and part.title:  # as a title it would be folded to the table's width
            console.print(part.title, style="bold")
            part.title = None
        console.print(part)


def rate_matrix(measured: Measurements, transport: str) -> dict[tuple[str, str], float]:
    """Return bytes per second by source and target on the network of the job: alone, or else beside other traffic.

    Args:
        measured: The measurements.
        transport: "mpi" or "tcp".
    """
    found: dict[tuple[str, str], float] = {}
    for wanted in ("alone", "together"):
        for pair in measured.pairs:
            if (pair.transport, pair.load, pair.both_ways, pair.network) == (transport, wanted, False, None):
                found.setdefault((pair.source, pair.target), pair.bandwidth_bytes_per_second)
    return found


def heat_map(measured: Measurements, transport: str, width: int) -> Text:
    """Draw the rates from each host (row) to each other host (column): numbers for up to 16 hosts, else tenths of the maximum.

    Args:
        measured: The measurements.
        transport: "mpi" or "tcp".
        width: Columns of the terminal.
    """
    rates = rate_matrix(measured, transport)
    hosts = measured.hosts
    if not rates:
        return Text("no link was measured")
    top, exceeded = scale_maximum(rates.values())
    unit, name = rate_unit(top)
    label = max(map(len, hosts))
    heads = [host[-CELL_WIDTH + 1 :] for host in _without_domains(hosts)]
    wide = len(set(heads)) == len(heads) <= 16 and label + CELL_WIDTH * len(hosts) <= width
    if not wide and label + 2 * len(hosts) > width:
        return Text(f"bandwidth over {transport}: {len(hosts)} hosts need a wider terminal; use --plot FILE.png")
    alone = {(p.source, p.target) for p in measured.pairs if _kind_of_link(p) == (transport, "alone", False, "")}
    beside = len(rates.keys() - alone)
    which = f"; {beside} of {len(rates)} beside other traffic" if beside else ""
    scale = f", {name}" if wide else f" in tenths of {bit_rate_text(top)}{', which few exceed' * exceeded}"
    order = "" if wide else ", same order"
    text = Text(f"bandwidth over {transport}{scale}: from (row) to (column{order}){which}\n", style="bold")
    if wide:
        text.append(" " * label + "".join(f"{head:>{CELL_WIDTH}}" for head in heads) + "\n", style="dim")
    cell = CELL_WIDTH if wide else 2
    for source in hosts:
        text.append(f"{source:>{label}}", style="dim")
        for target in hosts:
            rate = rates.get((source, target))
            if source == target:
                text.append(f"{'-':>{cell}}", style="dim")
            elif rate is None:
                text.append(f"{'?':>{cell}}", style="red")
            else:
                shown = three_digits(rate * 8 / unit) if wide else str(min(9, int(10 * rate / top)))
                text.append(f"{shown:>{cell}}", style=_rate_color(min(1.0, rate / top)))
        text.append("\n")
    return text


def three_digits(value: float) -> str:
    """Format a number with three digits, or with four where `g` would write 1e+03.

    Args:
        value: 0 or more.
    """
    return f"{value:.3g}" if value < 999.5 else f"{value:.4g}"


def scale_maximum(rates: Iterable[float]) -> tuple[float, bool]:
    """Choose the maximum of a color scale. A few much faster pairs are beyond it, as they would darken all other pairs.

    Args:
        rates: Bytes per second of all links.

    Returns:
        The maximum, and True if a few rates are beyond it.
    """
    ordered = sorted(rates)
    usual = ordered[int(0.95 * (len(ordered) - 1))]
    return (usual, True) if ordered[-1] > 1.5 * usual else (ordered[-1], False)


def rate_unit(top: float) -> tuple[float, str]:
    """Choose the unit of a table.

    Args:
        top: Its highest rate, in bytes per second.

    Returns:
        Bits per second of the unit, and its name.
    """
    return (1e9, "Gb/s") if top * 8 >= 1e9 else (1e6, "Mb/s")


def _without_domains(names: Sequence[str]) -> list[str]:
    short = [name.partition(".")[0] for name in names]
    return short if len(set(short)) == len(names) else list(names)


def _rate_color(fraction: float) -> str:
    """Return green for the maximum, over yellow to red at half of it."""
    worse = min(1.0, max(0.0, (1.0 - fraction) * 2))
    red, green = (int(190 * min(1.0, 2 * worse)), int(150 * min(1.0, 2 - 2 * worse)))
    return f"white on rgb({red},{green},40)"


def _plain_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


def links_table(measured: Measurements, records: Sequence[Record]) -> Table:
    """List each transport, load and direction: median, slowest link, latency and variation, in at most 80 columns.

    Args:
        measured: The measurements.
        records: The records.
    """
    unit, name = rate_unit(max((pair.bandwidth_bytes_per_second for pair in measured.pairs), default=0.0))
    table = _plain_table(f"links, {name}")
    for column in ("over", "load", "links", "median", "slowest", "latency", "varies", "outliers"):
        table.add_column(column, justify="left" if column in ("over", "load", "slowest") else "right")
    raw = [record for record in records if isinstance(record, PairMeasurement) and not record.failed]
    for kind in sorted({_kind_of_link(pair) for pair in measured.pairs}):
        transport, load, both, network = kind
        pairs = [pair for pair in measured.pairs if _kind_of_link(pair) == kind]
        seen = [record for record in raw if _kind_of_link(record) == kind]
        slowest = min(pairs, key=lambda pair: pair.bandwidth_bytes_per_second)
        latencies = [p.latency_seconds for p in pairs if p.latency_seconds is not None]
        variations = [record.variation for record in seen if record.repetitions > 1]
        table.add_row(
            f"{transport}, {network}" if network else transport,
            f"{load}, both ways" if both else load,
            str(len(pairs)),
            f"{statistics.median(p.bandwidth_bytes_per_second for p in pairs) * 8 / unit:.4g}",
            f"{slowest.bandwidth_bytes_per_second * 8 / unit:.4g} {slowest.source} to {slowest.target}",
            format_duration(statistics.median(latencies), digits=2) if latencies else "",
            f"{statistics.median(variations):.1%}" if variations else "-",
            f"{sum(r.outliers for r in seen)} of {sum(r.repetitions for r in seen)}",
        )
    return table


def _kind_of_link(pair: LinkMeasurement | PairMeasurement) -> tuple[str, str, bool, str]:
    return pair.transport, pair.load, pair.both_ways, pair.network or ""


def curve_table(measured: Measurements) -> Table | None:
    """List the times of MPI messages by size: median, fastest and slowest link. Measurements of links alone have priority.

    Args:
        measured: The measurements.

    Returns:
        A table for `rich`; None if no sizes were measured.
    """
    by_size: dict[int, dict[str, list[float]]] = {}
    for pair in measured.pairs:
        if pair.transport == "mpi" and pair.load != "bisection" and not pair.both_ways:
            for point in pair.curve:
                by_size.setdefault(point.size_bytes, {}).setdefault(pair.load, []).append(point.seconds)
    if not by_size:
        return None
    table = _plain_table("a message over MPI")
    for column in ("size", "load", "median", "fastest link", "slowest link", "rate"):
        table.add_column(column, justify="left" if column == "load" else "right")
    for size, by_load in sorted(by_size.items()):
        load = "alone" if "alone" in by_load else "together"
        seconds = by_load[load]
        median = statistics.median(seconds)
        times = (duration_text(value) for value in (median, min(seconds), max(seconds)))
        table.add_row(format_size(size, binary=True), load, *times, bit_rate_text(size / median))
    return table


def _collective_table(measured: Measurements) -> Table:
    """List bus bandwidth of all-reduce by size and number of hosts."""
    table = _plain_table(f"all-reduce over {measured.collectives[0].backend}, bus bandwidth")
    table.add_column("size", justify="right")
    for collective in measured.collectives:
        table.add_column(describe_ranks(collective), justify="right")
    for size in sorted({point.size_bytes for collective in measured.collectives for point in collective.curve}):
        cells = []
        for collective in measured.collectives:
            seconds = {point.size_bytes: point.seconds for point in collective.curve}.get(size)
            cells.append(bit_rate_text(bus_bandwidth(size, seconds, collective.ranks)) if seconds else "-")
        table.add_row(format_size(size, binary=True), *cells)
    return table


def describe_ranks(collective: Collective) -> str:
    """Describe the ranks of a collective: `4 hosts`, or `4 hosts, 32 ranks, no GPUDirect`.

    Args:
        collective: The collective.
    """
    hosts = len(collective.hosts)
    ranks = f", {collective.ranks} ranks" if collective.ranks != hosts else ""
    return f"{hosts} host{'s' * (hosts > 1)}{ranks}" + (", no GPUDirect" if collective.gpudirect is False else "")


def bus_bandwidth(size_bytes: int, seconds: float, ranks: int) -> float:
    """Compute the bus bandwidth of an all-reduce in bytes per second of each link (nccl-tests, doc/PERFORMANCE.md).

    Args:
        size_bytes: Buffer of each rank.
        seconds: Duration.
        ranks: Number of ranks.
    """
    return size_bytes / seconds * 2 * (ranks - 1) / ranks


def _copies_table(measured: Measurements) -> Table:
    """List copies inside hosts: median, and the slowest host."""
    table = _plain_table("inside hosts")
    for column in ("from", "to", "path", "median", "slowest"):
        table.add_column(column)
    for key in sorted({(link.source, link.target, link.path or "") for link in measured.inside}):
        links = [link for link in measured.inside if (link.source, link.target, link.path or "") == key]
        slowest = min(links, key=lambda link: link.bandwidth_bytes_per_second)
        median = statistics.median(link.bandwidth_bytes_per_second for link in links)
        least = format_rate(slowest.bandwidth_bytes_per_second, digits=3)
        table.add_row(*key, format_rate(median, digits=3), f"{least} {slowest.host}")
    return table


def _findings_text(findings: Sequence[Finding], measured: Measurements, width: int) -> Text:
    """Return the findings with evidence and advice."""
    hosts = len(measured.hosts)
    if not findings and hosts > 1 and not measured.pairs:
        return Text("no findings: no link was measured", style="yellow")
    if not findings:
        compared = {
            1: "a single host has no links",
            2: "both directions are equal; the rate that two hosts should reach is known only from a topology file",
        }
        return Text(f"no findings: {compared.get(hosts, 'all links are like others of their class')}", style="green")
    text = Text().append(count_text(len(findings), "finding"), style="bold")
    for finding in findings:
        text.append(f"\n{finding.severity}: ", style=SEVERITY_STYLE[finding.severity]).append(finding.what)
        for head, words in (("seen", finding.evidence), ("do", finding.advice)):
            lines = textwrap.wrap(words, max(40, width - 8), break_long_words=False, break_on_hyphens=False)
            text.append(f"\n  {head + ':':<6}" + "\n        ".join(lines), style="dim")
    return text
