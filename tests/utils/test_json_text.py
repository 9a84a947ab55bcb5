"""JSON with text that is not UTF-8."""

from __future__ import annotations

import json
import math
import os

import msgspec
import pytest

from distrib.utils.json_text import decode_json, encode_json


class Sample(msgspec.Struct, frozen=True):
    name: str
    number: float = 0.5
    by_rank: dict[int, tuple[str, ...]] = {}


@pytest.mark.parametrize("indent", [0, 2])
@pytest.mark.parametrize("name", ["plain", "caf\xe9 \U0001f600", os.fsdecode(b"caf\xe9\xff")])
def test_every_text_comes_back(name, indent):
    sample = Sample(name, by_rank={3: (name, "x")})
    text = encode_json(sample, indent)
    assert decode_json(text, Sample) == decode_json(text.decode(), Sample) == sample
    assert (b"\n" in text) == bool(indent) and json.loads(text)["number"] == 0.5


def test_numbers_that_json_lacks_are_null_in_any_text():
    for name in ("plain", "\udce9"):
        assert json.loads(encode_json(Sample(name, math.nan)))["number"] is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"name": "\\udce9"',
        '{"name": 3}',
        '{"name": "\\udce9", "number": "x"}',
        b'{"name": "\xe9"}',
        "\udce9",
        "[" * 5000,
    ],
)
def test_other_text_is_refused(text):
    with pytest.raises(msgspec.DecodeError):
        decode_json(text, Sample)
