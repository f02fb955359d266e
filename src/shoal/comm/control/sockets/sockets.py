"""The control plane between hosts: a socket between each two ranks.

[Note: the reader and the callers]
Threads that call send by themselves, straight into the socket, and wait in the inbox. One
reader thread takes in what the peers send: addressed frames go to the inbox, news to the control.
No thread ever blocks on a socket: what a peer's socket does not take is kept, and the reader sends
it later. So a peer that is stopped, or whose network is gone, delays only those that wait
for it, and they are told.

[Note: how the end of a rank is noticed]
A rank that fails says so (`FAILURE`), one that leaves does too (`BYE`). A connection that ends
without either is a death, known as soon as the peer's kernel closes its sockets. A host that
vanishes closes nothing: a peer that is silent for `SILENCE_S` though it should send a heartbeat
every second counts as dead. A process that keeps Python's lock for that long (an extension that
computes without releasing it) looks the same; ``SHOAL_SILENCE_S`` sets another time.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Control, Failure
from shoal.comm.control.sockets import frames
from shoal.comm.control.sockets.channel import Inbox, SocketChannel, SocketMessage, Tickets
from shoal.comm.control.sockets.connection import Connection
from shoal.comm.control.sockets.reader import Reader
from shoal.comm.control.sockets.wiring import TOKEN_VARIABLE, connect_all
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.comm.bootstrap.store import Bootstrap

__all__ = ["SILENCE_S", "SocketChannel", "SocketControl", "SocketMessage"]

SILENCE_S = 10.0
SILENCE_VARIABLE = "SHOAL_SILENCE_S"
# How long `publish` waits for the peers' hosts to have the news, should this process end next.
_FLUSH_S = 1.0
_NO_NOTE = "its own code, before any operation"


class SocketControl(Control):
    """The control plane of a world whose ranks are on several hosts."""

    def __init__(
        self, rank: int, size: int, connections: Iterable[Connection], silence_s: float = SILENCE_S
    ) -> None:
        """``connections`` lead to all other ranks and become ours."""
        self.rank, self.size = rank, size
        self.inbox = Inbox()
        self._connections = {each.rank: each for each in connections}
        self._tickets: dict[int, Tickets] = defaultdict(Tickets)
        self._lock = threading.Lock()
        self._failures: dict[int, Failure] = {}  # by the rank that reported it, or that died
        self._first: Failure | None = None
        self._left: set[int] = set()
        self._settled: dict[tuple[int, int], int] = {}  # by group and rank
        self._notes = {rank: _NO_NOTE}
        self._note = frames.encode_note(_NO_NOTE)
        self._is_closed = False
        name = f"shoal-control-{rank}"
        self._reader = Reader(self._connections.values(), self, name, silence_s)
        _open_controls.add(self)

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> SocketControl:
        """Connects each two ranks; every rank of the world calls this."""
        silence_s = _silence_s()
        sockets = connect_all(bootstrap)
        connections = [Connection(rank, sock) for rank, sock in sockets.items()]
        control = cls(bootstrap.rank, bootstrap.size, connections, silence_s)
        # All that can read the bootstrap know the key, so it must be private or a secret added.
        control.is_private = bootstrap.is_private or bool(os.environ.get(TOKEN_VARIABLE))
        return control

    def channel(self, group_id: int, ranks: Sequence[int]) -> SocketChannel:
        """No communication needed: what arrives early for the group is kept."""
        return SocketChannel(self, group_id, ranks)

    def tell(self, ranks: Iterable[int], frame: bytes) -> None:
        """Sends a frame, and our note where it is news, so that it is as fresh as our deeds."""
        note = self._note
        all_sent = True
        for rank in ranks:
            all_sent &= self._connections[rank].send(frame, note)
        if not all_sent:
            self._reader.wake()

    def await_frame(
        self, kind: int, sender: int, address: tuple[int, ...], patience: Patience
    ) -> bytes:
        """Waits for the content of one frame of one rank."""
        return self.inbox.collect({(kind, sender, *address): sender}, patience)[sender]

    def tickets(self, receiver: int) -> Tickets:
        """The tickets of open messages from this rank to another."""
        with self._lock:
            return self._tickets[receiver]

    def settled(self, group_id: int, rank: int) -> int:
        """How many transfers of a group a rank said that it is through with."""
        return self._settled.get((group_id, rank), 0)

    # The world's fate -------------------------------------------------------------------

    def publish(self, failure: Failure) -> None:
        """Sends the failure to all and sees that it gets there even if this process ends now.

        ``failure`` has the time of this host's monotonic clock, which means nothing on others;
        the clock of the day puts the failures of several hosts in order as well as it goes.
        """
        age = time.monotonic_ns() - failure.time_ns
        failure = failure._replace(time_ns=time.time_ns() - age)
        if not self._is_closed and self._record(self.rank, failure):
            self.tell(self._connections, frames.encode_failure(failure))
            self._reader.flush(self._connections.values(), _FLUSH_S)

    def _record(self, reporter: int, failure: Failure) -> bool:
        """Keeps the first word of a reporter: what it said of itself outlives its silence."""
        with self._lock:
            if reporter in self._failures:
                return False
            self._failures[reporter] = failure
            self._first = min(
                self._failures.values(), key=lambda each: (each.is_echo, each.time_ns)
            )
        self.inbox.alarm()
        return True

    def failure(self) -> Failure | None:
        """The first failure among those that were heard of or noticed."""
        return self._first

    def absence(self, rank: int) -> str | None:
        """A rank that said goodbye. One that is stopped is silent, and soon a failure."""
        if rank in self._left:
            return "it has left: it returned without taking part"
        return None

    def note(self, where: str) -> None:
        """Goes out with the next frame to each peer, or the next heartbeat."""
        self._notes[self.rank] = where
        self._note = frames.encode_note(where)

    def whereabouts(self, rank: int) -> str:
        """At most a heartbeat old."""
        return self._notes.get(rank, _NO_NOTE)

    def leave(self) -> None:
        """Says goodbye to all, unless this rank failed."""
        with self._lock:
            if self._is_closed or self.rank in self._failures or self.rank in self._left:
                return
            self._left.add(self.rank)
        self.tell(self._connections, frames.encode(frames.BYE))

    def close(self) -> None:
        """Sends what is left, for a second at most, and closes all sockets."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.inbox.close()
        self._reader.close()
        _open_controls.discard(self)

    def forget(self) -> None:
        """In a forked child: lets go of the parent's sockets, else its death would go unseen."""
        self._is_closed = True
        self.inbox = Inbox()
        self.inbox.close()
        self._reader.forget()

    # What the reader tells --------------------------------------------------------------

    def hear(self, rank: int, kind: int, body: bytes) -> None:
        """Takes in a frame."""
        if frames.is_addressed(kind):
            self.inbox.put(*frames.decode_addressed(kind, rank, body))
        elif kind == frames.WHERE:
            self._notes[rank] = frames.decode_text(body)
        elif kind == frames.SETTLED:
            group_id, number = frames.decode_settled(body)
            self._settled[group_id, rank] = number
        elif kind == frames.FAILURE:
            self._record(rank, frames.decode_failure(body, self.size))
        else:
            self._left.add(rank)
            self.inbox.alarm()

    def lose(self, rank: int, reason: str) -> None:
        """A peer is gone; unless it said goodbye, that is a failure."""
        if rank not in self._left:
            self._record(rank, Failure(rank, reason, time.time_ns()))

    def heartbeat(self) -> bytes:
        """Our note, whether it is news or not."""
        return self._note

    def give_up(self, reason: str) -> None:
        """Without a reader nothing will be heard of anybody, so waiting is pointless."""
        self._record(self.rank, Failure(self.rank, reason, time.time_ns()))


# Forked children (the workers of a data loader) inherit sockets, and as long as one of them has
# one open, no peer sees it end with its rank. A fork happens to a process, not to a world, so
# this is kept for the process; worlds stay strangers to each other.
_open_controls: weakref.WeakSet[SocketControl] = weakref.WeakSet()


def _forget_all() -> None:
    for control in list(_open_controls):
        control.forget()
    _open_controls.clear()


os.register_at_fork(after_in_child=_forget_all)


def _silence_s() -> float:
    text = os.environ.get(SILENCE_VARIABLE)
    try:
        silence_s = SILENCE_S if text is None else float(text)
    except ValueError:
        silence_s = 0.0
    if not silence_s > 0:
        raise ShoalError(f"{SILENCE_VARIABLE} must be a number of seconds above 0, not {text!r}")
    return silence_s
