"""Groups of the same ranks, for traffic whose order must not depend on other traffic."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.comm.backend import Backend


class Lanes:
    """Lanes of one group of ranks: lent to an owner, and used again when the owner is gone.

    Owners die at different times on different ranks, so the ranks agree on which lane is free
    everywhere before one is used again.
    """

    def __init__(self) -> None:
        self._lanes: list[Backend] = []
        self._free: set[int] = set()

    def lend(self, group: Backend, owner: object) -> Backend:
        """A lane of ``group`` until ``owner`` is gone; all ranks call it together."""
        usable = sorted(number for number in self._free if self._lanes[number].is_in_step)
        free_by_rank = [set(free) for free in group.all_gather_object(usable)]
        free = set.intersection(*free_by_rank)
        number = min(free) if free else self._add(group)
        self._free.discard(number)
        weakref.finalize(owner, self._free.add, number).atexit = False
        return self._lanes[number]

    def _add(self, group: Backend) -> int:
        lane = group.split(0)
        assert lane is not None
        lane.become_lane()
        self._lanes.append(lane)
        return len(self._lanes) - 1
