"""A group's side of the control plane between hosts: headers, messages, and waiting for them."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Channel, Message
from shoal.comm.control.sockets import census, frames, topology
from shoal.comm.control.sockets.frames import Key
from shoal.comm.control.sockets.relay import Relay
from shoal.errors import ClosedError

if TYPE_CHECKING:
    from shoal.comm.control.sockets.sockets import SocketControl

# Bad news wakes the waiting threads by itself; this is for warnings and deadlines.
_LOOK_EVERY_S = 0.02


class SocketChannel(Channel):
    """A group's headers and messages over the world's sockets."""

    def __init__(self, control: SocketControl, group_id: int, ranks: Sequence[int]) -> None:
        self.ranks, self.group_id = ranks, group_id
        self._control = control
        self._peers = [rank for rank in ranks if rank != control.rank]
        self._is_sparse = topology.is_sparse(len(ranks))
        if self._is_sparse:
            control.census.join(group_id, ranks)

    def exchange(self, number: int, header: bytes, patience: Patience) -> list[bytes]:
        """Everybody sends its header to everybody; in large groups, by way of others."""
        control, group_id = self._control, self.group_id
        if self._is_sparse:
            return Relay(control, group_id, number, self.ranks).exchange(header, patience)
        frame = frames.encode_addressed(frames.HEADER, (group_id, number), header)
        control.tell(self._peers, frame)
        wanted: dict[Key, int] = {
            (frames.HEADER, peer, group_id, number): peer for peer in self._peers
        }
        headers = control.inbox.collect(wanted, patience)
        headers[control.rank] = header
        return [headers[rank] for rank in self.ranks]

    def settle(self, number: int) -> None:
        """Tells the others; in large groups, only those who ask."""
        if self._is_sparse:
            self._control.census.reach(census.SETTLED, self.group_id, number)
            return
        self._control.tell(self._peers, frames.encode_settled(self.group_id, number))

    def unsettled(self, number: int) -> list[int]:
        """Who has not told as much."""
        if self._is_sparse:
            return self._ask_settled(number) if number else []
        settled = self._control.settled
        return [peer for peer in self._peers if settled(self.group_id, peer) < number]

    def _ask_settled(self, number: int) -> list[int]:
        settled = self._control.census.share((census.SETTLED, self.group_id, number))
        has_settled = self._control.news.has_settled  # by ranks that left and are not asked
        return [
            rank
            for place, rank in enumerate(self.ranks)
            if not (settled >> place & 1 or has_settled(rank, self.group_id, number))
        ]

    def offer(
        self, peer: int, key: tuple[int, int], header: bytes, patience: Patience
    ) -> SocketMessage:
        """The offer carries a ticket, under which the receiver answers."""
        receiver = self.ranks[peer]
        ticket = self._control.tickets(receiver).take()
        self._control.tell([receiver], frames.encode_offer((self.group_id, *key), ticket, header))
        answer = self._control.await_frame(frames.ANSWER, receiver, (ticket,), patience)
        return SocketMessage(self._control, receiver, ticket, answer, is_sender=True)

    def accept(
        self, peer: int, key: tuple[int, int], answer: Callable[[], bytes], patience: Patience
    ) -> SocketMessage:
        """Waits for the offer with the key and answers it."""
        sender = self.ranks[peer]
        self._control.connect_to(sender)  # to hear what becomes of it while we wait
        offer = self._control.await_frame(frames.OFFER, sender, (self.group_id, *key), patience)
        ticket, theirs = frames.split_offer(offer)
        self._control.tell([sender], frames.encode_addressed(frames.ANSWER, (ticket,), answer()))
        return SocketMessage(self._control, sender, ticket, theirs, is_sender=False)


class SocketMessage(Message):
    """One open message between two ranks, known to both by the sender's ticket."""

    def __init__(
        self, control: SocketControl, peer: int, ticket: int, theirs: bytes, *, is_sender: bool
    ) -> None:
        """``peer`` is the other side's world rank, ``theirs`` its header."""
        self.ticket, self.theirs = ticket, theirs
        self._control, self._peer, self._is_sender = control, peer, is_sender

    def finish(self, patience: Patience) -> None:
        """The receiver says so; the sender then has its ticket back."""
        if self._is_sender:
            self._control.await_frame(frames.FINISHED, self._peer, (self.ticket,), patience)
            self._control.tickets(self._peer).give_back(self.ticket)
        else:
            frame = frames.encode_addressed(frames.FINISHED, (self.ticket,))
            self._control.tell([self._peer], frame)

    def abandon(self) -> None:
        """The receiver has answered and will say no more, so the ticket is free."""
        if self._is_sender:
            self._control.tickets(self._peer).give_back(self.ticket)


class Tickets:
    """The smallest numbers that no open message to a peer has.

    The ticket of a message that was given up, by a deadline or a failure, never comes back: the
    receiver may still answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned: list[int] = []
        self._num_made = 0

    def take(self) -> int:
        """A ticket that no open message has."""
        with self._lock:
            if self._returned:
                return heapq.heappop(self._returned)
            self._num_made += 1
            return self._num_made - 1

    def give_back(self, ticket: int) -> None:
        """For the next message."""
        with self._lock:
            heapq.heappush(self._returned, ticket)


class Inbox:
    """Hands each frame's content to the thread that waits for its key, now or later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contents: dict[Key, bytes] = {}
        self._waits: dict[Key, _Wait] = {}
        self._is_closed = False

    def put(self, key: Key, content: bytes) -> None:
        """Keeps a content; wakes the thread that waits for it once that misses nothing else."""
        with self._lock:
            wait = self._waits.pop(key, None)
            if wait is None:
                self._contents[key] = content
            else:
                wait.take(key, content)

    def has(self, key: Key) -> bool:
        """Whether a content is here that nobody has waited for yet."""
        return key in self._contents

    def collect(
        self,
        wanted: Mapping[Key, int],
        patience: Patience,
        missing: Callable[[], Sequence[int]] | None = None,
    ) -> dict[int, bytes]:
        """Waits for contents, one from each of some ranks; ``wanted`` names the ranks by key.

        ``missing`` tells which ranks the wait is for, if not for those that send the contents.
        """
        wait = self._begin(wanted)
        try:
            while wait.missing:
                wait.wake.acquire(timeout=_LOOK_EVERY_S)
                if wait.missing:
                    self._check_open()
                    patience.look(lambda: self._missing(wait, missing))
        finally:
            self._end(wait)
        return wait.contents

    def alarm(self) -> None:
        """Wakes every waiting thread, so that it looks around now."""
        with self._lock:
            for wait in self._waits.values():
                wait.rouse()

    def close(self) -> None:
        """Ends all waits, begun or to come."""
        self._is_closed = True
        self.alarm()

    def _begin(self, wanted: Mapping[Key, int]) -> _Wait:
        wait = _Wait(wanted)
        with self._lock:
            for key in wanted:
                content = self._contents.pop(key, None)
                if content is None:
                    self._waits[key] = wait
                else:
                    wait.take(key, content)
        return wait

    def _end(self, wait: _Wait) -> None:
        """Forgets a wait that was given up; one that was fulfilled is forgotten already."""
        if wait.missing:
            with self._lock:
                for key in wait.missing:
                    self._waits.pop(key, None)

    def _missing(self, wait: _Wait, missing: Callable[[], Sequence[int]] | None) -> Sequence[int]:
        with self._lock:
            senders = list(wait.missing.values())
        return senders if missing is None or not senders else missing()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this world was shut down while an operation was under way")


class _Wait:
    """One thread's wait. A bare lock wakes it: half the time of a condition or an event."""

    __slots__ = ("contents", "missing", "wake")

    def __init__(self, wanted: Mapping[Key, int]) -> None:
        self.missing = dict(wanted)
        self.contents: dict[int, bytes] = {}
        self.wake = threading.Lock()
        self.wake.acquire()

    def take(self, key: Key, content: bytes) -> None:
        """The content first: the waiting thread takes an empty ``missing`` for the end."""
        self.contents[self.missing[key]] = content
        del self.missing[key]
        if not self.missing:
            self.rouse()

    def rouse(self) -> None:
        if self.wake.locked():
            self.wake.release()
