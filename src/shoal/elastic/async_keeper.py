"""Keeps a server's shard with its buddy, sent now and then and by one side only.

[Note: copies of a server]
Under strategy "async" no step is common to all ranks, so nothing is voted for. A server sends its
shard, with the optimizer's state, to its buddy after some updates of its own; the buddy's thread
takes it. If the server is lost, training goes on with the copy, without what was pushed to it
since. Those that are left have their own shards as they are: nothing of theirs is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.save.rank_state import RankState
from shoal.comm import Backend
from shoal.comm.peer_tensors.lending import Answer, Lent, PeerTensors
from shoal.elastic.keeper import Keeper
from shoal.elastic.kept_part import KeptPart, Room, Seat, Share, keep
from shoal.errors import ShoalError
from shoal.strategies.independent.worker import Unmade
from shoal.system.deadline import Deadline


class AsyncKeeper(Keeper):
    """What one rank keeps of servers that are lost perhaps; see [Note: copies of a server].

    Attributes:
        is_current: Whether this rank's shard is that of its seat: not while it is laid out anew.
        made: What training went on from after the last loss: by each server's rank, and each
            worker's, the number of the last update that is in it.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self.is_current = False
        self._sent: dict[int, KeptPart] = {}
        self._peers: PeerTensors | None = None
        self._num_copies = 0
        self.made: dict[int, dict[int, int]] = {}

    def move_to(self, backend: Backend, generation: int, ranks_per_replica: int) -> None:
        """Keeps with these ranks from now on, who all call it; what it has stays for now."""
        super().move_to(backend, generation, ranks_per_replica)
        self._peers, self.is_current = backend.lend(self), True

    @property
    def parts(self) -> list[KeptPart]:
        """All that it has."""
        return [*super().parts, *self._sent.values()]

    def drop_all(self) -> None:
        """What it has is not what training goes on from any more."""
        super().drop_all()
        self._sent = {}

    def commit(
        self,
        state: RankState,
        step: int,
        local: Any,
        *,
        share: Share | None,
        word: Callable[[], int] = lambda: 0,
    ) -> list[int]:
        """All ranks begin with copies, by a vote; of this rank's own part the shard is enough."""
        words = super().commit(state, 0, local, share=None, word=word)
        self.own, self._rooms = [], {}
        before = [part for part in self._sent.values() if part.seat.generation < self.generation]
        for part in before:
            self._sent.pop(part.seat.rank, None)
        return words

    @property
    def seat(self) -> Seat:
        """This rank, in the world that it keeps copies with."""
        return self._seat

    @property
    def generation(self) -> int:
        """Of the seat."""
        return self._seat.generation

    @property
    def buddy(self) -> int:
        """Who has the copy of this rank's shard."""
        return (self._seat.rank + self._shift) % self._seat.size

    @property
    def others_of_world(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self._seat.size) if rank != self._seat.rank]

    def tell_made(self, parts: Mapping[int, KeptPart], backend: Backend) -> None:
        """Tells all ranks which updates are in the parts that training goes on from."""
        own = {rank: part.values.get("made", []) for rank, part in parts.items()}
        found = backend.all_gather_object({str(rank): made for rank, made in own.items()})
        self.made = {int(rank): dict(made) for each in found for rank, made in each.items()}

    def left_out(self, unmade: Unmade, rank: int) -> list[str]:
        """What is not in the parts of an update that ``rank`` of the lost world has made."""
        number = unmade.update.number
        return [
            name
            for server, names in unmade.names.items()
            if self.made.get(server, {}).get(rank, 0) < number
            for name in names
        ]

    def take(self, state: RankState, made: Mapping[int, int]) -> KeptPart:
        """A copy of the shard as it is now, with these updates; nothing may change it meanwhile."""
        state.values["made"] = [list(each) for each in made.items()]
        self._num_copies += 1
        room = Room(None, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        return keep(state, self._seat, self._num_copies, share=None, room=room)

    def send(self, part: KeptPart, ranks: Iterable[int]) -> None:
        """Gives others a copy; returns once they have compared it."""
        assert self._peers is not None
        assert self._backend is not None
        told = json.dumps(part.about())
        request = {"kind": "copy", "about": told, "checksum": part.checksum()}
        for rank in ranks:
            deadline = Deadline(self._backend.timeout)
            self._peers.call(rank, request, part.data, deadline)

    # What the thread of a buddy does --------------------------------------------------------------

    def handle(self, request: dict[str, Any], values: Tensor | None) -> Answer:
        """Takes a copy of another rank's shard."""
        assert values is not None
        part = KeptPart.of(json.loads(request["about"]), values)
        if part.checksum() != request["checksum"]:
            raise ShoalError("the copy of a server's shard was damaged on the way")
        self._sent[part.seat.rank] = part
        return Answer({})

    def find(self, key: str) -> Lent | None:
        """Nothing is lent."""
        return None

    def listing(self) -> list[list[Any]]:
        """Nothing is lent."""
        return []
