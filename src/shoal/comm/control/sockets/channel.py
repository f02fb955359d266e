"""A group's side of the control plane between hosts: headers, and messages between two."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Channel, Message
from shoal.comm.control.sockets import frames
from shoal.comm.control.sockets.frames import Key

if TYPE_CHECKING:
    from shoal.comm.control.sockets.sockets import SocketControl


class SocketChannel(Channel):
    """A group's headers and messages over the world's sockets."""

    def __init__(self, control: SocketControl, group_id: int, ranks: Sequence[int]) -> None:
        """``ranks`` are world ranks in group order."""
        self.ranks = ranks
        self._control, self._group_id = control, group_id
        self._peers = [rank for rank in ranks if rank != control.rank]

    def exchange(self, number: int, header: bytes, patience: Patience) -> list[bytes]:
        """Everybody sends its header to everybody."""
        control, group_id = self._control, self._group_id
        frame = frames.encode_addressed(frames.HEADER, (group_id, number), header)
        control.tell(self._peers, frame)
        wanted: dict[Key, int] = {
            (frames.HEADER, peer, group_id, number): peer for peer in self._peers
        }
        headers = control.inbox.collect(wanted, patience)
        headers[control.rank] = header
        return [headers[rank] for rank in self.ranks]

    def settle(self, number: int) -> None:
        """Tells the others."""
        self._control.tell(self._peers, frames.encode_settled(self._group_id, number))

    def unsettled(self, number: int) -> list[int]:
        """Who has not told as much."""
        settled = self._control.settled
        return [peer for peer in self._peers if settled(self._group_id, peer) < number]

    def offer(
        self, peer: int, key: tuple[int, int], header: bytes, patience: Patience
    ) -> SocketMessage:
        """The offer carries a ticket, under which the receiver answers."""
        receiver = self.ranks[peer]
        ticket = self._control.tickets(receiver).take()
        self._control.tell([receiver], frames.encode_offer((self._group_id, *key), ticket, header))
        answer = self._control.await_frame(frames.ANSWER, receiver, (ticket,), patience)
        return SocketMessage(self._control, receiver, ticket, answer, is_sender=True)

    def accept(
        self, peer: int, key: tuple[int, int], header: bytes, patience: Patience
    ) -> SocketMessage:
        """Waits for the offer with the key and answers it."""
        sender = self.ranks[peer]
        offer = self._control.await_frame(frames.OFFER, sender, (self._group_id, *key), patience)
        ticket, theirs = frames.split_offer(offer)
        self._control.tell([sender], frames.encode_addressed(frames.ANSWER, (ticket,), header))
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
