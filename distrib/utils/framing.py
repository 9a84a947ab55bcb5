"""Handshake and limits shared by all connections between processes of one job. Standard library only.

The control channel of the launcher and the connections of the parameter servers begin with `Handshake`. The listener sends a
greeting and a nonce. The caller answers with a nonce and its proof, an HMAC-SHA256 of both nonces under the job's key. The
listener answers with its own proof. Neither side parses anything else before the proof of its peer is verified.
"""

from __future__ import annotations

import hmac
import os

NONCE_BYTES = 16
PROOF_BYTES = 32
HANDSHAKE_TIMEOUT_SECONDS = 5.0
"""Time that an accepted connection gets for the handshake, so that unauthenticated clients cannot exhaust file descriptors."""


class ProtocolError(Exception):
    """A peer that does not know the job's key or does not follow the protocol."""


def new_token() -> str:
    """Create a job token: 256 random bits as hexadecimal text, which fits an environment variable."""
    return os.urandom(32).hex()


class Handshake:
    """Mutual proof that both ends of a connection know a key. Does no I/O.

    The owner sends `opening`, receives `missing_bytes` bytes, passes them to `feed` and sends the result, until `proven`.

    Args:
        key: The secret of the job.
        greeting: Name and version of the protocol, the same on both sides.
        listener: True for the side that accepted the connection.
    """

    def __init__(self, key: bytes, greeting: bytes, *, listener: bool) -> None:
        self.proven = False
        """True once the peer has proven that it knows the key."""
        self.send_key = self.receive_key = b""
        """Keys for signed frames, one per direction, derived from both nonces."""
        self._key, self._greeting, self._listener = key, greeting, listener
        self._nonce = os.urandom(NONCE_BYTES)
        self._own_proof = self._peer_proof = b""
        self._received = b""
        self.opening = greeting + self._nonce if listener else b""
        """Bytes to send as soon as the connection is open."""

    @property
    def missing_bytes(self) -> int:
        """Number of bytes of the peer's next message that have not arrived; 0 once `proven`."""
        if self.proven:
            return 0
        if self._listener:
            expected = NONCE_BYTES + PROOF_BYTES
        else:
            expected = PROOF_BYTES if self._peer_proof else len(self._greeting) + NONCE_BYTES
        return expected - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Process received bytes of the handshake.

        Args:
            data: At most `missing_bytes` bytes.

        Returns:
            The bytes to send in reply; empty if there are none.

        Raises:
            ProtocolError: The peer speaks another protocol, or its proof does not match.
        """
        self._received += data
        if self.missing_bytes:
            return b""
        message, self._received = self._received, b""
        if self._listener:
            self._derive(self._nonce + message[:NONCE_BYTES])
            self._verify(message[NONCE_BYTES:])
            return self._own_proof
        if self._peer_proof:
            self._verify(message)
            return b""
        if not message.startswith(self._greeting):
            raise ProtocolError(
                f"handshake failed: greeting {message[: len(self._greeting)]!r}, expected {self._greeting!r}"
            )
        self._derive(message[len(self._greeting) :] + self._nonce)
        return self._nonce + self._own_proof

    def _derive(self, nonces: bytes) -> None:
        listener_proof, caller_proof, listener_key, caller_key = (
            hmac.digest(self._key, purpose + nonces, "sha256")
            for purpose in (b"proof of listener", b"proof of caller", b"key of listener", b"key of caller")
        )
        if self._listener:
            self._own_proof, self._peer_proof = listener_proof, caller_proof
            self.send_key, self.receive_key = listener_key, caller_key
        else:
            self._own_proof, self._peer_proof = caller_proof, listener_proof
            self.send_key, self.receive_key = caller_key, listener_key

    def _verify(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._peer_proof):
            raise ProtocolError("handshake failed: the peer does not know the key of this job")
        self.proven = True
