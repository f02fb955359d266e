"""What the backends over torch's process groups have in common.

A group of ranks has a process group of its own; torch's global state stays as it is. Most
collectives are put together from the two that a process group does best, a broadcast and an
all_to_all, both of bytes. So every dtype can travel, and what is reduced here is reduced in
rank order.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.bootstrap.bootstrap import Bootstrap
from shoal.comm.control.connect import connect
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Channel, Control, Failure
from shoal.comm.operation import Payload
from shoal.comm.operation.partition import split_sizes
from shoal.comm.operation.reduction import ReduceOp, finish, reduce_into
from shoal.comm.process_backend import ProcessBackend
from shoal.comm.torch_groups.groups import (
    GroupExchange,
    Links,
    Maker,
    NumberedAnew,
    ProcessGroup,
    link,
)
from shoal.comm.world_state import WorldState
from shoal.system.site import describe
from shoal.torch_support.dtypes import Native, traits

if TYPE_CHECKING:
    from torch.distributed import Work

# A process group that kept a deadline of its own would fail without naming a rank.
NEVER = timedelta(days=30)

REDUCE_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
_EXTREMES = (ReduceOp.MIN, ReduceOp.MAX)


class ProcessGroupBackend(ProcessBackend):
    """A backend whose transport is a process group of torch's."""

    _proves: ClassVar[bool] = True
    """Whether the connections of a process group prove nothing by themselves."""

    def __init__(
        self,
        state: WorldState,
        channel: Channel,
        ranks: Sequence[int],
        links: Links,
        group: ProcessGroup | None,
    ) -> None:
        """``group`` connects the ranks; one rank alone needs none."""
        super().__init__(state, links.control, channel, ranks)
        self._links = links
        self._group: Any = group
        self._others = [rank for rank in ranks if rank != links.control.rank]
        self._coordination.settle()  # connected: from here on the others can do without the store

    @classmethod
    def connect(
        cls,
        bootstrap: Bootstrap,
        state: WorldState,
        maker: Callable[[Control, str], Maker],
    ) -> Self:
        """The world's backend on this rank.

        ``maker`` leads from control plane and address of this host to what makes process groups.
        """
        control = connect(bootstrap)
        try:
            make = partial(maker, control)
            links = link(bootstrap, control, state.timeout, make, cls._leaves, proves=cls._proves)
            return cls._connect_group(state, links, 0, range(bootstrap.size))
        except BaseException as error:
            # Others may be through already, and would wait for a rank that is alive.
            control.publish(Failure(control.rank, describe(error), time.monotonic_ns()))
            control.close()
            raise

    def _make_group(self, members: Sequence[int], group_id: int) -> Self:
        ranks = [self.ranks[member] for member in members]
        return self._connect_group(self._state, self._links, group_id, ranks)

    @classmethod
    def _connect_group(
        cls, state: WorldState, links: Links, group_id: int, ranks: Sequence[int]
    ) -> Self:
        channel = links.control.channel(group_id, ranks)
        exchange = GroupExchange(channel)
        group = links.connect(f"{group_id}-{ranks[0]}", ranks, exchange)
        return cls(state, NumberedAnew(channel, exchange.number), ranks, links, group)

    # What a kind of process group adds ----------------------------------------------------

    @staticmethod
    def _leaves(rank: int) -> bool:
        """Whether a rank of a new group leaves something in its store for the others."""
        return True

    @abstractmethod
    def _carry(self, works: Iterable[Work], patience: Patience, peer: int | None = None) -> None:
        """Sees works through that begin as they are drawn, of all ranks or with one peer."""

    @abstractmethod
    def _abort(self, reason: BaseException) -> None:
        """Ends all transfers of this group, for good."""

    # Collectives ----------------------------------------------------------------------------

    def _all_reduce(self, payload: Payload, patience: Patience) -> None:
        target = payload.gotten
        if self._can_reduce(payload.op, target.dtype):
            options = _timed(dist.AllreduceOptions())
            options.reduceOp = REDUCE_OPS[payload.op]
            self._carry_one(lambda: self._group.allreduce([target], options), patience)
            finish(payload.op, target, self.size)
        else:
            counts = split_sizes(target.numel(), self.size)
            own = target.split(counts)[self.rank]
            reduce_into(payload.op, self._slices(target, counts, patience), own)
            self._spread(target, counts, patience)

    def _can_reduce(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        """Whether the process group's own arithmetic will do."""
        native: Native = getattr(traits(dtype), self.name)
        return native is Native.ALL or (native is Native.SUMS and op not in _EXTREMES)

    def _reduce(self, payload: Payload, patience: Patience) -> None:
        source = payload.given
        counts = split_sizes(source.numel(), self.size)
        own = torch.empty_like(source[: counts[self.rank]])
        reduce_into(payload.op, self._slices(source, counts, patience), own)
        self._collect(own, counts, payload.target, payload.root, patience)

    def _reduce_scatter(self, payload: Payload, patience: Patience) -> None:
        source, target = payload.given, payload.gotten
        reduce_into(payload.op, self._slices(source, payload.counts, patience), target)

    def _slices(self, source: Tensor, counts: Sequence[int], patience: Patience) -> list[Tensor]:
        """This rank's part of everybody's source, by rank."""
        own = counts[self.rank]
        arrived = self._scratch(own * self.size, source)
        arriving = [own] * self.size
        self._swap(source, counts, arrived, arriving, patience, source.numel())
        return list(arrived.split(arriving))

    def _scratch(self, numel: int, like: Tensor) -> Tensor:
        """Memory until the next collective."""
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def _broadcast(self, payload: Payload, patience: Patience) -> None:
        data = byte_view(payload.gotten)
        self._carry_one(lambda: self._start_broadcast(data, payload.root), patience)

    def _start_broadcast(self, data: Tensor, root: int) -> Work:
        options = _timed(dist.BroadcastOptions())
        options.rootRank = root
        return self._group.broadcast([data], options)  # type: ignore[no-any-return]

    def _all_gather(self, payload: Payload, patience: Patience) -> None:
        source, target = payload.given, payload.gotten
        target.split(payload.counts)[self.rank].copy_(source)
        self._spread(target, payload.counts, patience)

    def _spread(self, target: Tensor, counts: Sequence[int], patience: Patience) -> None:
        """Everybody's own part of ``target`` to everybody, by broadcasts that go on at once."""
        parts = enumerate(byte_view(target).split(in_bytes(counts, target)))

        def works() -> Iterator[Work]:
            for root, part in parts:
                if part.numel():
                    yield self._start_broadcast(part, root)

        self._carry(works(), patience)

    def _gather(self, payload: Payload, patience: Patience) -> None:
        source = payload.given
        self._collect(source, payload.counts, payload.target, payload.root, patience)

    def _collect(
        self,
        source: Tensor,
        counts: Sequence[int],
        target: Tensor | None,
        root: int,
        patience: Patience,
    ) -> None:
        """Everybody's source to the root, the only one with a target."""
        leaving, arriving = [0] * self.size, [0] * self.size
        leaving[root] = counts[self.rank]
        if target is None:
            target = source[:0]
        else:
            arriving = list(counts)
        self._swap(source, leaving, target, arriving, patience, sum(counts))

    def _scatter(self, payload: Payload, patience: Patience) -> None:
        target = payload.gotten
        leaving, arriving = [0] * self.size, [0] * self.size
        arriving[payload.root] = payload.counts[self.rank]
        source = payload.source
        if source is None:
            source = target[:0]
        else:
            leaving = list(payload.counts)
        self._swap(source, leaving, target, arriving, patience, sum(payload.counts))

    def _all_to_all(self, payload: Payload, patience: Patience) -> None:
        source, target = payload.given, payload.gotten
        counts, arriving = payload.counts, payload.arriving
        self._swap(source, counts, target, arriving, patience, payload.total)

    def _swap(
        self,
        source: Tensor,
        leaving: Sequence[int],
        target: Tensor,
        arriving: Sequence[int],
        patience: Patience,
        total: int,
    ) -> None:
        """Parts of ``source`` to all, parts of ``target`` from all, by rank.

        ``total`` tells all ranks the same of how long that is: it is a number of elements.
        """
        sizes = in_bytes(arriving, target), in_bytes(leaving, source)
        options = _timed(dist.AllToAllOptions())
        received, sent = byte_view(target), byte_view(source)
        self._carry_one(
            lambda: self._group.alltoall_base(received, sent, *sizes, options), patience
        )

    def _carry_one(
        self, start: Callable[[], Work], patience: Patience, peer: int | None = None
    ) -> None:
        self._carry((start() for _ in range(1)), patience, peer)

    def _needed(self, peer: int | None) -> Sequence[int]:
        """The world ranks without whom a work cannot end."""
        return self._others if peer is None else [self.ranks[peer]]

    # The end --------------------------------------------------------------------------------

    def _close_transport(self) -> None:
        self._links.watchdog.close()
        self._close_group(self._group)
        self._group = None

    def _close_group(self, group: ProcessGroup | None) -> None:
        """Ends a process group of ours; where there is no more to it, its last user does."""


def byte_view(tensor: Tensor) -> Tensor:
    """The same memory; an empty tensor may have strides that allow no such view."""
    return tensor.view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def in_bytes(counts: Sequence[int], tensor: Tensor) -> list[int]:
    """How many bytes so many elements of a tensor's dtype are."""
    return [count * tensor.itemsize for count in counts]


def _timed(options: Any) -> Any:
    options.timeout = NEVER
    return options
