"""Parameters that users change by hand.

[Note: changes by hand]
Users write to parameters in place: to initialise, to clamp, to prune. Where parameters are the
memory that is stepped, nothing is left to do. Elsewhere the change is in a whole that will be
dropped, or in a narrow copy of masters. So the parameters are looked at when they are known to be
right, and again before a change would be lost. Autograd's version counters catch all changes but
those through `p.data`; to catch those, a few elements of each parameter are compared (on a CPU:
elsewhere that would mean to wait for them). A whole that was gathered outside of a pass, for a
user's own purposes, is taken over in any case. Where ranks share memory, see [Note: changes of
common memory].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.strategies.engine.freed_memory import FreedWhole, ReplacedView, num_references
from shoal.torch_internals.tensors import as_plain_tensors, sum_of_versions

if TYPE_CHECKING:
    from shoal.strategies.engine.flat_group import FlatGroup


# How many elements of each parameter are looked at.
_NUM_SEEN = 4


class Changes:
    """Finds what was changed by hand in the parameters of one group, and makes it count."""

    def __init__(self, group: FlatGroup) -> None:
        """The parameters are right now."""
        self._group = group
        self.referenced: list[FreedWhole | ReplacedView] = []
        """Memory that the parameters had and users still reference."""
        self._is_watched = group.is_sharded or (group.is_mixed and not group.is_common)
        self._num_own_views = num_references(group.whole)
        self._num_bytes_written = 0
        self._elements: Tensor | None = None
        self._is_doubtful = False
        if self._is_watched:
            self._offsets = torch.tensor(sorted(self._chosen_offsets()), dtype=torch.long)
        self.settle()

    def _chosen_offsets(self) -> set[int]:
        return {
            slot.start + slot.shape.numel() * step // _NUM_SEEN
            for slot in self._group.layout.slots
            if slot.shape.numel()
            for step in range(_NUM_SEEN)
        }

    def settle(self) -> None:
        """The parameters are what they should be."""
        if self._is_watched:
            self._versions, self._elements = self._sum_versions(), self._some_elements()
            self._is_doubtful = False

    def doubt(self) -> None:
        """The whole is handed to users now."""
        self._is_doubtful = True

    def adopt(self) -> bool:
        """Makes what was changed by hand count, and returns whether anything was.

        What is common takes all ranks: see [Note: changes of common memory].
        """
        group = self._group
        if group.exposed is not None or group.is_common:
            return False
        is_seen = self._adopt_referenced() if self.referenced else False
        if not group.is_present:
            return is_seen
        is_changed = self.take_back() or (self._is_watched and self._are_there())
        if is_changed or self._is_doubtful:
            if self._is_watched:
                self.keep()
            self.settle()
        return is_changed or is_seen

    def _adopt_referenced(self) -> bool:
        seen = [each.adopt() for each in self.referenced]
        self.referenced = [each for each in self.referenced if each.is_referenced]
        return any(seen)

    def _are_there(self) -> bool:
        if self._sum_versions() != self._versions:
            return True
        found = self._some_elements()
        return self._elements is not None and found is not None and not found.equal(self._elements)

    def _sum_versions(self) -> int:
        with as_plain_tensors():
            return sum_of_versions(self._group.parameters)

    def _some_elements(self) -> Tensor | None:
        """Their bits, since not every number equals itself."""
        whole = self._group.whole
        return whole.index_select(0, self._offsets).view(torch.uint8) if whole.is_cpu else None

    def take_back(self) -> bool:
        """Parameters that were given other memory (``p.data = ...``) come back with its values."""
        group = self._group
        buffer = group.whole if group.exposed is None else group.exposed
        if not group.is_present:
            return False
        base, size = buffer.data_ptr(), buffer.itemsize
        with as_plain_tensors():
            moved = [
                (slot, parameter)
                for slot, parameter in zip(group.layout.slots, group.parameters, strict=True)
                if parameter.data_ptr() != base + slot.start * size and parameter.numel()
            ]
            for slot, parameter in moved:
                view = buffer[slot.start : slot.stop].view(slot.shape)
                view.copy_(parameter.data)
                parameter.data = view
        return bool(moved)

    # Into what is stepped -----------------------------------------------------------------

    def keep(self) -> None:
        """Takes what was written to the whole over into what is stepped."""
        group = self._group
        if not group.is_present:
            return
        part = group.own_slice(group.whole) if group.owns_part else group.whole
        if group.is_mixed:  # what was not written keeps its digits
            is_same = part == group.master.to(part.dtype)
            group.master.copy_(torch.where(is_same, group.master, part.to(group.master_dtype)))
        if group.is_sharded or group.is_common:
            group.shard.copy_(part)

    def take_over(self, buffer: Tensor) -> None:
        """Takes all values of a buffer over, into the whole as well."""
        group = self._group
        if not group.is_common:  # there, its own part is all that a rank writes
            group.whole.copy_(buffer)
        if group.owns_part:
            group.shard.copy_(group.own_slice(buffer))
        if group.is_mixed:
            group.master.copy_(group.own_slice(buffer) if group.owns_part else buffer)

    def overwrite(self, is_new: Tensor, buffer: Tensor) -> None:
        """Takes some elements of a buffer over, into the whole as well if it is there."""
        group = self._group
        own = group.own_slice if group.owns_part else lambda whole: whole
        chosen, values = own(is_new), own(buffer)
        if group.is_mixed:
            group.master.copy_(torch.where(chosen, values.to(group.master_dtype), group.master))
        group.shard.copy_(torch.where(chosen, values, group.shard))
        if group.whole.dim():  # it was gathered again in the meantime
            group.whole.copy_(torch.where(is_new, buffer, group.whole))

    # Memory that users reference; see [Note: freed memory that users reference] -----------

    def note_freed(self) -> None:
        """The whole is about to be dropped, and the parameters do not show it any more."""
        if num_references(self._group.whole) > 1:
            self.referenced.append(FreedWhole(self._group))

    def age(self) -> None:
        """The optimizer has made a step: what users took before is old."""
        for memory in self.referenced:
            memory.is_old = True
        group = self._group
        if group.common is not None and num_references(group.whole) > self._num_own_views:
            self.referenced.append(ReplacedView(group.names, group.common.replace_view()))
            group.whole = group.common.view
            group.point_at(group.whole)

    # Common memory; see [Note: changes of common memory] ----------------------------------

    def find_written(self) -> list[int]:
        """Indices of common parameters that were written to, or share a page with one."""
        group = self._group
        assert group.common is not None
        self.take_back()
        self._adopt_referenced()
        if group.exposed is not None:
            return []
        ranges = group.common.written()
        self._count_written(sum(stop - start for start, stop in ranges) * group.whole.itemsize)
        if not ranges:
            return []
        return [
            index
            for index, slot in enumerate(group.layout.slots)
            if any(slot.start < stop and start < slot.stop for start, stop in ranges)
        ]

    def drop_written(self) -> None:
        """Common parameters show what all ranks have."""
        assert self._group.common is not None
        self._group.common.drop()
        self._count_written(0)

    def _count_written(self, num_bytes: int) -> None:
        self._group.account.add("parameters", num_bytes - self._num_bytes_written)
        self._num_bytes_written = num_bytes
