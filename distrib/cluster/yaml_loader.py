"""YAML with line numbers: the core schema of YAML 1.2, converted to msgspec structs, errors with line and path.

`2:1` is text (YAML 1.1 reads 121) and `1e-5` a number. `yes` and `no` are booleans, as users write them.
"""

from __future__ import annotations

import difflib
import re
import typing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from distrib.errors import FieldError, TopologyError
from distrib.utils.files import UnreadableFileError
from distrib.utils.files import read_text as read_text_file

MAX_BYTES = 64 * 2**20
MAX_VALUES = 10_000_000
"""More values can only come from aliases of aliases ("billion laughs")."""
MAX_DEPTH = 40
"""Deeper nesting would overflow the C stack of libyaml's binding."""

T = TypeVar("T")

_TYPE_NAMES = {"object": "a mapping (`key: value`)", "array": "a list", "str": "text", "int": "a whole number",
               "float": "a number", "bool": "yes or no", "null": "nothing"}  # fmt: skip
_EXAMPLES = {"rate": "100Gb/s, 10 GbE or HDR", "uplink": "800Gb/s or 4 x HDR", "memory": "512GiB",
             "nvlink": "NVLink3 x12", "pcie": "PCIe4 x16", "hosts": "gpu[01-16]"}  # fmt: skip
_SEE_EXAMPLES = "see hostfiles/ for commented examples"
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE):  # type: ignore[misc]  # with or without libyaml
    """PyYAML's safe loader with the implicit types of YAML 1.2."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {}


for _tag, _pattern in {
    "null": r"~?|null|Null|NULL",
    "bool": r"(?i:true|false|yes|no|on|off)",
    "int": r"[-+]?(0|[1-9][0-9]{0,17})",
    "float": r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]{1,3})?|[0-9]+[eE][-+]?[0-9]{1,3}|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
    "merge": r"<<",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None)


class Document:
    """A YAML document: plain values in `data`, and the line of each value."""

    def __init__(self, source: str, root: yaml.Node | None, data: Any) -> None:
        self.source = source
        self.data = data
        self._root = root

    def line(self, path: str) -> int:
        """Find the line of a value.

        Args:
            path: Such as `$.nodes[0].gpus`.

        Returns:
            The line, from 1, of its key, or of the deepest existing part of the path.
        """
        node, line = self._root, 1
        for part in _split_path(path):
            found = None
            if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                found = node.value[part], node.value[part]
            elif isinstance(node, yaml.MappingNode):  # own keys stand behind merged ones
                found = next((pair for pair in reversed(node.value) if pair[0].value == str(part)), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        return line

    def error(self, path: str, what: str, hint: str = "") -> TopologyError:
        """Build the error for a value, with file, line and path.

        Args:
            path: Such as `$.nodes[0].gpus`.
            what: The problem.
            hint: The advice.

        Returns:
            The error, to be raised.
        """
        return TopologyError(f"{path}: {what}", source=self.source, line=self.line(path), hint=hint)


def read_topology_text(path: str | Path) -> str:
    """Read the text of a topology file without changing its line ends.

    Args:
        path: The file.

    Returns:
        The text.

    Raises:
        TopologyError: The file cannot be read.
    """
    try:
        return read_text_file(path, "topology file", "see hostfiles/ for examples", MAX_BYTES)
    except UnreadableFileError as problem:
        raise TopologyError(problem.what, source=str(path), line=problem.line, hint=problem.hint) from None


def parse_yaml(text: str, source: str) -> Document:
    """Parse one YAML document.

    Args:
        text: The document.
        source: The name of the file in errors.

    Returns:
        The document.

    Raises:
        TopologyError: The text is not valid YAML, has a key twice, or is nested too deeply.
    """
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise TopologyError("is nested too deeply", source=source, line=event.start_mark.line + 1)  # type: ignore[union-attr]  # set by every parser
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return Document(source, None, None)
            _count_values(root, source, {})
            return Document(source, root, loader.construct_document(root))
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read")
        line = mark.line + 1 if mark else 0
        shown = next(iter(text.splitlines()[line - 1 : line]), "") if line else ""
        hint = _SEE_EXAMPLES
        if shown.lstrip(" ").startswith("\t") or "tab" in what:
            hint = "indent with spaces, not tabs"
        elif re.search(r"[{,].*\w\[[0-9]", shown):
            hint = 'inside { } a range needs quotes: {hosts: "gpu[01-16]"}'
        raise TopologyError(f"is not valid YAML: {what}", source=source, line=line, hint=hint) from None
    except ValueError as error:  # of a value whose tag does not fit, such as !!int x
        raise TopologyError(f"is not valid YAML: {error}", source=source, hint=_SEE_EXAMPLES) from None


def _count_values(node: yaml.Node, source: str, counts: dict[int, int]) -> int:
    """Count the values below a node, aliases expanded; refuse duplicate keys and aliases that multiply or contain themselves."""

    def error(at: yaml.Node, what: str, hint: str) -> TopologyError:
        return TopologyError(what, source=source, line=at.start_mark.line + 1, hint=hint)

    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in counts:
        counts[id(node)] = MAX_VALUES  # until it is known: an alias of itself is never finished
        first_lines: dict[str, int] = {}
        children = node.value
        if isinstance(node, yaml.MappingNode):
            children = [value for _, value in node.value]
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise error(key, "a key must be a word", _SEE_EXAMPLES)
                line = first_lines.setdefault(key.value, key.start_mark.line + 1)
                if line != key.start_mark.line + 1 and key.value != "<<":
                    raise error(key, f"the key `{key.value}` is duplicate, first on line {line}", "drop one of them")
        counts[id(node)] = 1 + sum(_count_values(child, source, counts) for child in children)
    if counts[id(node)] >= MAX_VALUES:
        raise error(node, f"aliases expand to more than {MAX_VALUES:,} values", "write the values out")
    return counts[id(node)]


def convert_document(document: Document, kind: type[T]) -> T:
    """Convert a document to a struct.

    Args:
        document: The document.
        kind: A msgspec struct.

    Returns:
        The struct.

    Raises:
        TopologyError: A field is unknown, missing or of the wrong type.
    """
    try:
        return msgspec.convert(document.data, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `")
        path = path.removesuffix("`").removeprefix("key in ") or "$"
        cause = error.__cause__
    if isinstance(cause, FieldError):
        raise document.error(f"{path}.{cause.field}".replace(".[", "["), what)
    quoted = re.findall("`(.*?)`", what)
    if what.startswith("Object contains unknown field"):
        near = difflib.get_close_matches(quoted[0], _field_names(kind), n=1, cutoff=0.5)
        raise document.error(
            f"{path}.{quoted[0]}", "unknown field", f"did you mean {near[0]}?" if near else _SEE_EXAMPLES
        )
    if what.startswith("Object missing required field"):
        raise document.error(path, f"`{quoted[0]}` is missing", _SEE_EXAMPLES)
    if not what.startswith("Expected") or len(quoted) < 2:
        raise document.error(path, what[:1].lower() + what[1:] if what.startswith("Expected") else what)
    value = document.data
    for part in _split_path(path):
        value = value[part]
    expected = " or ".join(_TYPE_NAMES.get(name, f"`{name}`") for name in quoted[0].split(" | ") if name != "null")
    observed = {dict: "a mapping", list: "a list", type(None): "nothing"}.get(type(value)) or repr(value)[:60]
    example = _EXAMPLES.get(re.sub(r".*\.|\[.*", "", path))
    hint = f"write it such as {example}" if example else _SEE_EXAMPLES
    raise document.error(path, f"expected {expected}, not {observed}", hint)


def _split_path(path: str) -> list[str | int]:
    """Split `$.nodes[0].gpus` into `nodes`, 0, `gpus`; stop at `[...]`, the key of a mapping."""
    parts = re.findall(r"\.([\w$][\w-]*)|\[([0-9]+)\]", path.partition("[...]")[0].removeprefix("$"))
    return [name or int(index) for name, index in parts]


def _field_names(kind: Any) -> list[str]:
    """List the fields of a struct and of all structs in it."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        own = [field.encode_name for field in msgspec.structs.fields(kind)]
        return own + [name for field in own if field in hints for name in _field_names(hints[field])]
    return [name for inner in typing.get_args(kind) for name in _field_names(inner)]
