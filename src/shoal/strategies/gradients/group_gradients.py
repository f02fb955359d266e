"""The gradients of one group: collected into a flat buffer, and averaged over the ranks.

[Note: arriving]
Autograd leaves each gradient with its parameter. When the last of a group has arrived they are
moved into the group's buffer, all with one call, and the parameters drop them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.comm import Backend, ReduceOp, Work
from shoal.errors import ShoalError
from shoal.strategies.engine.flat_group import FlatGroup
from shoal.strategies.gradients.compressed.exchange import CompressedExchange, Exchange
from shoal.strategies.gradients.memory import BufferPool, GradientMemory
from shoal.strategies.gradients.reductions import AverageToAll, AverageToParts, Flagged, Flags
from shoal.strategies.gradients.sharded.owners import GradientOwners
from shoal.strategies.gradients.sharded.sharded_gradient import ShardedGradient
from shoal.strategies.gradients.shown import ShownGradients
from shoal.torch_internals.tensors import as_plain_tensors, foreach_copy_


class Arrived(list[int]):
    """Parameters whose gradients are there and not collected yet, by index.

    Autograd's hooks add to it. They know nothing else of a group: see `Arrivals`.
    """

    num_worth_telling = 0
    """From how many on a hook tells that it was called."""


class GroupGradients:
    """The gradients of one group on one rank; parameters are named by their index in the group."""

    def __init__(
        self,
        group: FlatGroup,
        pool: BufferPool,
        backend: Backend,
        owners: GradientOwners,
        is_sharded: bool,
        is_hidden: bool = False,
        exchange: CompressedExchange | None = None,
    ) -> None:
        """Nothing has arrived yet.

        Args:
            group: Whose gradients.
            pool: For buffers.
            backend: The ranks to average over.
            owners: The ranks that hold the gradients between them afterwards.
            is_sharded: Whether only this rank's part outlives the reduction.
            is_hidden: Whether parameters are parts themselves, and so is what they show.
            exchange: How gradients travel where they are compressed.
        """
        self.group, self._backend, self.is_sharded = group, backend, is_sharded
        self.memory = GradientMemory(group, pool, is_sharded=is_sharded)
        self.exchange = exchange
        self.arrived = Arrived()
        self.num_expected = 0
        """How many arrive in this backward; none outside of one."""
        self.collected: set[int] = set()
        """Parameters whose gradients are in the buffer of the whole gradient."""
        self.local: set[int] = set()
        """Parameters whose gradients have not been averaged with the others' yet."""
        self.used: set[int] = set()
        """Parameters that have a gradient on some rank."""
        self.adds_in_place = False
        self._all = frozenset(range(len(group.parameters)))
        self._no_gradients = [None] * len(group.parameters)
        self._reduction: tuple[Flagged, Work[Tensor]] | None = None
        self._unread: tuple[Flags, Callable[[], None]] | None = None
        self._average: AverageToAll | AverageToParts | None = None
        rank = backend.rank if is_sharded else 0
        shows_parts = is_sharded or is_hidden or group.is_narrow
        self.shown = ShownGradients(self, owners, rank, shows_parts=shows_parts)
        if group.is_narrow:  # gradients are averaged and shown in the masters' dtype
            with as_plain_tensors():
                for parameter in group.parameters:
                    parameter.grad_dtype = None

    # Backward -----------------------------------------------------------------------------

    def expect(self, *, one_by_one: bool) -> None:
        """A backward pass begins: every trainable parameter may get a gradient.

        ``one_by_one``: whether each of them is to be told of, not only the last.
        """
        with as_plain_tensors():
            self.num_expected = sum([each.requires_grad for each in self.group.parameters])
        self.arrived.num_worth_telling = 0 if one_by_one else self.num_expected

    def expect_nothing(self) -> None:
        """What arrives from now on is told of at once: backward has ended, or it comes late."""
        self.num_expected = self.arrived.num_worth_telling = 0

    @property
    def are_missing(self) -> bool:
        """Whether more gradients are expected before any are collected."""
        return len(self.arrived) < self.num_expected

    def add_in_place(self, is_wanted: bool) -> None:
        """Whether autograd itself adds to the buffer: for many backwards with nothing in between.

        The parameters then show their parts of it, where only autograd looks.
        """
        self.adds_in_place = is_wanted and not self.group.is_narrow
        if self.adds_in_place and self.memory.whole is not None:
            views = self.memory.views()
            for index in self.collected:
                self.group.parameters[index].grad = views[index]

    def was_added(self, index: int) -> bool:
        """Whether autograd added what has just arrived to the buffer: nothing is left to do."""
        if not self.adds_in_place or self._reduction is not None or index not in self.collected:
            return False
        gradient = self.group.parameters[index].grad
        if gradient is None or gradient.requires_grad:
            return False
        self.local.add(index)
        return gradient.data_ptr() == self.memory.views()[index].data_ptr()

    def collect(self) -> None:
        """Moves what has arrived into the buffer; see [Note: arriving]."""
        if not self.arrived or self._is_exchanging():
            return
        self.finish_reduction()  # one that comes late adds to what was averaged already
        arrived = list(self.arrived)
        self.arrived.clear()
        if not self._collect_all(arrived):
            self._collect_some(arrived)

    def _collect_all(self, arrived: list[int]) -> bool:
        """Whether all gradients came at once, as they mostly do, and have been moved."""
        parameters = self.group.parameters
        if len(arrived) != len(parameters) or self.collected or self.adds_in_place:
            return False
        gradients = [
            each
            for each in self.group.gradients()
            if type(each) is Tensor and not each.requires_grad and not each.is_sparse
        ]
        if len(gradients) != len(parameters):
            return False
        self.group.show_gradients(self._no_gradients)
        foreach_copy_(self.memory.views(), gradients)
        self.collected, self.local = set(self._all), set(self._all)
        return True

    def _collect_some(self, arrived: list[int]) -> None:
        views = self.memory.views()
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        more: tuple[list[Tensor], list[Tensor]] = ([], [])
        with as_plain_tensors():  # these are no accesses that want values
            taken = [(index, self._take_gradient(index)) for index in dict.fromkeys(arrived)]
        for index, gradient in taken:
            if gradient is None:  # a hook has set it to None
                self.forget(index)
                continue
            if gradient.requires_grad:
                raise ShoalError(
                    f"the gradient of {self.group.names[index]} has a graph of its own, from "
                    "backward(create_graph=True); averaging over the ranks would lose it. Use "
                    "torch.autograd.grad(loss, parameters, create_graph=True) instead"
                )
            if self.adds_in_place:
                self.group.parameters[index].grad = views[index]
            if gradient.data_ptr() != views[index].data_ptr():
                targets, sources = more if index in self.collected else fresh
                targets.append(views[index])
                sources.append(gradient)
            self.collected.add(index)
            self.local.add(index)
        if fresh[0]:
            foreach_copy_(*fresh)
        for view, gradient in zip(*more, strict=True):
            view.add_(gradient.to(view.dtype))

    def _take_gradient(self, index: int) -> Tensor | None:
        parameter = self.group.parameters[index]
        gradient = parameter.grad
        parameter.grad = None  # so that nothing is added to a buffer that is being reduced
        if isinstance(gradient, ShardedGradient):
            gradient = gradient.arrived
        return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient

    # Reducing -----------------------------------------------------------------------------

    def start_reduction(self) -> None:
        """Averages over the ranks in the background."""
        self.finish_reduction()
        self.collect()
        if self.adds_in_place:
            for parameter in self.group.parameters:
                parameter.grad = None
        self.memory.zero_all_but(self.collected)
        self.local.clear()
        if self._backend.size == 1:  # its own are the average
            self.used |= self.collected
            return
        flags = Flags(self.collected, len(self.group.parameters))
        if self.exchange is not None:
            if self.exchange.is_active:
                exchange = self._start_exchange(self.exchange, flags)
                self._reduction = exchange.operation, exchange
                return
            self.exchange.count_uncompressed()
        operation = self._next_average(self.memory.take_whole())
        operation.carry(flags)
        self._reduction = operation, self._backend.start(operation)

    def _average_text(self, operation: Flagged) -> str:
        return f"average of gradients (group {self.group.index}): {operation.signature}"

    def _start_exchange(self, exchange: CompressedExchange, flags: Flags) -> Exchange:
        whole, out = self.memory.take_whole(), None
        if self.is_sharded and self.memory.shard is None:
            out = self.memory.shard_memory()
        return exchange.start(whole, flags, self.collected, out)

    def _is_exchanging(self) -> bool:
        """Whether payloads are under way, which must not be waited for now.

        What arrives meanwhile stays with its parameter; see [Note: two phases].
        """
        return self._reduction is not None and isinstance(self._reduction[1], Exchange)

    def _next_average(self, whole: Tensor) -> Flagged:
        if self._average is None:  # it must not keep the whole
            self._average = self._make_average(torch.empty_like(whole, device="meta"))
            self._average.signature = self._average_text(self._average)
        if isinstance(self._average, AverageToAll):
            return self._average.again(whole)
        out = self.memory.shard_memory() if self.memory.shard is None else None
        return self._average.again(whole, out)

    def _make_average(self, whole: Tensor) -> AverageToAll | AverageToParts:
        if not self.is_sharded:
            return AverageToAll(whole, ReduceOp.AVERAGE)
        position = (self._backend.rank, self._backend.size)
        return AverageToParts(whole, ReduceOp.AVERAGE, None, self.group.layout.sizes, position)

    def is_reduced(self) -> bool:
        """Whether `take_average` would hold up neither this thread nor the GPU."""
        return self._reduction is None or self._reduction[1].is_done_soon()

    def take_average(self) -> None:
        """Waits for the average, not for who used what."""
        if self._reduction is None:
            return
        (operation, work), self._reduction = self._reduction, None
        result, memory = work.wait(), self.memory
        self._unread = operation.flags, work.confirm
        if self.is_sharded:
            memory.shard = result if memory.shard is None else memory.shard.add_(result)
            memory.drop_whole()
            self.collected.clear()

    def finish_reduction(self) -> None:
        """Waits for the average, and for who used what."""
        self.take_average()
        if self._unread is None:
            return
        (flags, confirm), self._unread = self._unread, None
        confirm()
        self.used |= flags.union
        if not self.is_sharded:  # what others used is in the buffer as well, to be added to
            self.collected |= flags.union

    def average_over(self, replicas: Backend) -> None:
        """The other copies of the shards take part too."""
        held = self.memory.held()
        assert held is not None
        operation = AverageToAll(held, ReduceOp.AVERAGE)
        operation.carry(Flags(self.used, len(self.group.parameters)))
        operation.signature = f"{self._average_text(operation)} over the replicas"
        replicas.run(operation)
        self.used |= operation.flags.union

    def gather(self, backend: Backend) -> None:
        """Puts the whole averaged gradient where the parameters show it."""
        whole = self.memory.whole
        if self.is_sharded and self.used:
            assert self.memory.shard is not None
            whole = backend.all_gather(self.memory.shard)
        for index, parameter in enumerate(self.group.parameters):
            slot = self.group.layout.slots[index]
            parameter.grad = None
            if index in self.used and whole is not None:
                parameter.grad = whole[slot.start : slot.stop].view(slot.shape)

    # What is there ------------------------------------------------------------------------

    def part(self, index: int) -> Tensor:
        """This rank's elements of a parameter's gradient, flat."""
        if self.is_sharded:
            return self.memory.shard_part(index)
        if self.memory.whole is None:
            self.memory.take_whole().zero_()
        return self.shown.elements(index)

    def check_averaged(self, index: int) -> None:
        """Raises if this rank's gradient of a parameter is still only its own."""
        if index in self.local:
            raise ShoalError(
                f"the gradient of {self.group.names[index]} is this rank's own: it was accumulated "
                "inside of no_sync(), or with auto_sync=False. Run the last backward before a step "
                "outside of no_sync(), or call model.synchronize_gradients()"
            )

    def forget(self, index: int) -> None:
        """A parameter has no gradient any more."""
        self.shown.release(index)
        self.used.discard(index)
        self.collected.discard(index)
        self.local.discard(index)
        self.zero(index)

    def zero(self, index: int) -> None:
        """Makes a parameter's gradient zero; it still counts as there."""
        self.memory.zero(index)
        self.shown.parts.make_zero(index)

    def clear(self) -> None:
        """Forgets all gradients."""
        self.finish_reduction()
        self.shown.clear()
        for indices in (self.used, self.collected, self.local, self.arrived):
            indices.clear()
        self.memory.drop_shard()
        if self.is_sharded:
            self.memory.drop_whole()

    @property
    def num_bytes_held(self) -> int:
        """Bytes of gradients that this rank holds now."""
        return self.memory.num_bytes_held
