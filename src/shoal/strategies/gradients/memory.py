"""The memory of gradients: buffers that groups use in turn, and each group's own."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.comm.accounting import Account
from shoal.strategies.engine.flat_group import FlatGroup
from shoal.strategies.engine.gather_buffers import fills_freed
from shoal.torch_support.memory import make_worthless

# Of how many buffers the views are remembered.
_MOST_VIEWS = 8

Views = dict[int, tuple[list[Tensor], list[Tensor]]]
"""By a buffer's address: the parameters' parts of it, and what is between and behind them."""


class BufferPool:
    """Flat buffers that groups use in turn, in memory that the transport reaches directly."""

    def __init__(self, backend: Backend, account: Account) -> None:
        """Nothing in it yet."""
        self._backend, self.account = backend, account
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._views: dict[object, Views] = {}
        self._fills = fills_freed()

    def views_for(self, group: FlatGroup) -> Views:
        """The views of groups that are laid out alike and have the buffers in turn."""
        return self._views.setdefault((group.master_dtype, group.memory_layout), {})

    def take(self, like: Tensor, numel: int) -> Tensor:
        """A buffer of at least that length, with any contents."""
        free = self._free.setdefault((like.dtype, like.device), [])
        fitting = [buffer for buffer in free if buffer.numel() >= numel]
        if not fitting:
            if free:  # too short for what comes now: drop it instead of keeping both
                self.account.add("gradients", -free.pop().nbytes)
            self.account.add("gradients", numel * like.itemsize)
            return self._backend.empty(numel, like.dtype, like.device)
        chosen = min(fitting, key=Tensor.numel)
        free[:] = [buffer for buffer in free if buffer is not chosen]
        return chosen

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back."""
        if self._fills:
            make_worthless(buffer)
        self._free[buffer.dtype, buffer.device].append(buffer)

    def release(self) -> None:
        """Backward is over. A GPU's free memory serves forward until then, and costs no time."""
        for (_, device), free in self._free.items():
            if device.type == "cuda":
                self.account.add("gradients", -sum(buffer.nbytes for buffer in free))
                free.clear()
                for views in self._views.values():
                    views.clear()


class GradientMemory:
    """The buffers of one group's gradients on one rank."""

    def __init__(self, group: FlatGroup, pool: BufferPool, *, is_sharded: bool) -> None:
        """``is_sharded``: whether only this rank's part outlives a reduction."""
        self._group, self.pool, self.is_sharded = group, pool, is_sharded
        self.whole: Tensor | None = None
        """The whole gradient, laid out like the group's whole."""
        self.shard: Tensor | None = None
        """This rank's part of the average, where only that is kept."""
        self._buffer: Tensor | None = None
        self._shard_memory: Tensor | None = None
        self._views = pool.views_for(group) if is_sharded else {}

    def take_whole(self) -> Tensor:
        """The buffer of the whole gradient; one from the pool if there is none yet."""
        if self.whole is None:
            numel = self._group.layout.num_elements
            self._buffer = self.pool.take(self._group.master, numel)
            self.whole = self._buffer[:numel]
        return self.whole

    def views(self) -> list[Tensor]:
        """Each parameter's part of the whole gradient."""
        return self._cut()[0]

    def _cut(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parts of the parameters, and what is between and behind them."""
        whole = self.take_whole()
        parts = self._views.get(whole.data_ptr())
        if parts is None:
            gaps = [whole[start:stop] for start, stop in self._group.layout.gaps]
            parts = self._group.views_of(whole), gaps
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[whole.data_ptr()] = parts
        return parts

    def drop_whole(self) -> None:
        """Gives the buffer back to the pool."""
        if self._buffer is not None:
            self.pool.give(self._buffer)
            self._buffer = self.whole = None

    @property
    def is_better_fresh(self) -> bool:
        """Whether a buffer that is not needed now is worth more to others, as a GPU's is.

        There a fresh one is cheap, and forward may need the most memory of a step. On a CPU fresh
        pages cost more time than copying gradients.
        """
        return self.whole is not None and self.whole.is_cuda and not self.is_sharded

    def leave_whole(self) -> Tensor:
        """Leaves the buffer to users who reference it; see [Note: gradients that users keep]."""
        left = self.whole
        assert left is not None
        assert self._buffer is not None
        self.pool.account.add("gradients", -self._buffer.nbytes)
        self._views.pop(left.data_ptr(), None)
        self._buffer = self.whole = None
        return left

    def drop_shard(self) -> None:
        """Forgets this rank's part; its memory is not kept on a GPU, where a fresh one is cheap."""
        self.shard = None
        if self._shard_memory is not None and self._shard_memory.is_cuda:
            self.pool.account.add("gradients", -self._shard_memory.nbytes)
            self._shard_memory = None

    def shard_memory(self) -> Tensor:
        """Memory for the shard, in every step: on a CPU fresh pages cost more than the sum."""
        if self._shard_memory is None:
            self._shard_memory = torch.empty_like(self._group.master)
            self.pool.account.add("gradients", self._shard_memory.nbytes)
        return self._shard_memory

    def own(self) -> Tensor | None:
        """This rank's part of the averaged gradient."""
        if self.is_sharded:
            return self.shard
        return None if self.whole is None else self._group.own_slice(self.whole)

    def held(self) -> Tensor | None:
        """All that this rank holds of the averaged gradient: whole, or its part."""
        return self.shard if self.is_sharded else self.whole

    def shard_part(self, index: int) -> Tensor:
        """This rank's elements of a parameter's gradient, where only the shard is kept."""
        if self.shard is None:
            self.shard = self.shard_memory().zero_()
        return self.shard[self._bounds_in_shard(index)]

    def _bounds_in_shard(self, index: int) -> slice:
        slot, length = self._group.layout.slots[index], self._group.high - self._group.low
        return slice(*(min(max(edge - self._group.low, 0), length) for edge in slot.bounds))

    def zero(self, index: int) -> None:
        """Makes a parameter's gradient zero, wherever it is."""
        if self.whole is not None:
            self.views()[index].zero_()
        if self.shard is not None:
            self.shard[self._bounds_in_shard(index)].zero_()

    def zero_all_but(self, collected: Collection[int]) -> None:
        """Makes what was not collected zero, before the whole is reduced."""
        whole, slots = self.take_whole(), self._group.layout.slots
        if len(collected) < len(slots):
            for index, slot in enumerate(slots):
                if index not in collected:
                    whole[slot.start : slot.stop].zero_()
        # Clipping by a norm that is not finite leaves no zeros there.
        for gap in self._cut()[1]:
            gap.zero_()

    @property
    def num_bytes_held(self) -> int:
        """Bytes of gradients that this rank holds now."""
        held = [buffer for buffer in (self.whole, self._shard_memory) if buffer is not None]
        return sum(buffer.nbytes for buffer in held)
