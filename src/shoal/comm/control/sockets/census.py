"""Who has come how far, in groups whose ranks do not all talk to each other.

[Note: the census]
A rank that waits long in an operation, or that wants to leave, has to know which ranks it waits
for, and its neighbours may be waiting themselves. So it tells them whom it knows to have come so
far. Each neighbour adds itself if it has, and whom it knows of, and tells its own neighbours if
that is more than it told them before. After as many steps as the group's size has bits, all know
the same. Nothing is sent where nobody waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from shoal.comm.control.sockets import frames, topology

BEGUN, EXCHANGED, SETTLED = range(3)
"""What is counted: operations begun, those with all headers known, transfers that are over."""

Topic = tuple[int, int, int]
"""What is counted, the group, and the number that ranks must have reached."""

_MOST_TOPICS = 256
_SHARE_EVERY_S = 0.02


class _Group:
    """A group as the census sees it: positions are bits."""

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.mine = 1 << ranks.index(rank)
        self.everybody = (1 << len(ranks)) - 1
        self.neighbours = topology.neighbours(rank, ranks)


class Census:
    """One rank's counts, and what it knows of the others'."""

    def __init__(self, rank: int, tell: Callable[[Sequence[int], bytes], None]) -> None:
        """``tell`` sends a frame to ranks."""
        self._rank, self._tell = rank, tell
        self._lock = threading.Lock()
        self._groups: dict[int, _Group] = {}
        self._reached: dict[tuple[int, int], int] = {}
        self._known: dict[Topic, int] = {}
        self._told: dict[Topic, int] = {}
        self._next_share: dict[Topic, float] = {}  # of those that this rank asks about

    def join(self, group_id: int, ranks: Sequence[int]) -> None:
        """This rank is a member of a group."""
        self._groups[group_id] = _Group(self._rank, ranks)

    def reach(self, count: int, group_id: int, number: int) -> None:
        """This rank has come so far; whoever asked is told."""
        self._reached[count, group_id] = number
        if self._known:  # somebody asked, now or long ago
            self._answer(count, group_id, number)

    def reached(self) -> dict[int, tuple[int, int]]:
        """Exchanges and settled transfers by group, for a goodbye."""
        get = self._reached.get
        return {
            group_id: (get((EXCHANGED, group_id), 0), get((SETTLED, group_id), 0))
            for group_id in list(self._groups)
        }

    def share(self, topic: Topic, members: int = 0) -> int:
        """Adds what this rank knows and tells the neighbours, now and then; returns all it knows.

        A rank that wants to know calls this again and again.
        """
        with self._lock:
            is_due = time.monotonic() >= self._next_share.get(topic, 0.0)
            if is_due:
                self._next_share[topic] = time.monotonic() + _SHARE_EVERY_S
            return self._merge(topic, members, tells=is_due)

    def hear(self, source: int, topic: Topic, members: int) -> None:
        """A neighbour has shared what it knows. Who asks as well will share the sum by itself."""
        count, group_id, number = topic
        group = self._groups.get(group_id)
        if group is not None and count == BEGUN and self._has_reached(EXCHANGED, group_id, number):
            if members != group.everybody:
                self._tell([source], frames.encode_census(*topic, group.everybody))
            return
        with self._lock:
            self._merge(topic, members, tells=topic not in self._next_share)

    def _answer(self, count: int, group_id: int, number: int) -> None:
        """Those who asked are told, and what is over is forgotten."""
        over = {EXCHANGED: BEGUN, SETTLED: SETTLED}.get(count)
        with self._lock:
            for topic in [each for each in self._known if each[:2] == (over, group_id)]:
                if topic[2] <= number:
                    self._merge(topic, 0, tells=True)
                    if over == BEGUN:
                        self._forget(topic)

    def _merge(self, topic: Topic, members: int, *, tells: bool) -> int:
        known = self._known.get(topic, 0) | members
        group = self._groups.get(topic[1])
        if group is not None:
            known |= self._own(topic, group)
            # That all have come is told at once, before this rank knows it and may leave.
            if known != self._told.get(topic, 0) and (tells or known == group.everybody):
                self._told[topic] = known
                self._tell(group.neighbours, frames.encode_census(*topic, known))
        self._known[topic] = known
        if len(self._known) > _MOST_TOPICS:
            self._forget(next(iter(self._known)))
        return known

    def _forget(self, topic: Topic) -> None:
        for kept in (self._known, self._told, self._next_share):
            kept.pop(topic, None)

    def _own(self, topic: Topic, group: _Group) -> int:
        count, group_id, number = topic
        if count == BEGUN and self._has_reached(EXCHANGED, group_id, number):
            return group.everybody
        return group.mine if self._has_reached(count, group_id, number) else 0

    def _has_reached(self, count: int, group_id: int, number: int) -> bool:
        return self._reached.get((count, group_id), 0) >= number
