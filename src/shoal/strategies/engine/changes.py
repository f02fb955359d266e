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

[Note: freed memory that users reference]
``q.data.copy_(p.data)`` asks for q's memory first and then for p's, and if p is in another group,
gathering it has freed q's whole by the time it is written to. So if users reference a whole when
it is freed, and took it outside of forward and backward, what is written to it until the next step
of an optimizer counts. After that step it is old, and writing to it is an error: its values are not
the parameters' any more. Where ranks share memory, the old memory would still show the parameters.
Code must behave alike with and without shared memory, so at a step the parameters get another view
there, and writing to the old one is the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shoal.errors import ShoalError
from shoal.torch_internals.tensors import as_plain_tensors, num_storage_users, sum_of_versions
from shoal.torch_support.memory import Glimpse, PrivateView

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
        self._starts = [slot.start for slot in group.layout.slots]
        self._base, self._addresses = -1, [-1]
        self._is_watched = group.is_sharded or (group.is_mixed and not group.is_common)
        self._num_own_views = num_references(group.whole)
        self._num_bytes_written = 0
        self._elements: object = None
        self.is_doubtful = False
        """Whether the whole was handed to users since the parameters were known to be right."""
        if self._is_watched:
            offsets = {
                slot.start + slot.shape.numel() * step // _NUM_SEEN
                for slot in group.layout.slots
                if slot.shape.numel()
                for step in range(_NUM_SEEN)
            }
            self._glimpse = Glimpse(sorted(offsets), group.whole.dtype)
        self.settle()

    def settle(self) -> None:
        """The parameters are what they should be."""
        if self._is_watched:
            self._versions = self._sum_versions()
            self.settle_gathered()

    def settle_gathered(self) -> None:
        """The parameters are what was gathered; nobody has used them since they were freed."""
        self._elements = self._some_elements()
        self.is_doubtful = False

    def tell_autograd(self) -> None:
        """What autograd saved of them without our hooks must not be taken for their values."""
        increment_version(self._group.parameters)
        self._versions += len(self._group.parameters)

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
        if is_changed or self.is_doubtful:
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
        return self._some_elements() != self._elements

    def _sum_versions(self) -> int:
        with as_plain_tensors():
            return sum_of_versions(self._group.parameters)

    def _some_elements(self) -> object:
        numbers = self._group.numbers
        return None if numbers is None else self._glimpse.at(numbers)

    def take_back(self) -> bool:
        """Parameters that were given other memory (``p.data = ...``) come back with its values."""
        group = self._group
        buffer = group.whole if group.exposed is None else group.exposed
        if not group.is_present:
            return False
        addresses = self._addresses_in(buffer)
        with as_plain_tensors():
            found = list(map(Tensor.data_ptr, group.parameters))
            if found == addresses:
                return False
            moved = [
                (slot, parameter)
                for slot, parameter, here, address in zip(
                    group.layout.slots, group.parameters, found, addresses, strict=True
                )
                if here != address and parameter.numel()
            ]
            for slot, parameter in moved:
                view = buffer[slot.start : slot.stop].view(slot.shape)
                view.copy_(parameter.data)
                parameter.data = view
        return bool(moved)

    def _addresses_in(self, buffer: Tensor) -> list[int]:
        """Where the parameters are that show a buffer."""
        base = buffer.data_ptr()
        if base != self._base:
            self._base = base
            self._addresses = [base + start * buffer.itemsize for start in self._starts]
        return self._addresses

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


class FreedWhole:
    """One whole of a group, and what was in it when it was freed."""

    def __init__(self, group: FlatGroup) -> None:
        """The group still has it, and its parameters do not."""
        self._group, self._whole = group, group.whole
        self._before = group.whole.clone()
        self.is_old = False

    @property
    def is_referenced(self) -> bool:
        """Whether users can still write to it."""
        return num_references(self._whole) > 1

    def adopt(self) -> bool:
        """Makes what was written to it count, and returns whether anything was."""
        now, before = self._whole, self._before
        is_new = (now != before) & ~(now.isnan() & before.isnan())
        if not is_new.any():
            return False
        self._before = now.clone()  # one error is enough
        if self.is_old:
            raise _written_late(self._group.names)
        self._group.changes.overwrite(is_new, now)
        return True


class ReplacedView:
    """A private view of common parameters that was in use up to a step, and is still referenced.

    It shows what all ranks write until it is written to itself; see [Note: private views].
    """

    def __init__(self, names: Sequence[str], view: PrivateView) -> None:
        """The parameters named so have another view now."""
        self._names, self._view = names, view
        self.is_old = True

    @property
    def is_referenced(self) -> bool:
        """Whether users can still write to it."""
        return num_references(self._view.memory) > 1

    def adopt(self) -> bool:
        """Raises if it was written to."""
        if self._view.written():
            self._view.drop()  # one error is enough
            raise _written_late(self._names)
        return False


def num_references(memory: Tensor) -> int:
    """How many tensors there are in the same memory."""
    # One more counts for the object that stands for the memory in Python.
    return num_storage_users(memory) - 1


def _written_late(names: Sequence[str]) -> ShoalError:
    which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return ShoalError(
        f"memory of {which} that was taken (with .data or .detach()) before the optimizer's last "
        "step was written to after it: parameters are spread over the ranks, so ask for .data anew "
        "after each step"
    )
