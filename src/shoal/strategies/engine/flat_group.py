"""One group of parameters as flat memory: the whole, what this rank has of it, and its state.

[Note: residence]
The parameters of a group are views of one flat buffer, the *whole*. Where parameters are
replicated the whole is always there. Where they are sharded it is allocated when it is gathered and
dropped afterwards, and this rank's *shard* has memory of its own. A view of a dropped whole keeps
its memory alive, so nothing ever points at freed memory. Where ranks share memory, sharded
parameters are one whole that all of them map: it is always there, nothing is gathered, and each
rank writes its own part of it only. The parameters are views of a private mapping of it, which
shows what all ranks write and keeps to itself what a user writes; see [Note: private views].
`Grouping` decides which of the three a parameter gets.

[Note: masters]
What an optimizer steps are the *masters*: the whole itself or this rank's part of it. With mixed
precision they have memory of their own in the parameters' first dtype, and the whole has a
narrower one. So they have where the whole is rounded, because it travels in 8 bits: see
[Note: rounded parameters].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.comm import Backend
from shoal.comm.accounting import Account
from shoal.compression import Quantize
from shoal.sharding.layout import GroupLayout
from shoal.strategies.engine.absent import AbsentParameter
from shoal.strategies.engine.changes import Changes
from shoal.strategies.engine.common_memory import CommonWhole
from shoal.strategies.engine.gather_buffers import GatherBuffer
from shoal.strategies.engine.rounding import Rounding
from shoal.torch_internals.tensors import as_plain_tensors
from shoal.torch_support.memory import Glimpse, make_worthless

if TYPE_CHECKING:
    from shoal.strategies.engine.gathering import Gathering


class Residence(StrEnum):
    """Where the whole of a group lives; see [Note: residence]."""

    REPLICATED = "replicated"
    SHARDED = "sharded"
    COMMON = "common"  # to the ranks of one host: makes gathers unnecessary


class GroupState(StrEnum):
    """What the parameters of a group show on this rank.

    ::

        ABSENT ---to_coming---> COMING ---to_present---> PRESENT ---to_exposed---> EXPOSED
           ^                     | |                      ^   |   ^                   |
           +------to_failed------+ +---to_hidden-> HIDDEN-+   |   +---to_concealed----+
           +----------------------to_absent-----------+-------+

    A group that is not sharded is PRESENT or EXPOSED only. One that is PRESENT or HIDDEN may be
    gathered once more, because another rank needs it: it stays so.
    """

    ABSENT = "absent"  # a shape without values; any use gathers it
    COMING = "coming"  # absent, with a gather into its memory under way
    HIDDEN = "hidden"  # still absent, though the whole is there, for what autograd saved of it
    PRESENT = "present"  # the whole
    EXPOSED = "exposed"  # a private copy of the masters, in their dtype


# By name: to ask the class for a member takes longer than a gather's other questions.
ABSENT, COMING, HIDDEN, PRESENT, EXPOSED = GroupState

_COMES_FROM = {
    ABSENT: (PRESENT, HIDDEN, COMING),
    COMING: (ABSENT,),
    HIDDEN: (COMING,),
    PRESENT: (COMING, HIDDEN, EXPOSED),
    EXPOSED: (PRESENT,),
}


@dataclass(frozen=True)
class GroupStorage:
    """What kind of memory a group gets."""

    residence: Residence  # where the whole lives
    owns_part: bool  # whether the optimizer on this rank steps a part only
    dtype: torch.dtype | None = None  # what the parameters are computed with; None for their own
    is_part: bool = False  # whether parameters are parts of others', which have views of their own
    codec: Quantize | None = None  # what masters travel as; None for as they are computed with


class FlatGroup:
    """The memory of one group on one rank."""

    def __init__(
        self,
        index: int,
        layout: GroupLayout,
        parameters: Sequence[nn.Parameter],
        backend: Backend,
        storage: GroupStorage,
        account: Account,
    ) -> None:
        """``parameters`` are in the order of the layout's slots; their values are taken over."""
        self.index, self.layout, self.parameters = index, layout, list(parameters)
        self.names = [slot.name for slot in layout.slots]
        self._num_elements = layout.num_elements
        self._places = [(slot.shape, _strides(slot.shape), slot.start) for slot in layout.slots]
        self.residence, self.owns_part = storage.residence, storage.owns_part
        self.is_part = storage.is_part
        """Whether parameters are parts of others, of which not only the engine has views."""
        self.is_sharded = storage.residence is Residence.SHARDED
        """Whether the whole is gathered and freed."""
        self.is_common = storage.residence is Residence.COMMON
        """Whether the ranks of this host have one whole between them."""
        self.state = PRESENT
        self.is_present = self.has_whole = True
        """Whether parameters have values; whether the whole is there, perhaps hidden."""
        self.pins = 0
        """How many users of the whole there are; it is not freed before there are none."""
        self.was_outside_pass = False
        """Whether the whole was there outside of forward and backward, where users take views."""
        self.num_freed = 0
        """How often the whole was freed, which autograd takes for a change."""
        self.exposed: Tensor | None = None
        self._classes = [type(parameter) for parameter in parameters]
        self._absent_class: type[AbsentParameter] | None = None
        first = parameters[0].detach()
        self.master_dtype = first.dtype
        # If anything gets at the values of an absent parameter, it shall not be overlooked.
        dtype = first.dtype if storage.dtype is None else storage.dtype
        self._nothing = _nothing(dtype, first.device, torch.Size())
        # What absent parameters have for values: a shape, and one number.
        self._shapes = [_nothing(dtype, first.device, slot.shape) for slot in layout.slots]
        self.memory_layout = (self._nothing.dtype, first.device, *self._places)
        """The same for groups that can be gathered into the same memory."""
        self.dtype = self._nothing.dtype
        """What the parameters are computed with."""
        self.is_narrow = first.dtype is not self.dtype
        """Whether masters have a dtype of their own."""
        self.rounding = None
        """What the whole is rounded to, if it is."""
        if storage.codec is not None:
            self.rounding = Rounding(storage.codec, layout, self.dtype)
        self.is_mixed = self.is_narrow or self.rounding is not None
        """Whether masters have memory of their own."""
        self.low, self.high = layout.bounds[backend.rank], layout.bounds[backend.rank + 1]
        values = self._joined_values(first, backend)
        self.common = None
        if self.is_common:  # ranks take turns in making it, so that each has its share
            self.common = CommonWhole(self.shown(values), backend, index % backend.size)
        self.whole = self._make_whole(values, backend)
        self.shard = self._make_shard(values, backend)
        self.master = self._make_master(values)
        self.point_at(self.whole)
        self._buffer = GatherBuffer(self.whole, self) if self.is_sharded else None
        self.numbers = self._find_numbers()
        """The whole's memory for a `Glimpse`, where it is the CPU's and looked at."""
        self.account = account
        self.changes = Changes(self)
        account.add("parameters", self.num_bytes_held)

    # Masters ------------------------------------------------------------------------------

    def shown(self, masters: Tensor) -> Tensor:
        """What is computed with in place of masters, those of a slice or all of them."""
        narrow = masters.to(self.dtype)
        return narrow if self.rounding is None else self.rounding.rounded(narrow)

    def sent(self, masters: Tensor) -> Tensor:
        """What travels of the masters of a slice."""
        narrow = masters.to(self.dtype)
        return narrow if self.rounding is None else self.rounding.encode(narrow)

    def refresh(self) -> None:
        """The masters have new values: what they are masters of follows."""
        if not self.is_mixed:
            return
        target = self.shard if self.owns_part else self.whole
        if self.rounding is None:  # narrowed on the way
            target.copy_(self.master)
        else:
            target.copy_(self.sent(self.master) if self.is_sharded else self.shown(self.master))

    # Memory -------------------------------------------------------------------------------

    def _joined_values(self, like: Tensor, backend: Backend) -> Tensor:
        """The parameters' values in a row, in memory that may become the whole."""
        numel = self.layout.num_elements
        if self.residence is not Residence.REPLICATED or self.is_mixed:
            values = torch.zeros(numel, dtype=like.dtype, device=like.device)
        else:
            values = backend.empty(numel, like.dtype, like.device).zero_()
        with torch.no_grad():
            for view, parameter in zip(self.views_of(values), self.parameters, strict=True):
                view.copy_(parameter)
        return values

    def _make_whole(self, values: Tensor, backend: Backend) -> Tensor:
        if self.common is not None:
            return self.common.view
        if not self.is_mixed:
            return values
        shown = self.shown(values)
        if self.is_sharded:
            return shown
        return backend.empty(shown.numel(), shown.dtype, shown.device).copy_(shown)

    def _make_shard(self, values: Tensor, backend: Backend) -> Tensor:
        if self.common is not None:
            return self.own_slice(self.common.shared)
        if not self.is_sharded:
            return self.own_slice(self.whole)
        shard = self.sent(self.own_slice(values))
        return backend.empty(shard.numel(), shard.dtype, shard.device).copy_(shard)

    def _find_numbers(self) -> memoryview | None:
        if self._buffer is not None:
            return self._buffer.numbers
        is_looked_at = self.is_mixed and not self.is_common and self.whole.is_cpu
        return Glimpse.numbers(self.whole) if is_looked_at else None

    def _make_master(self, values: Tensor) -> Tensor:
        if not self.is_mixed:
            return self.shard if self.owns_part else self.whole
        return self.own_slice(values).clone() if self.owns_part else values

    @property
    def buffer(self) -> GatherBuffer:
        """The memory of a whole that was gathered, or is about to be."""
        assert self._buffer is not None
        return self._buffer

    @property
    def num_bytes_held(self) -> int:
        """Bytes of parameters and masters that this rank holds now, its share of common ones."""
        held = self.master.nbytes if self.is_mixed else 0
        if self.is_sharded:
            return held + self.shard.nbytes + (self.whole.nbytes if self.has_whole else 0)
        return held + (self.shard.nbytes if self.is_common else self.whole.nbytes)

    @property
    def master_bounds(self) -> tuple[int, int]:
        """Where in the group's buffer the masters lie."""
        return (self.low, self.high) if self.owns_part else (0, self.layout.num_elements)

    def own_slice(self, buffer: Tensor) -> Tensor:
        """This rank's part of a buffer that is laid out like the whole."""
        return buffer[self.low : self.high]

    def views_of(self, buffer: Tensor) -> list[Tensor]:
        """Each parameter's elements of a buffer that is laid out like the whole."""
        base, as_strided = int(buffer.storage_offset()), buffer.as_strided
        return [as_strided(shape, strides, base + start) for shape, strides, start in self._places]

    def point_at(self, buffer: Tensor) -> None:
        """Makes the parameters views of a buffer that is laid out like the whole."""
        self._show(self.views_of(buffer))

    def _show(self, values: Iterable[Tensor]) -> None:
        with as_plain_tensors():  # this is no access that wants values
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.data = value

    def gradients(self) -> list[Tensor | None]:
        """What the parameters show for gradients, whether they have values or not."""
        with as_plain_tensors():
            return [parameter.grad for parameter in self.parameters]

    def show_gradients(self, gradients: Iterable[Tensor | None]) -> None:
        """Lets the parameters show these for gradients."""
        with as_plain_tensors():
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient

    # States -------------------------------------------------------------------------------

    def _enter(self, state: GroupState) -> None:
        is_possible = self.state in _COMES_FROM[state]
        assert is_possible, f"parameter group {self.index} is {self.state}, so not {state} next"
        self.state = state
        self.is_present = state is PRESENT or state is EXPOSED
        self.has_whole = self.is_present or state is HIDDEN

    def to_coming(self, buffer: GatherBuffer) -> None:
        """A gather is about to fill the buffer."""
        self._enter(COMING)
        self._buffer, self.whole = buffer, buffer.whole

    def to_failed(self) -> GatherBuffer:
        """The gather failed; returns its memory."""
        self._enter(ABSENT)
        return self._give_up_whole()

    def to_hidden(self) -> None:
        """The whole has been filled, for autograd: the parameters are left as they are.

        Nobody can change what is not shown, so to free it again takes little.
        """
        self._enter(HIDDEN)

    def to_present(self, *, is_watched: bool = False) -> None:
        """The whole has been filled: the parameters can be used.

        ``is_watched``: they keep their other class, which knows when they are used.
        """
        self._enter(PRESENT)
        if not is_watched:
            self.stop_watching()
        self._show(self.buffer.views)
        self.numbers = self.buffer.numbers
        self.changes.settle_gathered()

    def to_absent(self, gathering: Gathering) -> GatherBuffer:
        """Gives the whole up and returns its memory; a use of the parameters gathers it again."""
        if self.state is HIDDEN:
            self._enter(ABSENT)
            return self._give_up_whole()
        self.changes.adopt()
        self._enter(ABSENT)
        self._show(self._shapes)
        self.numbers = None
        if self.was_outside_pass:
            self.buffer.leave()
            self.changes.note_freed()
        self.was_outside_pass = False
        self.watch(gathering)
        self.changes.tell_autograd()
        self.num_freed += 1
        return self._give_up_whole()

    def _give_up_whole(self) -> GatherBuffer:
        buffer, self._buffer, self.whole = self.buffer, None, self._nothing
        self.numbers = None
        return buffer

    def is_whole_referenced(self, num_moved: int) -> bool:
        """Whether users have a gathered whole, of which so many parameters show nothing."""
        return self.buffer.num_others > len(self.parameters) - num_moved

    def replace_whole(self) -> Tensor:
        """Copies a gathered whole to memory that nobody has; returns the old one."""
        old = self.buffer
        self._buffer = GatherBuffer.allocate(self)
        self._buffer.whole.copy_(old.whole)
        old.leave()
        self.whole, self.numbers = self._buffer.whole, self._buffer.numbers
        self._show(self._buffer.views)
        return old.whole

    def to_exposed(self, masters: Tensor) -> None:
        """Lets the parameters show a copy of all masters, in their dtype."""
        self._enter(EXPOSED)
        self.exposed = masters
        self.point_at(masters)

    def to_concealed(self, *, keep: bool) -> None:
        """Lets them show the whole again; ``keep``: with the values of the copy."""
        self._enter(PRESENT)
        assert self.exposed is not None
        if keep:
            self.changes.take_over(self.exposed)
        self.exposed = None
        self.point_at(self.whole)

    def to_replicated(self) -> None:
        """The whole is not to be freed any more."""
        self.residence, self.is_sharded, self.is_common = Residence.REPLICATED, False, False

    def abandon(self) -> None:
        """Gives the parameters zeros of their own for values, and no gradients."""
        device = self._nothing.device
        self.stop_watching()
        self.show_gradients([None] * len(self.parameters))
        self._show(
            torch.zeros(s.shape, dtype=self.master_dtype, device=device) for s in self.layout.slots
        )

    # Watching uses of parameters; see [Note: absent parameters] ---------------------------

    def watch(self, gathering: Gathering) -> None:
        """Gives the parameters the class that knows when they are used."""
        kind = self._absent_class
        if kind is None:
            kind = self._absent_class = AbsentParameter.of_group(self, gathering)
        for parameter in self.parameters:
            parameter.__class__ = kind

    def stop_watching(self) -> None:
        """Gives the parameters their own class back."""
        for parameter, kind in zip(self.parameters, self._classes, strict=True):
            if type(parameter) is self._absent_class:
                parameter.__class__ = kind  # type: ignore[assignment]


@cache
def _nothing(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> Tensor:
    """A shape with one number for all values: the same tensor for all groups, read by nobody."""
    if shape:
        return _nothing(dtype, device, torch.Size()).expand(shape)
    with torch.inference_mode(False):
        number = torch.empty((), dtype=dtype, device=device)
        make_worthless(number)
    return number


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    return torch.empty(tuple(shape), device="meta").stride()
