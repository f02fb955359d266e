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

[Note: swapped parameters]
``old = p.data; p.data = averaged`` and later ``p.data = old`` evaluates with other weights and goes
back. What users gave a parameter is copied into the whole, so users who reference the whole are
left with it as it was, and the group gets another. What they write to the memory that they gave
counts as well, until the parameter is given something else. After a step of an optimizer, which
would have changed that memory, writing to it is an error. A whole that is stepped itself, because
nothing is gathered, cannot be left to users: if they still reference it when values have to be
taken over, that is an error.

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

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shoal.errors import ShoalError
from shoal.sharding.layout import Slot
from shoal.system.deadline import wait_until
from shoal.torch_internals.tensors import as_plain_tensors, num_storage_users, sum_of_versions
from shoal.torch_support.memory import Glimpse, PrivateView, storage_address

if TYPE_CHECKING:
    from shoal.strategies.engine.flat_group import FlatGroup

Moved = tuple[Slot, nn.Parameter, Tensor]
"""A parameter that was given other memory, and that memory."""

# How long threads that carry out transfers may take to let go of memory.
_LET_GO_S = 0.2
# How many elements of each parameter are looked at.
_NUM_SEEN = 4


class Changes:
    """Finds what was changed by hand in the parameters of one group, and makes it count."""

    def __init__(self, group: FlatGroup) -> None:
        """The parameters are right now."""
        self._group = group
        self.referenced: list[FreedWhole | ReplacedData | ReplacedView] = []
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

    def check_memory(self) -> None:
        """Refuses parameters without memory, which torch would read all the same."""
        with as_plain_tensors():
            if all(map(Tensor.data_ptr, self._group.parameters)):
                return
            for slot, parameter in zip(
                self._group.layout.slots, self._group.parameters, strict=True
            ):
                if parameter.numel():
                    _given_to(parameter, slot)

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
        had_referenced = bool(self.referenced)
        is_seen = self._adopt_referenced() if had_referenced else False
        if not group.is_present:
            if had_referenced and self._is_watched:  # writing to it counts as a version as well
                self._versions = self._sum_versions()
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
            if found == addresses and all(map(Tensor.is_contiguous, group.parameters)):
                return False
            moved = [
                (slot, parameter, _given_to(parameter, slot))
                for slot, parameter, here, address in zip(
                    group.layout.slots, group.parameters, found, addresses, strict=True
                )
                if (here != address or not parameter.is_contiguous()) and parameter.numel()
            ]
            moved = self._copy_own(moved, buffer)
            if moved and group.exposed is None:
                self._check_replicated([slot for slot, *_ in moved])
                buffer = self._leave_whole([slot for slot, *_ in moved])
            for slot, parameter, theirs in moved:
                view = buffer[slot.start : slot.stop].view(slot.shape)
                view.copy_(theirs)
                parameter.data = view
                if group.exposed is None:
                    self._follow(ReplacedData(group, slot, theirs))
        return bool(moved)

    def _copy_own(self, moved: list[Moved], buffer: Tensor) -> list[Moved]:
        """What was given and lies in the whole itself, as after a swap, before that is written."""
        inside = {
            slot: _bounds_in(buffer, data)
            for slot, _, data in moved
            if storage_address(data) == storage_address(buffer)
        }
        gone = {slot for slot, *_ in moved}
        others = [(each, each.bounds) for each in self._group.layout.slots if each not in gone]
        for slot, (start, stop) in inside.items():
            bounds = others + [(each, inside[each]) for each in inside if each is not slot]
            for other, (low, high) in bounds:
                if start < high and low < stop:
                    raise _tied(slot.name, other.name)
        for slot, parameter, data in moved:
            if slot in inside:
                parameter.data = data.clone()
        return [(slot, parameter, parameter.data) for slot, parameter, _ in moved]

    def _follow(self, given: ReplacedData) -> None:
        """Looks at memory that a parameter was given, instead of what it was given before."""
        self.referenced = [each for each in self.referenced if not given.succeeds(each)]
        if given.is_referenced:
            self.referenced.append(given)

    def count_own_views(self, change: int) -> None:
        """An optimizer has so many parts of the masters more: what is beyond these is users'."""
        if not (self._group.is_sharded or self._group.is_common or self._group.is_mixed):
            self._num_own_views += change

    def _check_replicated(self, moved: Sequence[Slot]) -> None:
        """A whole that is stepped stays where it is, so users' views of it would be overwritten."""
        group = self._group
        if group.is_sharded or group.is_common or group.is_part:
            return
        num_own = self._num_own_views - len(moved)
        if num_references(group.whole) > num_own and not _is_let_go_of(group.whole, num_own):
            raise ShoalError(
                f"parameters ({moved[0].name}) were given other memory (p.data = ...), while what "
                "they had is still referenced, as by old = p.data: shoal keeps parameters in "
                "memory of its own, which would be overwritten now. Copy instead: old = "
                "p.detach().clone(), then p.data.copy_(other)"
            )

    def _leave_whole(self, moved: Sequence[Slot]) -> Tensor:
        """Leaves a gathered whole to users who reference it: see [Note: swapped parameters]."""
        group = self._group
        if group.is_sharded and group.is_whole_referenced(len(moved)):
            before = group.replace_whole()
            self.referenced.append(FreedWhole(group, before, moved))
        return group.whole

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
        if group.rounding is not None:
            self._check_unwritten()
            return
        part = group.own_slice(group.whole) if group.owns_part else group.whole
        if group.is_mixed:  # what was not written keeps its digits
            is_same = part == group.master.to(part.dtype)
            group.master.copy_(torch.where(is_same, group.master, part.to(group.master_dtype)))
        if group.is_sharded or group.is_common:
            group.shard.copy_(part)

    def _check_unwritten(self) -> None:
        """Raises if a rounded whole was written to; see [Note: rounded parameters]."""
        group = self._group
        if group.common is not None:
            now, before = group.whole, group.common.shared
        else:
            now, before = group.own_slice(group.whole), group.shown(group.master)
        is_new = _differs(now, before)
        if is_new.any():
            if group.common is not None:
                self.drop_written()
            self.settle()  # one error is enough
            first = int(is_new.nonzero()[0]) + (0 if group.common is not None else group.low)
            raise _rounded(next(s.name for s in group.layout.slots if s.stop > first))

    def take_over(self, buffer: Tensor) -> None:
        """Takes all masters over from a buffer that the parameters showed."""
        group = self._group
        group.master.copy_(group.own_slice(buffer) if group.owns_part else buffer)
        if not group.is_common:  # there, its own part is all that a rank writes
            group.whole.copy_(group.shown(buffer))
        group.refresh()

    def overwrite(self, is_new: Tensor, buffer: Tensor) -> None:
        """Takes some elements of a buffer over, into the whole as well if it is there."""
        group = self._group
        if group.rounding is not None:
            first = int(is_new.nonzero()[0])
            raise _rounded(next(s.name for s in group.layout.slots if s.stop > first))
        own = group.own_slice if group.owns_part else lambda whole: whole
        chosen, values = own(is_new), own(buffer)
        if group.is_mixed:
            group.master.copy_(torch.where(chosen, values.to(group.master_dtype), group.master))
        group.shard.copy_(torch.where(chosen, values, group.shard))
        if group.whole.dim():  # it was gathered again in the meantime
            group.whole.copy_(torch.where(is_new, buffer, group.whole))

    def overwrite_one(self, slot: Slot, is_new: Tensor, values: Tensor) -> None:
        """Takes some elements of one parameter over."""
        group, here = self._group, slice(slot.start, slot.stop)
        if group.rounding is not None:
            raise _rounded(slot.name)
        if group.is_sharded:
            buffer = group.shard.new_zeros(group.layout.num_elements)
            everywhere = torch.zeros_like(buffer, dtype=torch.bool)
            everywhere[here], buffer[here] = is_new.reshape(-1), values.reshape(-1)
            self.overwrite(everywhere, buffer)
            return
        part = group.whole[here].view(slot.shape)
        part.copy_(torch.where(is_new, values, part))
        self.keep()

    # Memory that users reference; see [Note: freed memory that users reference] -----------

    def note_freed(self) -> None:
        """The whole is about to be dropped, and the parameters do not show it any more."""
        if num_references(self._group.whole) > 1:
            self.referenced.append(FreedWhole(self._group, self._group.whole))

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

    def __init__(self, group: FlatGroup, whole: Tensor, moved: Sequence[Slot] = ()) -> None:
        """The group's parameters do not show it; those of ``moved`` had left it before."""
        self._group, self._whole, self._moved = group, whole, moved
        self._before = whole.clone()
        self.is_old = False

    @property
    def is_referenced(self) -> bool:
        """Whether users can still write to it."""
        return num_references(self._whole) > 1

    def adopt(self) -> bool:
        """Makes what was written to it count, and returns whether anything was."""
        now = self._whole
        is_new = _differs(now, self._before)
        for slot in self._moved:
            is_new[slot.start : slot.stop] = False
        if not is_new.any():
            return False
        self._before = now.clone()  # one error is enough
        if self.is_old:
            raise _written_late(self._group.names)
        self._group.changes.overwrite(is_new, now)
        return True


class ReplacedData:
    """Memory that users gave to a parameter (``p.data = ...``) and still reference."""

    def __init__(self, group: FlatGroup, slot: Slot, memory: Tensor) -> None:
        """The parameter at ``slot`` has its values, and its own memory again."""
        self._group, self._slot, self._memory = group, slot, memory
        self._before = memory.clone()
        self.is_old = False

    def succeeds(self, other: object) -> bool:
        """Whether it was given to the same parameter, which has left the other one by that."""
        return isinstance(other, ReplacedData) and other._slot is self._slot

    @property
    def is_referenced(self) -> bool:
        """Whether users can still write to it."""
        return num_references(self._memory) > 1

    def adopt(self) -> bool:
        """Makes what was written to it count, and returns whether anything was."""
        is_new = _differs(self._memory, self._before)
        if not is_new.any():
            return False
        self._before = self._memory.clone()  # one error is enough
        if self.is_old:
            raise _written_late([self._slot.name])
        self._group.changes.overwrite_one(self._slot, is_new, self._memory)
        return True


def _differs(now: Tensor, before: Tensor) -> Tensor:
    return (now != before) & ~(now.isnan() & before.isnan())


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


def _given_to(parameter: Tensor, slot: Slot) -> Tensor:
    """What a parameter was given: ``p.data = ...`` takes tensors without memory as well."""
    if not parameter.data_ptr():
        raise ShoalError(
            f"{slot.name} was given a tensor without memory (p.data = ...), such as one computed "
            "from a gradient of which each rank holds a part. Change the parameter in place, as in "
            "p.data -= 0.1 * p.grad, or p.data.copy_(...)"
        )
    return parameter.data


def _bounds_in(buffer: Tensor, view: Tensor) -> tuple[int, int]:
    start = (view.data_ptr() - buffer.data_ptr()) // buffer.itemsize
    return start, start + view.numel()


def _tied(name: str, other: str) -> ShoalError:
    return ShoalError(
        f"{name} was given memory of {other} (p.data = q.data), and parameters that share memory "
        "without being one would be stepped twice: to tie them, have both modules use one "
        "parameter before the model is wrapped; to copy, write p.data.copy_(q.data)"
    )


def num_references(memory: Tensor) -> int:
    """How many tensors there are in the same memory."""
    # One more counts for the object that stands for the memory in Python.
    return num_storage_users(memory) - 1


def _is_let_go_of(memory: Tensor, num_own: int) -> bool:
    """Whether all other references were Python's garbage, or those of a thread that is ending."""
    gc.collect()
    return wait_until(lambda: num_references(memory) <= num_own, _LET_GO_S, poll_s=0.001)


def _rounded(name: str) -> ShoalError:
    return ShoalError(
        f"{name} was changed in place, but it is rounded to 8 bits here (gather_compression=), so "
        "the masters would lose their digits: change it inside of `with model.full_parameters():`, "
        "where parameters are the masters"
    )


def _written_late(names: Sequence[str]) -> ShoalError:
    which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return ShoalError(
        f"memory of {which} that was taken (with .data or .detach()) or given (p.data = ...) "
        "before the optimizer's last step was written to after it: parameters are in memory of "
        "shoal's own, so ask for .data anew after each step"
    )
