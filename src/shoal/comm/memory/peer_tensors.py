"""Lent tensors where ranks are threads: they are copied directly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.comm.peer_tensors.lending import (
    Answer,
    CalledSource,
    LendingSource,
    PeerTensors,
    not_held,
)
from shoal.comm.world_state import closed_error
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

    def listing(self, rank: int, deadline: Deadline) -> list[list[Any]]:
        """What the other thread lends."""
        return self._source(rank, "anything").listing()

    def call(
        self, rank: int, request: dict[str, Any], values: Tensor | None, deadline: Deadline
    ) -> Answer:
        """The other thread's source handles it in this one."""
        source = self._source(rank, "anything", f"a call of {request['kind']!r}")
        assert isinstance(source, CalledSource)
        answer = source.handle(request, values)
        moved = [each.nbytes for each in (values, answer.values) if each is not None]
        self._state.statistics.count(str(request["kind"]), sum(moved), 0.0, 0.0)
        return answer

    def absence(self, rank: int) -> str | None:
        """Whether the other thread has ended."""
        return self._simulator.absence(self._backend.ranks[rank])

    def hand_over(self) -> bool:
        """The others run until each of them waits, or hands over as well."""
        return self._simulator.hand_over(self._own[1])

    def close(self) -> None:
        """Nobody finds it any more."""
        self._sources.pop(self._own, None)

    def _source(self, rank: int, key: str, doing: str = "") -> LendingSource:
        holder = self._backend.ranks[rank]
        if self._state.is_closed:
            raise closed_error(self._state, self._backend.rank)
        reason = self._simulator.absence(holder)
        if reason is not None:
            raise self._simulator.loss(holder, reason, doing or f"a fetch of {key!r} from it")
        source = self._sources.get((self._number, holder))
        if source is None:
            raise not_held(holder, key, None)
        return source
