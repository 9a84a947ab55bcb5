"""Handshake of the connections of a job: the bytes of its messages, and messages that arrive in parts."""

from __future__ import annotations

import hmac

import pytest

from distrib.utils import framing
from distrib.utils.framing import Handshake, new_token


def test_a_token_is_256_random_bits():
    assert len(bytes.fromhex(new_token())) == 32 and new_token() != new_token()


def test_messages_that_arrive_byte_by_byte_are_those_of_the_protocol(monkeypatch: pytest.MonkeyPatch):
    """Both nonces are known here, so all messages and keys are."""
    nonces = {True: b"L" * 16, False: b"C" * 16}
    ends = {}
    for listener, nonce in nonces.items():
        monkeypatch.setattr(framing.os, "urandom", lambda size, nonce=nonce: nonce[:size])
        ends[listener] = Handshake(b"key", b"greeting", listener=listener)
        assert ends[listener].missing_bytes == (48 if listener else 24)
        assert ends[listener].proven is False and not ends[listener].send_key and not ends[listener].receive_key

    def derived(purpose: bytes) -> bytes:
        return hmac.digest(b"key", purpose + nonces[True] + nonces[False], "sha256")

    def feed(end: Handshake, message: bytes) -> bytes:
        *first, reply = [end.feed(bytes([byte])) for byte in message]
        assert set(first) == {b""}
        return reply

    assert (ends[True].opening, ends[False].opening) == (b"greeting" + nonces[True], b"")
    answer = feed(ends[False], ends[True].opening)
    assert answer == nonces[False] + derived(b"proof of caller") and not ends[False].proven
    proof = feed(ends[True], answer)
    assert proof == derived(b"proof of listener") and ends[True].proven
    assert feed(ends[False], proof) == b"" and ends[False].proven
    assert ends[True].missing_bytes == ends[False].missing_bytes == 0
    assert ends[True].send_key == ends[False].receive_key == derived(b"key of listener")
    assert ends[False].send_key == ends[True].receive_key == derived(b"key of caller")
