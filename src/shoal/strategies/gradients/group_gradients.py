"""Gradients: collected into flat buffers, averaged over the ranks, kept whole or as shards.

[Note: arriving]
Autograd leaves each gradient with its parameter. When the last of a group has arrived they are
moved into the group's buffer, all with one call, and the parameters let go of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection

import torch
from torch import Tensor

from shoal.comm import Backend, Work
from shoal.errors import ShoalError
from shoal.strategies.engine.flat_group import FlatGroup
from shoal.strategies.gradients.buffer_pool import BufferPool
from shoal.strategies.gradients.flagged_reduction import (
    FlaggedAllReduce,
    FlaggedReduceScatter,
    Flags,
)
from shoal.strategies.gradients.sharded.owners import GradientOwners
from shoal.strategies.gradients.sharded.part import GradientPart, PartLayout
from shoal.strategies.gradients.sharded.sharded_gradient import ShardedGradient
from shoal.strategies.gradients.shown_buffer import ShownBuffer

_MOST_VIEWS = 8


class GroupGradients:
    """The gradients of one group on one rank."""

    def __init__(
        self,
        group: FlatGroup,
        pool: BufferPool,
        backend: Backend,
        owners: GradientOwners,
        is_sharded: bool,
        is_hidden: bool = False,
    ) -> None:
        """Nothing has arrived yet.

        Args:
            group: Whose gradients.
            pool: For buffers.
            backend: The ranks to average over.
            owners: The ranks that hold the gradients between them afterwards.
            is_sharded: Whether only this rank's part outlives the reduction.
            is_hidden: Whether parameters are parts themselves, so that nobody may take what they
                would show for the whole gradient.
        """
        self.group, self._pool, self._backend, self._owners = group, pool, backend, owners
        self.is_sharded = is_sharded
        """Whether only this rank's part outlives the reduction."""
        self._shows_parts = is_sharded or is_hidden or group.is_mixed
        self._buffer: Tensor | None = None
        self._whole: Tensor | None = None
        self._views: dict[int, list[Tensor]] = {}
        self._outside: ShownBuffer | None = None
        self._shown: dict[int, ShardedGradient] = {}
        self._own_references = 0
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
        self.by_hand: dict[int, Tensor] = {}
        """What users put in the place of gradients, as far as `adopt` found it."""
        self._versions = 0
        if group.is_mixed:  # gradients are averaged and shown in the masters' dtype
            with torch._C.DisableTorchFunctionSubclass():
                for parameter in group.parameters:
                    parameter.grad_dtype = None

    def expect(self) -> None:
        """A backward pass begins: every trainable parameter may get a gradient."""
        missing = sum(parameter.requires_grad for parameter in self.group.parameters)
        self.waiting = missing - len(self.arrived)
        self._versions = self._sum_versions()

    def _sum_versions(self) -> int:
        """How often the parameters were changed in place."""
        with torch._C.DisableTorchFunctionSubclass():
            return sum([parameter._version for parameter in self.group.parameters]) - (
                self.group.num_vanished * len(self.group.parameters)
            )

    def check_unchanged(self) -> None:
        """Raises if parameters were changed in place since the backward began."""
        if self._sum_versions() != self._versions:
            names = self.group.names
            which = names[0] if len(names) == 1 else f"one of {names[0]} to {names[-1]}"
            raise ShoalError(
                f"{which} was changed while backward ran, by an optimizer that steps in a hook, "
                "say. Gradients are averaged over the ranks by the end of backward, so each rank "
                "would step with its own, and the ranks would drift apart: step after backward, "
                "with the optimizer that shoal.as_distributed(model, optimizer) returned"
            )

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
        views = self._all_views()
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        more: tuple[list[Tensor], list[Tensor]] = ([], [])
        for place in dict.fromkeys(places):
            gradient = self._take_gradient(place)
            if gradient is None:  # a hook has set it to None
                self._forget(place)
                continue
            if gradient.requires_grad:
                raise ShoalError(
                    f"the gradient of {self.group.names[place]} has a graph of its own, from "
                    "backward(create_graph=True); averaging over the ranks would lose it. Use "
                    "torch.autograd.grad(loss, parameters, create_graph=True) instead"
                )
            if self._adds_in_place:
                self.group.parameters[place].grad = views[place]
            if gradient.data_ptr() != views[place].data_ptr():
                targets, sources = more if place in self._collected else fresh
                targets.append(views[place])
                sources.append(gradient)
            self._collected.add(place)
            self.local.add(place)
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
        self._work = (self._backend.start(operation), flags)

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
        else:  # what others used is in the buffer as well, to be added to
            self._collected |= flags.union

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
        parameters = self.group.parameters
        is_all = len(self.used | self._collected) == len(parameters)
        if is_all and not self._shows_parts:
            for parameter, face in zip(parameters, self._as_seen().faces(), strict=True):
                parameter.grad = face
            return
        for place, parameter in enumerate(parameters):
            if place not in self.used and place not in self._collected:
                parameter.grad = None
            else:
                parameter.grad = self._face(place)

    def _face(self, place: int) -> Tensor:
        """What a parameter shows."""
        return self._shown_part(place) if self._shows_parts else self._as_seen().face(place)

    def _as_seen(self) -> ShownBuffer:
        if self._outside is None:
            has_faces = not self._shows_parts
            self._outside = ShownBuffer(self.whole(), self.group.layout, has_faces=has_faces)
        return self._outside

    def _shown_part(self, place: int) -> ShardedGradient:
        if place not in self._shown:
            part = GradientPart(self._layout_of(place), self, place)
            self._shown[place] = ShardedGradient(part, self.group.master)
            del part
            self._own_references = self._num_references(place)
        shown = self._shown[place]
        shown.arrived = None
        return shown

    def _num_references(self, place: int) -> int:
        """How often what a parameter shows is referred to, itself and what it stands for."""
        shown = self._shown[place]
        return sys.getrefcount(shown) + sys.getrefcount(shown.part)

    def _layout_of(self, place: int) -> PartLayout:
        slot = self.group.layout.slots[place]
        cuts: tuple[int, ...] = (0, slot.stop - slot.start)
        if self.is_sharded:
            bounds = self.group.layout.bounds
            cuts = tuple(min(max(edge, slot.start), slot.stop) - slot.start for edge in bounds)
        rank = self._backend.rank if self.is_sharded else 0
        return PartLayout(slot.name, slot.shape, cuts, rank, weakref.ref(self._owners))

    def part(self, place: int) -> Tensor:
        """This rank's elements of a parameter's gradient, flat."""
        if self.is_sharded:
            if self._shard is None:
                self._shard = self._kept_memory().zero_()
            return self._shard[slice(*self._own_bounds(place))]
        if self._whole is None:
            self.whole().zero_()
        return self._as_seen().elements(place)

    def check_averaged(self, places: Collection[int]) -> None:
        """Raises if this rank's gradients of some parameters are still only its own."""
        if self.local and not self.local.isdisjoint(places):
            name = self.group.names[min(self.local.intersection(places))]
            raise ShoalError(
                f"the gradient of {name} is this rank's own: it was accumulated inside of "
                "no_sync(), or with auto_sync=False. Run the last backward before a step outside "
                "of no_sync(), or call model.synchronize_gradients()"
            )

    # What users did -----------------------------------------------------------------------

    def adopt(self) -> None:
        """Finds what a user did to the gradients that the parameters show.

        Those that were put in by hand are left in `by_hand`, to be taken over as this rank's own
        or as what all ranks have.
        """
        self.by_hand = {}
        if self._adds_in_place or self._is_as_shown():
            return
        self.forget_cleared()
        arrived = set(self.arrived)
        for place, parameter in enumerate(self.group.parameters):
            gradient = parameter.grad
            if gradient is None or place in arrived:
                continue
            if isinstance(gradient, ShardedGradient):
                if gradient is not self._shown.get(place) or gradient.replacement is not None:
                    self._adopt_part(place, gradient)
            elif not self._is_own(place, gradient):
                self.by_hand[place] = gradient

    def _is_as_shown(self) -> bool:
        """Whether every parameter has the whole gradient that it was shown with."""
        if self._shows_parts or self._outside is None:
            return False
        return self._outside.are_shown([parameter.grad for parameter in self.group.parameters])

    def _is_own(self, place: int, gradient: Tensor) -> bool:
        """Whether a plain gradient is the buffer's: ``.data = ...`` may have moved what was."""
        if self._shows_parts or self._whole is None or gradient.is_sparse:
            return False
        if place not in self.used and place not in self._collected:
            return False
        return self._as_seen().contains(place, gradient)

    def _adopt_part(self, place: int, gradient: ShardedGradient) -> None:
        """One that was computed from averaged ones is averaged."""
        if gradient.replacement is not None:
            self.by_hand[place] = gradient.replacement
            self._shown.pop(place, None)
            return
        layout = self._layout_of(place)
        if gradient.part.layout.conforms(layout):
            values = gradient.part.values()
        else:
            values = layout.take(gradient.whole("use"))
        self._owners.note(f"{layout.name} {gradient.part.after('assigned')}")
        self._overwrite(place, values)

    def _overwrite(self, place: int, values: Tensor) -> None:
        """This rank's elements of an averaged gradient, whatever was there."""
        self.group.parameters[place].grad = None
        self._release(place)
        if not self.is_sharded and not self.used and not self._collected:
            self.whole().zero_()
        self.part(place).copy_(values)
        self.used.add(place)
        if not self.is_sharded:
            self._collected.add(place)
        self.group.parameters[place].grad = self._face(place)

    def take_as_final(self, places: Collection[int]) -> None:
        """Gradients that were put in by hand count as whole, the same on every rank."""
        for place in places:
            self._overwrite(place, self._layout_of(place).take(self.by_hand.pop(place).detach()))

    def take_as_local(self) -> None:
        """Gradients that were put in by hand count as this rank's own, to be averaged."""
        for place, gradient in self.by_hand.items():
            self.group.parameters[place].grad = None
            self._forget(place)
            self.group.parameters[place].grad = gradient.detach()
            self.arrived.append(place)
        self.by_hand = {}
        self.collect()

    def _own_bounds(self, place: int) -> tuple[int, int]:
        """Where in this rank's part a parameter's elements are."""
        slot, length = self.group.layout.slots[place], self.group.high - self.group.low
        start, stop = (min(max(edge - self.group.low, 0), length) for edge in slot.bounds)
        return start, stop

    def forget_cleared(self) -> None:
        """A gradient that the user set to None is no longer there to be added to."""
        for place in [*(self.used | self._collected)]:
            if self.group.parameters[place].grad is None:
                if place in self.used and place not in self.local:
                    self._owners.note(f"{self.group.names[place]} has none")
                self._forget(place)

    def _forget(self, place: int) -> None:
        self._release(place)
        self.used.discard(place)
        self._collected.discard(place)
        self.local.discard(place)
        self._zero(place)

    def _release(self, place: int) -> None:
        """What users still hold of a gradient that is gone stays what it was."""
        if place not in self._shown:
            return
        num_users = self._num_references(place) - self._own_references
        part = self._shown[place].part
        if num_users > part.is_gathered:
            del self._shown[place]
            if place in self.used and place not in self.local:
                part.leave()
        else:
            part.forget()
            self._shown[place].replacement = None

    def _zero(self, place: int) -> None:
        if self._whole is not None:
            self._all_views()[place].zero_()
        if self._shard is not None:
            self._shard[slice(*self._own_bounds(place))].zero_()
        if place in self._shown:
            self._shown[place].part.make_zero()

    def forget(self, places: set[int]) -> None:
        """Forgets the gradients of some parameters."""
        self.finish_reduction()
        for place in places:
            self.group.parameters[place].grad = None
        if self._outside is not None and self._outside.is_held(places):
            self._move()
        self.forget_cleared()

    def _move(self) -> None:
        """Users keep the buffer, and the group takes another with the same values."""
        shown = [
            place
            for place, parameter in enumerate(self.group.parameters)
            if parameter.grad is not None and self._is_own(place, parameter.grad)
        ]
        left = self._leave_buffer()
        self.whole().copy_(left)
        for place in shown:
            self.group.parameters[place].grad = self._face(place)

    def make_zero(self, places: set[int]) -> None:
        """Makes gradients that are there zero; they still count as there."""
        self.finish_reduction()
        for place in places & (self.used | self._collected):
            self._zero(place)
        for place in places & self.by_hand.keys():
            self.by_hand[place].zero_()

    def _leave_buffer(self) -> Tensor:
        """Users keep the buffer, and the group takes another; see [Note: what users hold]."""
        left = self._whole
        assert left is not None
        assert self._buffer is not None
        self._pool.account.add("gradients", -self._buffer.nbytes)
        self._views.pop(left.data_ptr(), None)
        self._buffer = self._whole = self._outside = None
        return left

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
        if self.used:
            self._owners.note(f"group {self.group.index} has none")
        for parameter in self.group.parameters:
            parameter.grad = None
        for place in [*self._shown]:
            self._release(place)
        if self._outside is not None and self._outside.is_held(range(len(self.group.parameters))):
            self._leave_buffer()
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
