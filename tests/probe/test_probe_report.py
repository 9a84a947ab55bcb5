"""Tables and heat maps of measured links."""

from __future__ import annotations

import io
import re

import pytest
from msgspec import structs
from rich.console import Console

from distrib.cluster.measurements import Collective, LinkMeasurement, Measurements, Point
from distrib.probe.probe_report import bus_bandwidth, curve_table, describe_ranks, heat_map, links_table, scale_maximum
from distrib.probe.records import PairMeasurement, build_measured
from distrib.probe.settings import FULL
from tests.support.simulated_network import Network, drawn, links_of_further_network


def test_a_single_repetition_shows_no_variation():
    records = [
        structs.replace(r, repetitions=1, variation=0.0) if isinstance(r, PairMeasurement) else r
        for r in Network(3).records()
    ]
    assert "0.0%" not in drawn(links_table(build_measured(records), records))
    records = Network(3).records()
    assert "1.0%" in drawn(links_table(build_measured(records), records))


def test_the_table_of_links_fits_80_columns():
    records = Network(12).records(FULL)
    records += [
        structs.replace(r, both_ways=True, latency_seconds=1.2e-4) for r in records if isinstance(r, PairMeasurement)
    ]
    table = links_table(build_measured(records), records)
    text = drawn(table, width=80)
    rows = [line for line in text.splitlines() if re.search(r"tcp .* to n\d.* [\d.]+%  +0 of \d+ *$", line)]
    assert len(rows) == table.row_count and "…" not in text, text


@pytest.mark.parametrize(("hosts", "width"), [(20, 100), (8, 40), (8, 100)])
def test_the_heat_map_can_be_read_without_colours(hosts, width):
    kept = build_measured(Network(hosts, slow={1: 0.5}).records())
    console = Console(width=width, file=io.StringIO())
    console.print(heat_map(kept, "tcp", width))
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    cells = {row[0]: row[1:] for row in rows if row and row[0] in kept.hosts and len(row) > hosts}
    slow, fast = ("478", "956") if (hosts, width) == (8, 100) else ("5", "9")
    assert cells["n3"] == [fast, slow, "-"] + [fast] * (hosts - 3)
    assert cells["n2"] == [slow, "-"] + [slow] * (hosts - 2)


def test_the_heat_map_excludes_further_networks():
    beside = tuple(
        structs.replace(pair, network=None, load="together") for pair in links_of_further_network("10.9.0.0/24")
    )
    kept = Measurements(
        when="", software={}, hosts=("n1", "n2", "n3", "n4"), pairs=(*beside, *links_of_further_network("10.9.0.0/24"))
    )
    assert "12 of 12 beside other traffic" in heat_map(kept, "tcp", 100).plain


@pytest.mark.parametrize(
    ("megabits", "shown"), [(999.4, "999"), (999.7, "999.7"), (999.96, "1000"), (95.73, "95.7"), (9.5, "9.5")]
)
def test_a_rate_in_the_heat_map_is_not_rounded_to_1000(megabits, shown):
    pairs = tuple(
        structs.replace(pair, network=None) for pair in links_of_further_network("x", ("n1", "n2"), megabits * 1e6 / 8)
    )
    text = heat_map(Measurements(when="", software={}, hosts=("n1", "n2"), pairs=pairs), "tcp", 100).plain
    assert text.splitlines()[2].split() == ["n1", "-", shown]


@pytest.mark.parametrize("ending", ["", ".cluster.local"])
def test_columns_of_the_heat_map_have_distinct_names(ending):
    names = [f"gpu{n}{ending}" for n in range(1, 5)]
    pairs = tuple(
        LinkMeasurement(
            source=a, target=b, transport="tcp", load="alone", bandwidth_bytes_per_second=1e8, variation=0.0
        )
        for a in names
        for b in names
        if a != b
    )
    kept = Measurements(when="", software={}, hosts=tuple(names), pairs=pairs)
    head = heat_map(kept, "tcp", 120).plain.splitlines()[1]
    assert head.split() == ["gpu1", "gpu2", "gpu3", "gpu4"]


def test_a_heat_map_with_equal_column_names_states_their_order():
    names = ("n1-storage", "n2-storage")
    pair = LinkMeasurement(
        source=names[0], target=names[1], transport="tcp", load="alone", bandwidth_bytes_per_second=1e8, variation=0.0
    )
    text = heat_map(Measurements(when="", software={}, hosts=names, pairs=(pair,)), "tcp", 120).plain
    assert "same order" in text.splitlines()[0] and text.splitlines()[1].startswith("n1-storage")


def test_large_messages_measured_only_together_are_shown():
    def pair(load, *points, **more):
        return LinkMeasurement(source="a", target="b", transport="mpi", load=load, bandwidth_bytes_per_second=1e8, variation=0.0,
                        curve=points, **more)  # fmt: skip

    pairs = (
        pair("alone", Point(8, 1e-5), Point(4 << 20, 0.01)),
        pair("together", Point(4 << 20, 0.5), Point(64 << 20, 0.2)),
        pair("together", Point(4 << 20, 0.9), both_ways=True),
    )
    table = curve_table(Measurements(when="", software={}, hosts=("a", "b"), pairs=pairs))
    sizes, loads, medians, *_ = ([*column.cells] for column in table.columns)
    assert list(zip(sizes, loads, medians, strict=True)) == [
        ("8 B", "alone", "10 us"), ("4 MiB", "alone", "10 ms"), ("64 MiB", "together", "200 ms"),
    ]  # fmt: skip


def test_columns_of_all_reduce_show_hosts_and_ranks():
    over = Collective(name="all_reduce", backend="nccl", hosts=("a", "b"), ranks=2, gpudirect=None, curve=())
    assert describe_ranks(over) == "2 hosts"
    assert describe_ranks(structs.replace(over, ranks=16, gpudirect=False)) == "2 hosts, 16 ranks, no GPUDirect"


def test_bus_bandwidth_is_computed_as_in_nccl_tests():
    one = Collective(name="all_reduce", backend="gloo", hosts=("a",) * 4, ranks=4, curve=(Point(1 << 20, 0.01),))
    assert bus_bandwidth(one.curve[0].size_bytes, one.curve[0].seconds, one.ranks) == pytest.approx(
        (1 << 20) / 0.01 * 1.5
    )


def test_the_colour_scale_ignores_a_few_fast_pairs():
    assert scale_maximum([1.0] * 100) == (1.0, False)
    assert scale_maximum([1.0] * 99 + [60.0]) == (1.0, True)
    assert scale_maximum([0.5] * 50 + [1.0] * 50) == (1.0, False)
    assert scale_maximum([2.0]) == (2.0, False)
