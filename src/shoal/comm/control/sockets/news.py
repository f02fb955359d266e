"""What one rank knows of the others: who failed and why, who left, where everybody was last.

[Note: passing on]
Where all pairs of ranks are connected, each tells all others what happens to it, and each notices
by itself who is gone. Where they are not, a rank passes on what is news to it to all its neighbours
but the one that it heard it from. So every rank hears of a failure after a few steps, by as many
ways as it has neighbours. A goodbye and a failure travel together with what the rank did last
and how far it had come: an operation that it has completed need not wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from shoal.comm.control.plane import Failure
from shoal.comm.control.sockets import frames

_NO_NOTE = "its own code, before any operation"
# For so many missing ranks others are told where they are.
_MOST_SOUGHT = 8

Reached = dict[int, tuple[int, int]]
"""By group: the last exchange of headers that was complete, the transfers that were settled."""


class News:
    """The latest of every rank. Any thread may ask.

    Attributes:
        first: The first failure of those that are known.
        left: The ranks that have said goodbye, each with how it left, if it said so.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        spread: Callable[[bytes, int | None], None],
        alarm: Callable[[], None],
        *,
        passes_on: bool,
    ) -> None:
        """``spread`` sends to all neighbours but one; ``alarm`` wakes those that wait."""
        self.first: Failure | None = None
        self.left: dict[int, str] = {}
        self._rank, self._size = rank, size
        self._spread, self._alarm, self._passes_on = spread, alarm, passes_on
        self._lock = threading.Lock()
        self._failures: dict[int, Failure] = {}  # by the rank that reported it, or that died
        self._notes: dict[int, tuple[int, str]] = {}  # each with its number
        self._waits: dict[int, tuple[int, bytes]] = {}  # each with its number
        self._reached: dict[int, Reached] = {}
        self._sought: frozenset[int] = frozenset()

    # What is known ----------------------------------------------------------------------

    def whereabouts(self, rank: int) -> str:
        """The last note of a rank."""
        return self._notes.get(rank, (0, _NO_NOTE))[1]

    def waits(self) -> dict[int, bytes]:
        """The latest record of each rank that waits; [Note: proof of a deadlock]: it may be old."""
        return {rank: record for rank, (_, record) in list(self._waits.items()) if record}

    def has_failed(self, rank: int) -> bool:
        """Whether a rank said that it failed, or died."""
        return rank in self._failures

    def has_exchanged(self, rank: int, group_id: int, number: int) -> bool:
        """Whether a rank that failed or left had seen everybody's headers of an operation."""
        return self._reached.get(rank, {}).get(group_id, (0, 0))[0] >= number

    def has_settled(self, rank: int, group_id: int, number: int) -> bool:
        """Whether a rank that failed or left was through with a transfer."""
        return self._reached.get(rank, {}).get(group_id, (0, 0))[1] >= number

    # This rank's own --------------------------------------------------------------------

    def note(self, where: str) -> bytes:
        """What this rank does now; returns the frame for the others."""
        number = self._notes.get(self._rank, (0, ""))[0] + 1
        self._notes[self._rank] = (number, where)
        return frames.encode_note(self._rank, number, where)

    def show_wait(self, record: bytes) -> None:
        """What this rank waits for. All are told: any of them may be part of a deadlock."""
        number = self._waits.get(self._rank, (0, b""))[0] + 1
        self._waits[self._rank] = (number, record)
        self._spread(frames.encode_waits(self._rank, number, record), None)

    def publish(self, failure: Failure, reached: Reached) -> bool:
        """This rank cannot go on; returns whether the others did not know yet."""
        self._reached[self._rank] = reached
        is_news = self._add_failure(self._rank, failure)
        if is_news:
            self._spread(self._encode_failure(self._rank), None)
        return is_news

    def leave(self, reached: Reached, how: str) -> None:
        """This rank goes in good order, unless it failed."""
        if self._rank not in self._failures and self._add_goodbye(self._rank, how):
            self._reached[self._rank] = reached
            self._spread(self._encode_goodbye(self._rank), None)

    def lose(self, rank: int, reason: str) -> None:
        """A peer is gone; unless it said goodbye, that is a failure."""
        if rank in self.left or not self._add_failure(rank, Failure(rank, reason, time.time_ns())):
            return
        if self._rank not in self.left:  # else it hung up because this rank did
            self._pass_on(self._encode_failure(rank), rank)

    def seek(self, ranks: Sequence[int]) -> None:
        """This rank waits for others: what is heard of where they are is passed on."""
        sought = frozenset(ranks[:_MOST_SOUGHT])
        new, self._sought = sought - self._sought, sought
        for rank in new:
            if data := self._encode_note(rank):
                self._pass_on(data, rank)

    # What others say --------------------------------------------------------------------

    def hear(self, source: int, kind: int, body: bytes) -> None:
        """Takes in a frame from a neighbour, and passes it on if it is news."""
        if kind == frames.WHERE:
            rank, number, text = frames.decode_note(body, self._size)
            if self._add_note(rank, number, text) and rank in self._sought:
                self._pass_on(self._encode_note(rank), source)
        elif kind == frames.WAITS:
            rank, number, record = frames.decode_waits(body, self._size)
            if rank != self._rank and number > self._waits.get(rank, (0, b""))[0]:
                self._waits[rank] = (number, record)
                self._pass_on(frames.encode_waits(rank, number, record), source)
        elif kind == frames.REACHED:
            rank, reached = frames.decode_reached(body, self._size)
            self._reached[rank] = reached
        elif kind == frames.FAILURE:
            reporter, failure = frames.decode_failure(body, self._size)
            if self._add_failure(reporter, failure):
                self._pass_on(self._encode_failure(reporter), source)
        else:
            rank, how = frames.decode_bye(body, self._size)
            if self._add_goodbye(rank, how):
                self._pass_on(self._encode_goodbye(rank), source)

    def _add_failure(self, reporter: int, failure: Failure) -> bool:
        """Keeps the first word of a reporter: what it said of itself outlives its silence."""
        with self._lock:
            if reporter in self._failures:
                return False
            self._failures[reporter] = failure
            self.first = min(self._failures.values(), key=lambda each: (each.is_echo, each.time_ns))
        self._alarm()
        return True

    def _add_goodbye(self, rank: int, how: str) -> bool:
        with self._lock:
            if rank in self.left:
                return False
            self.left[rank] = how
        self._alarm()
        return True

    def _add_note(self, rank: int, number: int, text: str) -> bool:
        """Notes that come by several ways may come late."""
        if rank == self._rank or (rank in self._notes and self._notes[rank][0] >= number):
            return False
        self._notes[rank] = (number, text)
        return True

    def _pass_on(self, data: bytes, heard_from: int) -> None:
        if self._passes_on:
            self._spread(data, heard_from)

    # For others -------------------------------------------------------------------------

    def encode_all(self) -> bytes:
        """Everything that a new neighbour may not have heard."""
        with self._lock:
            failed, left = list(self._failures), list(self.left)
        told = [self._encode_failure(rank) for rank in failed]
        return b"".join(told + [self._encode_goodbye(rank) for rank in left])

    def _encode_failure(self, reporter: int) -> bytes:
        """A failure, after what is known of the ranks concerned."""
        failure = self._failures[reporter]
        about = [self._encode_about(rank) for rank in sorted({reporter, failure.rank})]
        return b"".join(about) + frames.encode_failure(reporter, failure)

    def _encode_goodbye(self, rank: int) -> bytes:
        return self._encode_about(rank) + frames.encode_bye(rank, self.left.get(rank, ""))

    def _encode_about(self, rank: int) -> bytes:
        reached = self._reached.get(rank)
        counts = frames.encode_reached(rank, reached) if reached else b""
        return self._encode_note(rank) + counts

    def _encode_note(self, rank: int) -> bytes:
        known = self._notes.get(rank)
        return b"" if known is None else frames.encode_note(rank, *known)
