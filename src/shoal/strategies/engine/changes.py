"""Parameters that somebody changed by hand.

[Note: changes by hand]
Users write to parameters in place: to initialise, to clamp, to prune. Where parameters are the
memory that is stepped, that is all there is to it. Elsewhere the change is not where it counts: it
is in a whole that will be dropped, or in a narrow copy of masters. So the parameters are looked at
when all is well, and again before it matters: at autograd's version counters, which everything but
``p.data`` increases, and for the sake of that at a few elements of each (on the CPU: elsewhere that
would mean to wait for them). A whole that was gathered for a user's own purposes is taken over in
any case. Where ranks share memory, see [Note: changes of common memory].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shoal.strategies.engine.flat_group import FlatGroup


# How many elements of each parameter are looked at.
_NUM_SEEN = 4


class Changes:
    """Finds what was changed by hand in the parameters of one group, and makes it count."""

    def __init__(self, group: FlatGroup) -> None:
        """All is well now."""
        self._group = group
        steps = range(_NUM_SEEN)
        places = {
            slot.start + slot.shape.numel() * step // _NUM_SEEN
            for slot in group.layout.slots
            for step in (steps if slot.shape.numel() else ())
        }
        self._places = torch.tensor(sorted(places), dtype=torch.long)
        self._elements: Tensor | None = None
        self._is_doubtful = False
        self.settle()

    def settle(self) -> None:
        """The parameters are what they should be."""
        self._versions, self._elements = self._sum_versions(), self._some_elements()
        self._is_doubtful = False

    def doubt(self) -> None:
        """The whole is handed to users now."""
        self._is_doubtful = True

    def adopt(self) -> bool:
        """Makes changes count, and returns whether any were seen."""
        is_seen = self._group.take_back() or self._are_there()
        if is_seen or self._is_doubtful:
            self._group.keep_changes()
            self.settle()
        return is_seen

    def _are_there(self) -> bool:
        if self._sum_versions() != self._versions:
            return True
        found = self._some_elements()
        return self._elements is not None and found is not None and not found.equal(self._elements)

    def _sum_versions(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return sum([parameter._version for parameter in self._group.parameters])

    def _some_elements(self) -> Tensor | None:
        """Their bits, since not every number equals itself."""
        whole = self._group.whole
        return whole.index_select(0, self._places).view(torch.uint8) if whole.is_cpu else None
