"""A buffer of gradients as users see it: one tensor for each parameter.

[Note: what users hold]
In plain PyTorch a gradient that somebody keeps stays what it is when the parameter forgets it. Here
the next backward would write to the same memory. So the tensors that users see have a storage of
their own around the buffer's memory, and it is known how many of them there are: if there are more
when the gradients are forgotten, somebody keeps some, and the group takes another buffer.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection

import torch
from torch import Tensor

from shoal.sharding.layout import GroupLayout
from shoal.strategies.engine.lent import num_holders


class ShownBuffer:
    """One buffer; see [Note: what users hold]."""

    def __init__(self, buffer: Tensor, layout: GroupLayout, *, has_faces: bool) -> None:
        """``has_faces``: whether users see plain tensors, one for each parameter."""
        self._outside = torch.from_dlpack(buffer)
        self._layout = layout
        places = range(len(layout.slots)) if has_faces else ()
        self._faces = [self._view(place) for place in places]
        self._addresses = [face.data_ptr() for face in self._faces]
        self._num_uses = num_holders(self._outside)
        self._num_references = self._references(places)

    def _view(self, place: int) -> Tensor:
        return self.elements(place).view(self._layout.slots[place].shape)

    def elements(self, place: int) -> Tensor:
        """A parameter's gradient, flat."""
        slot = self._layout.slots[place]
        return self._outside[slot.start : slot.stop]

    def face(self, place: int) -> Tensor:
        """What a parameter shows."""
        if not self.contains(place, self._faces[place]):  # ``.data = ...`` has moved it
            self._faces[place] = self._view(place)
        return self._faces[place]

    def faces(self) -> list[Tensor]:
        """What the parameters show."""
        if [face.data_ptr() for face in self._faces] != self._addresses:
            self._faces = [self.face(place) for place in range(len(self._faces))]
        return self._faces

    def are_shown(self, gradients: list[Tensor | None]) -> bool:
        """Whether the parameters' gradients are all there, as they were shown."""
        return all(map(operator.is_, gradients, self.faces()))

    def contains(self, place: int, gradient: Tensor) -> bool:
        """Whether a gradient is in a parameter's place of the buffer."""
        return gradient.data_ptr() == self._addresses[place] or not gradient.numel()

    def is_held(self, places: Collection[int]) -> bool:
        """Whether users keep gradients, also some that parameters have let go of."""
        is_used = num_holders(self._outside) != self._num_uses
        return is_used or self._references(places) > self._num_references

    def _references(self, places: Collection[int]) -> int:
        faces = [self._faces[place] for place in places] if self._faces else []
        return max(map(sys.getrefcount, faces), default=0)
