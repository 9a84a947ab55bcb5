"""Text of the `measured:` section of a topology file: encoding and fast decoding.

Each link is one line of JSON, which is YAML, too. The section is decoded without a YAML parser: a probe of 32 hosts has half a million
numbers.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from distrib.cluster.measurements import Measurements
from distrib.utils.json_text import decode_json

MARK = "measured:  # by distrib-topo probe, which replaces this part as a whole"

_KEY = re.compile(r"^(measured|'measured'|\"measured\")[ \t]*:(?=[ \t\r\n]|\Z)", re.MULTILINE)
_LISTS = ("machines", "pairs", "inside", "collectives")


def split_measured(text: str) -> tuple[str, str, str]:
    """Split a topology file at its `measured` section.

    Blank lines and comments at the left margin after the section belong to the following text.

    Args:
        text: The file.

    Returns:
        The text before, the section and the text after; two empty texts without the section.
    """
    match = _KEY.search(text)
    if not match:
        return text, "", ""
    end = position = match.start()
    for number, line in enumerate(text[match.start() :].splitlines(keepends=True)):
        if number and line[:1] not in (" ", "\t", "\r", "\n", "#"):
            break
        position += len(line)
        if not number or (line[:1] in (" ", "\t") and line.strip()):
            end = position
    return text[: match.start()], text[match.start() : end], text[end:]


def encode_measured(measured: Measurements, newline: str = "\n") -> str:
    """Encode the section.

    Args:
        measured: The measurements.
        newline: The line end of the file.
    """
    lines = [MARK]
    built = msgspec.to_builtins(measured)
    for key, value in built.items():
        if key in _LISTS:
            lines.append(f"  {key}:")
            lines += [f"    - {_json(item)}" for item in value]
        else:
            lines.append(f"  {key}: {_json(value)}")
    return newline.join(lines) + newline


def decode_measured(part: str) -> Measurements | None:
    """Decode a section of `encode_measured`.

    Args:
        part: The section.

    Returns:
        The measurements; None for a section that was edited or written otherwise.
    """
    lines = part.splitlines()
    if not lines or lines[0] != MARK:
        return None
    values: dict[str, str] = {}
    items: dict[str, list[str]] = {}
    key = ""
    for line in lines[1:]:
        if key in items and line.startswith("    - "):
            items[key].append(line[6:])
            continue
        match = re.fullmatch(r"  ([a-z_]+):(?: (.+))?", line)
        if not match or match[1] in values or match[1] in items:
            return None
        key = match[1]
        if match[2]:
            values[key] = match[2]
        else:
            items[key] = []
    values |= {key: f"[{','.join(lines)}]" for key, lines in items.items()}
    document = "{" + ",".join(f'"{key}":{value}' for key, value in values.items()) + "}"
    try:
        return decode_json(document, Measurements)
    except msgspec.DecodeError:
        return None


def _json(value: Any) -> str:
    """Encode as JSON that is valid YAML 1.1, too: PyYAML takes 1e-05 for text."""
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_json(str(key))}: {_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_json, value)) + "]"
    if isinstance(value, str):
        # YAML has no surrogate escapes: printable text is written as it is.
        return json.dumps(value, ensure_ascii=not value.isprintable())
    return json.dumps(value)
