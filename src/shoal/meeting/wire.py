"""What travels between the server where ranks meet and its guests: frames of plain data.

A frame is a length, a proof where there is a key, and JSON. A proof covers the direction and the
number of the frame as well, so no frame can be left out, repeated, sent back or put into another
conversation. Nothing here is pickled.
"""

from __future__ import annotations

import hmac
import json
import struct
from typing import Any

from shoal.errors import ShoalError

LONGEST_REQUEST_BYTES = 1 << 20
LONGEST_REPLY_BYTES = 1 << 28
_LENGTH = struct.Struct("<I")
_PROOF_BYTES = 32


class WireError(Exception):
    """The other side sent what is no frame, or not its own."""


class Wire:
    """One end of a conversation: messages to bytes, and bytes to messages."""

    def __init__(self, side: str, longest_bytes: int, key: bytes | None = None) -> None:
        """``side`` is "guest" or "server"; ``longest_bytes`` is the most that a frame may take."""
        sides = (b"guest", b"server")
        self._sends, self._hears = sides if side == "guest" else sides[::-1]
        self._longest_bytes, self._key = longest_bytes, key
        self._num_sent = self._num_heard = 0
        self._rest = bytearray()

    def encode(self, message: Any) -> bytes:
        """A whole frame."""
        body = json.dumps(message).encode()
        if len(body) > LONGEST_REPLY_BYTES:
            raise ShoalError(f"a message of {len(body)} bytes is too long for ranks that meet")
        proof = self._prove(self._sends, self._num_sent, body)
        self._num_sent += 1
        return _LENGTH.pack(len(body)) + proof + body

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete with ``data``."""
        self._rest += data
        messages = []
        while (body := self._next_body()) is not None:
            try:
                messages.append(json.loads(body))
            except (ValueError, RecursionError) as error:
                raise WireError("it speaks another language") from error
        return messages

    def _next_body(self) -> bytes | None:
        if len(self._rest) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._rest)
        if length > self._longest_bytes:  # before anything is kept of it
            raise WireError(
                f"it announces {length} bytes, above the limit of {self._longest_bytes}"
            )
        begin = _LENGTH.size + (0 if self._key is None else _PROOF_BYTES)
        if len(self._rest) < begin + length:
            return None
        proof, body = bytes(self._rest[_LENGTH.size : begin]), bytes(self._rest[begin:][:length])
        del self._rest[: begin + length]
        if not hmac.compare_digest(proof, self._prove(self._hears, self._num_heard, body)):
            raise WireError("a frame does not come from who began the conversation")
        self._num_heard += 1
        return body

    def _prove(self, side: bytes, number: int, body: bytes) -> bytes:
        if self._key is None:
            return b""
        return hmac.digest(self._key, side + struct.pack("<Q", number) + body, "sha256")
