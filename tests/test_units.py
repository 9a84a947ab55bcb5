"""Units in text, valid and invalid; formatted text parses to the same value."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distrib import units

GOOD_RATES = [
    ("100Gb/s", 12.5e9),
    ("100 Gb/s", 12.5e9),
    (" 100Gbit/s ", 12.5e9),
    ("100 Gbps", 12.5e9),
    ("100Gbit", 12.5e9),
    ("957 Mbits/sec", 119.625e6),
    ("25GB/s", 25e9),
    ("25 GBytes/sec", 25e9),
    ("25GBps", 25e9),
    ("1.5GiB/s", 1.5 * 2**30),
    ("8Gib/s", 2**30),
    ("10 GbE", 1.25e9),
    ("2.5GbE", 312.5e6),
    ("1b/s", 0.125),
    ("0.1 MB/s", 1e5),
    ("1e3 MB/s", 1e9),
    ("+5 kB/s", 5e3),
    ("5 KB/s", 5e3),
    (".5TB/s", 5e11),
    ("0 B/s", 0.0),
]


def test_rates():
    assert [(text, units.parse_rate(text)) for text, _ in GOOD_RATES] == GOOD_RATES


BAD_RATES = [
    ("100", "has no unit; write one, such as 100Gb/s"),
    ("100gb/s", "may be bits or bytes; did you mean GB/s (bytes) or Gb/s (bits)?"),
    ("100 gbps", "may be bits or bytes"),
    ("100 mb/s", "did you mean MB/s (bytes) or Mb/s (bits)?"),
    ("5GB", "GB is an amount; did you mean GB/s?"),
    ("5Gb", "Gb is an amount; did you mean Gb/s?"),
    ("5 Gbs", "unknown unit 'Gbs'; did you mean Gbps?"),
    ("5 furlongs", "unknown unit"),
    ("-5GB/s", "is negative"),
    ("nan", "finite"),
    ("NaN Gb/s", "finite"),
    (".inf", "finite"),
    ("-Infinity GB/s", "finite"),
    ("1,000 MB/s", "without commas"),
    ("16 GT/s", "transfers are not bytes"),
    ("HDR", "write a number and a unit"),
    ("", "write a number and a unit"),
    ("1e99 GB/s", "larger than a rate can be"),
    ("1e999999999 GB/s", "is not a rate"),
    ("5 ＧB/s", "plain letters"),
    ("٣ GB/s", "write a number and a unit"),
    ("1_000 MB/s", "unknown unit"),
    ("0x10 GB/s", "unknown unit"),
]


def test_bad_rates():
    for text, what in BAD_RATES:
        with pytest.raises(ValueError, match=re.escape(what)):
            units.parse_rate(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", 2**34), ("80GB", 80 * 10**9), ("80 GB", 80 * 10**9), ("512B", 512), ("1.5KiB", 1536), ("2TiB", 2**41)],
)
def test_sizes(text, size):
    assert units.parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("80Gb", "Gb counts bits; did you mean GB?"),
        ("80 Gbit", "did you mean GB?"),
        ("80gb", "did you mean GB?"),
        ("80GB/s", "is a rate"),
        ("1.5B", "not a whole number of bytes"),
        ("80", "has no unit"),
        ("-1GB", "is negative"),
        ("80 GIB", "did you mean GiB?"),
    ],
)
def test_bad_sizes(text, what):
    with pytest.raises(ValueError, match=re.escape(what)):
        units.parse_size(text)


def test_durations_and_ratios():
    assert units.parse_duration("1.5us") == 1.5e-6 == units.parse_duration("1.5 µs") == units.parse_duration("1.5 μs")
    assert units.parse_duration("20ms") == 0.02
    assert units.parse_ratio("2:1") == 2.0 == units.parse_ratio(2) == units.parse_ratio("4:2")
    assert units.parse_ratio("3:2") == 1.5
    for bad in ("1:2", "2:0", "0:0", "x", "2:", ":2", "-2:1", "2:1:1", math.nan, math.inf, 0, "1e9999"):
        with pytest.raises(ValueError, match=r"ratio|less than|zero"):
            units.parse_ratio(bad)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_rate(12.5e9), "12.5 GB/s"),
        (units.format_rate(12.5e9, bits=True), "100 Gb/s"),
        (units.format_rate(119.634e6, digits=3), "120 MB/s"),
        (units.format_rate(999.96e6, digits=3), "1 GB/s"),
        (units.format_rate(0.0), "0 B/s"),
        (units.format_size(2**34), "16 GiB"),
        (units.format_size(80 * 10**9), "80 GB"),
        (units.format_size(80 * 10**9, binary=True, digits=4), "74.51 GiB"),
        (units.format_size(1), "1 B"),
        (units.format_duration(2.7e-6), "2.7 us"),
        (units.format_duration(90.0), "90 s"),
        (units.format_duration(1e-12), "0.001 ns"),
    ],
)
def test_formats(text, expected):
    assert text == expected


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_nothing_negative_or_infinite_is_written(bad):
    for write in (units.format_rate, units.format_duration):
        with pytest.raises(ValueError, match="0 or more"):
            write(bad)


floats = st.floats(min_value=0, max_value=1e23, allow_nan=False, allow_infinity=False)


@given(floats, st.booleans())
@example(1 / 3, True)
@example(5e-324, False)
@example(0.1 + 0.2, True)
@settings(max_examples=200, deadline=None)
def test_a_rate_written_is_the_rate_read(rate, bits):
    assert units.parse_rate(units.format_rate(rate, bits=bits)) == rate


@given(st.integers(min_value=0, max_value=10**23), st.sampled_from([None, True, False]))
@settings(max_examples=200, deadline=None)
def test_a_size_written_is_the_size_read(size, binary):
    text = units.format_size(size, binary=binary)
    number, unit = text.split()
    # Binary units of odd sizes need more decimals than usual; the text is still exact.
    assert Fraction(number) * units.SIZES[unit] == size
    if len(number) < 30:
        assert units.parse_size(text) == size


@given(st.floats(min_value=1e-12, max_value=1e6))
@settings(max_examples=200, deadline=None)
def test_a_duration_written_is_the_duration_read(seconds):
    assert units.parse_duration(units.format_duration(seconds)) == seconds


@given(st.integers(min_value=1, max_value=10**6), st.sampled_from(["k", "M", "G", "T"]))
def test_a_byte_is_eight_bits(number, prefix):
    assert units.parse_rate(f"{8 * number}{prefix}b/s") == units.parse_rate(f"{number}{prefix}B/s")


@given(st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(text):
    for parse in (units.parse_rate, units.parse_size, units.parse_duration, units.parse_ratio):
        try:
            value = parse(text)
        except ValueError as error:
            assert str(error)
        else:
            assert value >= 0 and math.isfinite(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0335, "0.0335"), (8626, "8,626"), (12_900, "12.9k"), (999_600, "1M"), (3e11, "300B"), (1.5e16, "15,000T")],
)  # fmt: skip
def test_numbers_of_a_table_are_short(value, text):
    assert units.compact_text(value) == text


@given(st.floats(0, 1e17))
def test_a_short_number_has_three_digits_of_the_value(value):
    text = units.compact_text(value).replace(",", "")
    factor = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1)
    assert float(text.rstrip("kMBT")) * factor == pytest.approx(value, rel=0.006)
