"""How two ranks prove to each other who they are before they talk.

Both know a key and never show it. The caller says its rank and a random number; the called
answers with a random number of its own and a proof that it knows the key; the caller returns
its proof. A proof covers both random numbers, both ranks and the side that makes it, so
nothing that was overheard, or said by the other side, can be used again.

The two sides are generators that know nothing of sockets: each yields what to send and how
many bytes it then needs, is sent those bytes, and returns the peer's rank.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Generator

Talk = Generator[tuple[bytes, int], bytes, int]

_MAGIC = b"shoal\0\0\1"
_HELLO = struct.Struct("<8sII32s")
_NONCE_BYTES = 32
_PROOF_BYTES = 32


class HandshakeError(Exception):
    """The other side is not who it should be."""


def make_key(token: str, secret: str) -> bytes:
    """The key of a world: ``token`` is the run's own, ``secret`` what the user added."""
    return hashlib.sha256(f"{len(token)}:{token}{secret}".encode()).digest()


def fingerprint(key: bytes) -> str:
    """Lets ranks see that their keys are the same."""
    return _prove(key, b"fingerprint", b"").hex()


def call(key: bytes, rank: int, peer: int) -> Talk:
    """The side of ``rank``, which has connected to ``peer``."""
    hello = _HELLO.pack(_MAGIC, rank, peer, secrets.token_bytes(_NONCE_BYTES))
    reply = yield hello, _NONCE_BYTES + _PROOF_BYTES
    nonce, proof = reply[:_NONCE_BYTES], reply[_NONCE_BYTES:]
    _check(proof, _prove(key, b"called", hello + nonce))
    yield _prove(key, b"caller", hello + nonce), 0
    return peer


def answer(key: bytes, rank: int, size: int) -> Talk:
    """The side of ``rank``, to which somebody has connected."""
    hello = yield b"", _HELLO.size
    magic, caller, called, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or called != rank or not rank < caller < size:
        raise HandshakeError("it speaks another language or means another rank")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    reply = nonce + _prove(key, b"called", hello + nonce)
    proof = yield reply, _PROOF_BYTES
    _check(proof, _prove(key, b"caller", hello + nonce))
    return int(caller)


def _prove(key: bytes, side: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, side + b"\0" + transcript, "sha256")


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise HandshakeError("it does not know this run's key")
