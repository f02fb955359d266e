"""The control plane between hosts: sockets between the ranks.

[Note: the reader and the callers]
Threads that call send by themselves, straight into the socket, and wait in the inbox. One
reader thread takes in what the peers send: addressed frames go to the inbox, news to the control.
No thread ever blocks on a socket: what a peer's socket does not take is kept, and the reader sends
it later. So a peer that is stopped, or whose network is gone, delays only those that wait
for it, and they are told.

[Note: how the end of a rank is noticed]
A rank that fails says so (`FAILURE`), one that leaves does too (`BYE`). Where not all pairs are
connected, its neighbours pass that on, and theirs do. A connection that ends
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
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Control, Failure, absence_text
from shoal.comm.control.sockets import frames
from shoal.comm.control.sockets.census import Census
from shoal.comm.control.sockets.channel import Inbox, SocketChannel, SocketMessage, Tickets
from shoal.comm.control.sockets.connection import Connection
from shoal.comm.control.sockets.news import News
from shoal.comm.control.sockets.reader import Reader
from shoal.comm.control.sockets.topology import neighbours
from shoal.comm.control.sockets.wiring import Wires, connect_all
from shoal.meeting.silence import SILENCE_S, silence_s

if TYPE_CHECKING:
    from shoal.comm.bootstrap.bootstrap import Bootstrap

__all__ = ["SocketChannel", "SocketControl", "SocketMessage"]

# How long `publish` waits for the peers' hosts to have the news, should this process end next.
_FLUSH_S = 1.0


class SocketControl(Control):
    """The control plane of a world whose ranks are on several hosts.

    Attributes:
        news: What is known of the other ranks.
        census: How far the ranks of large groups have come.
        num_sent: How many frames this rank has sent, by kind; without heartbeats.
    """

    def __init__(self, rank: int, size: int, wires: Wires, silence_s: float = SILENCE_S) -> None:
        """The sockets of ``wires`` become ours."""
        self.rank, self.size = rank, size
        self.inbox = Inbox()
        self.census = Census(rank, self.tell)
        self.num_sent: Counter[int] = Counter()
        self._connections = {peer: Connection(peer, sock) for peer, sock in wires.sockets.items()}
        self._is_sparse = wires.line is not None
        self.news = News(rank, size, self._spread, self._alarm, passes_on=self._is_sparse)
        self._tickets: dict[int, Tickets] = defaultdict(Tickets)
        self._lock = threading.Lock()
        self._settled: dict[tuple[int, int], int] = {}  # by group and rank
        self._note = frames.encode_note(rank, 0, self.news.whereabouts(rank))
        self._num_left_before = 0
        self._is_closed = False
        self._reader = Reader(self._connections.values(), self, wires.line, silence_s)
        self._reader.start()
        _open_controls.add(self)

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> SocketControl:
        """Connects the ranks; every rank of the world calls this."""
        silence = silence_s()  # an error of it comes before anybody is called
        control = cls(bootstrap.rank, bootstrap.size, connect_all(bootstrap), silence)
        control.secret = bootstrap.secret
        return control

    @property
    def num_connections(self) -> int:
        """How many sockets to other ranks are open."""
        return len(self._reader.connections)

    def channel(self, group_id: int, ranks: Sequence[int]) -> SocketChannel:
        """No communication needed: what arrives early for the group is kept."""
        return SocketChannel(self, group_id, ranks)

    def tell(self, ranks: Sequence[int], frame: bytes) -> None:
        """Sends a frame, and our note where it is news, so that it is as fresh as our deeds."""
        note = self._note
        all_sent = True
        for rank in ranks:
            connection = self._connections.get(rank) or self.connect_to(rank)
            all_sent &= connection.send(frame, note)
        self.num_sent[frames.kind_of(frame)] += len(ranks)
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

    # Connections ------------------------------------------------------------------------

    def connect_to(self, rank: int) -> Connection:
        """The connection to a rank, which the reader makes if there is none yet."""
        with self._lock:
            connection = self._connections.get(rank)
            if connection is not None:
                return connection
            connection = self._connections[rank] = Connection(rank)
        self._reader.call(rank)
        return connection

    def connection_for(self, rank: int) -> Connection:
        """Which connection a new socket to a rank is for.

        Two ranks that have called each other at once have two sockets. Each sends by the one that
        it had first, and reads both.
        """
        with self._lock:
            connection = self._connections.setdefault(rank, Connection(rank))
        return Connection(rank) if connection.is_attached else connection

    def greeting(self) -> bytes:
        """What a rank is told first that has just been connected."""
        return self.news.encode_all() + self._note

    def to_call(self) -> list[int]:
        """Whom to connect to, so that the world stays in one piece though ranks have left."""
        left = self.news.left
        if not self._is_sparse or len(left) == self._num_left_before or self.rank in left:
            return []
        self._num_left_before = len(left)
        remaining = [rank for rank in range(self.size) if rank not in left]
        # One of two is enough to call.
        return [rank for rank in neighbours(self.rank, remaining) if rank < self.rank]

    def is_gone(self, rank: int) -> bool:
        """Whether there is no sense in calling a rank."""
        return rank in self.news.left or self.news.has_failed(rank)

    # The world's fate -------------------------------------------------------------------

    def publish(self, failure: Failure) -> None:
        """Sends the failure to all and sees that it gets there even if this process ends now.

        ``failure`` has the time of this host's monotonic clock, which means nothing on others;
        the clock of the day puts the failures of several hosts in order as well as it goes.
        """
        age = time.monotonic_ns() - failure.time_ns
        failure = failure._replace(time_ns=time.time_ns() - age)
        if not self._is_closed and self.news.publish(failure, self.census.reached()):
            self._reader.flush(_FLUSH_S)

    def _spread(self, data: bytes, except_rank: int | None) -> None:
        """Sends news to all neighbours but one."""
        all_sent = True
        for connection in self._reader.connections:
            if connection.rank != except_rank:
                all_sent &= connection.send(data)
                self.num_sent[frames.kind_of(data)] += 1
        if not all_sent:
            self._reader.wake()

    def failure(self) -> Failure | None:
        """The first failure among those that were heard of or noticed."""
        return self.news.first

    def absence(self, rank: int) -> str | None:
        """A rank that said goodbye. One that is stopped is silent, and soon a failure."""
        how = self.news.left.get(rank)
        return None if how is None else absence_text(how)

    def note(self, where: str) -> None:
        """Goes out with the next frame to each peer, or the next heartbeat."""
        self._note = self.news.note(where)

    def whereabouts(self, rank: int) -> str:
        """At most a heartbeat old between neighbours; see also `News.seek`."""
        return self.news.whereabouts(rank)

    def show_wait(self, record: bytes) -> None:
        """Tells all, by way of the neighbours."""
        if not self._is_closed:
            self.news.show_wait(record)

    def shown_waits(self) -> dict[int, bytes]:
        """The latest of each."""
        return self.news.waits()

    def leave(self, how: str = "") -> None:
        """Says goodbye to all, unless this rank failed."""
        if not self._is_closed:
            self.news.leave(self.census.reached(), how)

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

    def _alarm(self) -> None:
        self.inbox.alarm()

    # What the reader tells --------------------------------------------------------------

    def hear(self, source: int, kind: int, body: bytes) -> None:
        """Takes in a frame."""
        if frames.is_addressed(kind):
            self.inbox.put(*frames.decode_addressed(kind, source, body))
        elif kind == frames.SETTLED:
            group_id, number = frames.decode_settled(body)
            self._settled[group_id, source] = number
        elif kind == frames.CENSUS:
            self.census.hear(source, *frames.decode_census(body))
        else:
            self.news.hear(source, kind, body)

    def lose(self, rank: int, reason: str) -> None:
        """A peer is gone. While this rank closes, that is because it hangs up itself."""
        if not self._is_closed:
            self.news.lose(rank, reason)

    def heartbeat(self) -> bytes:
        """Our note, whether it is news or not."""
        return self._note

    def give_up(self, reason: str) -> None:
        """Without a reader nothing will be heard of anybody, so waiting is pointless."""
        self.news.lose(self.rank, reason)


# Forked children (the workers of a data loader) inherit sockets, and as long as one of them has
# one open, no peer sees it end with its rank. A fork happens to a process, not to a world, so
# this is kept for the process; worlds stay strangers to each other.
_open_controls: weakref.WeakSet[SocketControl] = weakref.WeakSet()


def _forget_all() -> None:
    for control in list(_open_controls):
        control.forget()
    _open_controls.clear()


os.register_at_fork(after_in_child=_forget_all)
