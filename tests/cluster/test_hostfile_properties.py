"""Properties of the hostfile parser for any text, and its speed."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distrib.cluster.hostfile import Host, HostList, format_hostfile, parse_host_list, parse_hostfile, slurm_hosts
from distrib.errors import HostfileError

VOCABULARY = """
    a b n1 node [ ] [1-3] [01-99] [1-9999999] :4 :22 : , @ bob@ - ^ + = / // /* */ # slots slots= max_slots=1 user= port=
    python= role=server binding= 10.0.0.1 ::1 [::1] % 0 4 2(x3) (x " \\ ٣ ö
"""
BLANKS_AND_JUNK = [" ", "\t", "\n", "\r\n", "\x85", "\u2028", "\ufeff", "\0", "\ud800"]
PIECES = st.sampled_from([*VOCABULARY.split(), *BLANKS_AND_JUNK])
# Half of the texts consist of parts of hostfiles, to get past the first check.
TEXTS = st.text(st.characters()) | st.lists(PIECES, max_size=30).map("".join)


@settings(deadline=None)  # a range may expand to 50,000 hosts
@given(TEXTS)
@example("a python=/")
@example("[" * 5000)
@example("[1]" * 5000)
@example("a" + "@" * 5000)
@example("9" * 5000)
def test_any_text_gives_hosts_or_a_hostfile_error(text: str) -> None:
    parsers: list[Callable[[], HostList | None]] = [
        lambda: parse_hostfile(text, "hosts.txt"),
        lambda: parse_host_list(text),
        lambda: slurm_hosts({"SLURM_JOB_NODELIST": text}),
        lambda: slurm_hosts({"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": text}),
    ]
    for parse in parsers:
        try:
            read = parse()
        except HostfileError as error:
            assert "\n" not in str(error)
        else:
            assert read is None or (read.hosts and not any(host.name.startswith("-") for host in read.hosts))
            if read is not None:
                assert without_lines(parse_hostfile(format_hostfile(read.hosts), "x").hosts) == without_lines(
                    read.hosts
                )


LABELS = st.from_regex(r"[a-z_][A-Za-z0-9_-]{0,10}", fullmatch=True)
NAMES = (
    LABELS
    | st.lists(LABELS, min_size=2, max_size=4).map(".".join)
    | st.ip_addresses(v=4).map(str)
    | st.ip_addresses(v=6).map(str)
    | st.ip_addresses(v=6, network="fe80::/64").map(lambda address: f"{address}%eth0")
)
PATHS = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters='"') | st.just(" ")).map("/".__add__)


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    slots = draw(st.none() | st.integers(1, 100_000))
    return Host(
        name=draw(NAMES),
        slots=slots,
        max_slots=draw(st.none() | st.integers(slots or 1, 100_000)),
        user=draw(st.none() | LABELS),
        port=draw(st.none() | st.integers(1, 65_535)),
        python=draw(st.none() | PATHS),
        role=draw(st.sampled_from(["worker", "server"])),
    )


def without_lines(read: tuple[Host, ...]) -> list[Host]:
    return [msgspec.structs.replace(host, line=0) for host in read]


@settings(deadline=None)
@given(st.lists(hosts(), min_size=1, max_size=10, unique_by=lambda host: host.name.lower()))
def test_a_written_hostfile_reads_back_equal(written: list[Host]) -> None:
    assert without_lines(parse_hostfile(format_hostfile(written), "x").hosts) == written


def test_a_thousand_lines_are_read_within_half_a_second() -> None:
    text = "".join(f"node{i} slots=8 max_slots=16 user=bob  # rack {i % 7}\n" for i in range(1000))
    seconds = []
    for _ in range(5):
        start = time.process_time()
        assert len(parse_hostfile(text, "x").hosts) == 1000
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5  # 0.03 on an idle machine
