"""YAML read with care: where every value stands, no key twice, no bombs; and typed, with errors by line and path.

The dialect is YAML 1.2's core: `2:1` is text (1.1 makes it 121), `1e-5` a number, a date text; `yes` and `no` count as booleans,
as people write them so.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from distrib.errors import TopologyError
from distrib.utils.files import UnreadableFileError
from distrib.utils.files import read_text as read_text_file

MAX_BYTES = 64 * 2**20
MAX_REPEATED = 100_000
"""More values than this behind aliases come from aliases of aliases, not from a person."""
MAX_DEPTH = 40

T = TypeVar("T")
PathPart = str | int

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULLS = {"", "~", "null", "Null", "NULL"}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]{1,3})?|[0-9]+[eE][-+]?[0-9]{1,3})")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "map", "int", "float", "bool", "null")}
_WHERE = re.compile(r"(?P<what>.*?)(?: - at `(?P<key>key in )?(?P<path>\$[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([\w$][\w-]*)|\[([0-9]+|\.\.\.)\]")
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class FieldError(ValueError):
    """Raised while a struct is made: `field` is the path, from that struct on, of what is wrong."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(what)
        self.field = field


class _Loader(_BASE):  # type: ignore[misc]  # whichever of the two there is
    """PyYAML's, without the implicit types of YAML 1.1."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {}


class Document:
    """A YAML file: plain values in `data`, and the line of each."""

    def __init__(self, source: str, root: yaml.Node | None, data: Any) -> None:
        self.source = source
        self.data = data
        self._root = root

    def line(self, path: str) -> int:
        """The line, from 1, of what stands at a path such as `$.nodes[0].gpus`, or of the deepest part there is."""
        node, line = self._root, 1
        for part in split_path(path):
            found = _child(node, part) if node is not None else None
            if found is None:
                break
            node, line = found
        return line

    def error(self, path: str, what: str, hint: str = "") -> TopologyError:
        """What is wrong at a path, with file and line."""
        return TopologyError(f"{path}: {what}", source=self.source, line=self.line(path), hint=hint)


def read_text(path: str | Path) -> str:
    """The text of a file, its line ends as they are. Raises TopologyError where there is none."""
    source = str(path)
    try:
        return read_text_file(path, "topology file", "see hostfiles/ for examples", MAX_BYTES)
    except UnreadableFileError as problem:
        raise TopologyError(problem.what, source=source, line=problem.line, hint=problem.hint) from None


def parse(text: str, source: str) -> Document:
    """The one document in `text`. Raises TopologyError where it is no YAML that can be trusted."""
    try:
        _check_depth(text, source)
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise _no_yaml(error, text, source) from None
    return Document(source, root, _Builder(source).build(root, 0) if root is not None else None)


def typed(document: Document, kind: type[T]) -> T:
    """The document as a struct. Raises TopologyError with line and path."""
    try:
        return msgspec.convert(document.data, kind)
    except msgspec.ValidationError as error:
        raise _explain(error, document, kind) from None


def split_path(path: str) -> list[PathPart]:
    """`$.nodes[0].gpus` as `nodes`, 0, `gpus`; ends where the path is no longer exact."""
    parts: list[PathPart] = []
    for name, index in _STEP.findall(path.removeprefix("$")):
        if index == "...":
            break
        parts.append(name or int(index))
    return parts


def _check_depth(text: str, source: str) -> None:
    """Refuse what is nested so deeply that composing it, which libyaml's binding does on the C stack, would crash."""
    loader, depth = _Loader(text), 0
    try:
        while loader.check_event():
            event = loader.get_event()
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > MAX_DEPTH:
                raise TopologyError("is nested too deeply", source=source, line=event.start_mark.line + 1)
    finally:
        loader.dispose()


class _Builder:
    """From nodes to plain values. Aliases are followed, and what they stand for is counted each time."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._seen: set[int] = set()
        self._repeated = 0

    def build(self, node: yaml.Node, depth: int, *, repeated: bool = False) -> Any:
        if isinstance(node, yaml.CollectionNode):
            repeated = repeated or id(node) in self._seen
            self._seen.add(id(node))
        self._repeated += repeated
        if self._repeated > MAX_REPEATED:
            raise self._error(
                node, f"aliases stand for more than {MAX_REPEATED:,} values", "they multiply each other; write them out"
            )
        if depth > MAX_DEPTH:
            raise self._error(node, "is nested too deeply", "an alias may not hold itself")
        if node.tag not in _PLAIN_TAGS:
            raise self._error(node, f"the tag {node.tag} means nothing here", "leave it out")
        if isinstance(node, yaml.ScalarNode):
            return node.value if node.style else _plain(node.value)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, depth + 1, repeated=repeated) for item in node.value]
        found: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, "a key must be a word")
            if key.value == "<<" and not key.style:
                self._merge(merged, value, depth, repeated)
                continue
            if key.value in found:
                raise self._error(
                    key,
                    f"the key `{key.value}` stands here twice, first on line {lines[key.value]}",
                    "drop one of them",
                )
            lines[key.value] = key.start_mark.line + 1
            found[key.value] = self.build(value, depth + 1, repeated=repeated)
        return {**merged, **found}

    def _merge(self, merged: dict[str, Any], node: yaml.Node, depth: int, repeated: bool) -> None:
        """`<<: *other`: the other's keys, where there are no own ones."""
        for item in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            value = self.build(item, depth + 1, repeated=repeated)
            if not isinstance(value, dict):
                raise self._error(item, "`<<` must name a mapping")
            for key, inner in value.items():
                merged.setdefault(key, inner)

    def _error(self, node: yaml.Node, what: str, hint: str = "") -> TopologyError:
        return TopologyError(what, source=self._source, line=node.start_mark.line + 1, hint=hint)


def _plain(text: str) -> Any:
    if text in _NULLS:
        return None
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _child(node: yaml.Node, part: PathPart) -> tuple[yaml.Node, int] | None:
    """A part of a node, and the line on which a person looks for it: that of its key."""
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part].start_mark.line + 1
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in node.value:
        if key.value == str(part):
            return value, key.start_mark.line + 1
    for key, value in node.value:
        if key.value == "<<":
            for item in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if found := _child(item, part):
                    return found
    return None


def _line_at(text: str, position: int) -> int:
    """The line of a reader's position: libyaml counts bytes, PyYAML's own reader characters."""
    if hasattr(yaml, "CSafeLoader"):
        return text.encode()[:position].count(b"\n") + 1
    return text.count("\n", 0, position) + 1


def _no_yaml(error: yaml.YAMLError, text: str, source: str) -> TopologyError:
    mark = getattr(error, "problem_mark", None)
    what = str(getattr(error, "problem", None) or "").strip() or "cannot be read"
    line = mark.line + 1 if mark else 0
    if isinstance(error, yaml.reader.ReaderError):
        line = _line_at(text, error.position) if isinstance(error.position, int) else 0
        what = str(error.reason)
    lines = text.splitlines()
    shown = lines[line - 1] if 0 < line <= len(lines) else ""
    hint = "see hostfiles/ for commented examples"
    if re.match(r"\s*\t", shown) or "'\\t'" in what or "tab" in what:
        hint = "indent with spaces, not tabs"
    elif re.search(r"[{,].*\w\[[0-9]", shown):
        hint = 'inside { } a range needs quotes: {hosts: "gpu[01-16]"}'
    elif "expected a single document" in str(error):
        what, hint = "holds more than one document", "take away the line `---` between them"
    return TopologyError(f"is no YAML: {what}", source=source, line=line, hint=hint)


_WORDS = (
    (r"`object`", "a mapping (`key: value`)"),
    (r"`array`", "a list"),
    (r"`str`", "text"),
    (r"`int`", "a whole number"),
    (r"`float`", "a number"),
    (r"`bool`", "yes or no"),
    (r"`null`", "nothing"),
)
_UNITS = {
    "rate": "such as 100Gb/s, 10 GbE or HDR",
    "uplink": "such as 800Gb/s or 4 x HDR",
    "memory": "such as 512GiB",
    "nvlink": "such as NVLink3 x12",
    "pcie": "such as PCIe4 x16",
    "hosts": "a name or a range, such as gpu[01-16]; several with commas between them",
}


def _explain(error: msgspec.ValidationError, document: Document, kind: Any) -> TopologyError:
    match = _WHERE.fullmatch(str(error))
    assert match is not None  # it matches any text
    what, path = match["what"], match["path"] or "$"
    if isinstance(error.__cause__, FieldError):
        return document.error(f"{path}.{error.__cause__.field}".replace(".[", "["), what)
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        known = _fields_at(kind, split_path(path))
        near = difflib.get_close_matches(unknown[1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        return document.error(f"{path}.{unknown[1]}", "is not known here", hint)
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        return document.error(path, f"`{missing[1]}` is missing", "see hostfiles/ for commented examples")
    value: Any = document.data
    for part in split_path(path):
        value = value[part]
    got = re.fullmatch(r"Expected `(.*)`, got `(\w+)`", what)
    if got:
        wanted = " or ".join(f"`{word}`" for word in got[1].split(" | ") if word != "null")
        for code, words in _WORDS:
            wanted = wanted.replace(code, words)
        shown = {dict: "a mapping", list: "a list", type(None): "nothing"}.get(type(value)) or repr(value)
        field = [part for part in split_path(path) if isinstance(part, str)][-1:]
        hint = (
            f"write it {_UNITS[field[0]]}" if field and field[0] in _UNITS else "see hostfiles/ for commented examples"
        )
        return document.error(path, f"expected {wanted}, not {shown[:60]}", hint)
    return document.error(path, what[:1].lower() + what[1:] if what.startswith("Expected") else what)


def _fields_at(kind: Any, path: list[PathPart]) -> list[str]:
    """The names of the fields of the struct that `path` leads to from the struct `kind`."""
    for part in path:
        if isinstance(part, str):
            hints = typing.get_type_hints(kind)
            kind = _struct_in(hints.get(part))
        if kind is None:
            return []
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def _struct_in(kind: Any) -> Any:
    """The struct in a type such as `tuple[Nic, ...]` or `Gpus | None`."""
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias):
        return kind if issubclass(kind, msgspec.Struct) else None
    return next((found for inner in typing.get_args(kind) if (found := _struct_in(inner))), None)
