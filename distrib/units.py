"""Sizes, rates and durations: parsed to bytes, bytes per second and seconds, and formatted.

`b` is a bit and `B` a byte: `100Gb/s` is 12.5 GB/s, and `100gb/s` is refused as ambiguous. `k`, `M`, `G`, `T` are powers of 1000,
`Ki`, `Mi`, `Gi`, `Ti` powers of 1024. Values are computed exactly and rounded once. `parse_*` reads the output of `format_*`
without `digits` as the same value.
"""

from __future__ import annotations

import difflib
import re
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction

_NUMBER = re.compile(r"([+-]?)([0-9]{1,30}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,2})?(?![0-9])")
_LARGEST = Fraction(10) ** 24

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_PREFIXES = {**_DECIMAL, **_BINARY}

SIZES: dict[str, Fraction] = {
    prefix + unit: Fraction(factor) for prefix, factor in _PREFIXES.items() for unit in ("B", "byte", "bytes", "Byte", "Bytes")
}  # fmt: skip
"""Bytes by unit of size."""

_BITS = ("b", "bit", "bits", "Bit", "Bits")
_BYTES = ("B", "byte", "bytes", "Byte", "Bytes")
RATES: dict[str, Fraction] = {
    prefix + unit + per: Fraction(factor, 8 if unit in _BITS else 1)
    for prefix, factor in _PREFIXES.items()
    for unit in (*_BITS, *_BYTES)
    for per in ("/s", "ps", "/sec")
}
RATES |= {prefix + "bE": Fraction(factor, 8) for prefix, factor in _DECIMAL.items() if prefix in "MGT" and prefix}
RATES |= {
    prefix + word: Fraction(factor, 8) for prefix, factor in _DECIMAL.items() if prefix for word in ("bit", "bits")
}
"""Bytes per second by unit of rate; `10 GbE` is Ethernet's name for 10 Gb/s, `10Gbit` that of tc."""

DURATIONS: dict[str, Fraction] = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "μs": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
"""Seconds by unit of time. Two of them are the micro sign and the Greek letter, which are two characters."""


def parse_size(text: str) -> int:
    """Parse a size to bytes, such as `16GiB`, `80 GB` or `512B`.

    Args:
        text: A number and a unit of bytes.

    Raises:
        ValueError: The text is not a size, or not a whole number of bytes.
    """
    value = _parse(text, SIZES, "a size", "such as 16GiB or 80GB")
    if value.denominator != 1:
        raise ValueError(f"{_shown(text)} is not a whole number of bytes")
    return int(value)


def parse_rate(text: str) -> float:
    """Parse a rate to bytes per second, such as `100Gb/s`, `25GB/s`, `10 GbE` or `200Gbit`.

    Args:
        text: A number and a unit of bits or bytes per second.

    Raises:
        ValueError: The text is not a rate.
    """
    return float(_parse(text, RATES, "a rate", "such as 100Gb/s (bits) or 12.5GB/s (bytes)"))


def parse_duration(text: str) -> float:
    """Parse a duration to seconds, such as `1.5us`, `20 ms` or `3s`.

    Args:
        text: A number and a unit of time.

    Raises:
        ValueError: The text is not a duration.
    """
    return float(_parse(text, DURATIONS, "a time", "such as 1.5us or 20ms"))


def parse_ratio(text: str | int | float) -> float:
    """Parse a ratio such as `2:1`, `3:2` or `1.5`.

    Args:
        text: Two numbers with a colon, or one number.

    Returns:
        The ratio, 1 or more.

    Raises:
        ValueError: The text is not a ratio, or less than 1.
    """
    wide, colon, narrow = str(text).partition(":")
    value = _number(wide.strip(), text) / (_number(narrow.strip(), text) or 1 if colon else 1)
    if colon and not _number(narrow.strip(), text):
        raise ValueError(f"{_shown(text)} divides by zero")
    if value < 1:
        raise ValueError(f"{_shown(text)} is less than 1:1; write the incoming against the outgoing rate, such as 2:1")
    return float(value)


def format_size(size_bytes: int, *, digits: int | None = None, binary: bool | None = None) -> str:
    """Format a size, such as `16 GiB` or `80 GB`.

    Args:
        size_bytes: 0 or more.
        digits: Significant digits. None: exact.
        binary: True for units of 1024, False for units of 1000, None for the shorter text.

    Raises:
        ValueError: The size is negative.
    """
    if size_bytes < 0:
        raise ValueError(f"size {size_bytes}, expected 0 or more")
    texts = [
        _format(Fraction(size_bytes), {f"{prefix}B": Fraction(factor) for prefix, factor in factors.items()}, digits)
        for factors, is_binary in (({"": 1, **_BINARY}, True), (_shown_prefixes(), False))
        if binary is None or binary == is_binary
    ]
    return min(texts, key=lambda text: (len(text.partition(" ")[0]), len(text)))


def format_rate(bytes_per_second: float, *, digits: int | None = None, bits: bool = False) -> str:
    """Format a rate, such as `12.5 GB/s`, or `100 Gb/s` with `bits`.

    Args:
        bytes_per_second: 0 or more, finite.
        digits: Significant digits. None: exact.
        bits: True for bits per second, as networks are rated.

    Raises:
        ValueError: The rate is negative or not finite.
    """
    units = {
        f"{prefix}{'b' if bits else 'B'}/s": Fraction(factor, 8 if bits else 1)
        for prefix, factor in _shown_prefixes().items()
    }
    return _format_float(bytes_per_second, units, digits)


def format_duration(seconds: float, *, digits: int | None = None) -> str:
    """Format a duration, such as `1.5 us`, `20 ms` or `90 s`.

    Args:
        seconds: 0 or more, finite.
        digits: Significant digits. None: exact.

    Raises:
        ValueError: The duration is negative or not finite.
    """
    return _format_float(seconds, {unit: DURATIONS[unit] for unit in ("ns", "us", "ms", "s")}, digits)


def duration_text(seconds: float) -> str:
    """Format a duration for a message, with three digits: `62.9 ms`.

    Args:
        seconds: 0 or more.
    """
    return format_duration(seconds, digits=3)


def rate_text(bytes_per_second: float) -> str:
    """Format the rate of memory or of a link inside a host for a message, in bytes: two digits below 1 GB/s (`24 MB/s`), else three (`1.14 GB/s`).

    Args:
        bytes_per_second: 0 or more.
    """
    return format_rate(bytes_per_second, digits=2 if bytes_per_second < 1e9 else 3)


def bit_rate_text(bytes_per_second: float) -> str:
    """Format the rate of a NIC, an uplink or a link between hosts for a message, in bits with three digits: `957 Mb/s`.

    Args:
        bytes_per_second: 0 or more.
    """
    return format_rate(bytes_per_second, digits=3, bits=True)


def size_text(size_bytes: int) -> str:
    """Format a size for a message, with three digits in units of 1000: `102 MB`.

    Args:
        size_bytes: 0 or more.
    """
    return format_size(size_bytes, digits=3, binary=False)


def binary_size_text(size_bytes: int) -> str:
    """Format a size of memory for a message, with three digits in units of 1024: `1.95 TiB`.

    Args:
        size_bytes: 0 or more.
    """
    return format_size(size_bytes, digits=3, binary=True)


def number_text(value: float) -> str:
    """Format a number for a message: thousands with commas, below 100 three digits.

    Args:
        value: Any finite number.
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def compact_text(value: float) -> str:
    """Format a number for a table: three digits with k, M, B or T, such as `18.9k` or `300B`.

    Args:
        value: Any number of 0 or more.
    """
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        scaled = value / factor
        if value >= 9999.5 and scaled >= 0.9995:
            return (f"{scaled:,.0f}" if scaled >= 999.5 else f"{scaled:.3g}") + suffix
    return number_text(value)


def count_text(count: int, what: str) -> str:
    """Format a number of things, such as `1 rank` or `8 ranks`.

    Args:
        count: The number.
        what: Singular noun.
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


def _shown_prefixes() -> dict[str, int]:
    return {prefix: factor for prefix, factor in _DECIMAL.items() if prefix != "K"}


def _parse(text: str, units: dict[str, Fraction], what: str, example: str) -> Fraction:
    stripped = text.strip()
    if stripped.lstrip("+-.").lower().startswith(("nan", "inf")):
        raise ValueError(f"{_shown(text)} is not {what}: it must be a finite number with a unit, {example}")
    match = _NUMBER.match(stripped)
    if not match:
        raise ValueError(f"{_shown(text)} is not {what}; write a number and a unit, {example}")
    unit = stripped[match.end() :].strip()
    if match[1] == "-":
        raise ValueError(f"{_shown(text)} is negative; {what} is zero or more")
    if unit[:1] == ",":
        raise ValueError(f"{_shown(text)}: write the number without commas, {example}")
    if not unit:
        raise ValueError(f"{_shown(text)} has no unit; write one, {example}")
    if unit not in units:
        raise ValueError(f"{_shown(text)} is not {what}: {_unknown(unit, units, what, example)}")
    value = Fraction(Decimal(match[2] + (match[3] or ""))) * units[unit]
    if value > _LARGEST:
        raise ValueError(f"{_shown(text)} is larger than {what} can be")
    return value


def _unknown(unit: str, units: dict[str, Fraction], what: str, example: str) -> str:
    if any(ord(character) > 126 for character in unit) and unit not in DURATIONS:
        return f"unknown unit {_shown(unit)}; write it in plain letters, {example}"
    if unit in ("GT/s", "MT/s"):
        return "transfers are not bytes; write the link, such as PCIe4 x16"
    if what == "a rate" and (unit in SIZES or re.fullmatch(r"([kKMGTP]i?)?b", unit)):
        return f"{unit} is an amount; did you mean {unit}/s?"
    if what == "a size" and re.fullmatch(r"([kKMGTP]i?)?(b|bits?)", unit):
        return f"{unit} counts bits; did you mean {re.sub('b(its?)?$', 'B', unit)}?"
    if what == "a size" and unit in RATES:
        return f"{unit} is a rate; write {example}"
    same = sorted({known for known in units if known.lower() == unit.lower() and len(known) == len(unit)})
    if len({units[known] for known in same}) > 1:
        known = [
            f"{k} ({'bits' if re.search('b', k) and not re.search('byte', k) else 'bytes'})"
            for k in same
            if "K" not in k
        ]
        return f"{unit} may be bits or bytes; did you mean {' or '.join(known[:4])}?"
    near = same or difflib.get_close_matches(unit, list(units), n=1, cutoff=0.5)
    return f"unknown unit {_shown(unit)}; " + (f"did you mean {near[0]}?" if near else f"write {example}")


def _number(text: str, whole: object) -> Fraction:
    match = _NUMBER.fullmatch(text)
    if not match or match[1] == "-":
        raise ValueError(f"{_shown(whole)} is not a ratio; write such as 2:1")
    return Fraction(Decimal(match[2] + (match[3] or "")))


def _format_float(value: float, units: dict[str, Fraction], digits: int | None) -> str:
    if not 0 <= value < float("inf"):
        raise ValueError(f"{value}, expected a finite number of 0 or more")
    if digits is not None:
        return _format(Fraction(value), units, digits)
    for exact in range(1, 30):
        text = _format(Fraction(value), units, exact)
        number, _, unit = text.partition(" ")
        if float(Fraction(Decimal(number)) * units[unit]) == value:
            return text
    return _format(Fraction(value), units, None)


def _format(value: Fraction, units: dict[str, Fraction], digits: int | None) -> str:
    """`value` in the largest unit of which it is at least one; the exact decimal number where `digits` is None."""
    by_size = sorted(units.items(), key=lambda item: item[1])
    unit, factor = max((item for item in by_size if item[1] <= value), key=lambda item: item[1], default=by_size[0])
    number = _decimal(value / factor, digits)
    bigger = by_size[by_size.index((unit, factor)) + 1 :]
    if bigger and Fraction(number) * factor >= bigger[0][1]:  # 999.96 rounds to 1000: the next unit's 1
        unit, factor = bigger[0]
        number = _decimal(value / factor, digits)
    plain = f"{number:f}"
    return f"{plain.rstrip('0').rstrip('.') if '.' in plain else plain} {unit}"


def _decimal(value: Fraction, digits: int | None) -> Decimal:
    # Sizes and rates are multiples of powers of two and ten, so their decimals end; 400 digits hold any float's.
    context = Context(prec=digits or 400, rounding=ROUND_HALF_EVEN)
    return context.divide(Decimal(value.numerator), Decimal(value.denominator))


def _shown(text: object) -> str:
    shown = str(text)
    return repr(shown if len(shown) <= 40 else shown[:37] + "...")
