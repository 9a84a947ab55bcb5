"""Host expressions such as `bob@gpu[01-16]:8`, and the host lists of `-H`."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distrib.cluster.hosts import MAX_HOSTS, Host, HostList, Notes, SourcePlace, merge_mentions, shown
from distrib.utils.ranges import is_whole_number

MAX_SLOTS = 100_000

# Each pattern names its characters in ASCII: `\w` and `\d` would let in letters and digits of every script. No name may
# begin with `-`: ssh would take it for an option, and `-oProxyCommand=...` runs a program.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*\.?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_ITEM = re.compile(r"(?:\[[^\[\]]*\]|[^,])*")


class Expression(NamedTuple):
    """A parsed `user@names:slots`; iterating `names` expands the ranges."""

    names: Iterator[str]
    user: str | None
    slots: int | None
    ranged: bool


def parse_host_list(text: str, source: str = "-H") -> HostList:
    """Parse an inline list: `a:2,b:2`, `gpu[01-16]:8`, `user@host:4`, `[::1]:2`.

    Args:
        text: The list.
        source: Its name in errors.

    Raises:
        HostfileError: The list is invalid.
    """
    notes = Notes()
    place = SourcePlace(source, column=1)
    if not text.strip():
        raise place.error("no hosts", "write -H HOST:SLOTS,HOST:SLOTS or name a hostfile", code="hostfile-empty")
    hosts = merge_mentions(list_mentions(text, place), notes)
    return HostList(hosts=hosts, source=source, dialect="inline", notes=notes.lines())


def list_mentions(text: str, place: SourcePlace) -> Iterator[tuple[Host, SourcePlace]]:
    """Expand a list to host names.

    Args:
        text: The list.
        place: Its position.

    Yields:
        Every host as often as it is named, with its position.

    Raises:
        HostfileError: The list is invalid.
    """
    for item, at in split_list(text, place):
        expression = parse_expression(item, at)
        for name in expression.names:
            yield Host(name=name, slots=expression.slots, user=expression.user), at


def split_list(text: str, place: SourcePlace) -> Iterator[tuple[str, SourcePlace]]:
    """Split a list at the commas outside brackets.

    Args:
        text: The list.
        place: Its position.

    Yields:
        Each item without blanks, with its position.

    Raises:
        HostfileError: An item is empty.
    """
    start = 0
    while start <= len(text):
        match = _ITEM.match(text, start)
        assert match is not None  # it matches the empty string
        item = match[0].strip()
        at = place.right(start + len(match[0]) - len(match[0].lstrip()) if item else start)
        if not item:
            raise at.error("no host here", "take away the extra comma")
        yield item, at
        start = match.end() + 1


def parse_expression(text: str, place: SourcePlace) -> Expression:
    """Parse one item of a list: `[user@]host[:slots]`, where host may be an address or contain ranges.

    Args:
        text: The item, not empty.
        place: Its position.

    Raises:
        HostfileError: The item is invalid.
    """
    if gap := re.search(r"\s+", text):
        word = text[gap.end() :].split()[0]
        write = f"slots={word}" if is_whole_number(word) else "slots=8"
        raise place.right(gap.end()).error(
            f"did not expect {shown(word)} after a host",
            f"write settings as {write} in a hostfile, and a comma between hosts",
        )
    if text[0] in "^+":
        raise place.error(f"{shown(text)}: Open MPI's filters are not supported", "use --exclude and --include")
    user, at_sign, host = text.rpartition("@")
    at_host = place.right(len(user) + len(at_sign))
    if at_sign:
        check_user(user, place)
    name, count, at_count = _split_count(host, at_host)
    slots = None if count is None else parse_number(count, at_count, "slots", MAX_SLOTS)
    return Expression(_names(name, at_host), user or None, slots, "[" in name)


def _split_count(host: str, place: SourcePlace) -> tuple[str, str | None, SourcePlace]:
    """Split `host:count` and remove the brackets of IPv6; returns the host, the count and its position."""
    if address := re.fullmatch(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?", host, re.DOTALL):
        if not _is_ipv6(address[1]):
            raise place.right(1).error(f"{shown(address[1])} is not an IPv6 address", code="hostfile-host-name")
        return address[1], address[2], place.right(address.start(2) if address[2] is not None else 0)
    if host.count(":") > 1 and _is_ipv6(host):
        return host, None, place
    if host.count("[") != host.count("]"):
        return host, None, place  # _names refuses it as a whole
    colon = host.find(":", host.rfind("]") + 1)
    if colon < 0:
        return host, None, place
    return host[:colon], host[colon + 1 :], place.right(colon + 1)


def _is_ipv6(text: str) -> bool:
    address, percent, zone = text.partition("%")
    if percent and not _NAME.fullmatch(zone):
        return False
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def _names(name: str, place: SourcePlace) -> Iterator[str]:
    """Yield the host names of an expression, rightmost range fastest, each checked."""
    if ":" in name and _is_ipv6(name):
        yield name
        return
    if "[" not in name and "]" not in name:
        check_name(name, place)
        yield name
        return
    # Literals at even indices, the insides of brackets at odd ones.
    segments = re.split(r"\[([^\[\]]*)\]", name)
    choices: list[Sequence[str]] = []
    size, offset = 1, 0
    for number, segment in enumerate(segments):
        if number % 2:
            choices.append(_range(segment, place.right(offset + 1)))
            size *= len(choices[-1])
            _check_size(size, name, place)
            offset += len(segment) + 2
        elif "[" in segment or "]" in segment:
            raise place.right(offset).error(f"brackets in {shown(name)} do not match", "write ranges as gpu[01-16]")
        else:
            choices.append([segment])
            offset += len(segment)
    for parts in itertools.product(*choices):
        expanded = "".join(parts)
        check_name(expanded, place)
        yield expanded


def _range(text: str, place: SourcePlace) -> list[str]:
    """Expand the numbers in one pair of brackets, with leading zeros, in the given order.

    ClusterShell expands each run of numbers. It does not get the whole name: it would sort the hosts, and Slurm's task counts follow
    the order of the list.
    """
    from ClusterShell.RangeSet import RangeSet, RangeSetException  # slow to import, and most hostfiles hold no range

    numbers: list[str] = []
    for run in text.split(","):
        match = re.fullmatch(r"([0-9]{1,15})(?:-([0-9]{1,15})(?:/([0-9]{1,9}))?)?", run)
        if not match:
            raise place.error(f"{shown(run)} is not a range of numbers", "write ranges as gpu[01-16] or n[1-3,7]")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if step:
            _check_size((last - first) // step, run, place)
        try:
            numbers += [str(number) for number in RangeSet(run)]
        except RangeSetException:
            raise place.error(
                f"{shown(run)} is not a range of numbers",
                "the first must not be above the last, and leading zeros must make them equally long",
            ) from None
        _check_size(len(numbers), text, place)
        place = place.right(len(run) + 1)
    return numbers


def _check_size(hosts: int, text: str, place: SourcePlace) -> None:
    if hosts > MAX_HOSTS:
        raise place.error(f"{shown(text)} stands for more than {MAX_HOSTS:,} hosts", code="hostfile-too-large")


def check_name(name: str, place: SourcePlace) -> None:
    """Check a host name or IPv4 address.

    Args:
        name: The name.
        place: Its position.

    Raises:
        HostfileError: The name is invalid.
    """
    if name.startswith("-"):
        raise place.error(
            f"host name {shown(name)} begins with '-'", "ssh would take it for an option", code="hostfile-host-name"
        )
    if not _NAME.fullmatch(name) or len(name) > 253:  # RFC 1035
        if "/" in name:
            hint = "if this is a hostfile, there is no such file"
        elif not name.isascii():
            hint = "host names have only ASCII letters; write an international name in its xn-- form"
        else:
            hint = "host names have letters, digits, '.', '-' and '_', at most 253"
        raise place.error(f"{shown(name)} is not a host name", hint, code="hostfile-host-name")
    if not name.strip("0123456789."):  # ssh would read 12 as the address 0.0.0.12
        try:
            ipaddress.IPv4Address(name)
        except ValueError:
            raise place.error(
                f"{shown(name)} is neither a host name nor an IPv4 address",
                "an address has four numbers from 0 to 255 without leading zeros",
                code="hostfile-host-name",
            ) from None


def check_user(user: str, place: SourcePlace) -> None:
    """Check a user name, also against options of ssh and characters of the shell.

    Args:
        user: The name.
        place: Its position.

    Raises:
        HostfileError: The name is invalid.
    """
    if not _USER.fullmatch(user):
        raise place.error(
            f"{shown(user)} is not a user name",
            "user names have letters, digits, '.', '-', '_' and '+'",
            code="hostfile-value",
        )
    if user.isdigit():
        raise place.error(
            f"{shown(user)} is not a user name",
            "choose GPUs such as host:0,2@host2 with --include and --exclude",
            code="hostfile-value",
        )


def parse_number(text: str, place: SourcePlace, what: str, most: int) -> int:
    """Parse a whole number of ASCII digits; int() alone accepts `1_000`, ` +4` and other scripts.

    Args:
        text: The digits.
        place: Their position.
        what: The quantity, for errors.
        most: The largest allowed value. The smallest is 1.

    Raises:
        HostfileError: The text is not a number in this range.
    """
    if not is_whole_number(text) or not 1 <= int(text) <= most:
        raise place.error(f"{what} must be a whole number from 1 to {most}, not {shown(text)}", code="hostfile-value")
    return int(text)
