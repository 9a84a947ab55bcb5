"""Text for terminals: control sequences removed, except colours."""

from __future__ import annotations

import re

PLAIN_BYTES = bytes((*b"\t\n\x1b", *range(0x20, 0x7F)))


def without_controls(text: str) -> str:
    r"""Remove control sequences, which could change or read the state of a terminal. Colours, tabs and newlines stay.

    Args:
        text: Text of a rank, a host, a file or an error; bytes that are not UTF-8 as with `surrogateescape`.

    Example:
        >>> without_controls("\x1b]0;title\x07\x1b[31mred\x1b[0m\x1b[2J")
        '\x1b[31mred\x1b[0m'
    """
    # An escape sequence that sets no colour: a title or a string of OSC, DCS, SOS, PM or APC; CSI; another one. Then single characters.
    return re.sub(
        r"\x1b(?!\[[0-9;:]*m)"
        r"(?:[\]PX^_k][^\x07\x1b\n]*(?:\x07|\x1b\\)|\[[0-?]*[ -/]*[@-~]|[ -/]*[0-~])?"
        "|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\udc80-\udc9f]",
        "",
        text,
    )


def without_control_bytes(data: bytes) -> bytes:
    """Remove control sequences from output of a program, as `without_controls`.

    Args:
        data: Whole lines, of any bytes.
    """
    if not data.translate(None, PLAIN_BYTES) and not re.search(rb"\x1b(?!\[[0-9;:]*m)", data):  # five times as fast
        return data
    return without_controls(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")
