"""From a world that has lost a rank to the next one, where ranks have no steps in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from shoal.comm import World
from shoal.elastic.async_keeper import AsyncKeeper
from shoal.elastic.choosing import Chosen, Head, freshest, newest_complete
from shoal.elastic.kept_part import KeptPart
from shoal.elastic.recovery import Recovery
from shoal.elastic.snapshot import AttemptSnapshot
from shoal.torch_support.random_state import RandomState

if TYPE_CHECKING:
    from shoal.elastic.async_elastic_optimizer import AsyncElasticOptimizer


class AsyncRecovery(Recovery):
    """Servers that are left go on with what they have, lost ones with their newest copy."""

    _keeper: AsyncKeeper
    _optimizer: AsyncElasticOptimizer

    def __init__(
        self,
        optimizer: AsyncElasticOptimizer,
        world: World,
        snapshot: AttemptSnapshot | None,
        buffers: list[Tensor],
    ) -> None:
        """``snapshot`` and ``buffers``: what this rank itself goes on with; None for who comes."""
        super().__init__(optimizer, world, snapshot)
        self._buffers = buffers

    def run(self) -> int:
        """Returns how many updates this rank has made, or those who have made the fewest."""
        heads = [list(Head.of(part)) for part in self._keeper.parts]
        reports = freshest(self._backend.all_gather_object(heads))
        chosen = newest_complete(reports)
        self._keeper.is_current = False
        if chosen is None:
            return self._fall_back(reports)
        self._keeper.tell_made(self._parts(chosen), self._backend)
        common = self._agree_on_snapshot(chosen)
        self._rebuild(common)  # ranks compare options, of which each has its own afterwards
        self._load(chosen)
        own = self._snapshot or common
        self._put_back(own)
        for buffer, value in zip(
            self._optimizer.model.module.buffers() if self._buffers else (),
            self._buffers,
            strict=True,
        ):
            buffer.detach().copy_(value)
        return own.step

    def _parts(self, chosen: Chosen) -> dict[int, KeptPart]:
        """The newest of each part, where it is this rank that has it."""
        found: dict[int, KeptPart] = {}
        for part in sorted(self._keeper.parts, key=lambda part: part.step):
            is_chosen = part.seat.generation == chosen.generation
            if is_chosen and chosen.holders[part.seat.rank] == self._backend.rank:
                found[part.seat.rank] = part
        return found

    def _agree_on_snapshot(self, chosen: Chosen) -> AttemptSnapshot:
        """That of the rank which has made the fewest updates."""
        own, count = self._snapshot, None
        if own is not None:  # one that joins comes to where others wait, by an update
            count = max(own.step - self._optimizer.is_together, 0)
        counts = self._backend.all_gather_object(count)
        fewest = min(each for each in counts if each is not None)
        told = None if own is None else own.common()
        common = self._backend.broadcast_object(told, root=counts.index(fewest))
        _, num_steps, options, also = common
        step = fewest
        return AttemptSnapshot(step, num_steps, RandomState.capture(), options, also)
