"""What the parameters of one group show where each rank holds a part of their gradients."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.strategies.gradients.sharded.owners import GradientOwners
from shoal.strategies.gradients.sharded.part import GradientPart, PartLayout
from shoal.strategies.gradients.sharded.sharded_gradient import ShardedGradient

if TYPE_CHECKING:
    from shoal.strategies.gradients.group_gradients import GroupGradients


class PartViews:
    """One `ShardedGradient` for each parameter, made when it is first shown."""

    def __init__(self, gradients: GroupGradients, owners: GradientOwners, rank: int) -> None:
        """``rank``: this rank's index among those that hold the parts."""
        self._gradients, self._owners, self._rank = gradients, owners, rank
        self._views: dict[int, ShardedGradient] = {}
        self._num_own_references = 0

    def layout_of(self, index: int) -> PartLayout:
        """Where the elements of a parameter's gradient are."""
        layout = self._gradients.group.layout
        slot = layout.slots[index]
        cuts: tuple[int, ...] = (0, slot.stop - slot.start)
        if self._gradients.is_sharded:
            edges = (min(max(edge, slot.start), slot.stop) for edge in layout.bounds)
            cuts = tuple(edge - slot.start for edge in edges)
        return PartLayout(slot.name, slot.shape, cuts, self._rank, weakref.ref(self._owners))

    def view(self, index: int) -> ShardedGradient:
        """What a parameter shows."""
        if index not in self._views:
            part = GradientPart(self.layout_of(index), self._gradients, index)
            self._views[index] = ShardedGradient(part, self._gradients.group.master)
            del part
            self._num_own_references = self._num_references(index)
        view = self._views[index]
        view.arrived = None
        return view

    def _num_references(self, index: int) -> int:
        """How often a view is referenced, itself and the part that it stands for."""
        view = self._views[index]
        return sys.getrefcount(view) + sys.getrefcount(view.part)

    def shown(self) -> list[int]:
        """The parameters that have a view."""
        return list(self._views)

    def is_unchanged(self, index: int, gradient: Tensor) -> bool:
        """Whether a gradient is what the parameter was shown with."""
        view = self._views.get(index)
        return view is gradient and view.replacement is None

    def discard(self, index: int) -> None:
        """Another view is made when the parameter next shows one."""
        self._views.pop(index, None)

    def release(self, index: int, *, is_averaged: bool) -> None:
        """What users still reference of a gradient that is gone stays what it was."""
        if index not in self._views:
            return
        num_users = self._num_references(index) - self._num_own_references
        part = self._views[index].part
        if num_users > part.is_gathered:
            del self._views[index]
            if is_averaged:
                part.leave()
        else:
            part.forget()
            self._views[index].replacement = None

    def make_zero(self, index: int) -> None:
        """A parameter's gradient was made zero."""
        if index in self._views:
            self._views[index].part.make_zero()
