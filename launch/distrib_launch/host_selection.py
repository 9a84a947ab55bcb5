"""Which hosts of a list take part, which of their slots, and how many ranks each gets. Pure.

`--include` and `--exclude` take DeepSpeed's words: hosts between `@`, each with the indices of slots after a colon,
`host:0,2@host2@node[3-8]:1`. An index is that of a GPU where the host has GPUs, counted as nvidia-smi does.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from distrib.cluster.host_expression import parse_expression
from distrib.cluster.hostfile import Host
from distrib.cluster.hosts import MAX_HOSTS, Notes, Place, shown
from distrib.cluster.node import name_hosts
from distrib.errors import ConfigError
from distrib_launch.cli.options import Joined

if TYPE_CHECKING:
    from distrib.cluster.topology import Gpus

MAX_INDEX = 4095
HINT = "write hosts between @ and indices after a colon, such as host:0,2@host2@node[3-8]:1"

_INDEX = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_BRACKETS = re.compile(r"\[[^\]]*\]")
_SPLIT = re.compile(r"@(?![^\[]*\])")


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A host that takes part: how many ranks it may have and, where they were chosen, on which slots or GPUs."""

    host: Host
    slots: int
    indices: tuple[int, ...] | None = None


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked of the hosts: `--include`, `--exclude`, `--pool` and `--spread`, as they were written."""

    include: str | None = None
    exclude: str | None = None
    pool: str | None = None
    spread: bool = False
    without: tuple[str, ...] = ()
    """Hosts that were found unfit and are to be left out."""
    fewer: bool = False
    """Whether there may be fewer ranks than `-np` says."""
    servers: tuple[str, ...] = ()
    """Hosts set apart for parameter servers: they may be named, but are not chosen from."""


def add_options(parser: argparse._ActionsContainer) -> None:
    """The options that choose among the hosts, the same for all commands."""
    parser.add_argument(
        "--include", action=Joined, metavar="HOSTS", help="only these hosts, slots or GPUs: host:0,2@host2@node[3-8]:1"
    )
    parser.add_argument("--exclude", action=Joined, metavar="HOSTS", help="all but these hosts, slots or GPUs")
    parser.add_argument("--pool", metavar="GPU", help="only hosts whose GPUs are of this kind, such as A100")


def wishes_of(options: argparse.Namespace) -> Wishes:
    """What was wished with `add_options`."""
    return Wishes(include=options.include, exclude=options.exclude, pool=options.pool)


def parse_filter(text: str, option: str) -> dict[str, tuple[int, ...] | None]:
    """Indices by host of a filter, None where it names the whole host; `ConfigError` says where it cannot be read."""
    chosen: dict[str, tuple[int, ...] | None] = {}
    position = 0
    for item in _SPLIT.split(text):
        place = Place(option, column=position + 1)
        position += len(item) + 1
        if not item.strip():
            raise place.error("no host here", HINT)
        names, indices = _split_indices(item.strip(), place)
        if "," in _BRACKETS.sub("", names):
            raise place.error(
                f"{shown(item.strip())} has a comma between hosts", "hosts are separated by @: n1@n2, or n[1-2]"
            )
        for name in parse_expression(names, place, Notes()).names:
            key = name.lower()
            if key not in chosen:
                chosen[key] = indices
            elif (before := chosen[key]) is None and indices is None:
                continue
            elif before is None or indices is None:
                raise place.error(f"{name} is named twice, whole and in part", "name it once")
            else:
                chosen[key] = tuple(sorted({*before, *indices}))
            if len(chosen) > MAX_HOSTS:
                raise place.error(f"more than {MAX_HOSTS:,} hosts")
    return chosen


def _split_indices(item: str, place: Place) -> tuple[str, tuple[int, ...] | None]:
    """The host expression and the indices after its last colon; colons inside brackets are an IPv6 address's."""
    colon = item.find(":", item.rfind("]") + 1)
    if colon < 0:
        return item, None
    if not item[:colon].strip():
        raise place.error("no host before the indices", HINT)
    if item.count(":", colon) > 1:
        raise place.error(f"{shown(item)} has too many colons", "write an IPv6 address in brackets: [fd00::1]:0,2")
    found: set[int] = set()
    for part in item[colon + 1 :].split(","):
        match = _INDEX.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > MAX_INDEX:
            raise place.right(colon + 1).error(f"{shown(part)} is no index of a slot or GPU", HINT)
        found.update(range(first, last + 1))
    return item[:colon].rstrip(), tuple(sorted(found))


def choose(
    hosts: Sequence[Host], gpus: Mapping[str, Gpus | None], slots: Mapping[str, int], wishes: Wishes
) -> tuple[Choice, ...]:
    """The hosts that take part, in the order of `hosts`.

    `gpus` holds what is known of each host's GPUs, `slots` how many ranks it may have. Raises `ConfigError` for a host,
    index or pool that is not there, and where nothing is left.
    """
    if wishes.include is not None and wishes.exclude is not None:
        raise ConfigError(
            "--include and --exclude exclude each other", hint="say what to take or what to leave, not both"
        )
    if wishes.pool is not None:
        hosts = _pool(hosts, gpus, wishes.pool)
    option, text = ("--include", wishes.include) if wishes.include is not None else ("--exclude", wishes.exclude)
    if text is None:
        chosen = [Choice(host=host, slots=slots[host.name]) for host in hosts]
    else:
        filters = parse_filter(text, option)
        names = {host.name.lower() for host in hosts}
        names |= {name.lower() for name in wishes.servers}
        if unknown := [name for name in filters if name not in names]:
            raise ConfigError(
                f"{option} names {name_hosts(unknown)}, which is not among the hosts",
                hint=f"there are {name_hosts([host.name for host in hosts])}",
            )
        taken = (_choose_slots(host, gpus[host.name], slots[host.name], option, filters) for host in hosts)
        chosen = [choice for choice in taken if choice and choice.slots]
        if not chosen:
            raise ConfigError(f"{option} {text} leaves no host", hint="leave out less")
    left = tuple(choice for choice in chosen if choice.host.name not in wishes.without)
    if not left:
        raise ConfigError(
            f"no host is left: {name_hosts(wishes.without)} cannot take part, and all others are left out",
            hint="see distrib-topo check; and --include or --exclude less",
        )
    return left


def choose_servers(hosts: Sequence[Host], wishes: Wishes) -> tuple[Host, ...]:
    """Of the hosts set apart for parameter servers those that take part: all, unless some are named.

    Raises `ConfigError` where some of the slots of one are named: they are all alike.
    """
    option, text = ("--include", wishes.include) if wishes.include is not None else ("--exclude", wishes.exclude)
    named = parse_filter(text, option) if text is not None else {}
    for host in hosts:
        if named.get(host.name.lower()) is not None:
            raise ConfigError(
                f"{option} names slots of {host.name}, which has role=server",
                hint="name the host without indices; --servers N says how many servers there are",
            )
    chosen = [host for host in hosts if (host.name.lower() in named) == (option == "--include")]
    if option == "--include" and not chosen:
        chosen = list(hosts)
    return tuple(host for host in chosen if host.name not in wishes.without)


def _choose_slots(
    host: Host, gpus: Gpus | None, slots: int, option: str, filters: Mapping[str, tuple[int, ...] | None]
) -> Choice | None:
    including = option == "--include"
    if host.name.lower() not in filters:
        return None if including else Choice(host=host, slots=slots)
    indices = filters[host.name.lower()]
    if indices is None:
        return Choice(host=host, slots=slots) if including else None
    count = gpus.count if gpus and gpus.count else slots
    # Where nobody has said how many there are, the host itself will tell whether it has those that were chosen.
    unsaid = host.slots is None and not (gpus and gpus.count)
    if unsaid and not including:
        raise ConfigError(
            f"--exclude {host.name}:{_numbers(indices)}: nobody has said how many slots {host.name} has",
            hint="write slots=N after it in the hostfile, or describe it in the topology",
        )
    if not unsaid and indices[-1] >= count:
        what = "GPU" if gpus and gpus.count else "slot"
        raise ConfigError(
            f"{option} names {what} {indices[-1]} of {host.name}, which has {count} {what}(s)",
            hint=f"there are {_numbers(range(count))}" if count > 1 else f"there is {what} 0 alone",
        )
    if including:
        return Choice(host=host, slots=len(indices), indices=indices)
    left = tuple(index for index in range(count) if index not in indices)[:slots]
    return Choice(host=host, slots=len(left), indices=left)


def pools(hosts: Sequence[Host], gpus: Mapping[str, Gpus | None]) -> dict[str, list[str]]:
    """Names of hosts by kind of GPU, `CPU only` where there is none; hosts of which nothing is known are left out."""
    found: dict[str, list[str]] = {}
    for host in hosts:
        if known := gpus[host.name]:
            found.setdefault((known.kind or "unnamed GPU") if known.count else "CPU only", []).append(host.name)
    return found


def _pool(hosts: Sequence[Host], gpus: Mapping[str, Gpus | None], wanted: str) -> list[Host]:
    found = pools(hosts, gpus)
    members = {name for kind, names in found.items() if wanted.lower() in kind.lower() for name in names}
    if not wanted.strip() or not members:
        known = "; ".join(f"{kind}: {name_hosts(names)}" for kind, names in found.items())
        raise ConfigError(
            f"--pool {wanted}: no host has such a GPU",
            hint=f"there are {known}"
            if known
            else "nobody has said which GPUs the hosts have; distrib-topo show -H FILE --ask -o FILE.yaml asks them, and writes the topology "
            "in which it is looked up",
        )
    return [host for host in hosts if host.name in members]


def mixed_pools(found: Mapping[str, Sequence[str]]) -> str | None:
    """A note where a job that waits for its slowest rank would run on several kinds of GPU."""
    if len(found) < 2:
        return None
    kinds = "; ".join(f"{kind}: {name_hosts(names)}" for kind, names in found.items())
    return f"the hosts have different GPUs, and every step waits for the slowest ({kinds}); --pool chooses one kind"


def widen(choices: Sequence[Choice], wanted: int) -> tuple[Choice, ...]:
    """The choices with room for `wanted` ranks, taken evenly up to their hosts' `max_slots`; as they are where that is too little."""
    room = [(choice.host.max_slots or 0) - choice.slots if choice.indices is None else 0 for choice in choices]
    spare = [msgspec.structs.replace(choice, slots=max(0, more)) for choice, more in zip(choices, room, strict=True)]
    missing = wanted - sum(choice.slots for choice in choices)
    if missing > sum(choice.slots for choice in spare):
        return tuple(choices)
    added = {choice.host.name: more for choice, more in share_out(spare, missing, "spread")}
    return tuple(
        msgspec.structs.replace(choice, slots=choice.slots + added.get(choice.host.name, 0)) for choice in choices
    )


def share_out(
    choices: Sequence[Choice], wanted: int, how: Literal["fill", "spread"] = "fill"
) -> tuple[tuple[Choice, int], ...]:
    """Ranks for each host that gets any: `fill` one after the other, or `spread` evenly.

    `wanted` is at most the sum of the slots. Spread over hosts with room, no two differ by more than one; the hosts
    named first have the odd ones.
    """
    counts = [0] * len(choices)
    if how == "fill":
        for number, choice in enumerate(choices):
            counts[number] = min(choice.slots, wanted)
            wanted -= counts[number]
    while how == "spread" and wanted:
        open_ = [number for number, choice in enumerate(choices) if counts[number] < choice.slots]
        # As many whole rounds as the fullest host allows, then the odd ones.
        rounds = min(wanted // len(open_), min(choices[n].slots - counts[n] for n in open_))
        for number in open_ if rounds else open_[:wanted]:
            counts[number] += rounds or 1
            wanted -= rounds or 1
    return tuple((choice, count) for choice, count in zip(choices, counts, strict=True) if count)


def _numbers(numbers: Sequence[int]) -> str:
    """`0,2` or `0-7`."""
    first, last = numbers[0], numbers[-1]
    whole = len(numbers) > 2 and list(numbers) == list(range(first, last + 1))
    return f"{first}-{last}" if whole else ",".join(map(str, numbers))
