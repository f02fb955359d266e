"""One group of parameters as flat memory: the whole, and what this rank has of it.

[Note: resident and sharded]
The parameters of a group are views of one flat buffer, the *whole*. Where parameters are
replicated the whole is always there. Where they are sharded it is made when it is gathered and
dropped afterwards, and this rank's *shard* has memory of its own. Whoever still holds a view of
a dropped whole keeps it alive; nothing ever points at freed memory. Where ranks share memory,
sharded parameters are one whole that all of them map: it is always there, and each rank writes
its own part of it only. The parameters are views of a private mapping of it, which shows what all
ranks write and keeps to itself what a user writes; see [Note: private views].

[Note: masters]
What an optimizer steps are the *masters*: the whole itself or this rank's part of it. With mixed
precision they have memory of their own in the parameters' first dtype, and the whole has a
narrower one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm import Backend
from shoal.comm.accounting.ledger import Account
from shoal.sharding.layout import GroupLayout
from shoal.strategies.engine.changes import Changes
from shoal.strategies.engine.common_whole import CommonWhole
from shoal.strategies.engine.lent import Lent, OldView, num_holders
from shoal.strategies.guards.absent_parameter import AbsentParameter


class Residence(StrEnum):
    """Where the whole of a group lives; see [Note: resident and sharded]."""

    REPLICATED = "replicated"
    SHARDED = "sharded"
    COMMON = "common"  # to the ranks of one host


@dataclass(frozen=True)
class Tenure:
    """How a group's memory is held.

    Attributes:
        residence: Where the whole lives.
        owns_part: Whether the optimizer on this rank steps a part only.
        dtype: What the parameters are computed with; None for their own.
    """

    residence: Residence
    owns_part: bool
    dtype: torch.dtype | None = None


class FlatGroup:
    """The memory of one group on one rank."""

    def __init__(
        self,
        index: int,
        layout: GroupLayout,
        parameters: Sequence[nn.Parameter],
        backend: Backend,
        tenure: Tenure,
        account: Account,
    ) -> None:
        """``parameters`` are in the order of the layout's slots; their values are taken over."""
        self.index, self.layout, self.parameters = index, layout, list(parameters)
        self.names = [slot.name for slot in layout.slots]
        self.residence, self.owns_part = tenure.residence, tenure.owns_part
        self.is_present = True
        self.num_vanished = 0
        """How often the whole was freed, which autograd takes for a change."""
        self.exposed: Tensor | None = None
        self.pins = 0
        self.was_outside = False
        """Whether the whole was there outside of forward and backward, where users take views."""
        self.lent: list[Lent | OldView] = []
        self._common: CommonWhole | None = None
        self._num_bytes_written = 0
        self._classes = [type(parameter) for parameter in parameters]
        first = parameters[0].detach()
        self.master_dtype = first.dtype
        self._nothing = first.new_zeros((), dtype=tenure.dtype)
        self.low, self.high = layout.bounds[backend.rank], layout.bounds[backend.rank + 1]
        values = self._joined_values(first, backend)
        self.whole = self._place_whole(values, backend)
        self.shard = self._place_shard(backend)
        self.master = self._place_master(values)
        self.point_at(self.whole)
        self._num_own_views = num_holders(self.whole)
        is_watched = self.is_sharded or (self.is_mixed and not self.is_common)
        self.changes = Changes(self) if is_watched else None
        self.account = account
        account.add("parameters", self.num_bytes_held)

    def _joined_values(self, like: Tensor, backend: Backend) -> Tensor:
        """The parameters' values in a row, in memory that may become the whole."""
        numel = self.layout.num_elements
        if self.residence is not Residence.REPLICATED or self.is_mixed:
            values = torch.zeros(numel, dtype=like.dtype, device=like.device)
        else:
            values = backend.empty(numel, like.dtype, like.device).zero_()
        with torch.no_grad():
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
                values[slot.start : slot.stop].view(slot.shape).copy_(parameter)
        return values

    def _place_whole(self, values: Tensor, backend: Backend) -> Tensor:
        numel, dtype = self.layout.num_elements, self._nothing.dtype
        if self.is_common:
            # Ranks take turns in making it, so that each has its share.
            self._common = CommonWhole(values.to(dtype), backend, self.index % backend.size)
            return self._common.view
        if not self.is_mixed:
            return values
        if self.is_sharded:
            return values.to(dtype)
        return backend.empty(numel, dtype, values.device).copy_(values)

    def _place_shard(self, backend: Backend) -> Tensor:
        if self._common is not None:
            return self.own_slice(self._common.shared)
        shard = self.own_slice(self.whole)
        if not self.is_sharded:
            return shard
        return backend.empty(shard.numel(), shard.dtype, shard.device).copy_(shard)

    def _place_master(self, values: Tensor) -> Tensor:
        if not self.is_mixed:
            return self.shard if self.owns_part else self.whole
        return self.own_slice(values).clone() if self.owns_part else values

    def point_at(self, buffer: Tensor) -> None:
        """Makes the parameters views of a buffer that is laid out like the whole."""
        with torch._C.DisableTorchFunctionSubclass():  # this is no access that wants values
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
                parameter.data = buffer[slot.start : slot.stop].view(slot.shape)

    @property
    def is_sharded(self) -> bool:
        """Whether the whole comes and goes."""
        return self.residence is Residence.SHARDED

    @property
    def is_common(self) -> bool:
        """Whether the ranks of this host have one whole between them."""
        return self.residence is Residence.COMMON

    @property
    def has_gradients(self) -> bool:
        """Whether its dtype can have gradients at all."""
        return self.master_dtype.is_floating_point or self.master_dtype.is_complex

    @property
    def is_mixed(self) -> bool:
        """Whether masters have a dtype of their own."""
        return self.master_dtype is not self._nothing.dtype

    @property
    def num_bytes_held(self) -> int:
        """Bytes of parameters and masters that this rank holds now, its share of common ones."""
        held = self.master.nbytes if self.is_mixed else 0
        if self.is_sharded:
            return held + self.shard.nbytes + (self.whole.nbytes if self.is_present else 0)
        return held + (self.shard.nbytes if self.is_common else self.whole.nbytes)

    @property
    def master_bounds(self) -> tuple[int, int]:
        """Where in the group's buffer the masters lie."""
        return (self.low, self.high) if self.owns_part else (0, self.layout.num_elements)

    def own_slice(self, buffer: Tensor) -> Tensor:
        """This rank's part of a buffer that is laid out like the whole."""
        return buffer[self.low : self.high]

    def refresh(self) -> None:
        """The optimizer has stepped the masters: what they are masters of follows."""
        if self.is_mixed:
            (self.shard if self.owns_part else self.whole).copy_(self.master)

    # Showing something else -------------------------------------------------------------

    def expose(self, buffer: Tensor) -> None:
        """Lets the parameters show another buffer, in the masters' dtype, until `conceal`."""
        self.exposed = buffer
        self.point_at(buffer)

    def conceal(self, *, keep: bool) -> None:
        """Lets them show the whole again; ``keep``: with the values of the other buffer."""
        assert self.exposed is not None
        if keep:
            self._take_over(self.exposed)
        self.exposed = None
        self.point_at(self.whole)

    def _take_over(self, buffer: Tensor) -> None:
        if not self.is_common:  # there, its own part is all that a rank writes
            self.whole.copy_(buffer)
        if self.owns_part:
            self.shard.copy_(self.own_slice(buffer))
        if self.is_mixed:
            self.master.copy_(self.own_slice(buffer) if self.owns_part else buffer)

    # What is made in inference mode could not be trained with afterwards.
    @torch.inference_mode(False)
    def vanish(
        self,
        gather: Callable[[FlatGroup], None],
        using: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Frees the whole.

        ``gather`` is called when somebody wants it nevertheless; what is then done with it is done
        inside of ``using``.
        """
        if not self.is_present or not self.is_sharded:
            return
        self.adopt_changes()
        self.is_present = False
        self.account.add("parameters", -self.whole.nbytes)
        with torch._C.DisableTorchFunctionSubclass():
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
                parameter.data = self._nothing.expand(slot.shape)
        if self.was_outside and num_holders(self.whole) > 1:
            self.lent.append(Lent(self))
        self.was_outside = False
        self.whole = self._nothing
        self.watch(gather, using)
        # What autograd saved of them without our hooks must not be taken for their values.
        torch.autograd.graph.increment_version(self.parameters)
        self.num_vanished += 1

    def watch(
        self, gather: Callable[[FlatGroup], None], using: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Gives the parameters the class that knows when they are used; see `vanish`."""
        for parameter in self.parameters:
            parameter.__class__ = AbsentParameter
            parameter._group = self  # type: ignore[attr-defined]
            parameter._appear = lambda: gather(self)  # type: ignore[attr-defined]
            parameter._using = using  # type: ignore[attr-defined]

    @property
    def storage_id(self) -> int:
        """Tells the memory of the whole from any other."""
        identity: int = self.whole.untyped_storage()._cdata
        return identity

    @torch.inference_mode(False)
    def allocate(self) -> Tensor:
        """Memory for the whole, to be filled; the parameters stay absent until `appear`."""
        if not self.is_present:
            self.whole = self.shard.new_empty(self.layout.num_elements)
            self.account.add("parameters", self.whole.nbytes)
        return self.whole

    @torch.inference_mode(False)
    def appear(self, *, is_watched: bool = False) -> None:
        """The whole has been filled: the parameters can be used.

        ``is_watched``: they keep their other class, which knows when they are used.
        """
        if self.is_present:
            return
        self.is_present = True
        self.point_at(self.whole)
        self.settle()
        if not is_watched:
            self.stop_watching()

    def stop_watching(self) -> None:
        """Gives the parameters their own class back."""
        for parameter, kind in zip(self.parameters, self._classes, strict=True):
            if isinstance(parameter, AbsentParameter):
                parameter.__class__ = kind  # type: ignore[assignment]
                del parameter._group, parameter._appear, parameter._using

    # Changes by hand ----------------------------------------------------------------------

    def settle(self) -> None:
        """The parameters are what they should be; see [Note: changes by hand]."""
        if self.changes is not None:
            self.changes.settle()

    def adopt_changes(self) -> bool:
        """Makes what was changed by hand count, and returns whether anything was.

        What is common takes all ranks: see [Note: changes of common memory].
        """
        if self.exposed is not None or self.is_common:
            return False
        is_seen = self._adopt_lent()
        if not self.is_present:
            return is_seen
        own = self.take_back() if self.changes is None else self.changes.adopt()
        return own or is_seen

    def _adopt_lent(self) -> bool:
        seen = [each.adopt() for each in self.lent]
        self.lent = [each for each in self.lent if each.is_held]
        return any(seen)

    def age(self) -> None:
        """The optimizer has made a step: what users hold of before is old."""
        for lent in self.lent:
            lent.is_old = True
        if self._common is not None and num_holders(self.whole) > self._num_own_views:
            self.lent.append(OldView(self.names, self._common.replace_view()))
            self.whole = self._common.view
            self.point_at(self.whole)

    def overwrite(self, is_new: Tensor, buffer: Tensor) -> None:
        """Takes some elements of a buffer over into what is stepped, and into the whole."""
        own = self.own_slice if self.owns_part else lambda whole: whole
        chosen, values = own(is_new), own(buffer)
        if self.is_mixed:
            self.master.copy_(torch.where(chosen, values.to(self.master_dtype), self.master))
        self.shard.copy_(torch.where(chosen, values, self.shard))
        if self.whole is not self._nothing:  # it was gathered again in the meantime
            self.whole.copy_(torch.where(is_new, buffer, self.whole))

    def find_written(self) -> list[int]:
        """Places of common parameters that were written to, or lie on one page with such."""
        assert self._common is not None
        self.take_back()
        self._adopt_lent()
        if self.exposed is not None:
            return []
        ranges = self._common.written()
        self._count_written(sum(stop - start for start, stop in ranges) * self.whole.itemsize)
        if not ranges:
            return []
        return [
            place
            for place, slot in enumerate(self.layout.slots)
            if any(slot.start < stop and start < slot.stop for start, stop in ranges)
        ]

    def drop_written(self) -> None:
        """Common parameters show what all ranks have."""
        assert self._common is not None
        self._common.drop()
        self._count_written(0)

    def _count_written(self, num_bytes: int) -> None:
        self.account.add("parameters", num_bytes - self._num_bytes_written)
        self._num_bytes_written = num_bytes

    def keep_changes(self) -> None:
        """Takes what was written to the whole over into what is stepped."""
        if not self.is_present:
            return
        part = self.own_slice(self.whole) if self.owns_part else self.whole
        if self.is_mixed:  # what was not written keeps its digits
            is_same = part == self.master.to(part.dtype)
            self.master.copy_(torch.where(is_same, self.master, part.to(self.master_dtype)))
        if self.residence is not Residence.REPLICATED:
            self.shard.copy_(part)

    def take_back(self) -> bool:
        """Parameters that were given other memory (``p.data = ...``) come back with its values."""
        buffer = self.whole if self.exposed is None else self.exposed
        if not self.is_present:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            moved = [
                (slot, parameter)
                for slot, parameter in zip(self.layout.slots, self.parameters, strict=True)
                if parameter.data_ptr() != buffer.data_ptr() + slot.start * buffer.itemsize
                and parameter.numel()
            ]
            for slot, parameter in moved:
                view = buffer[slot.start : slot.stop].view(slot.shape)
                view.copy_(parameter.data)
                parameter.data = view
        return bool(moved)
