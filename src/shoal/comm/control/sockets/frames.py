"""What travels over a control socket: frames of a length, a kind and a body.

Addressed frames (`HEADER`, `OFFER`, `ANSWER`, `FINISHED`) carry whole numbers by which they are
kept for the thread that waits for them. News (`SETTLED`, `FAILURE`, `WHERE`, `BYE`) has no reader
of its own: the control plane keeps the latest.
Nothing here is pickled, and a frame that makes no sense raises `FrameError`.
"""

from __future__ import annotations

import struct

from shoal.comm.control.plane import Failure
from shoal.errors import ShoalError

HEADER, OFFER, ANSWER, FINISHED, SETTLED, FAILURE, WHERE, BYE = range(1, 9)

MAX_BODY_BYTES = 1 << 20
_MAX_REASON_BYTES = 16 << 10
_MAX_NOTE_BYTES = 1 << 10

_PREFIX = struct.Struct("<IB")
_SETTLED = struct.Struct("<2q")  # group_id, number
_FAILURE = struct.Struct("<qqB")
# By kind: the numbers that address a frame, besides the rank that sent it.
_ADDRESSES = {
    HEADER: struct.Struct("<2q"),  # group_id, number
    OFFER: struct.Struct("<3q"),  # group_id, tag, number
    ANSWER: struct.Struct("<q"),  # ticket
    FINISHED: struct.Struct("<q"),  # ticket
}
_TICKET = struct.Struct("<q")

Key = tuple[int, ...]
"""Where an addressed frame is kept: its kind, the world rank it came from, its address."""


class FrameError(Exception):
    """A peer sent what is no frame."""


def encode(kind: int, body: bytes = b"") -> bytes:
    """A whole frame."""
    if len(body) > MAX_BODY_BYTES:
        raise ShoalError(
            f"an operation's header takes {len(body)} bytes where {MAX_BODY_BYTES} fit: "
            "a tensor with this many dimensions or split sizes cannot be described"
        )
    return _PREFIX.pack(len(body), kind) + body


def encode_addressed(kind: int, address: tuple[int, ...], content: bytes = b"") -> bytes:
    """An addressed frame."""
    return encode(kind, _ADDRESSES[kind].pack(*address) + content)


def encode_offer(address: tuple[int, ...], ticket: int, header: bytes) -> bytes:
    """The frame of an offer, whose content begins with the ticket to answer under."""
    return encode_addressed(OFFER, address, _TICKET.pack(ticket) + header)


def split_offer(content: bytes) -> tuple[int, bytes]:
    """The ticket and the header of an offer."""
    (ticket,) = _TICKET.unpack_from(content)
    return ticket, content[_TICKET.size :]


def encode_settled(group_id: int, number: int) -> bytes:
    """The frame of how many of a group's transfers a rank is through with."""
    return encode(SETTLED, _SETTLED.pack(group_id, number))


def encode_failure(failure: Failure) -> bytes:
    """The frame of a failure, with as much of its reason as is good for a reader."""
    numbers = _FAILURE.pack(failure.rank, failure.time_ns, failure.is_echo)
    return encode(FAILURE, numbers + failure.reason.encode(errors="replace")[:_MAX_REASON_BYTES])


def encode_note(where: str) -> bytes:
    """The frame of a note of what a rank is doing."""
    return encode(WHERE, where.encode(errors="replace")[:_MAX_NOTE_BYTES])


def is_addressed(kind: int) -> bool:
    """Whether a thread will wait for this frame."""
    return kind in _ADDRESSES


def decode_addressed(kind: int, source: int, body: bytes) -> tuple[Key, bytes]:
    """Where to keep a frame, and its content."""
    address = _ADDRESSES[kind]
    content_bytes = len(body) - address.size
    if content_bytes < (_TICKET.size if kind == OFFER else 0):
        raise FrameError(f"an addressed frame of {len(body)} bytes, too few for its address")
    return (kind, source, *address.unpack_from(body)), body[address.size :]


def decode_settled(body: bytes) -> tuple[int, int]:
    """The id of a group, and how many of its transfers a rank is through with."""
    try:
        group_id, number = _SETTLED.unpack(body)
    except struct.error as error:
        raise FrameError(f"a count of {len(body)} bytes") from error
    return group_id, number


def decode_failure(body: bytes, size: int) -> Failure:
    """The failure of one of ``size`` ranks."""
    try:
        rank, time_ns, is_echo = _FAILURE.unpack_from(body)
    except struct.error as error:
        raise FrameError(f"a failure of {len(body)} bytes") from error
    if not 0 <= rank < size:
        raise FrameError(f"the failure of rank {rank} in a world of {size}")
    return Failure(rank, decode_text(body[_FAILURE.size :]), time_ns, bool(is_echo))


def decode_text(body: bytes) -> str:
    """Text that may have been cut inside a character."""
    return body.decode(errors="replace")


class Splitter:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames (kind and body) that are complete with ``data``."""
        data = self._rest + data
        frames: list[tuple[int, bytes]] = []
        begin = 0
        while len(data) - begin >= _PREFIX.size:
            length, kind = _PREFIX.unpack_from(data, begin)
            _check_prefix(length, kind)
            body = begin + _PREFIX.size
            if len(data) - body < length:
                break
            frames.append((kind, data[body : body + length]))
            begin = body + length
        self._rest = data[begin:]
        return frames


def _check_prefix(length: int, kind: int) -> None:
    """Before anything is kept: a stranger's length must not become our memory."""
    if not HEADER <= kind <= BYE:
        raise FrameError(f"a frame of unknown kind {kind}")
    if length > MAX_BODY_BYTES:
        raise FrameError(f"a frame of {length} bytes, above the limit of {MAX_BODY_BYTES}")
