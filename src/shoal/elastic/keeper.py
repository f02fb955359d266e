"""Keeps a rank's own part of a step and its neighbour's, until all ranks have the next one.

[Note: commit]
A rank copies its part, sends it to its *buddy*, and gets the part of the rank before it, whose step
and checksum it compares. Then all ranks vote. Who has passed the vote knows that every part of the
step exists twice; only then is the step before dropped. So if a rank is lost anywhere in between,
all that are left have the step before, or all have this one: who had not passed the vote was
complete before it voted, if anybody passed.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.save.rank_state import RankState
from shoal.comm import Backend
from shoal.elastic.kept_part import KeptPart, Room, Seat, Share, keep
from shoal.errors import ShoalError

WANTS_CHANGE, IS_LEAVING, IS_DAMAGED = 1, 2, 4
"""What a rank may say in a vote."""
_MOST_TRIES = 3


class Keeper:
    """The parts that one rank keeps."""

    def __init__(self) -> None:
        """None yet."""
        self.own: list[KeptPart] = []
        self.others: list[KeptPart] = []
        self._rooms: dict[str, Tensor] = {}
        self._backend: Backend | None = None
        self._seat = Seat(0, 0, 1)
        self._shift = 1

    def move_to(self, backend: Backend, generation: int, ranks_per_replica: int) -> None:
        """Keeps with these ranks from now on, who all call it; what it has stays for now."""
        hosts = backend.all_gather_object(platform.node())
        self._shift = buddy_distance(hosts, ranks_per_replica)
        self._backend = backend.lane(self)
        self._seat = Seat(generation, backend.rank, backend.size)

    @property
    def parts(self) -> list[KeptPart]:
        """All that it has."""
        return [*self.own, *self.others]

    @property
    def rooms(self) -> list[Tensor]:
        """Memory that the next commit will use."""
        return list(self._rooms.values())

    def drop_all(self) -> None:
        """What it has is not what training goes on from any more."""
        self.own, self.others = [], []

    def commit(
        self,
        state: RankState,
        step: int,
        local: Any,
        *,
        share: Share | None,
        word: Callable[[], int] = lambda: 0,
    ) -> list[int]:
        """Keeps a step with all ranks, and drops those before; see [Note: commit].

        ``share``: this rank's, where ranks that see other data have the same values.

        Returns what each rank says in the vote.
        """
        room = Room(self._rooms.pop("own", None), self._make_room)
        part = keep(state, self._seat, step, share=share, room=room)
        part.local = local
        self.own.append(part)
        words: list[int] = []
        for _ in range(_MOST_TRIES):
            other = self._exchange(part)
            words = self._vote(word() | (IS_DAMAGED if other is None else 0))
            if not any(each & IS_DAMAGED for each in words):
                self._settle(part, other)
                return words
        damaged = [rank for rank, each in enumerate(words) if each & IS_DAMAGED]
        raise ShoalError(
            f"the copy that rank {damaged[0]} got of a neighbour's state was damaged "
            f"{_MOST_TRIES} times on the way: memory or network of these hosts cannot be trusted"
        )

    def _make_room(self, num_bytes: int) -> Tensor:
        """Memory that a buddy on this host reads by itself, where that is possible."""
        assert self._backend is not None
        return self._backend.empty(num_bytes, torch.uint8)

    def _exchange(self, part: KeptPart) -> KeptPart | None:
        """Sends this rank's part to its buddy; returns the one it gets, None if it is damaged."""
        backend, seat = self._backend, self._seat
        assert backend is not None
        if seat.size == 1:
            return part
        after = (seat.rank + self._shift) % seat.size
        before = (seat.rank - self._shift) % seat.size
        # Thousands of small values: as one text they are written and read by json's own loop.
        told = [json.dumps(part.about()), part.checksum(), part.data.numel()]
        about = backend.encode_message(told, after)
        sending = [backend.start_send(about, after), backend.start_send(part.data, after, 1)]
        content, checksum, num_bytes = backend.recv_object(before)
        data = self._rooms.pop("other", None)
        if data is None or data.numel() != num_bytes:
            data = torch.empty(num_bytes, dtype=torch.uint8)
        backend.recv(data, src=before, tag=1)
        for work in sending:
            work.wait()
        other = KeptPart.of(json.loads(content), data)
        expected = (Seat(seat.generation, before, seat.size), part.step)
        if (other.seat, other.step) != expected or other.checksum() != checksum:
            return None
        self.others.append(other)
        return other

    def _vote(self, word: int) -> list[int]:
        assert self._backend is not None
        words = torch.zeros(self._seat.size, dtype=torch.int64)
        words[self._seat.rank] = word
        found: list[int] = self._backend.all_reduce(words).tolist()
        return found

    def _settle(self, part: KeptPart, other: KeptPart | None) -> None:
        """Drops all but the step that was voted for; their memory is used for the next."""
        for name, kept, latest in (("own", self.own, part), ("other", self.others, other)):
            for each in kept:
                is_of_this_world = each.seat.generation == self._seat.generation
                if each is not latest and each.data is not part.data and is_of_this_world:
                    self._rooms[name] = each.data
        self.own = [part]
        self.others = [] if other is None or other is part else [other]

    def hand_over(self, words: list[int]) -> None:
        """Before ranks leave: what only they would have had goes to one that stays."""
        backend, seat = self._backend, self._seat
        assert backend is not None
        staying = [rank for rank in range(seat.size) if not words[rank] & IS_LEAVING]
        for rank in range(seat.size):
            buddy = (rank + self._shift) % seat.size
            if not staying or rank in staying or buddy in staying:
                continue
            heir = staying[rank % len(staying)]
            if seat.rank == rank:
                backend.send_object(self.own[-1].about(), heir, 2)
                backend.send(self.own[-1].data, heir, 3)
            elif seat.rank == heir:
                about = backend.recv_object(rank, 2)
                self.others.append(KeptPart.of(about, backend.recv(src=rank, tag=3)))


def buddy_distance(hosts: list[str], ranks_per_replica: int = 1) -> int:
    """How far ahead a rank's buddy is: on another host for as many as can be.

    Then in another replica of the model, since a replica goes as a whole where one of it is lost.
    """
    size = len(hosts)

    def is_other_replica(rank: int, shift: int) -> bool:
        return rank // ranks_per_replica != (rank + shift) % size // ranks_per_replica

    def quality(shift: int) -> tuple[int, int, int]:
        num_apart = sum(host != hosts[(rank + shift) % size] for rank, host in enumerate(hosts))
        num_other = sum(is_other_replica(rank, shift) for rank in range(size))
        return num_apart, num_other, -shift

    return max(range(1, max(size, 2)), key=quality)
