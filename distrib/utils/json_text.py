"""JSON with any text. Python keeps bytes of file names and arguments that are not UTF-8 as lone surrogates, which msgspec refuses."""

from __future__ import annotations

import json
from typing import TypeVar

import msgspec

T = TypeVar("T")


def encode_json(value: object, indent: int = 0) -> bytes:
    """Encode a value as JSON. A byte that is not UTF-8 becomes an escape: 0xE9 becomes `\\udce9`, as in `os.fsdecode`.

    Args:
        value: Structs, lists, dicts, numbers and strings.
        indent: Spaces per level; 0 for one line.

    Returns:
        The JSON text.
    """
    try:
        text = msgspec.json.encode(value)
    except UnicodeEncodeError:
        with_nan = json.dumps(msgspec.to_builtins(value, str_keys=True))
        plain = json.loads(with_nan, parse_constant=lambda _: None)  # as msgspec does
        return json.dumps(plain, indent=indent or None, separators=None if indent else (",", ":")).encode()
    return msgspec.json.format(text, indent=indent) if indent else text


def decode_json(text: str | bytes, kind: type[T]) -> T:
    """Decode what `encode_json` wrote.

    Args:
        text: The JSON text.
        kind: Type of the value.

    Returns:
        The value.

    Raises:
        msgspec.DecodeError: The text is not JSON, or has another type.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:  # a lone surrogate, or no JSON
        try:
            return msgspec.convert(json.loads(text), kind, str_keys=True)
        except msgspec.ValidationError:
            raise
        except (ValueError, RecursionError):
            raise msgspec.DecodeError(str(error)) from None
