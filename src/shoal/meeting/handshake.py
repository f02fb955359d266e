"""How two sides that know the same key prove it to each other, without showing it.

[Note: the handshake]
Two ranks prove to each other who they are before they talk. Both know a key and never show it. The
caller says its rank and a random number; the called answers with a random number of its own and a
proof that it knows the key; the caller returns its proof. A proof covers both random numbers, both
ranks and the side that makes it, so nothing that was overheard, or said by the other side, can be
used again. The two sides are generators that know nothing of sockets: each yields what to send and
how many bytes it then needs, is sent those bytes, and returns the peer's rank. `Handshake` runs one
of them over a socket.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Generator

TOKEN_VARIABLE = "SHOAL_TOKEN"
HandshakeSteps = Generator[tuple[bytes, int], bytes, int]

_MAGIC = b"shoal\0\0\1"
_HELLO = struct.Struct("<8sII32s")
_NONCE_BYTES = 32
_PROOF_BYTES = 32


class HandshakeError(Exception):
    """The other side is not who it should be."""


class HungUpError(HandshakeError):
    """The other side is gone before it has proven anything."""


def make_key(token: str, secret: str) -> bytes:
    """The key of a world: ``token`` is the run's own, ``secret`` what the user added."""
    return hashlib.sha256(f"{len(token)}:{token}{secret}".encode()).digest()


def fingerprint(key: bytes) -> str:
    """Lets ranks see that their keys are the same."""
    return _prove(key, b"fingerprint", b"").hex()


def call(key: bytes, rank: int, peer: int, transcript: bytearray | None = None) -> HandshakeSteps:
    """The side of ``rank``, which has connected to ``peer``.

    ``transcript`` is given what both sides have said, for `session_key`.
    """
    hello = _HELLO.pack(_MAGIC, rank, peer, secrets.token_bytes(_NONCE_BYTES))
    reply = yield hello, _NONCE_BYTES + _PROOF_BYTES
    nonce, proof = reply[:_NONCE_BYTES], reply[_NONCE_BYTES:]
    _check(proof, _prove(key, b"called", hello + nonce))
    if transcript is not None:
        transcript += hello + nonce
    yield _prove(key, b"caller", hello + nonce), 0
    return peer


def answer(key: bytes, rank: int, size: int, transcript: bytearray | None = None) -> HandshakeSteps:
    """The side of ``rank``, to which another has connected."""
    hello = yield b"", _HELLO.size
    magic, caller, called, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or called != rank or caller == rank or caller >= size:
        raise HandshakeError("it speaks another language or means another rank")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    reply = nonce + _prove(key, b"called", hello + nonce)
    proof = yield reply, _PROOF_BYTES
    _check(proof, _prove(key, b"caller", hello + nonce))
    if transcript is not None:
        transcript += hello + nonce
    return int(caller)


def session_key(key: bytes, transcript: bytes) -> bytes:
    """A key for what the two sides say next: both random numbers are in it."""
    return _prove(key, b"session", transcript)


def frame_key(key: bytes, transcript: bytearray, *, is_one_host: bool) -> bytes | None:
    """Proves frames between hosts; on one host nobody else can write to the socket."""
    return None if is_one_host else session_key(key, bytes(transcript))


def _prove(key: bytes, side: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, side + b"\0" + transcript, "sha256")


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise HandshakeError("it does not know this run's key")


class Handshake:
    """One handshake under way, over one socket that never blocks."""

    def __init__(
        self,
        sock: socket.socket,
        steps: HandshakeSteps,
        name: str,
        deadline: float,
        *,
        is_call: bool,
    ) -> None:
        """``name`` says who is at the other end; ``is_call`` whether it was us who connected."""
        self.socket, self.name, self.deadline, self.is_call = sock, name, deadline, is_call
        self._steps = steps
        self._is_begun = False
        self._wanted = 0
        self._received = b""

    def go_on(self) -> int | None:
        """Does what can be done now; returns the peer's rank once it is proven."""
        try:
            if not self._is_begun:
                self._begin()
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._receive()
        except StopIteration as end:
            return int(end.value)
        return None

    def _begin(self) -> None:
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._is_begun = True
        self._send(next(self._steps))

    def _receive(self) -> None:
        """Never more than was asked for: what follows is for the connection to read."""
        missing = self._wanted - len(self._received)
        data = self.socket.recv(missing) if missing else b""
        if missing and not data:
            raise HungUpError("it hung up")
        self._received += data
        if len(self._received) == self._wanted:
            received, self._received = self._received, b""
            self._send(self._steps.send(received))

    def _send(self, step: tuple[bytes, int]) -> None:
        data, self._wanted = step
        # A hundred bytes always fit into the buffer of a new socket.
        if self.socket.send(data) != len(data):
            raise HandshakeError("it does not listen")
