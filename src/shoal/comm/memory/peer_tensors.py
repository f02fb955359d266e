"""Lent tensors where ranks are threads: they are copied directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.comm.peer_tensors.lending import LendingSource, PeerTensors, not_held
from shoal.comm.peer_tensors.shelf import Shelf
from shoal.comm.world_state import closed_error
from shoal.errors import PeerError
from shoal.system.deadline import Deadline

if TYPE_CHECKING:
    from shoal.comm.backend import Backend
    from shoal.comm.memory.backend import Simulator
    from shoal.comm.world_state import WorldState


class ThreadPeerTensors(PeerTensors):
    """One lending of one group; only one rank runs at a time, so nobody waits."""

    takes_time = False

    def __init__(
        self, backend: Backend, state: WorldState, simulator: Simulator, source: LendingSource
    ) -> None:
        """All ranks of the group ``backend`` call it."""
        self._backend, self._state, self._simulator = backend, state, simulator
        self._number = max(backend.all_gather_object(state.next_lending))
        state.next_lending = self._number + 1
        self._sources = simulator.lent
        self._own = (self._number, backend.ranks[backend.rank])
        self._sources[self._own] = source
        backend.barrier()

    def read(self, rank: int, key: str, deadline: Deadline) -> Tensor:
        """A copy: the holder's memory is its own."""
        source = self._source(rank, key)
        lent = source.find(key)
        if lent is None:
            raise not_held(self._backend.ranks[rank], key, source.listing())
        if lent.ready is not None:
            torch.cuda.current_stream(lent.tensor.device).wait_event(lent.ready)
        self._state.statistics.count("fetch", lent.tensor.nbytes, 0.0, 0.0)
        with torch.inference_mode(mode=False):
            room = torch.empty(
                lent.tensor.shape, dtype=lent.tensor.dtype, device=lent.tensor.device
            )
        with torch.no_grad():
            return room.copy_(lent.tensor)

    def give(self, rank: int, key: str, tensor: Tensor, deadline: Deadline) -> None:
        """Puts a copy there."""
        with torch.inference_mode(mode=False), torch.no_grad():
            self._shelf(rank, key).keep(key, tensor.clone(), tensor.device.type)
        self._state.statistics.count("give", tensor.nbytes, 0.0, 0.0)

    def take(self, rank: int, key: str, deadline: Deadline) -> Tensor:
        """The other thread has no use for it: no copy is made."""
        shelf = self._shelf(rank, key)
        lent = shelf.find(key)
        if lent is None:
            raise not_held(self._backend.ranks[rank], key, shelf.listing())
        shelf.drop(key)
        self._state.statistics.count("fetch", lent.tensor.nbytes, 0.0, 0.0)
        return lent.tensor

    def drop(self, rank: int, keys: Sequence[str], deadline: Deadline) -> None:
        """At once."""
        for key in keys:
            self._shelf(rank, key).drop(key)

    def _shelf(self, rank: int, key: str) -> Shelf:
        source = self._source(rank, key)
        assert isinstance(source, Shelf)
        return source

    def listing(self, rank: int, deadline: Deadline) -> list[list[Any]]:
        """What the other thread lends."""
        return self._source(rank, "anything").listing()

    def close(self) -> None:
        """Nobody finds it any more."""
        self._sources.pop(self._own, None)

    def _source(self, rank: int, key: str) -> LendingSource:
        holder = self._backend.ranks[rank]
        if self._state.is_closed:
            raise closed_error(self._state, self._backend.rank)
        reason = self._simulator.absence(holder)
        if reason is not None:
            raise PeerError(holder, reason, f"a fetch of {key!r} from it")
        source = self._sources.get((self._number, holder))
        if source is None:
            raise not_held(holder, key, None)
        return source
