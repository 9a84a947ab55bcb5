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
from distrib.utils.files import UnreadableFileError, read_text

T = TypeVar("T")

_SEE_EXAMPLES = "see hostfiles/ for commented examples"
_TYPE_NAMES = {"object": "a mapping (`key: value`)", "array": "a list", "str": "text", "int": "a whole number",
               "float": "a number", "bool": "yes or no", "null": "nothing"}  # fmt: skip
_EXAMPLES = {"rate": "100Gb/s, 10 GbE or HDR", "uplink": "800Gb/s or 4 x HDR", "memory": "512GiB"}
_CORE_SCHEMA = {
    "null": r"~?|null|Null|NULL",
    "bool": r"(?i:true|false|yes|no|on|off)",
    "int": r"[-+]?(0|[1-9][0-9]{0,17})",
    "float": r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]{1,3})?|[0-9]+[eE][-+]?[0-9]{1,3}|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
    "merge": r"<<",
}
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE):  # type: ignore[misc]  # with or without libyaml
    """PyYAML's safe loader with the implicit types of YAML 1.2, and without duplicate keys."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        first_lines: dict[str, int] = {}
        for key, _ in node.value:
            line = first_lines.setdefault(str(key.value), key.start_mark.line + 1)
            if line != key.start_mark.line + 1 and key.value != "<<":
                what = f"the key `{key.value}` is duplicate, first on line {line}"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > 100_000:  # ten levels of merges (`<<`) in merges would need hours
            what = f"merged into a mapping of {len(node.value)} keys, expected at most 100000"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)


for _tag, _pattern in _CORE_SCHEMA.items():
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

    def error(self, path: str, what: str, hint: str = "", code: str = "") -> TopologyError:
        """Build the error for a value, with file, line and path.

        Args:
            path: Such as `$.nodes[0].gpus`.
            what: The problem.
            hint: The advice.
            code: Kind of the error; empty: `topology-value`.
        """
        return TopologyError(f"{path}: {what}", source=self.source, line=self.line(path), hint=hint, code=code)


def read_topology_text(path: str | Path) -> str:
    """Read the text of a topology file without changing its line ends.

    Args:
        path: The file.

    Raises:
        TopologyError: The file cannot be read.
    """
    try:
        return read_text(
            path, "topology file", "check the path; distrib-topo show --ask -o FILE drafts one", max_bytes=64 << 20
        )
    except UnreadableFileError as problem:
        raise TopologyError(
            problem.what, source=str(path), line=problem.line, hint=problem.hint, code="topology-unreadable"
        ) from None


def parse_yaml(text: str, source: str) -> Document:
    """Parse one YAML document.

    Args:
        text: The document.
        source: The name of the file in errors.

    Raises:
        TopologyError: The text is not valid YAML, or has a key twice.
    """
    try:
        _check_depth(text, source)
        loader = _Loader(text)
        root = loader.get_single_node()
        return Document(source, root, loader.construct_document(root) if root else None)
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
        raise TopologyError(
            f"is not valid YAML: {what}", source=source, line=line, hint=hint, code="topology-syntax"
        ) from None
    except (ValueError, RecursionError) as error:  # of a value whose tag does not fit, such as !!int x; of deep nesting
        raise TopologyError(
            f"is not valid YAML: {error}", source=source, hint=_SEE_EXAMPLES, code="topology-syntax"
        ) from None


def _check_depth(text: str, source: str) -> None:
    """Refuse deeply nested text, which would overflow the C stack."""
    depth = line = 0
    for event in yaml.parse(text, Loader=_BASE):
        line = event.start_mark.line + 1 if event.start_mark else line
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > 100:
            raise TopologyError(
                "is not valid YAML: nested more than 100 levels deep", source=source, line=line, code="topology-syntax"
            )


def convert_document(document: Document, kind: type[T]) -> T:
    """Convert a document to a struct.

    Args:
        document: The document.
        kind: A msgspec struct.

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
    expected, *observed = re.findall("`(.*?)`", what) or [""]
    if what.startswith("Object contains unknown field"):
        near = difflib.get_close_matches(expected, _field_names(kind), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else _SEE_EXAMPLES
        raise document.error(f"{path}.{expected}", "unknown field", hint, code="topology-unknown-field")
    if what.startswith("Object missing required field"):
        raise document.error(path, f"`{expected}` is missing", _SEE_EXAMPLES, code="topology-missing-field")
    if not observed:
        raise document.error(path, what)
    allowed = [_TYPE_NAMES.get(name, f"`{name}`") for name in expected.split(" | ") if name != "null"]
    what = f"expected {' or '.join(allowed)}, not {_TYPE_NAMES.get(observed[0], observed[0])}"
    example = _EXAMPLES.get(path.rpartition(".")[2])
    raise document.error(path, what, f"write it such as {example}" if example else _SEE_EXAMPLES)


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
