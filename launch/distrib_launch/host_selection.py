"""Selection of hosts, slots and GPUs, and distribution of ranks over them. Pure.

`--include` and `--exclude` have DeepSpeed's syntax: hosts separated by `@`, each with the indices of slots after a colon,
`host:0,2@host2@node[3-8]:1`. On a host with GPUs an index is that of a GPU, as nvidia-smi counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from distrib.cluster.host_expression import parse_expression
from distrib.cluster.hostfile import Host
from distrib.cluster.hosts import MAX_HOSTS, SourcePlace, shown
from distrib.cluster.node import name_hosts
from distrib.errors import ConfigError

if TYPE_CHECKING:
    from distrib.cluster.node import Gpus

SYNTAX_HINT = "write hosts between @ and indices after a colon, such as host:0,2@host2@node[3-8]:1"


class SelectedHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host that takes part, with the number of ranks that it may have."""

    host: Host
    slots: int
    indices: tuple[int, ...] | None = None
    """Selected slots or GPUs; None: not restricted."""


class HostFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selection of hosts by the user and by the launcher."""

    include: str | None = None
    """Value of `--include`, as written."""
    exclude: str | None = None
    gpu_type: str | None = None
    spread: bool = False
    """Distribute ranks evenly."""
    dropped: tuple[str, ...] = ()
    """Hosts that failed the preflight or were lost."""
    allow_fewer_ranks: bool = False
    """Accept fewer ranks than `-np` where slots are missing."""
    server_hosts: tuple[str, ...] = ()
    """Hosts of dedicated parameter servers: the user may name them, but no worker runs there."""

    @property
    def text(self) -> tuple[str, str | None]:
        """The option that filters, and its value."""
        return ("--include", self.include) if self.include is not None else ("--exclude", self.exclude)

    @property
    def is_empty(self) -> bool:
        """True if the user selected nothing."""
        return self.include is self.exclude is self.gpu_type is None


def parse_filter(text: str, option: str) -> dict[str, tuple[int, ...] | None]:
    """Parse the value of `--include` or `--exclude`.

    Args:
        text: The value.
        option: Name of the option, for messages.

    Returns:
        Indices by host in lower case; None for a whole host.

    Raises:
        ConfigError: The text does not follow the syntax; the message names the column.
    """
    chosen: dict[str, tuple[int, ...] | None] = {}
    position = 0
    for item in re.split(r"@(?![^\[]*\])", text):
        place = SourcePlace(option, column=position + 1)
        position += len(item) + 1
        if not item.strip():
            raise place.error("no host here", SYNTAX_HINT)
        names, indices = _split_indices(item.strip(), place)
        if "," in re.sub(r"\[[^\]]*\]", "", names):
            raise place.error(
                f"{shown(item.strip())} has a comma between hosts", "separate hosts by @: n1@n2, or n[1-2]"
            )
        for name in parse_expression(names, place).names:
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


def _split_indices(item: str, place: SourcePlace) -> tuple[str, tuple[int, ...] | None]:
    """Split at the last colon; colons inside brackets belong to an IPv6 address."""
    colon = item.find(":", item.rfind("]") + 1)
    if colon < 0:
        return item, None
    if not item[:colon].strip():
        raise place.error("no host before the indices", SYNTAX_HINT)
    if item.count(":", colon) > 1:
        raise place.error(f"{shown(item)} has too many colons", "write an IPv6 address in brackets: [fd00::1]:0,2")
    found: set[int] = set()
    for part in item[colon + 1 :].split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > 4095:  # a typing error
            raise place.right(colon + 1).error(f"{shown(part)} is not a valid index of a slot or GPU", SYNTAX_HINT)
        found.update(range(first, last + 1))
    return item[:colon].rstrip(), tuple(sorted(found))


def select_hosts(
    hosts: Sequence[Host], gpus: Mapping[str, Gpus | None], slots: Mapping[str, int], host_filter: HostFilter
) -> tuple[SelectedHost, ...]:
    """Return the hosts that take part, in the order of `hosts`.

    Args:
        hosts: Hosts of the list.
        gpus: GPUs by host, as far as known.
        slots: Number of ranks by host.
        host_filter: The selection.

    Raises:
        ConfigError: A host, index or GPU type does not exist, or no host is left.
    """
    if host_filter.include is not None and host_filter.exclude is not None:
        raise ConfigError("--include and --exclude are both given", hint="give one of them", code="option-conflict")
    if host_filter.gpu_type is not None:
        hosts = _of_gpu_type(hosts, gpus, host_filter.gpu_type)
    option, text = host_filter.text
    if text is None:
        selected = [SelectedHost(host=host, slots=slots[host.name]) for host in hosts]
    else:
        filters = parse_filter(text, option)
        names = {host.name.lower() for host in hosts}
        names |= {name.lower() for name in host_filter.server_hosts}
        if unknown := [name for name in filters if name not in names]:
            raise ConfigError(
                f"{option} names {name_hosts(unknown)}, which is not among the hosts",
                hint=f"there are {name_hosts([host.name for host in hosts])}",
                code="host-unknown",
            )
        taken = (_select_slots(host, gpus[host.name], slots[host.name], option, filters) for host in hosts)
        selected = [each for each in taken if each and each.slots]
        if not selected:
            raise ConfigError(f"{option} {text} leaves no host", hint="exclude fewer hosts", code="no-hosts")
    left = tuple(each for each in selected if each.host.name not in host_filter.dropped)
    if not left:
        raise ConfigError(
            f"no host is left: {name_hosts(host_filter.dropped)} failed, and all others are excluded",
            hint="see distrib-topo check, or exclude fewer hosts",
            code="no-hosts",
        )
    return left


def select_server_hosts(hosts: Sequence[Host], host_filter: HostFilter) -> tuple[Host, ...]:
    """Return the dedicated server hosts that take part: all, unless the filter names some.

    Args:
        hosts: Hosts with `role=server`.
        host_filter: The selection.

    Raises:
        ConfigError: The filter names single slots of such a host; its slots are interchangeable.
    """
    option, text = host_filter.text
    named = parse_filter(text, option) if text is not None else {}
    for host in hosts:
        if named.get(host.name.lower()) is not None:
            raise ConfigError(
                f"{option} names slots of {host.name}, which has role=server",
                hint="name the host without indices; --servers N sets the number of servers",
            )
    selected = [host for host in hosts if (host.name.lower() in named) == (option == "--include")]
    if option == "--include" and not selected:
        selected = list(hosts)
    return tuple(host for host in selected if host.name not in host_filter.dropped)


def _select_slots(
    host: Host, gpus: Gpus | None, slots: int, option: str, filters: Mapping[str, tuple[int, ...] | None]
) -> SelectedHost | None:
    including = option == "--include"
    if host.name.lower() not in filters:
        return None if including else SelectedHost(host=host, slots=slots)
    indices = filters[host.name.lower()]
    if indices is None:
        return SelectedHost(host=host, slots=slots) if including else None
    count = gpus.count if gpus and gpus.count else slots
    # Without slots and topology only the host itself can tell, at the start, whether it has the selected GPUs.
    is_unknown = host.slots is None and not (gpus and gpus.count)
    if is_unknown and not including:
        raise ConfigError(
            f"--exclude {host.name}:{_index_text(indices)}: the number of slots of {host.name} is not known",
            hint="write slots=N after it in the hostfile, or describe it in the topology",
        )
    if not is_unknown and indices[-1] >= count:
        what = "GPU" if gpus and gpus.count else "slot"
        raise ConfigError(
            f"{option} names {what} {indices[-1]} of {host.name}, which has {count} {what}(s)",
            hint=f"there are {_index_text(range(count))}" if count > 1 else f"there is only {what} 0",
        )
    if including:
        return SelectedHost(host=host, slots=len(indices), indices=indices)
    left = tuple(index for index in range(count) if index not in indices)[:slots]
    return SelectedHost(host=host, slots=len(left), indices=left)


def hosts_by_gpu_type(hosts: Sequence[Host], gpus: Mapping[str, Gpus | None]) -> dict[str, list[str]]:
    """Group host names by kind of GPU; hosts of unknown hardware are left out.

    Args:
        hosts: Hosts to group.
        gpus: GPUs by host, as far as known.
    """
    found: dict[str, list[str]] = {}
    for host in hosts:
        if known := gpus[host.name]:
            found.setdefault((known.kind or "unnamed GPU") if known.count else "CPU only", []).append(host.name)
    return found


def _of_gpu_type(hosts: Sequence[Host], gpus: Mapping[str, Gpus | None], wanted: str) -> list[Host]:
    found = hosts_by_gpu_type(hosts, gpus)
    members = {name for kind, names in found.items() if wanted.lower() in kind.lower() for name in names}
    if not wanted.strip() or not members:
        known = "; ".join(f"{kind}: {name_hosts(names)}" for kind, names in found.items())
        raise ConfigError(
            f"--gpu-type {wanted}: no host has such a GPU",
            hint=f"there are {known}"
            if known
            else "the GPUs of the hosts are not known; write a topology with distrib-topo show -H FILE --ask -o FILE.yaml",
            code="gpu-unknown",
        )
    return [host for host in hosts if host.name in members]


def mixed_gpu_note(found: Mapping[str, Sequence[str]]) -> str | None:
    """Return a note for a synchronous job on several kinds of GPU, None for one kind.

    Args:
        found: Result of `hosts_by_gpu_type`.
    """
    if len(found) < 2:
        return None
    kinds = "; ".join(f"{kind}: {name_hosts(names)}" for kind, names in found.items())
    return f"the hosts have different GPUs, and every step waits for the slowest ({kinds}); --gpu-type selects one kind"


def widen_to_max_slots(selected: Sequence[SelectedHost], wanted: int) -> tuple[SelectedHost, ...]:
    """Add slots evenly up to `max_slots` of each host, until there are enough.

    Args:
        selected: Hosts that take part.
        wanted: Number of ranks.

    Returns:
        The hosts with `wanted` slots in all; unchanged if `max_slots` does not suffice.
    """
    room = [(each.host.max_slots or 0) - each.slots if each.indices is None else 0 for each in selected]
    spare = [msgspec.structs.replace(each, slots=max(0, more)) for each, more in zip(selected, room, strict=True)]
    missing = wanted - sum(each.slots for each in selected)
    if missing > sum(each.slots for each in spare):
        return tuple(selected)
    added = {each.host.name: more for each, more in distribute_ranks(spare, missing, spread=True)}
    return tuple(msgspec.structs.replace(each, slots=each.slots + added.get(each.host.name, 0)) for each in selected)


def distribute_ranks(
    selected: Sequence[SelectedHost], wanted: int, *, spread: bool = False
) -> tuple[tuple[SelectedHost, int], ...]:
    """Return the number of ranks for each host that gets any.

    Args:
        selected: Hosts that take part.
        wanted: Number of ranks, at most the sum of the slots.
        spread: Distribute evenly, odd ranks to the first hosts; else fill one host after the other.
    """
    counts = [0] * len(selected)
    if not spread:
        for number, each in enumerate(selected):
            counts[number] = min(each.slots, wanted)
            wanted -= counts[number]
    while spread and wanted:
        free = [number for number, each in enumerate(selected) if counts[number] < each.slots]
        # As many whole rounds as the fullest host allows, then the odd ranks.
        rounds = min(wanted // len(free), min(selected[n].slots - counts[n] for n in free))
        for number in free if rounds else free[:wanted]:
            counts[number] += rounds or 1
            wanted -= rounds or 1
    return tuple((each, count) for each, count in zip(selected, counts, strict=True) if count)


def _index_text(numbers: Sequence[int]) -> str:
    """Format as `0,2` or `0-7`."""
    first, last = numbers[0], numbers[-1]
    whole = len(numbers) > 2 and list(numbers) == list(range(first, last + 1))
    return f"{first}-{last}" if whole else ",".join(map(str, numbers))
