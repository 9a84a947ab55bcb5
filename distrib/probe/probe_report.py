"""A probe for people: what was found, a heat map of the links, times against size, and the findings."""

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
from distrib.units import format_duration, format_rate, format_size

NUMBERS_UP_TO = 16
"""So many hosts get rates in the heat map, where the terminal is wide enough; more get tenths of the fastest."""

CELL = 6
SEVERITY_STYLE = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def matrix(measured: Measurements, way: str, load: str = "alone") -> dict[tuple[str, str], float]:
    """Bytes per second by source and target; where a pair was not measured so, as it was together with others."""
    found: dict[tuple[str, str], float] = {}
    for wanted in (load, "together"):
        for pair in measured.pairs:
            if (pair.transport, pair.load, pair.both_ways, pair.network) == (way, wanted, False, None):
                found.setdefault((pair.source, pair.target), pair.bandwidth_bytes_per_second)
    return found


def print_report(
    console: Console, measured: Measurements, records: Sequence[Record], findings: Sequence[Finding]
) -> None:
    """Print everything."""
    start = next(record for record in records if isinstance(record, ProbeStarted))
    parts: list[RenderableType] = []
    if len(measured.hosts) > 1:
        parts += [heat_map(measured, start.primary, console.width), links_table(measured, records)]
    if curves := curve_table(measured):
        parts.append(curves)
    if measured.collectives:
        parts.append(collective_table(measured))
    if measured.inside:
        parts.append(inside_table(measured))
    parts.append(findings_text(findings, measured, console.width))
    for part in parts:
        if isinstance(part, Table) and part.title:  # as a title it would be folded to the table's width
            console.print(part.title, style="bold")
            part.title = None
        console.print(part)


def heat_map(measured: Measurements, way: str, width: int) -> RenderableType:
    """Rates from each host (rows) to each other (columns), alone where that was measured."""
    rates = matrix(measured, way)
    hosts = measured.hosts
    if not rates:
        return Text("no link was measured")
    top, exceeded = usual_most(rates.values())
    unit, name = unit_of(top)
    label = max(map(len, hosts))
    heads = [name[-CELL + 1 :] for name in _short(hosts)]
    told_apart = len(set(heads)) == len(heads)
    wide = told_apart and len(hosts) <= NUMBERS_UP_TO and label + CELL * len(hosts) <= width
    alone = {(p.source, p.target) for p in measured.pairs if _kind(p) == (way, "alone", False, "")}
    beside = len(rates.keys() - alone)
    which = f"; {beside} of {len(rates)} beside others, as they were not had alone" if beside else ""
    text = Text(f"bandwidth over {way}, {name}: from (row) to (column){which}\n", style="bold")
    if wide:
        text.append(" " * label + "".join(f"{head:>{CELL}}" for head in heads) + "\n", style="dim")
    elif label + 2 * len(hosts) > width:
        return Text(f"bandwidth over {way}: a table of {len(hosts)} hosts does not fit here; --plot FILE.png draws it")
    else:
        fastest = f"{format_rate(top, digits=3, bits=True)}{', which few exceed' if exceeded else ''}"
        text = Text(
            f"bandwidth over {way} in tenths of the fastest, {fastest}: from (row) to (column, same order){which}\n"
        )
        text.stylize("bold")
    for source in hosts:
        text.append(f"{source:>{label}}", style="dim")
        for target in hosts:
            rate = rates.get((source, target))
            cell = CELL if wide else 2
            if source == target:
                text.append(f"{'-':>{cell}}", style="dim")
            elif rate is None:
                text.append(f"{'?':>{cell}}", style="red")
            else:
                shown = digits(rate * 8 / unit) if wide else str(min(9, int(10 * rate / top)))
                text.append(f"{shown:>{cell}}", style=_heat(min(1.0, rate / top)))
        text.append("\n")
    return text


def digits(value: float) -> str:
    """Three digits, or four where three would be a power of ten (1e+03)."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.4g}"


def usual_most(rates: Iterable[float]) -> tuple[float, bool]:
    """The rate that stands for the fastest in a picture of all, bytes per second; and whether some that lie apart are beyond it.

    A few pairs on one switch or machine would else leave the others in the dark.
    """
    ordered = sorted(rates)
    usual = ordered[int(0.95 * (len(ordered) - 1))]
    return (usual, True) if ordered[-1] > 1.5 * usual else (ordered[-1], False)


def unit_of(top: float) -> tuple[float, str]:
    """Bits per second of the unit in which a table tells its rates, the highest of which is `top`; and its name."""
    return (1e9, "Gb/s") if top * 8 >= 1e9 else (1e6, "Mb/s")


def _short(names: Sequence[str]) -> list[str]:
    """The names without their domains, where that tells them apart."""
    short = [name.partition(".")[0] for name in names]
    return short if len(set(short)) == len(names) else list(names)


def _heat(part: float) -> str:
    """Green for the fastest, over yellow to red at half of it."""
    worse = min(1.0, max(0.0, (1.0 - part) * 2))
    red, green = (int(190 * min(1.0, 2 * worse)), int(150 * min(1.0, 2 - 2 * worse)))
    return f"white on rgb({red},{green},40)"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


def links_table(measured: Measurements, records: Sequence[Record]) -> Table:
    """A line for each way, load and direction: what is usual, the slowest, and how sure that is."""
    unit, name = unit_of(max((pair.bandwidth_bytes_per_second for pair in measured.pairs), default=0.0))
    # Narrow enough for 80 columns: one unit for all, and what is counted of something, beside it.
    table = _table(f"links, {name}")
    for column in ("way", "load", "links", "median", "slowest", "latency", "varies", "outliers"):
        table.add_column(column, justify="left" if column in ("way", "load", "slowest") else "right")
    raw = [record for record in records if isinstance(record, PairMeasurement) and not record.failed]
    for kind in sorted({_kind(pair) for pair in measured.pairs}):
        way, load, both, network = kind
        pairs = [pair for pair in measured.pairs if _kind(pair) == kind]
        seen = [record for record in raw if _kind(record) == kind]
        slowest = min(pairs, key=lambda pair: pair.bandwidth_bytes_per_second)
        latencies = [p.latency_seconds for p in pairs if p.latency_seconds is not None]
        median = statistics.median(p.bandwidth_bytes_per_second for p in pairs)
        table.add_row(
            f"{way}, {network}" if network else way,
            f"{load}, both ways" if both else load,
            str(len(pairs)),
            f"{median * 8 / unit:.4g}",
            f"{slowest.bandwidth_bytes_per_second * 8 / unit:.4g} {slowest.source} to {slowest.target}",
            format_duration(statistics.median(latencies), digits=2) if latencies else "",
            _variation(seen),
            f"{sum(r.outliers for r in seen)} of {sum(r.repetitions for r in seen)}",
        )
    return table


def _variation(seen: Sequence[PairMeasurement]) -> str:
    """The median of those links that were measured more than once: one repetition varies from nothing."""
    known = [record.variation for record in seen if record.repetitions > 1]
    return f"{statistics.median(known):.1%}" if known else "-"


def _kind(pair: LinkMeasurement | PairMeasurement) -> tuple[str, str, bool, str]:
    transport = pair.transport
    return transport, pair.load, pair.both_ways, pair.network or ""


def curve_table(measured: Measurements) -> Table | None:
    """Times against size over MPI: median of all links, fastest and slowest; alone, where a size was measured so."""
    by_size: dict[int, dict[str, list[float]]] = {}
    for pair in measured.pairs:
        if pair.transport == "mpi" and pair.load != "bisection" and not pair.both_ways:
            for point in pair.curve:
                by_size.setdefault(point.size_bytes, {}).setdefault(pair.load, []).append(point.seconds)
    if not by_size:
        return None
    table = _table("a message over MPI")
    for column in ("size", "load", "median", "fastest link", "slowest link", "rate"):
        table.add_column(column, justify="left" if column == "load" else "right")
    for size, by_load in sorted(by_size.items()):
        load = "alone" if "alone" in by_load else "together"
        seconds = by_load[load]
        middle = statistics.median(seconds)
        table.add_row(
            format_size(size, binary=True), load,
            *(format_duration(s, digits=3) for s in (middle, min(seconds), max(seconds))),
            format_rate(size / middle, digits=3, bits=True),
        )  # fmt: skip
    return table


def collective_table(measured: Measurements) -> Table:
    """Bus bandwidth of all-reduce by size and count of hosts (nccl-tests: size / seconds x 2 (n - 1) / n)."""
    backend = measured.collectives[0].backend
    table = _table(f"all-reduce over {backend}, bus bandwidth")
    table.add_column("size", justify="right")
    for collective in measured.collectives:
        table.add_column(ranks_text(collective), justify="right")
    sizes = sorted({point.size_bytes for collective in measured.collectives for point in collective.curve})
    for size in sizes:
        cells = []
        for collective in measured.collectives:
            seconds = {point.size_bytes: point.seconds for point in collective.curve}.get(size)
            cells.append(
                format_rate(bus_bandwidth(size, seconds, collective.ranks), digits=3, bits=True) if seconds else "-"
            )
        table.add_row(format_size(size, binary=True), *cells)
    return table


def ranks_text(collective: Collective) -> str:
    """Over what a collective went: `4 hosts`, or `4 hosts, 32 ranks`; and whether without GPUDirect RDMA."""
    hosts = len(collective.hosts)
    ranks = f", {collective.ranks} ranks" if collective.ranks != hosts else ""
    return f"{hosts} host{'s' * (hosts > 1)}{ranks}" + (", no GPUDirect" if collective.gpudirect is False else "")


def bus_bandwidth(size_bytes: int, seconds: float, ranks: int) -> float:
    """Bytes per second of an all-reduce that each link would have to carry (nccl-tests, doc/PERFORMANCE.md)."""
    return size_bytes / seconds * 2 * (ranks - 1) / ranks


def inside_table(measured: Measurements) -> Table:
    """Ways inside hosts: what is usual, and the slowest host."""
    table = _table("inside hosts")
    for column in ("from", "to", "path", "median", "slowest"):
        table.add_column(column)
    for key in sorted({(link.source, link.target, link.path or "") for link in measured.inside}):
        links = [link for link in measured.inside if (link.source, link.target, link.path or "") == key]
        slowest = min(links, key=lambda link: link.bandwidth_bytes_per_second)
        table.add_row(
            *key, format_rate(statistics.median(link.bandwidth_bytes_per_second for link in links), digits=3),
            f"{format_rate(slowest.bandwidth_bytes_per_second, digits=3)} {slowest.host}",
        )  # fmt: skip
    return table


def findings_text(findings: Sequence[Finding], measured: Measurements, width: int) -> Text:
    """The findings, each with its evidence and what to do."""
    hosts = len(measured.hosts)
    if not findings and hosts > 1 and not measured.pairs:
        return Text("no findings: no link was measured", style="yellow")
    if not findings:
        compared = {
            1: "one host has no links to others",
            2: "both directions do the same; what two hosts should reach, only their cards' described rates tell",
        }
        return Text(
            f"no findings: {compared.get(hosts, 'all links do what the others of their class do')}", style="green"
        )
    text = Text().append(f"{len(findings)} finding(s)", style="bold")
    for finding in findings:
        text.append(f"\n{finding.severity}: ", style=SEVERITY_STYLE[finding.severity]).append(finding.what)
        for head, words in (("seen", finding.evidence), ("do", finding.advice)):
            folded = textwrap.wrap(words, max(40, width - 8), break_long_words=False, break_on_hyphens=False)
            text.append(f"\n  {head + ':':<6}" + "\n        ".join(folded), style="dim")
    return text
