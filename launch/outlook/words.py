"""Numbers as people read them."""

from __future__ import annotations

from distrib import units


def time(seconds: float) -> str:
    """With three digits: `62.9 ms`."""
    return units.format_duration(seconds, digits=3)


def rate(bytes_per_second: float) -> str:
    """With as many digits as rates are known to: `24 MB/s`, `1.14 GB/s`."""
    return units.format_rate(bytes_per_second, digits=2 if bytes_per_second < 1e9 else 3)


def size(size_bytes: int) -> str:
    """With three digits: `102 MB`."""
    return units.format_size(size_bytes, digits=3, binary=False)


def number(value: float) -> str:
    """Thousands apart; small ones with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
