"""Memory that groups are gathered into, used again by the next group of the same layout.

[Note: gather buffers]
A model has many layers alike. While a pass goes through them, the memory of one that was freed
serves another: its parameters' views are there already. Nobody may look at memory that belongs to
another group by then. So a buffer is used again only if nothing refers to it but this file; else it
is left to those who do. One at most lies idle, and none outlives a pass.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.comm.accounting import Account
from shoal.torch_internals.tensors import num_users, storage_id
from shoal.torch_support.memory import Glimpse, make_worthless

if TYPE_CHECKING:
    from shoal.strategies.engine.flat_group import FlatGroup


FILL_VARIABLE = "SHOAL_FILL_FREED"
"""If it is 1, memory is filled with NaN when it is freed, to find uses of it."""


def fills_freed() -> bool:
    """Whether memory is to be filled when it is freed."""
    return os.environ.get(FILL_VARIABLE) == "1"


Place = tuple[torch.Size, tuple[int, ...], int]
"""Where a view lies in a buffer: its shape, its strides, and where it begins."""


class GatherBuffer:
    """Memory for the whole of a group, and each parameter's view of it."""

    def __init__(self, whole: Tensor, group: FlatGroup) -> None:
        """For groups that are laid out like this one."""
        self.whole, self._views_of = whole, group.views_of
        self.storage_id = storage_id(whole)
        self.begin = whole.data_ptr()
        self.end = self.begin + whole.nbytes
        self._num_users = num_users(self.storage_id)
        self._views: list[Tensor] = []
        self._others: dict[Place, Tensor] = {}
        self._numbers: memoryview | None = None

    @classmethod
    def allocate(cls, group: FlatGroup) -> GatherBuffer:
        """Fresh memory."""
        # What is made in inference mode could not be trained with afterwards.
        with torch.inference_mode(False):
            whole = group.shard.new_empty(group.layout.num_elements, dtype=group.dtype)
            return cls(whole, group)

    # Most memory of a backward is seen by autograd alone, so what others need is made for them.

    @property
    def views(self) -> list[Tensor]:
        """Each parameter's view of it."""
        if not self._views:
            with torch.inference_mode(False):
                self._views = self._views_of(self.whole)
            self._num_users += len(self._views)
        return self._views

    @property
    def numbers(self) -> memoryview | None:
        """The memory for a `Glimpse`, where it is the CPU's."""
        if self._numbers is None and self.whole.is_cpu:
            before = num_users(self.storage_id)
            self._numbers = Glimpse.numbers(self.whole)
            self._num_users += num_users(self.storage_id) - before
        return self._numbers

    def view(self, place: Place) -> Tensor:
        """Any view of it; groups that have the memory in turn ask for the same ones."""
        view = self._others.get(place)
        if view is None:
            view = self._others[place] = self.whole.as_strided(*place)
            self._num_users += 1
        return view

    def leave(self) -> None:
        """Drops all views but the whole: what is referenced from now on is users'."""
        self._numbers = None
        self._views = []
        self._others.clear()

    @property
    def is_referenced(self) -> bool:
        """Whether somebody else has a tensor in this memory."""
        return self.num_others != 0

    @property
    def num_others(self) -> int:
        """How many tensors of somebody else there are in this memory."""
        return num_users(self.storage_id) - self._num_users


class GatherBuffers:
    """The memory for gathers of one model; see [Note: gather buffers]."""

    def __init__(self, groups: Iterable[FlatGroup]) -> None:
        """None is there yet."""
        layouts: dict[object, int] = {}
        self._layout_of = {
            group.index: layouts.setdefault(group.memory_layout, len(layouts)) for group in groups
        }
        self._idle: tuple[int, GatherBuffer, Account] | None = None
        self._fills = fills_freed()

    def take(self, group: FlatGroup) -> GatherBuffer:
        """Memory for a group, with any contents."""
        if self._idle is not None and self._idle[0] == self._layout_of[group.index]:
            buffer, self._idle = self._idle[1], None
            return buffer
        buffer = GatherBuffer.allocate(group)
        group.account.add("parameters", buffer.whole.nbytes)
        return buffer

    def give(self, group: FlatGroup, buffer: GatherBuffer, *, may_reuse: bool) -> None:
        """A group needs its memory no more; ``may_reuse``: another may have it."""
        self.clear()
        self._idle = self._layout_of[group.index], buffer, group.account
        if not may_reuse or buffer.is_referenced:
            self.clear()
        elif self._fills:
            make_worthless(buffer.whole)

    def clear(self) -> None:
        """Frees what is idle, or leaves it to those who refer to it."""
        if self._idle is not None:
            _, buffer, account = self._idle
            self._idle = None
            account.add("parameters", -buffer.whole.nbytes)
