"""Text for terminals: no control sequence passes, except colours."""

from __future__ import annotations

import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.errors import ConfigError
from distrib.utils import log
from distrib.utils.terminal_text import without_control_bytes
from distrib_launch import console

COLOUR = re.compile(rb"\x1b\[[0-9;:]*m")
FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\udc80-\udc9f]")
PIECES = [
    b"\x1b", b"\x1b[", b"\x1b]", b"\x1bP", b"\x9b", b"\x9d", b"\xc2\x9b", b"\xc2", b"\xe7\x9b\x9b", b"31", b";", b"m", b"m\x07",
    b"\x1b\\", b"\x1b[31m", b"\x1b[0m", b"\x1b[?25l", b"\x1b[2J", b"52;c;eA==", b"\n", b"\r", b"\t", b" text ",
]  # fmt: skip


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"a\tb \xc3\xa9 \xe7\x9b\x9b caf\xe9", b"a\tb \xc3\xa9 \xe7\x9b\x9b caf\xe9"),
        (b"\x1b[31mred\x1b[0m \x1b[38;2;1;2;3mtrue\x1b[4:3m", b"\x1b[31mred\x1b[0m \x1b[38;2;1;2;3mtrue\x1b[4:3m"),
        (b"\x1b]0;title\x07a\x1b]52;c;eA==\x1b\\b\x1bPq#0\x1b\\c\x1b_G1\x1b\\d\x1b^x\x07e\x1bktmux\x1b\\f", b"abcdef"),
        (b"a\x1b[2J\x1b[1;1Hb\x1b[6n\x1b[?1049h\x1b[>4;1m\x1b[?1m\x1b[0 qc", b"abc"),
        (b"a\x1bc\x1b7\x1b(0\x1b#8b\x1b", b"ab"),
        (b"a\x9b2Jb\xc2\x9b2Jc\x07\x08\x7f\x00\x0e", b"a2Jb2Jc"),
        (b"\x1b]0;no end", b"0;no end"),
        (b"\xc2\x1b[H\x9b31m", b"\xc231m"),
        ("\x1b[\u0661m".encode(), "\u0661m".encode()),
    ],
)  # fmt: skip
def test_known_sequences(printed, shown):
    assert without_control_bytes(printed) == shown


@given(st.lists(st.one_of(st.binary(max_size=8), st.sampled_from(PIECES)), max_size=30), st.integers(1, 5))
def test_no_control_sequence_of_a_rank_reaches_a_terminal_whatever_its_chunks(pieces, size):
    printed = b"".join(pieces)
    terminal = console.Console(["n1", "n2"], streams=(out := Terminal(), Terminal()))
    for start in range(0, len(printed), size):
        terminal.rank_output(0, 1, printed[start : start + size])
    terminal.finish_rank(0)
    terminal.close()
    raw = without_control_bytes(printed)
    for shown in (raw, out.getvalue().encode()):
        assert not FORBIDDEN.search(COLOUR.sub(b"", shown).decode(errors="surrogateescape"))
    if not FORBIDDEN.search(printed.decode(errors="surrogateescape")):
        assert raw == printed
        plain = printed.decode(errors="replace").rstrip("\n")
        assert out.getvalue().replace("[0@n1] ", "").rstrip("\n") == plain


class Terminal(io.StringIO):
    """Stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_messages_and_tables_reach_a_terminal_without_control_sequences(monkeypatch):
    hostile = "host\x1b]0;owned\x07\x1b[2J\r\x9b1m"
    for stream, shown in ((Terminal(), "host1m"), (io.StringIO(), hostile)):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", errors := type(stream)())
        log.get_logger("launch").error("%s", ConfigError(hostile, hint=hostile))
        console.prepare_streams()
        print(hostile)
        assert stream.getvalue() == f"{shown}\n"
        joined = f"{shown}\n  {shown}" if shown != hostile else f"{hostile}; {hostile}"
        assert errors.getvalue() == f"distrib-launch: error: {joined}\n"
