"""How headers reach every rank of a large group: in rounds, from rank to rank.

[Note: rounds of headers]
In round k each rank sends all headers it knows to the rank 2**k positions after it, and gets those
of as many ranks from the one 2**k positions before it. So it knows twice as many after each round,
and all of them after as many rounds as the group's size has bits. Equal headers travel once,
whatever the number of ranks that show them: usually that is one header a frame. Headers that
differ, because an operation has numbers of its own on each rank or because the ranks disagree, all
arrive, so every rank compares every header exactly, as if each had been sent to all.

A rank that has got everything has sent everything, so that it may fail or leave: the others need
nothing more from it for this operation.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.comm.control.patience import Patience
from shoal.comm.control.sockets import census, frames, topology
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.comm.control.sockets.sockets import SocketControl

_PART_BYTES = frames.MAX_BODY_BYTES // 2
_LENGTH = struct.Struct("<I")
# From then on a wait is worth a few messages to learn whom it is for.
_ASK_AFTER_S = 0.06
# What is under way when all have come arrives within this time, or never.
_ARRIVAL_S = 2.0


class Relay:
    """One rank's exchange of headers in one operation."""

    def __init__(
        self, control: SocketControl, group_id: int, number: int, ranks: Sequence[int]
    ) -> None:
        self._control, self._ranks = control, ranks
        self._group_id, self._number = group_id, number
        self._position = ranks.index(control.rank)
        self._topic = (census.BEGUN, group_id, number)
        self._headers: list[bytes] = []  # this rank's, then those of the ranks before it
        self._begin = time.monotonic()
        self._all_came_at: float | None = None

    def exchange(self, header: bytes, patience: Patience) -> list[bytes]:
        """Everybody's headers, in group order."""
        control, size = self._control, len(self._ranks)
        control.census.reach(census.BEGUN, self._group_id, self._number)
        self._headers.append(header)
        try:
            for turn in range(topology.num_rounds(size)):
                self._send(turn)
                self._receive(turn, patience)
        finally:
            control.news.seek(())
        control.census.reach(census.EXCHANGED, self._group_id, self._number)
        first = self._headers[self._position :: -1]  # positions 0 up to this rank's
        return first + self._headers[: self._position : -1]

    def _rank_at(self, distance: int) -> int:
        """The rank so many positions before this one."""
        return self._ranks[(self._position - distance) % len(self._ranks)]

    def _send(self, turn: int) -> None:
        """The receiver already has what is more than once around."""
        step = 1 << turn
        content = encode_headers(self._headers[: len(self._ranks) - step])
        cuts = range(0, len(content), _PART_BYTES)
        for part, begin in enumerate(cuts):
            piece = content[begin : begin + _PART_BYTES]
            if part == 0:
                piece = _LENGTH.pack(len(cuts)) + piece
            address = (self._group_id, self._number, turn, part)
            frame = frames.encode_addressed(frames.RELAY, address, piece)
            self._control.tell([self._rank_at(-step)], frame)

    def _receive(self, turn: int, patience: Patience) -> None:
        step = 1 << turn
        source = self._rank_at(step)
        self._all_came_at = None
        first = self._await(source, turn, 0, patience)
        (num_parts,) = _LENGTH.unpack_from(first)
        pieces = [first[_LENGTH.size :]]
        pieces += [self._await(source, turn, part, patience) for part in range(1, num_parts)]
        headers = decode_headers(b"".join(pieces), self._headers[0])
        if len(headers) != min(step, len(self._ranks) - step):
            raise ShoalError(f"rank {source} passed on the headers of {len(headers)} ranks")
        self._headers += headers

    def _await(self, source: int, turn: int, part: int, patience: Patience) -> bytes:
        key = (frames.RELAY, source, self._group_id, self._number, turn, part)
        contents = self._control.inbox.collect(
            {key: source}, patience, lambda: self._missing(source)
        )
        return contents[source]

    # Whom a wait is for -----------------------------------------------------------------

    def _missing(self, source: int) -> list[int]:
        """The ranks that have not come, as far as this one knows; else the one that passes on."""
        came = self._arrived()
        if is_long := time.monotonic() - self._begin > _ASK_AFTER_S:
            came |= self._control.census.share(self._topic, came)
        missing = [rank for place, rank in enumerate(self._ranks) if not came >> place & 1]
        news = self._control.news
        if not missing or any(
            news.has_exchanged(rank, self._group_id, self._number) for rank in self._ended()
        ):
            return [source] if self._is_lost(source) else []
        if is_long:
            self._control.news.seek(missing)
        return missing

    def _arrived(self) -> int:
        """A bit for each position whose header is here, in this round's place or early."""
        size, inbox = len(self._ranks), self._control.inbox
        distances = list(range(len(self._headers)))
        for turn in range(topology.num_rounds(size)):
            step = 1 << turn
            key = (frames.RELAY, self._rank_at(step), self._group_id, self._number, turn, 0)
            if inbox.has(key):
                distances += range(step, min(2 * step, size))
        came = 0
        for distance in distances:
            came |= 1 << (self._position - distance) % size
        return came

    def _ended(self) -> list[int]:
        failure, left = self._control.news.first, self._control.news.left
        ended = [rank for rank in self._ranks if rank in left]
        return ended if failure is None else [failure.rank, *ended]

    def _is_lost(self, source: int) -> bool:
        """Whether what the source passes on will not come though all ranks have."""
        failure = self._control.news.first
        if failure is not None and not self._control.news.has_exchanged(
            failure.rank, self._group_id, self._number
        ):
            return True
        now = time.monotonic()
        if self._all_came_at is None:
            self._all_came_at = now
        return now - self._all_came_at > _ARRIVAL_S


# What a frame has ---------------------------------------------------------------------------


def encode_headers(headers: Sequence[bytes]) -> bytes:
    """Each different header once, then which of them each rank shows, unless there is only one."""
    numbers = {header: number for number, header in enumerate(dict.fromkeys(headers))}
    pieces = [_LENGTH.pack(len(headers)), _LENGTH.pack(len(numbers))]
    for header in numbers:
        pieces += [_LENGTH.pack(len(header)), header]
    if len(numbers) > 1:
        pieces.append(array("I", [numbers[header] for header in headers]).tobytes())
    return b"".join(pieces)


def decode_headers(content: bytes, own: bytes) -> list[bytes]:
    """The inverse. A header like this rank's ``own`` is that very object: comparing is quick."""
    try:
        (count,) = _LENGTH.unpack_from(content)
        (num_different,) = _LENGTH.unpack_from(content, 4)
        begin = 8
        different: list[bytes] = []
        for _ in range(num_different):
            (length,) = _LENGTH.unpack_from(content, begin)
            begin += _LENGTH.size
            header = content[begin : begin + length]
            different.append(own if header == own else header)
            begin += length
        if num_different == 1:
            return different * int(count)
        numbers = array("I", content[begin : begin + 4 * count])
        return [different[number] for number in numbers]
    except (struct.error, ValueError, IndexError) as error:
        raise ShoalError(f"a rank passed on headers that are none: {error}") from error
