"""How data moves over shared memory once all ranks have shown theirs: a method for each route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.comm.control.page.page import PageChannel
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Message
from shoal.comm.operation import Payload
from shoal.comm.operation.partition import offsets, split_sizes
from shoal.comm.operation.reduction import ReduceOp, reduce_into
from shoal.comm.shm.exposure import Exposer, Window, windows_of
from shoal.comm.shm.routing import NOTHING, ShmRoute, Shown, Way, decode_shown, route
from shoal.torch_support.memory import copy

# Small enough for the cache: what was just reduced is still there when it is handed out.
_BLOCK_BYTES = 256 << 10
_LONG_BYTES = 8 << 20
_FEW = 2
_WIDE_BYTES = 4


class Transfers:
    """The data plane of one group; see `Route`."""

    def __init__(self, exposer: Exposer, channel: PageChannel, rank: int, size: int) -> None:
        self._exposer, self._channel = exposer, channel
        self.rank, self.size = rank, size

    # Reductions -------------------------------------------------------------------------

    def all_reduce(self, payload: Payload, patience: Patience) -> None:
        """Any of five routes."""
        shown, source = _shown(payload), payload.given
        way = route("all_reduce", [each.way for each in shown], num_bytes=source.nbytes)
        if way is ShmRoute.STAGED:
            self._reduce_staged(payload, 0, source.numel())
        elif way is ShmRoute.HALVES:
            self._reduce_halves(payload, shown, patience)
        elif way is ShmRoute.EVERYWHERE:
            self._reduce_everywhere(payload, [each.in_windows() for each in shown], patience)
        else:
            self._reduce_in_slices(payload, shown, range(self.size), patience)

    def reduce_scatter(self, payload: Payload, patience: Patience) -> None:
        """Each rank reduces its own part."""
        shown, source = _shown(payload), payload.given
        if route("reduce_scatter", [each.way for each in shown]) is ShmRoute.STAGED:
            self._reduce_staged(payload, *offsets(payload.counts)[self.rank : self.rank + 2])
            return
        exposures = self._exposer.exposures(shown, [payload.counts] * self.size, source.dtype)
        target = payload.gotten
        for window in self._exposer.windows(exposures, source, patience, kept=self.rank):
            inputs = self._exposer.pieces(exposures, source, self.rank, window)
            _reduce_in_blocks(payload.op, inputs, target[window.start : window.stop])

    def _reduce_staged(self, payload: Payload, start: int, stop: int) -> None:
        target = payload.gotten
        counts = [payload.total] * self.size
        wholes = self._exposer.staged_wholes(payload, counts, target.dtype)
        reduce_into(payload.op, [whole[start:stop] for whole in wholes], target)

    def _reduce_halves(self, payload: Payload, shown: Sequence[Shown], patience: Patience) -> None:
        source, target = payload.given, payload.gotten
        parts = split_sizes(source.numel(), self.size)
        exposures = self._exposer.exposures(shown, [parts] * self.size, source.dtype)
        mine, rest = self.rank, 1 - self.rank
        own, other = exposures[mine], exposures[rest]
        # All ranks have met for this operation, so none reads this rank's staging memory now.
        scratch = self._exposer.staging.scratch(source.dtype)
        for window in windows_of(parts[mine], scratch.numel()):
            inputs = [own.private(source, mine, window)]
            inputs.insert(rest, other.found(mine, window, scratch))
            reduce_into(payload.op, inputs, own.private(target, mine, window))
        self._channel.sync(patience)
        other.copy_piece(target[offsets(parts)[rest] :], rest, Window(0, 0, parts[rest]))
        self._channel.sync(patience)

    def _reduce_everywhere(
        self, payload: Payload, shown: Sequence[Shown], patience: Patience
    ) -> None:
        source, target = payload.given, payload.gotten
        exposures = self._exposer.exposures(shown, [[source.numel()]] * self.size, source.dtype)
        for window in self._exposer.windows(exposures, source, patience):
            inputs = self._exposer.pieces(exposures, source, 0, window)
            reduce_into(payload.op, inputs, target[window.start : window.stop])

    def reduce(self, payload: Payload, patience: Patience) -> None:
        """Into the root's memory."""
        self._reduce_in_slices(payload, _shown(payload), [payload.root], patience)

    def _reduce_in_slices(
        self,
        payload: Payload,
        shown: Sequence[Shown],
        receivers: Sequence[int],
        patience: Patience,
    ) -> None:
        source = payload.given
        parts = split_sizes(source.numel(), self.size)
        exposures = self._exposer.exposures(shown, [parts] * self.size, source.dtype)
        own = exposures[self.rank]
        is_staged = self.rank in receivers and not own.is_shared
        for window in self._exposer.windows(exposures, source, patience):
            inputs = [exposure.piece(self.rank, window) for exposure in exposures]
            _reduce_and_hand_out(payload.op, inputs, receivers)
            if not all(exposure.is_shared for exposure in exposures):
                self._channel.sync(patience)
            if is_staged:
                own.unstage(source, window)

    # Reductions of pending operations: all sources are shared, and ranks do not meet ------

    def reduce_pending(self, kind: str, payload: Payload) -> None:
        """This rank's part of an all-reduce or a reduce-scatter."""
        is_for_all = kind == "all_reduce"
        parts = split_sizes(payload.total, self.size) if is_for_all else payload.counts
        start, stop = offsets(parts)[self.rank : self.rank + 2]
        dtype = payload.given.dtype
        wholes = self._exposer.shared_wholes(payload, [payload.total] * self.size, dtype)
        inputs = [whole[start:stop] for whole in wholes.values()]
        if is_for_all:
            _reduce_and_hand_out(payload.op, inputs, range(self.size))
        else:
            _reduce_in_blocks(payload.op, inputs, payload.gotten)

    # Copies -----------------------------------------------------------------------------

    def all_gather(self, payload: Payload, patience: Patience) -> None:
        """Everybody's whole source, to everybody."""
        parts = [[count] for count in payload.counts]
        self._collect(payload, parts, range(self.size), 0, payload.counts, patience)

    def gather(self, payload: Payload, patience: Patience) -> None:
        """Everybody's whole source, to the root."""
        parts = [[count] for count in payload.counts]
        senders = range(self.size) if self.rank == payload.root else []
        self._collect(payload, parts, senders, 0, payload.counts, patience)

    def scatter(self, payload: Payload, patience: Patience) -> None:
        """Each rank's part of the root's source."""
        mine = self.rank
        parts = [payload.counts if rank == payload.root else [] for rank in range(self.size)]
        counts = [payload.counts[mine]]
        self._collect(payload, parts, [payload.root], mine, counts, patience, mine)

    def all_to_all(self, payload: Payload, patience: Patience) -> None:
        """Each rank's part of everybody's source."""
        mine, every = self.rank, range(self.size)
        self._collect(payload, payload.matrix, every, mine, payload.arriving, patience, mine)

    def send(self, payload: Payload, message: Message, patience: Patience) -> None:
        """Nothing to do: the receiver reads."""

    def recv(self, payload: Payload, message: Message, patience: Patience) -> None:
        """Reads what the sender has shown."""
        target = payload.gotten
        sent = self._exposer.view(payload.root, payload.wires[0], target.nbytes, target.dtype)
        copy(target, sent)

    def broadcast(self, payload: Payload, patience: Patience) -> None:
        """From the root; ranks whose target is shared may have it written by the root."""
        shown, mine, root = _shown(payload), payload.given, payload.root
        if route("broadcast", [each.way for each in shown], root=root) is ShmRoute.ROOT_SHARED:
            self._broadcast_together(payload, shown, mine)
            self._channel.sync(patience)
            return
        only_root = [each if rank == root else NOTHING for rank, each in enumerate(shown)]
        payload.wires = [each.encode() for each in only_root]
        parts = [[mine.numel()] if rank == root else [] for rank in range(self.size)]
        senders = [root] if self.rank != root else []
        self._collect(payload, parts, senders, 0, [mine.numel()], patience)

    def _broadcast_together(self, payload: Payload, shown: Sequence[Shown], mine: Tensor) -> None:
        """The root writes the first part for ranks it can reach, so that all have as much to do."""
        helped = split_sizes(mine.numel(), self.size)[0]
        counts = [mine.numel()] * self.size
        wholes = self._exposer.shared_wholes(payload, counts, mine.dtype)
        if self.rank != payload.root:
            start = helped if shown[self.rank].way is Way.SHARED else 0
            copy(mine[start:], wholes[payload.root][start:])
            return
        for rank, whole in wholes.items():
            if rank != payload.root:
                copy(whole[:helped], mine[:helped])

    def _collect(
        self,
        payload: Payload,
        parts: Sequence[Sequence[int]],
        senders: Sequence[int],
        part: int,
        counts: Sequence[int],
        patience: Patience,
        kept: int | None = None,
    ) -> None:
        """Copies one part of each sender's source into the target, one after the other.

        ``parts`` are the counts of each rank's source, ``counts`` how many elements each sender has
        for this rank, and ``kept`` is the part of its own source that no other rank reads.
        """
        source, target, shown = payload.source, payload.target, _shown(payload)
        places = [] if target is None else target.split(list(counts))
        if route("collect", [each.way for each in shown]) is ShmRoute.STAGED:
            self._collect_staged(payload, parts, senders, part, places)
            return
        exposures = self._exposer.exposures(shown, parts, _dtype(payload))
        for window in self._exposer.windows(exposures, source, patience, kept):
            for sender, place in zip(senders, places, strict=False):
                if sender == self.rank and source is not None:
                    exposures[sender].copy_own(place[window.start :], source, part, window)
                else:
                    exposures[sender].copy_piece(place[window.start :], part, window)

    def _collect_staged(
        self,
        payload: Payload,
        parts: Sequence[Sequence[int]],
        senders: Sequence[int],
        part: int,
        places: Sequence[Tensor],
    ) -> None:
        if not places:
            return
        counts = [sum(each) for each in parts]
        wholes = self._exposer.staged_wholes(payload, counts, places[0].dtype)
        for sender, place in zip(senders, places, strict=False):
            first = sum(parts[sender][:part])
            place.copy_(wholes[sender][first : first + parts[sender][part]])


def _shown(payload: Payload) -> list[Shown]:
    return [decode_shown(wire) for wire in payload.wires]


def _dtype(payload: Payload) -> torch.dtype:
    return (payload.given if payload.source is not None else payload.gotten).dtype


# Reductions of shared memory, in blocks that suit the cache ------------------------------------


def _reduce_and_hand_out(op: ReduceOp, inputs: Sequence[Tensor], receivers: Sequence[int]) -> None:
    """Reduces the slices of all ranks and writes the result over those of the receivers."""
    first, *others = receivers
    for parts in _blocks(inputs):
        reduce_into(op, parts, parts[first])
        for receiver in others:
            copy(parts[receiver], parts[first])


def _reduce_in_blocks(op: ReduceOp, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Reduces into memory of its own."""
    if len(inputs) <= _FEW and not _is_widened(out):
        reduce_into(op, inputs, out)
        return
    for *parts, result in _blocks([*inputs, out]):
        reduce_into(op, parts, result)


def _blocks(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """The same range of every tensor, again and again.

    Blocks fit into the cache, so that what was reduced is still there when it is handed out. Two
    long tensors do better whole: then copies go past the cache.
    """
    first = tensors[0]
    if len(tensors) <= _FEW and first.nbytes >= _LONG_BYTES and not _is_widened(first):
        yield tensors
        return
    step = max(1, _BLOCK_BYTES // first.itemsize)
    yield from zip(*(tensor.split(step) for tensor in tensors), strict=True)


def _is_widened(tensor: Tensor) -> bool:
    """Whether reducing it takes memory for wider numbers: better for a block at a time."""
    return tensor.is_floating_point() and tensor.itemsize < _WIDE_BYTES
