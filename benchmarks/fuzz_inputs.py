"""Mutations of valid samples, and samples from types, options, docs and tests. Used by `fuzz.py`."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from msgspec import inspect

ROOT = Path(__file__).parents[1]
OUT_OF_RANGE = (
    "0",
    "-1",
    "1e999",
    "nan",
    "-inf",
    "9" * 25,
    "4294967296",
    "1e-320",
    "0x10",
    "٣",
    "1_000",
    "²",
    "9" * 5000,
    "",
)
WORDS = (
    *OUT_OF_RANGE, "\0", "\n", "\r", "\t", " ", "\udce9", "\ud800", "é", "😀", "\u202e", "\ufeff", "\x1b[2J", "null", "true", "{}", "[]",
    "[", "]", "{", "}", ":", ",", "=", "@", "#", '"', "'", "\\", "%", "--", "-", "..", "/", "~", "~nouser/x", "$HOME", "&a", "*a",
    "!!python/object:os.system", "!!int x", "/dev/null", "a" * 5000, "[1-999999]", "[0-9][0-9][0-9][0-9][0-9]", "[" * 3000, "{\"a\":" * 3000,
)  # fmt: skip
"""Text that mutations insert."""


def mutate(choice: random.Random, samples: Sequence[str]) -> str:
    """Change a sample at one to four places."""
    text = choice.choice(samples)
    for _ in range(choice.choice((0, 1, 1, 1, 2, 2, 4))):
        start = choice.randint(0, len(text))
        end = min(len(text), start + choice.choice((0, 1, 1, 2, 5, 20, 200)))
        numbers = [match.span() for match in re.finditer(r"\d+(\.\d+)?", text)]
        values = [match.span() for match in re.finditer(r'(?<=[:=] )\S[^,\n}]*|(?<=[:=,\[])[^\s,\]}]+|"[^"]*"', text)]
        kind = choice.randrange(7)
        if kind == 0 and numbers:
            start, end = choice.choice(numbers)
            new = choice.choice(OUT_OF_RANGE)
        elif kind in (1, 2) and values:
            start, end = choice.choice(values)
            new = choice.choice((*WORDS, '"x"', "[1]", '{"a": 1}', '{"": null}'))
        elif kind == 3:
            new = text[start:end] * choice.choice((2, 3, 1000 if end - start < 9 else 2))
        elif kind == 4:
            other = choice.choice(samples)
            new, end = other[choice.randint(0, len(other)) :], len(text) if choice.random() < 0.5 else end
        elif kind == 5:
            new = ""
        else:
            new = (
                choice.choice(WORDS)
                if choice.random() < 0.7
                else chr(choice.choice((1, 127, 0xDC80, 0xDCFF, 0x3000, 0x10FFFF)))
            )
        text = text[:start] + new + text[end:]
    return text


def example(kind: Any, depth: int = 0) -> Any:
    """Build plain values that msgspec converts to a type."""
    info = kind if isinstance(kind, inspect.Type) else inspect.type_info(kind)
    if isinstance(info, inspect.StructType):
        values = {each.encode_name: example(each.type, depth + 1) for each in info.fields if depth < 4 or each.required}
        values |= {info.tag_field: info.tag} if info.tag_field else {}
        return list(values.values()) if info.array_like else values
    if isinstance(info, inspect.UnionType):
        return example(next(each for each in info.types if not isinstance(each, inspect.NoneType)), depth)
    if isinstance(info, inspect.LiteralType):
        return info.values[0]
    if isinstance(info, (inspect.VarTupleType, inspect.ListType, inspect.SetType)):
        return [example(info.item_type, depth + 1)]
    if isinstance(info, inspect.TupleType):
        return [example(each, depth + 1) for each in info.item_types]
    if isinstance(info, inspect.DictType):
        return {str(example(info.key_type)): example(info.value_type, depth + 1)}
    plain = {
        inspect.IntType: 1,
        inspect.FloatType: 1.0,
        inspect.BoolType: True,
        inspect.StrType: "n1",
        inspect.BytesType: "AAAA",
    }
    return plain.get(type(info))


def examples(*kinds: Any) -> list[str]:
    return [
        json.dumps(example(kind))
        .replace('"format": "n1"', '"format": "fp32"')
        .replace('"mode": "n1"', '"mode": "sync"')
        for kind in kinds
    ]


def binary(text: str) -> bytes:
    """Return the bytes of a text; other lone surrogates than those of bytes become `?`."""
    return (
        text.encode("utf-8", "surrogateescape")
        if not re.search("[\ud800-\udc7f\udd00-\udfff]", text)
        else text.encode("utf-8", "replace")
    )


def tables(name: str) -> list[Any]:
    def rows(value: Any) -> list[Any]:
        return [row for each in value.values() for row in rows(each)] if isinstance(value, dict) else value

    return rows(yaml.safe_load((ROOT / "tests/data" / name).read_text()))


def texts(*patterns: str) -> list[str]:
    return [path.read_text() for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def option_samples(parser: argparse.ArgumentParser, *always: str) -> list[str]:
    """Combine options of a parser with their values, choices, and words of the help."""
    choice, made = random.Random(1), []
    known = [action for action in parser._actions if action.option_strings]
    values = ("1", "4", "0.5", "80%", "30s", "n1:2,n2:2", "hosts.txt", "cluster.yaml", "w.json", "ResNet-50", "HDR", "25GbE", "4 x NDR",
              "A100", "n1", "n1:0", "10.0.0.0/8", "eth0", "A=B", "OMP_NUM_THREADS=2", "CUDA_VISIBLE_DEVICES=0", "int8", "powersgd:4", "25MiB", "0.7:0.9", "1..64", "job.toml", "ssh -p 2")  # fmt: skip
    for _ in range(400):
        words = list(always)
        for action in choice.sample(known, choice.choice((1, 1, 2, 3, 5))):
            words.append(choice.choice(action.option_strings))
            if action.nargs != 0:
                words.append(
                    str(choice.choice([*action.choices]))
                    if action.choices and choice.random() < 0.9
                    else choice.choice(values)
                )
        made.append("\n".join([*words, *(("train.py",) if not always else ())]))
    return made


def documented(command: str) -> list[str]:
    """Return the words of the command in README and docs."""
    found = []
    for line in "\n".join(texts("README.md", "docs/**/*.md")).splitlines():
        if line.strip().startswith(command):
            with contextlib.suppress(ValueError):
                found.append("\n".join(shlex.split(line, comments=True)[1:]))
    return [one.removeprefix(command.partition(" ")[2] + "\n") for one in found]
