"""What travels over a control socket: frames of a length, a kind and a body.

Addressed frames (`HEADER`, `RELAY`, `OFFER`, `ANSWER`, `FINISHED`) carry whole numbers by which
they are kept for the thread that waits for them. News (`SETTLED`, `CENSUS`, `REACHED`, `FAILURE`,
`WHERE`, `WAITS`, `BYE`) has no reader of its own: the control plane keeps the latest. The last five
name the rank that they are from, since others pass them on.
Nothing here is pickled, and a frame that makes no sense raises `FrameError`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from shoal.comm.control.plane import Failure
from shoal.errors import ShoalError

HEADER, RELAY, OFFER, ANSWER, FINISHED = range(1, 6)
SETTLED, CENSUS, REACHED, FAILURE, WHERE, WAITS, BYE = range(6, 13)

MAX_BODY_BYTES = 1 << 20
_MAX_REASON_BYTES = 16 << 10
_MAX_NOTE_BYTES = 1 << 10

_PREFIX = struct.Struct("<IB")
_SETTLED = struct.Struct("<2q")  # group_id, number
_CENSUS = struct.Struct("<B2q")  # count, group_id, number
_FAILURE = struct.Struct("<qqqB")  # who says so, rank, time_ns, is_echo
_NOTE = struct.Struct("<qq")  # rank, number of the note or record
_RANK = struct.Struct("<q")
_MOST_PARTING_BYTES = 1024
_REACHED = struct.Struct("<3q")  # group_id, last exchange that is complete, transfers settled
# By kind: the numbers that address a frame, besides the rank that sent it.
_ADDRESSES = {
    HEADER: struct.Struct("<2q"),  # group_id, number
    RELAY: struct.Struct("<4q"),  # group_id, number, round, part
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


def encode_census(count: int, group_id: int, number: int, members: int) -> bytes:
    """The frame of who has come how far; ``members`` has a bit for each position in the group."""
    mask = members.to_bytes((members.bit_length() + 7) // 8, "little")
    return encode(CENSUS, _CENSUS.pack(count, group_id, number) + mask)


def encode_failure(reporter: int, failure: Failure) -> bytes:
    """The frame of a failure, with as much of its reason as is good for a reader."""
    numbers = _FAILURE.pack(reporter, failure.rank, failure.time_ns, failure.is_echo)
    return encode(FAILURE, numbers + failure.reason.encode(errors="replace")[:_MAX_REASON_BYTES])


def encode_note(rank: int, number: int, where: str) -> bytes:
    """The frame of a rank's ``number``-th note of what it is doing."""
    text = where.encode(errors="replace")[:_MAX_NOTE_BYTES]
    return encode(WHERE, _NOTE.pack(rank, number) + text)


def encode_waits(rank: int, number: int, record: bytes) -> bytes:
    """The frame of the ``number``-th record of what a rank waits for."""
    return encode(WAITS, _NOTE.pack(rank, number) + record)


def encode_reached(rank: int, reached: Mapping[int, tuple[int, int]]) -> bytes:
    """The frame of how far a rank came: exchanges and settled transfers, by group."""
    counts = [_REACHED.pack(group_id, *numbers) for group_id, numbers in reached.items()]
    return encode(REACHED, _RANK.pack(rank) + b"".join(counts))


def encode_bye(rank: int, how: str = "") -> bytes:
    """The frame of a rank that leaves, and how."""
    return encode(BYE, _RANK.pack(rank) + how.encode(errors="replace")[:_MOST_PARTING_BYTES])


def kind_of(data: bytes) -> int:
    """The kind of the first frame in ``data``."""
    return data[_PREFIX.size - 1]


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


def decode_census(body: bytes) -> tuple[tuple[int, int, int], int]:
    """Count, group and number; and the members that are known to have come so far."""
    try:
        topic = _CENSUS.unpack_from(body)
    except struct.error as error:
        raise FrameError(f"a census of {len(body)} bytes") from error
    return topic, int.from_bytes(body[_CENSUS.size :], "little")


def decode_failure(body: bytes, size: int) -> tuple[int, Failure]:
    """Who reports a failure of one of ``size`` ranks, and which."""
    try:
        reporter, rank, time_ns, is_echo = _FAILURE.unpack_from(body)
    except struct.error as error:
        raise FrameError(f"a failure of {len(body)} bytes") from error
    for each in (reporter, rank):
        _check_rank(each, size, "the failure")
    return reporter, Failure(rank, decode_text(body[_FAILURE.size :]), time_ns, bool(is_echo))


def decode_note(body: bytes, size: int) -> tuple[int, int, str]:
    """A rank, the number of its note, and the note."""
    rank, number, text = decode_waits(body, size)
    return rank, number, decode_text(text)


def decode_waits(body: bytes, size: int) -> tuple[int, int, bytes]:
    """A rank, the number of its record, and the record."""
    try:
        rank, number = _NOTE.unpack_from(body)
    except struct.error as error:
        raise FrameError(f"a note of {len(body)} bytes") from error
    _check_rank(rank, size, "a note")
    return rank, number, body[_NOTE.size :]


def decode_reached(body: bytes, size: int) -> tuple[int, dict[int, tuple[int, int]]]:
    """A rank, and the last exchange that is complete and the transfers that it settled by group."""
    try:
        (rank,) = _RANK.unpack_from(body)
        counts = list(_REACHED.iter_unpack(body[_RANK.size :]))
    except struct.error as error:
        raise FrameError(f"counts of {len(body)} bytes") from error
    _check_rank(rank, size, "counts")
    return rank, {group_id: (exchanged, settled) for group_id, exchanged, settled in counts}


def decode_bye(body: bytes, size: int) -> tuple[int, str]:
    """The rank that leaves, and how."""
    try:
        (rank,) = _RANK.unpack_from(body)
    except struct.error as error:
        raise FrameError(f"a goodbye of {len(body)} bytes") from error
    _check_rank(rank, size, "the goodbye")
    return int(rank), decode_text(body[_RANK.size :])


def _check_rank(rank: int, size: int, what: str) -> None:
    if not 0 <= rank < size:
        raise FrameError(f"{what} of rank {rank} in a world of {size}")


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
