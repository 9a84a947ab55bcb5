"""Line grammar of hostfiles: tokens, host expressions and `key=value` settings, common to all dialects."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from distrib.cluster.host_expression import Expression, parse_expression, split_list
from distrib.cluster.hosts import SourcePlace, shown

# `//` begins a comment, except inside a path, which ends at a blank only.
_TOKEN = re.compile(
    r"""
      (?P<newline> \r\n? | \n )
    | (?P<blank>   [^\S\r\n]+ )
    | (?P<block>   /\* (?s:.*?) \*/ )
    | (?P<open>    /\* )
    | (?P<comment> \# [^\r\n]* )
    | (?P<slashes> // [^\r\n]* )
    | (?P<equals>  = )
    | (?P<quoted>  " [^"\r\n]* " )
    | (?P<path>    / \S* )
    | (?P<word>    (?: [^\s=\#"/] | / (?![/*]) )+ )
    | (?P<quote>   " )
    """,
    re.VERBOSE,
)


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    place: SourcePlace


class HostfileLine(NamedTuple):
    """One line of a hostfile: host expressions with their places, and settings by their canonical names."""

    place: SourcePlace
    expressions: tuple[tuple[Expression, SourcePlace], ...]
    settings: Mapping[str, tuple[str, SourcePlace]]
    has_c_comment: bool
    """True if a comment in C style stands on or before the line."""


def parse_lines(text: str, source: str, spellings: Mapping[str, str]) -> Iterator[HostfileLine]:
    """Parse the lines of a hostfile that name hosts.

    Args:
        text: The file.
        source: Its name in errors.
        spellings: Every spelling of a setting, with `_` for `-`, and its canonical name.

    Yields:
        The lines in order.

    Raises:
        HostfileError: A line is invalid; with line and column.
    """
    for tokens, has_c_comment in _token_lines(text, source):
        head, pairs = _split_head(tokens)
        hosts = text[head[0].start : head[-1].start + len(head[-1].text)]
        expressions = tuple((parse_expression(item, at), at) for item, at in split_list(hosts, head[0].place))
        yield HostfileLine(head[0].place, expressions, _read_settings(pairs, spellings), has_c_comment)


def _token_lines(text: str, source: str) -> Iterator[tuple[list[_Token], bool]]:
    """Split the text into lines of tokens without blanks and comments."""
    line, line_start = 1, 0
    tokens: list[_Token] = []
    has_c_comment = False
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        place = SourcePlace(source, line, match.start() - line_start + 1)
        if kind == "open":
            raise place.error("this comment is never closed", "close it with */")
        if kind == "quote":
            raise place.error("this quotation mark is never closed", 'close it with "')
        has_c_comment = has_c_comment or kind in ("block", "slashes")
        if kind in ("equals", "quoted", "path", "word"):
            tokens.append(_Token(kind, match[0], match.start(), place))
        # A line ends with a newline, also inside a comment.
        if kind in ("newline", "block") and (ends := list(re.finditer(r"\r\n?|\n", match[0]))):
            line, line_start = line + len(ends), match.start() + ends[-1].end()
            if tokens:
                yield tokens, has_c_comment
            tokens = []
    if tokens:
        yield tokens, has_c_comment


def _split_head(tokens: list[_Token]) -> tuple[list[_Token], list[tuple[_Token, _Token]]]:
    """Split a line into its host expressions and its pairs of key and value."""
    equals = [token.kind == "equals" for token in tokens] + [False, False]
    if True not in equals:
        return tokens, []
    start = equals.index(True) - 1
    if start < 1:
        raise tokens[0].place.error(f"no host before {shown(tokens[0].text)}=", "write such as: node1 slots=8")
    pairs = []
    for at in range(start, len(tokens), 3):
        key = tokens[at]
        if not equals[at + 1]:
            raise key.place.error(f"did not expect {shown(key.text)} here", "settings are key=value, such as slots=8")
        if at + 2 >= len(tokens) or equals[at + 2] or equals[at + 3]:
            raise tokens[at + 1].place.error(f"{shown(key.text)} has no value", f"write such as: {key.text[:60]}=8")
        pairs.append((key, tokens[at + 2]))
    return tokens[:start], pairs


def _read_settings(
    pairs: list[tuple[_Token, _Token]], spellings: Mapping[str, str]
) -> dict[str, tuple[str, SourcePlace]]:
    values: dict[str, tuple[str, SourcePlace]] = {}
    for key, value in pairs:
        setting = spellings.get(key.text.replace("-", "_"))
        if setting is None:
            raise key.place.error(
                f"unknown setting {shown(key.text)}", _suggestion(key.text, spellings), code="hostfile-unknown-setting"
            )
        if setting in ("slots", "max_slots", "port") and "," in value.text:
            raise value.place.error(f"did not expect a comma in {shown(value.text)}", "write one host a line")
        if setting in values:
            raise key.place.error(
                f"{setting} is given twice for this host", "drop one of them", code="hostfile-duplicate-setting"
            )
        values[setting] = value.text.strip('"') if value.kind == "quoted" else value.text, value.place
    return values


def _suggestion(key: str, spellings: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(key.lower().replace("-", "_")[:60], spellings, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(dict.fromkeys(spellings.values()))}"
