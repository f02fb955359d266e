"""Gradients as users see them, and what users did to them.

[Note: gradients that users keep]
In plain PyTorch a gradient that a user references stays what it is when the parameter forgets it.
Here the next backward would write to the same memory. So the tensors that users see have a storage
of their own around the buffer's memory, and it is known how many references to it there are: if
there are more when the gradients are forgotten, users keep some, and the group takes another
buffer.
"""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.strategies.engine.changes import num_references
from shoal.strategies.engine.flat_group import FlatGroup
from shoal.strategies.gradients.sharded.owners import GradientOwners
from shoal.strategies.gradients.sharded.part import GradientPart, PartLayout
from shoal.strategies.gradients.sharded.sharded_gradient import ShardedGradient
from shoal.torch_internals.tensors import version_of
from shoal.torch_support.memory import storage_address

if TYPE_CHECKING:
    from shoal.strategies.gradients.group_gradients import GroupGradients


class WholeViews:
    """The views of one buffer of whole gradients; see [Note: gradients that users keep]."""

    def __init__(self, buffer: Tensor, group: FlatGroup, *, are_shown: bool) -> None:
        """``are_shown``: whether users see plain tensors, one for each parameter."""
        self._memory = torch.from_dlpack(buffer)
        self._slots = group.layout.slots
        self._views = group.views_of(self._memory) if are_shown else []
        self._addresses = [view.data_ptr() for view in self._views]
        self._num_uses = num_references(self._memory)
        self._num_references = self._most_references(range(len(self._views)))

    def elements(self, index: int) -> Tensor:
        """A parameter's gradient, flat."""
        slot = self._slots[index]
        return self._memory[slot.start : slot.stop]

    def view(self, index: int) -> Tensor:
        """What a parameter shows."""
        if not self.contains(index, self._views[index]):  # ``.data = ...`` has moved it
            self._views[index] = self.elements(index).view(self._slots[index].shape)
        return self._views[index]

    def views(self) -> list[Tensor]:
        """What the parameters show."""
        is_moved = [view.data_ptr() for view in self._views] != self._addresses
        if is_moved or not all(map(Tensor.is_contiguous, self._views)):
            self._views = [self.view(index) for index in range(len(self._views))]
        return self._views

    def are_shown(self, gradients: list[Tensor | None]) -> bool:
        """Whether the parameters' gradients are all there, as they were shown."""
        return all(map(operator.is_, gradients, self.views()))

    def num_writes(self) -> int:
        """How often what the parameters show was written to."""
        return version_of(self._memory)

    def contains(self, index: int, gradient: Tensor) -> bool:
        """Whether a gradient is a parameter's part of the buffer, in its order."""
        is_there = gradient.data_ptr() == self._addresses[index] and gradient.is_contiguous()
        return is_there or not gradient.numel()

    def has(self, gradient: Tensor) -> bool:
        """Whether a gradient lies in the buffer, wherever."""
        return not gradient.is_sparse and storage_address(gradient) == storage_address(self._memory)

    def are_referenced(self, indices: Collection[int]) -> bool:
        """Whether users keep gradients, also some that parameters do not show any more."""
        is_used = num_references(self._memory) != self._num_uses
        return is_used or self._most_references(indices) > self._num_references

    def _most_references(self, indices: Collection[int]) -> int:
        views = [self._views[index] for index in indices] if self._views else []
        return max(map(sys.getrefcount, views), default=0)


class ShownGradients:
    """What the parameters of one group show for gradients, and what users made of it."""

    def __init__(
        self, gradients: GroupGradients, owners: GradientOwners, rank: int, *, shows_parts: bool
    ) -> None:
        """``shows_parts``: whether parameters show a `ShardedGradient`, not a plain tensor."""
        self._gradients, self._owners, self._shows_parts = gradients, owners, shows_parts
        self._parameters = gradients.group.parameters
        self.parts = PartViews(gradients, owners, rank)
        self._whole_views: WholeViews | None = None
        self._num_writes = 0
        self.by_hand: dict[int, Tensor] = {}
        """What users put in the place of gradients, as far as `adopt` found it."""

    # Showing ------------------------------------------------------------------------------

    def show(self) -> None:
        """Lets the parameters show what they have: None where no rank used them."""
        gradients = self._gradients
        if gradients.adds_in_place:
            return
        there = gradients.used | gradients.collected
        if len(there) == len(self._parameters):
            gradients.group.show_gradients(
                self.parts.all() if self._shows_parts else self._views_of_whole().views()
            )
            return
        everything = range(len(self._parameters))
        views = [self._view(index) if index in there else None for index in everything]
        gradients.group.show_gradients(views)

    def _view(self, index: int) -> Tensor:
        """What a parameter shows."""
        return self.parts.view(index) if self._shows_parts else self._views_of_whole().view(index)

    def _views_of_whole(self) -> WholeViews:
        if self._whole_views is None:
            whole, group = self._gradients.memory.take_whole(), self._gradients.group
            self._whole_views = WholeViews(whole, group, are_shown=not self._shows_parts)
        return self._whole_views

    def elements(self, index: int) -> Tensor:
        """A parameter's gradient in the buffer of the whole, flat."""
        return self._views_of_whole().elements(index)

    # What users wrote to averaged gradients that are whole; see [Note: edits of gradients].

    def expect_writes(self) -> None:
        """What was written to them so far is known."""
        if self._whole_views is not None:
            self._num_writes = self._whole_views.num_writes()

    def note_writes(self) -> None:
        """Users may have written to them since they were shown."""
        if self._whole_views is None or self._shows_parts:
            return
        count, gradients = self._whole_views.num_writes() - self._num_writes, self._gradients
        if count and gradients.used and not gradients.local:
            self._owners.note(f"group {gradients.group.index} written to", count)
        self.expect_writes()

    # What users did -----------------------------------------------------------------------

    def adopt(self) -> None:
        """Finds what a user did to the gradients that the parameters show.

        Those that were put in by hand are left in `by_hand`, to be taken over as this rank's own
        or as what all ranks have.
        """
        self.by_hand = {}
        if self._gradients.adds_in_place or self._is_as_shown():
            return
        self.forget_cleared()
        arrived = set(self._gradients.arrived)
        for index, gradient in enumerate(self._gradients.group.gradients()):
            if gradient is None or index in arrived:
                continue
            if isinstance(gradient, ShardedGradient):
                if not self.parts.is_unchanged(index, gradient):
                    self._adopt_part(index, gradient)
            elif not self._is_own(index, gradient):
                self.by_hand[index] = gradient

    def _is_as_shown(self) -> bool:
        """Whether every parameter has the gradient that it was shown with."""
        gradients, shown = self._gradients, self._gradients.group.gradients()
        if not gradients.used and not gradients.collected:
            return all(map(operator.is_, shown, itertools.repeat(None)))
        if self._shows_parts:
            return self.parts.are_shown(shown, gradients.used | gradients.collected)
        if self._whole_views is None:
            return False
        return self._whole_views.are_shown(shown)

    def _is_own(self, index: int, gradient: Tensor) -> bool:
        """Whether a plain gradient is the buffer's: ``.data = ...`` may have moved it."""
        gradients = self._gradients
        if self._shows_parts or gradients.memory.whole is None or gradient.is_sparse:
            return False
        if index not in gradients.used and index not in gradients.collected:
            return False
        return self._views_of_whole().contains(index, gradient)

    def _adopt_part(self, index: int, gradient: ShardedGradient) -> None:
        """One that was computed from averaged ones is averaged."""
        if gradient.replacement is not None:
            self.parts.views.pop(index, None)
            gradient.part.leave()  # what was gathered of it must not be taken over any more
            if not isinstance(gradient.replacement, ShardedGradient):
                self.by_hand[index] = gradient.replacement
                return
            gradient = gradient.replacement
        layout = self.parts.layout_of(index)
        if gradient.part.layout.conforms(layout):
            values = gradient.part.values()
        else:
            values = layout.take(gradient.whole("use"))
        self._owners.note(f"{layout.name} {gradient.part.after('assigned')}")
        self._overwrite(index, values)

    def _overwrite(self, index: int, values: Tensor) -> None:
        """This rank's elements of an averaged gradient, whatever was there."""
        gradients, parameter = self._gradients, self._parameters[index]
        parameter.grad = None
        self.release(index)
        if not gradients.is_sharded and not gradients.used and not gradients.collected:
            gradients.memory.take_whole().zero_()
        gradients.part(index).copy_(values)
        gradients.used.add(index)
        if not gradients.is_sharded:
            gradients.collected.add(index)
        parameter.grad = self._view(index)

    def lies_here(self, gradient: Tensor) -> bool:
        """Whether a gradient is a view of this group's buffer."""
        return self._whole_views is not None and self._whole_views.has(gradient)

    def replace_by_hand(self, index: int, gradient: Tensor) -> None:
        """Another tensor with the values of one that was put in by hand."""
        self.by_hand[index] = self._parameters[index].grad = gradient

    def leave_to_users(self) -> None:
        """What users reference stays what it is when other gradients take its place."""
        everything = range(len(self._parameters))
        if self._whole_views is not None and self._whole_views.are_referenced(everything):
            self._move()

    def take_as_final(self, indices: Collection[int]) -> None:
        """Gradients that were put in by hand count as whole, the same on every rank."""
        if indices:
            self.leave_to_users()
        for index in indices:
            layout, gradient = self.parts.layout_of(index), self.by_hand.pop(index)
            self._overwrite(index, layout.take(gradient.detach()))

    def take_as_local(self) -> None:
        """Gradients that were put in by hand count as this rank's own, to be averaged."""
        if self.by_hand:
            self.leave_to_users()
        for index, gradient in self.by_hand.items():
            self._parameters[index].grad = None
            self._gradients.forget(index)
            self._parameters[index].grad = gradient.detach()
            self._gradients.arrived.append(index)
        self.by_hand = {}
        self._gradients.collect()

    # Forgetting ---------------------------------------------------------------------------

    def forget_cleared(self) -> None:
        """A gradient that the user set to None is no longer there to be added to."""
        gradients = self._gradients
        shown = gradients.group.gradients()
        for index in [*(gradients.used | gradients.collected)]:
            if shown[index] is None:
                if self._is_averaged(index):
                    self._owners.note(f"{gradients.group.names[index]} has none")
                gradients.forget(index)

    def _is_averaged(self, index: int) -> bool:
        return index in self._gradients.used and index not in self._gradients.local

    def release(self, index: int) -> None:
        """What users still reference of a gradient that is gone stays what it was."""
        self.parts.release(index, is_averaged=self._is_averaged(index))

    def forget(self, indices: set[int]) -> None:
        """Forgets the gradients of some parameters."""
        self._gradients.finish_reduction()
        for index in indices:
            self._parameters[index].grad = None
        if self._whole_views is not None and self._whole_views.are_referenced(indices):
            self._move()
        self.forget_cleared()

    def _move(self) -> None:
        """Users keep the buffer, and the group takes another with the same values."""
        shown = [
            index
            for index, parameter in enumerate(self._parameters)
            if parameter.grad is not None and self._is_own(index, parameter.grad)
        ]
        self._whole_views = None
        left = self._gradients.memory.leave_whole()
        self._gradients.memory.take_whole().copy_(left)
        for index in shown:
            self._parameters[index].grad = self._view(index)

    def make_zero(self, indices: set[int]) -> None:
        """Makes gradients that are there zero; they still count as there."""
        self._gradients.finish_reduction()
        for index in indices & (self._gradients.used | self._gradients.collected):
            self._gradients.zero(index)
        for index in indices & self.by_hand.keys():
            self.by_hand[index].zero_()

    def clear(self) -> None:
        """The parameters show nothing; see [Note: gradients that users keep]."""
        gradients = self._gradients
        if gradients.used:
            self._owners.note(f"group {gradients.group.index} has none")
        gradients.group.show_gradients([None] * len(self._parameters))
        for index in list(self.parts.views):
            self.release(index)
        everything, views = range(len(self._parameters)), self._whole_views
        is_left = views is not None and views.are_referenced(everything)
        if is_left or gradients.memory.is_better_fresh:
            self._whole_views = None
            gradients.memory.leave_whole()


class PartViews:
    """One `ShardedGradient` for each parameter, made when it is first shown."""

    def __init__(self, gradients: GroupGradients, owners: GradientOwners, rank: int) -> None:
        """``rank``: this rank's index among those that hold the parts."""
        self._gradients, self._owners, self._rank = gradients, owners, rank
        self.views: dict[int, ShardedGradient] = {}
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
        if index not in self.views:
            part = GradientPart(self.layout_of(index), self._gradients, index)
            self.views[index] = ShardedGradient(part, self._gradients.group.master)
            del part
            self._num_own_references = self._num_references(index)
        view = self.views[index]
        view.arrived = None
        return view

    def all(self) -> list[ShardedGradient]:
        """What the parameters show if all have a gradient."""
        indices = range(len(self._gradients.group.parameters))
        if len(self.views) < len(indices):
            return [self.view(index) for index in indices]
        for view in self.views.values():
            view.arrived = None
        return [self.views[index] for index in indices]

    def _num_references(self, index: int) -> int:
        """How often a view is referenced, itself and the part that it stands for."""
        view = self.views[index]
        return sys.getrefcount(view) + sys.getrefcount(view.part)

    def are_shown(self, gradients: list[Tensor | None], there: Collection[int]) -> bool:
        """Whether the parameters in ``there`` have what they were shown with, the others none."""
        return all(
            self.is_unchanged(index, gradient) if index in there else gradient is None
            for index, gradient in enumerate(gradients)
        )

    def is_unchanged(self, index: int, gradient: Tensor | None) -> bool:
        """Whether a gradient is what the parameter was shown with."""
        view = self.views.get(index)
        return view is not None and view is gradient and view.replacement is None

    def release(self, index: int, *, is_averaged: bool) -> None:
        """What users still reference of a gradient that is gone stays what it was."""
        if index not in self.views:
            return
        num_users = self._num_references(index) - self._num_own_references
        part = self.views[index].part
        if num_users > part.is_gathered:
            del self.views[index]
            if is_averaged:
                part.leave()
        else:
            part.forget()
            self.views[index].replacement = None

    def make_zero(self, index: int) -> None:
        """A parameter's gradient was made zero."""
        if index in self.views:
            self.views[index].part.make_zero()
