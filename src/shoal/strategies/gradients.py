"""Gradients: collected into flat buffers, averaged over the ranks, kept whole or as shards.

[Note: arriving]
Autograd leaves each gradient with its parameter. When the last of a group has arrived they are
moved into the group's buffer, all with one call, and the parameters let go of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.comm import Backend, Work
from shoal.errors import ShoalError
from shoal.strategies.buffer_pool import BufferPool
from shoal.strategies.elsewhere import ShardedGradient
from shoal.strategies.flagged_reduction import FlaggedAllReduce, FlaggedReduceScatter, Flags
from shoal.strategies.flat_group import FlatGroup

_MOST_VIEWS = 8


class GroupGradients:
    """The gradients of one group on one rank."""

    def __init__(
        self,
        group: FlatGroup,
        pool: BufferPool,
        backend: Backend,
        is_sharded: bool,
        is_hidden: bool = False,
    ) -> None:
        """Nothing has arrived yet.

        Args:
            group: Whose gradients.
            pool: For buffers.
            backend: The ranks to average over.
            is_sharded: Whether only this rank's part outlives the reduction.
            is_hidden: Whether parameters are parts themselves, so that nobody may take what they
                would show for the whole gradient.
        """
        self.group, self._pool, self._backend = group, pool, backend
        self.is_sharded = is_sharded
        """Whether only this rank's part outlives the reduction."""
        self._shows_stand_in = is_sharded or is_hidden or group.is_mixed
        self._buffer: Tensor | None = None
        self._whole: Tensor | None = None
        self._views: dict[int, list[Tensor]] = {}
        self._stand_ins: dict[int, ShardedGradient] = {}
        self._shard: Tensor | None = None
        self._shard_memory: Tensor | None = None
        self._collected: set[int] = set()
        self.arrived: list[int] = []
        """Parameters, by place, whose gradients are there and not collected yet."""
        self.waiting = 0
        """How many are still missing in this backward; none outside of one."""
        self._work: tuple[Work[Tensor], Flags] | None = None
        self._adds_in_place = False
        self.used: set[int] = set()
        """Parameters, by place in the group, that have a gradient on some rank."""
        self.local: set[int] = set()
        """Parameters, by place, whose gradients have not been averaged with the others' yet."""

    def expect(self) -> None:
        """A backward pass begins: every trainable parameter may get a gradient."""
        missing = sum(parameter.requires_grad for parameter in self.group.parameters)
        self.waiting = missing - len(self.arrived)

    def add_in_place(self, is_wanted: bool) -> None:
        """Whether autograd itself adds to the buffer: for many backwards with nothing in between.

        The parameters then show their places in it, where nobody but autograd looks.
        """
        self._adds_in_place = is_wanted and not self.group.is_mixed
        if self._adds_in_place and self._whole is not None:
            views = self._all_views()
            for place in self._collected:
                self.group.parameters[place].grad = views[place]

    def was_added(self, place: int) -> bool:
        """Whether autograd added what has just arrived to the buffer: nothing is left to do."""
        if not self._adds_in_place or self._work is not None or place not in self._collected:
            return False
        gradient = self.group.parameters[place].grad
        if gradient is None or gradient.requires_grad:
            return False
        self.local.add(place)
        return gradient.data_ptr() == self._all_views()[place].data_ptr()

    # Collecting ---------------------------------------------------------------------------

    def collect(self) -> None:
        """Moves what has arrived into the buffer; see [Note: arriving]."""
        if not self.arrived:
            return
        self.finish_reduction()  # one that comes late adds to what was averaged already
        places, self.arrived = self.arrived, []
        self.local.update(places)
        views = self._all_views()
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        more: tuple[list[Tensor], list[Tensor]] = ([], [])
        for place in dict.fromkeys(places):
            gradient = self._take_gradient(place)
            if gradient is not None and gradient.requires_grad:
                raise ShoalError(
                    f"the gradient of {self.group.names[place]} has a graph of its own, from "
                    "backward(create_graph=True); averaging over the ranks would lose it. Use "
                    "torch.autograd.grad(loss, parameters, create_graph=True) instead"
                )
            if self._adds_in_place:
                self.group.parameters[place].grad = views[place]
            if gradient is not None and gradient.data_ptr() != views[place].data_ptr():
                targets, sources = more if place in self._collected else fresh
                targets.append(views[place])
                sources.append(gradient)
            self._collected.add(place)
        if fresh[0]:
            torch._foreach_copy_(*fresh)
        for view, gradient in zip(*more, strict=True):
            view.add_(gradient.to(view.dtype))

    def _take_gradient(self, place: int) -> Tensor | None:
        parameter = self.group.parameters[place]
        with torch._C.DisableTorchFunctionSubclass():  # this is no access that wants values
            gradient = parameter.grad
            parameter.grad = None  # so that nothing is added to a buffer that is being reduced
        if isinstance(gradient, ShardedGradient):
            gradient = gradient.arrived
        return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient

    def _all_views(self) -> list[Tensor]:
        """Each parameter's place in the buffer."""
        whole = self.whole()
        views = self._views.get(whole.data_ptr())
        if views is None:
            views = [
                whole[slot.start : slot.stop].view(slot.shape) for slot in self.group.layout.slots
            ]
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[whole.data_ptr()] = views
        return views

    def whole(self) -> Tensor:
        """The buffer of the group's whole gradient."""
        if self._whole is None:
            numel = self.group.layout.num_elements
            self._buffer = self._pool.take(self.group.master, numel)
            self._whole = self._buffer[:numel]
        return self._whole

    # Reducing -----------------------------------------------------------------------------

    def start_reduction(self) -> None:
        """Averages over the ranks in the background."""
        self.collect()
        self.finish_reduction()
        if self._adds_in_place:
            for parameter in self.group.parameters:
                parameter.grad = None
        whole = self.whole()
        if len(self._collected) < len(self.group.parameters):
            for place, slot in enumerate(self.group.layout.slots):
                if place not in self._collected:
                    whole[slot.start : slot.stop].zero_()
        # Clipping by a norm that is not finite leaves no zeros behind the last slot.
        whole[self.group.layout.slots[-1].stop :].zero_()
        self.local.clear()
        flags = Flags(self._collected, len(self.group.parameters))
        operation = self._operation(whole, flags)
        operation.signature += f" of gradient group {self.group.index}"
        self._work = (self._backend.post(operation), flags)

    def _operation(self, whole: Tensor, flags: Flags) -> FlaggedAllReduce | FlaggedReduceScatter:
        if not self.is_sharded:
            return FlaggedAllReduce(whole, flags)
        place = (self._backend.rank, self._backend.size)
        out = self._kept_memory() if self._shard is None else None
        return FlaggedReduceScatter(whole, out, self.group.layout.sizes, place, flags)

    def _kept_memory(self) -> Tensor:
        """Memory for the shard, the same in every step: fresh pages cost more than the sum."""
        if self._shard_memory is None:
            self._shard_memory = torch.empty_like(self.group.master)
            self._pool.account.add("gradients", self._shard_memory.nbytes)
        return self._shard_memory

    def is_reduced(self) -> bool:
        """Whether `finish_reduction` would not wait."""
        return self._work is None or self._work[0].is_done()

    def finish_reduction(self) -> None:
        """Waits for the average."""
        if self._work is None:
            return
        (work, flags), self._work = self._work, None
        result = work.wait()
        self.used |= flags.union
        if self.is_sharded:
            self._shard = result if self._shard is None else self._shard.add_(result)
            self._drop_whole()

    def average_over(self, replicas: Backend) -> None:
        """The other copies of the shards take part too."""
        held = self.held()
        assert held is not None
        flags = Flags(self.used, len(self.group.parameters))
        operation = FlaggedAllReduce(held, flags)
        operation.signature += f" of gradient group {self.group.index} over the replicas"
        replicas.run(operation)
        self.used |= flags.union

    def _drop_whole(self) -> None:
        if self._buffer is not None:
            self._pool.give(self._buffer)
            self._buffer = self._whole = None
        self._collected.clear()

    # What is there ------------------------------------------------------------------------

    def own(self) -> Tensor | None:
        """This rank's part of the averaged gradient."""
        if self.is_sharded:
            return self._shard
        return None if self._whole is None else self.group.own_slice(self._whole)

    def held(self) -> Tensor | None:
        """All that this rank holds of the averaged gradient: whole, or its part."""
        return self._shard if self.is_sharded else self._whole

    def show(self) -> None:
        """Lets the parameters show what they have: nothing if nobody used them."""
        if self._adds_in_place:
            return
        views = [] if self._shows_stand_in or self._whole is None else self._all_views()
        for place, parameter in enumerate(self.group.parameters):
            if place not in self.used and place not in self._collected:
                parameter.grad = None
            elif self._shows_stand_in:
                parameter.grad = self._stand_in(place)
            else:
                parameter.grad = views[place]

    def _stand_in(self, place: int) -> ShardedGradient:
        stand_in = self._stand_ins.get(place)
        if stand_in is None:
            stand_in = self._stand_ins[place] = ShardedGradient(self.group.parameters[place])
        stand_in.arrived = None
        return stand_in

    def check_averaged(self, places: Iterable[int]) -> None:
        """Raises if this rank's gradients of some parameters are still only its own."""
        if self.local and not self.local.isdisjoint(places):
            name = self.group.names[min(self.local.intersection(places))]
            raise ShoalError(
                f"the gradient of {name} is this rank's own: it was accumulated inside of "
                "no_sync(), or with auto_sync=False. Run the last backward before a step outside "
                "of no_sync(), or call model.synchronize_gradients()"
            )

    def adopt(self) -> None:
        """Takes over what a user did to the gradients that the parameters show.

        One that was set by hand is the whole gradient, the same on every rank.
        """
        if self._adds_in_place:
            return
        self.forget_cleared()
        arrived = set(self.arrived)
        for place, parameter in enumerate(self.group.parameters):
            gradient = parameter.grad
            if gradient is None or isinstance(gradient, ShardedGradient) or place in arrived:
                continue
            if self.is_sharded:
                self._adopt_part(place, gradient)
            elif gradient.data_ptr() != self._all_views()[place].data_ptr() or (
                place not in self.used and place not in self._collected
            ):
                self._adopt_whole(place, gradient)

    def _adopt_whole(self, place: int, gradient: Tensor) -> None:
        view = self._all_views()[place]
        if not self.used and not self._collected:
            self.whole().zero_()
        view.copy_(gradient)
        shown = self._stand_in(place) if self._shows_stand_in else view
        self.group.parameters[place].grad = shown
        self.used.add(place)
        self._collected.add(place)

    def _adopt_part(self, place: int, gradient: Tensor) -> None:
        if self._shard is None:
            self._shard = self._kept_memory().zero_()
        (start, stop), slot = self._own_bounds(place), self.group.layout.slots[place]
        first = start + self.group.low - slot.start
        self._shard[start:stop] = gradient.reshape(-1)[first : first + stop - start]
        self.group.parameters[place].grad = self._stand_in(place)
        self.used.add(place)

    def _own_bounds(self, place: int) -> tuple[int, int]:
        """Where in this rank's part a parameter's elements are."""
        slot, length = self.group.layout.slots[place], self.group.high - self.group.low
        start, stop = (min(max(edge - self.group.low, 0), length) for edge in slot.bounds)
        return start, stop

    def forget_cleared(self) -> None:
        """A gradient that the user set to None is no longer there to be added to."""
        for place in [*(self.used | self._collected)]:
            if self.group.parameters[place].grad is None:
                self._forget(place)

    def _forget(self, place: int) -> None:
        self.used.discard(place)
        self._collected.discard(place)
        self.local.discard(place)
        self._zero(place)

    def _zero(self, place: int) -> None:
        if self._whole is not None:
            self._all_views()[place].zero_()
        if self._shard is not None:
            self._shard[slice(*self._own_bounds(place))].zero_()

    def forget(self, places: set[int]) -> None:
        """Forgets the gradients of some parameters."""
        self.finish_reduction()
        for place in places:
            self.group.parameters[place].grad = None
        self.forget_cleared()

    def make_zero(self, places: set[int]) -> None:
        """Makes gradients that are there zero; they still count as there."""
        self.finish_reduction()
        for place in places & (self.used | self._collected):
            self._zero(place)

    def gather(self, backend: Backend) -> None:
        """Puts the whole averaged gradient where the parameters show it."""
        whole = self._whole
        if self.is_sharded and self.used:
            assert self._shard is not None
            whole = backend.all_gather(self._shard)
        for place, parameter in enumerate(self.group.parameters):
            slot = self.group.layout.slots[place]
            parameter.grad = None
            if place in self.used and whole is not None:
                parameter.grad = whole[slot.start : slot.stop].view(slot.shape)

    def clear(self) -> None:
        """Forgets all gradients."""
        self.finish_reduction()
        for parameter in self.group.parameters:
            parameter.grad = None
        self.used.clear()
        self._collected.clear()
        self.local.clear()
        self.arrived.clear()
        self._shard = None
        if self.is_sharded:
            self._drop_whole()

    @property
    def num_bytes_held(self) -> int:
        """Bytes of gradients that this rank holds now."""
        held = [buffer for buffer in (self._whole, self._shard_memory) if buffer is not None]
        return sum(buffer.nbytes for buffer in held)
