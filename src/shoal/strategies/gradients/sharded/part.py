"""What a rank holds of one gradient, and how it gets at the rest.

[Note: gathered gradients]
What cannot be computed from parts is computed on the whole gradient, which is gathered for it.
Views of that whole may be written to (``p.grad[0] = 0``). So the part keeps the whole while users
reference it, and takes its own elements over before they are used again.
"""

from __future__ import annotations

import weakref
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.strategies.engine.changes import num_references
from shoal.strategies.gradients.sharded.owners import GradientOwners
from shoal.torch_internals.tensors import make_wrapper
from shoal.torch_support.fingerprint import checksum

if TYPE_CHECKING:
    from shoal.strategies.gradients.group_gradients import GroupGradients


@dataclass(frozen=True, eq=False)
class PartLayout:
    """Where the elements of one gradient are."""

    name: str  # the parameter's
    shape: torch.Size  # the parameter's
    # Where each rank's elements begin in the flattened gradient, and its length.
    cuts: tuple[int, ...]
    rank: int  # this rank's index among them
    # The ranks. They belong to the model, which must not live as long as a gradient.
    owners: weakref.ref[GradientOwners]

    @property
    def bounds(self) -> slice:
        """Which elements of the flattened gradient this rank has."""
        return slice(self.cuts[self.rank], self.cuts[self.rank + 1])

    @property
    def is_divided(self) -> bool:
        """Whether other ranks have elements, too."""
        return len(self.cuts) > 2

    def conforms(self, other: PartLayout) -> bool:
        """Whether every rank has the same elements of both."""
        return self is other or (
            self.shape == other.shape and self.cuts == other.cuts and self.owners == other.owners
        )

    def take(self, whole: Tensor) -> Tensor:
        """This rank's elements of a tensor that can be expanded to the whole shape."""
        return whole.expand(self.shape).reshape(-1)[self.bounds]

    def all_owners(self) -> GradientOwners:
        """The ranks, as long as their model is there."""
        owners = self.owners()
        if owners is None:
            raise ShoalError(f"the model of {self.name} is gone, and with it the ranks' parts")
        return owners


class GradientPart:
    """This rank's elements of one gradient, flat, and what was gathered of the others'."""

    def __init__(self, layout: PartLayout, source: GroupGradients, index: int) -> None:
        """The elements are those of the parameter of that index, wherever they are now."""
        self.layout, self._index = layout, index
        # It belongs to the model, which must not live as long as a gradient.
        self._source: weakref.ref[GroupGradients] | None = weakref.ref(source)
        self._own: Tensor | None = None
        self._whole: Tensor | None = None
        self._known = 0
        self._history = 0

    @classmethod
    def of(cls, layout: PartLayout, values: Tensor, history: int = 0) -> GradientPart:
        """One with memory of its own; ``history`` tells how it was computed."""
        made = cls.__new__(cls)
        made.layout, made._source, made._own, made._whole = layout, None, values, None
        made._history, made._known = history, 0
        return made

    def after(self, edit: str) -> int:
        """How it was computed from an averaged gradient, and this, as a number."""
        return zlib.crc32(edit.encode(), self._history)

    def note(self, edit: str) -> None:
        """It was changed in place; see [Note: edits of gradients]."""
        owners = self.layout.owners()
        if self._own is not None:
            self._history = self.after(edit)
        elif owners is not None:
            owners.note(f"{self.layout.name} {edit}")

    def _find(self) -> Tensor:
        if self._own is not None:
            return self._own
        return self._averaged_by().part(self._index)

    def _averaged_by(self) -> GroupGradients:
        source = None if self._source is None else self._source()
        if source is None:
            raise ShoalError(f"the model of {self.layout.name} is gone, and its gradients with it")
        return source

    @property
    def is_kept(self) -> bool:
        """Whether users reference what was gathered, so that it must change with the part."""
        return self._whole is not None and num_references(self._whole) > 1

    @property
    def is_gathered(self) -> bool:
        """Whether `GradientOwners.kept` has it."""
        return self._whole is not None

    def values(self) -> Tensor:
        """This rank's elements."""
        if self._own is None:
            self._averaged_by().check_averaged(self._index)
        self.settle()
        return self._find()

    def whole(self, what: str) -> Tensor:
        """The whole gradient, whose elements may be written to; all ranks call it.

        ``what`` says what for, should another rank do something else.
        """
        values, layout = self.values(), self.layout
        if not layout.is_divided:
            return values.view(layout.shape)
        owners = layout.all_owners()
        owners.settle()
        gathered = owners.gather(values, f"{what} of the gradient of {layout.name}")
        # A copy, because a transport may hold on to what it has gathered.
        self._keep(gathered.clone(), owners)
        return self.here()

    def _keep(self, gathered: Tensor, owners: GradientOwners) -> None:
        if self._whole is None:
            self._whole = gathered
            owners.kept.append(self)
        else:  # users who reference it see the new values
            self._whole.copy_(gathered)
        self.expect_writes()

    def expect_writes(self) -> None:
        """What was written to the whole so far is known."""
        self._known = self._sum_of_whole()

    def note_writes(self) -> None:
        """Users may have written to views of the whole; see [Note: edits of gradients]."""
        if self._whole is None:
            return
        before, self._known = self._known, self._sum_of_whole()
        owners = self.layout.owners()
        if before != self._known and self._own is None and owners is not None:
            owners.note(f"{self.layout.name} written to")

    def _sum_of_whole(self) -> int:
        """Changes with the whole. Its views have version counters of their own."""
        is_read = self._whole is not None and self._whole.is_cpu
        return int(checksum(self._whole)) if is_read else 0

    def here(self) -> Tensor:
        """The whole where it was gathered already."""
        whole = self._find() if self._whole is None else self._whole
        return whole.view(self.layout.shape)

    def settle(self) -> bool:
        """Takes over what was written to the whole; returns whether users still reference it."""
        self.note_writes()
        return self._take_over()

    def _take_over(self) -> bool:
        if self._whole is None:
            return False
        self._find().copy_(self._whole[self.layout.bounds])
        if num_references(self._whole) == 1:
            self._whole = None
        return self._whole is not None

    def refresh(self) -> None:
        """The part was changed: the whole has at least this rank's elements of it."""
        if self._whole is not None:
            self.note_writes()
            self._whole[self.layout.bounds] = self._find()
            self.expect_writes()

    def leave(self) -> None:
        """Has memory of its own from now on: where it was, another gradient will be."""
        # Not noted, since ranks whose users do not reference it just forget it.
        self._take_over()
        self._own, self._source = self._find().clone(), None

    def make_zero(self) -> None:
        """The part is zero now, and so is the whole."""
        if self._whole is not None:
            self._whole.zero_()
            self.expect_writes()

    def forget(self) -> None:
        """Drops what was gathered: the gradient is gone."""
        self._whole = None


class PartTensor(torch.Tensor):
    """A tensor of which this rank holds a part."""

    part: GradientPart
    arrived: Tensor | None
    """What autograd has just added to it."""
    replacement: Tensor | None
    """What was put in its place with ``gradient.data = ...``."""

    @staticmethod
    def __new__(cls, part: GradientPart, like: Tensor) -> PartTensor:
        """``like`` has its dtype and device."""
        made: PartTensor = make_wrapper(
            cls, part.layout.shape, dtype=like.dtype, device=like.device
        )
        made.part, made.arrived, made.replacement = part, None, None
        return made
