"""How data moves over shared memory once all ranks have shown theirs: a method for each route."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.control.page.page import PageChannel
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Message
from shoal.comm.operation import Payload
from shoal.comm.operation.partition import offsets, split_sizes
from shoal.comm.operation.reduction import reduce_into
from shoal.comm.shm.blocks import reduce_and_hand_out, reduce_in_blocks
from shoal.comm.shm.exposure import Exposer, Window, windows_of
from shoal.comm.shm.routing import NOTHING, ShmRoute, Shown, Way, decode_shown, route
from shoal.torch_support.copying import copy


class Transfers:
    """The data plane of one group; see `Route`."""

    def __init__(self, exposer: Exposer, channel: PageChannel, rank: int, size: int) -> None:
        """``rank`` of ``size`` in the group."""
        self._exposer, self._channel = exposer, channel
        self.rank, self.size = rank, size

    # Reductions -------------------------------------------------------------------------

    def all_reduce(self, payload: Payload, patience: Patience) -> None:
        """Any of five routes."""
        shown, source = _shown(payload), _given(payload.source)
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
        shown, source = _shown(payload), _given(payload.source)
        if route("reduce_scatter", [each.way for each in shown]) is ShmRoute.STAGED:
            self._reduce_staged(payload, *offsets(payload.counts)[self.rank : self.rank + 2])
            return
        exposures = self._exposer.exposures(shown, [payload.counts] * self.size, source.dtype)
        target = _given(payload.target)
        for window in self._exposer.windows(exposures, source, patience, kept=self.rank):
            inputs = self._exposer.pieces(exposures, source, self.rank, window)
            reduce_in_blocks(payload.op, inputs, target[window.start : window.stop])

    def _reduce_staged(self, payload: Payload, start: int, stop: int) -> None:
        target = _given(payload.target)
        counts = [payload.total] * self.size
        wholes = self._exposer.staged_wholes(payload, counts, target.dtype)
        reduce_into(payload.op, [whole[start:stop] for whole in wholes], target)

    def _reduce_halves(self, payload: Payload, shown: Sequence[Shown], patience: Patience) -> None:
        source, target = _given(payload.source), _given(payload.target)
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
        source, target = _given(payload.source), _given(payload.target)
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
        source = _given(payload.source)
        parts = split_sizes(source.numel(), self.size)
        exposures = self._exposer.exposures(shown, [parts] * self.size, source.dtype)
        own = exposures[self.rank]
        is_staged = self.rank in receivers and not own.is_shared
        for window in self._exposer.windows(exposures, source, patience):
            inputs = [exposure.piece(self.rank, window) for exposure in exposures]
            reduce_and_hand_out(payload.op, inputs, receivers)
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
        dtype = _given(payload.source).dtype
        wholes = self._exposer.shared_wholes(payload, [payload.total] * self.size, dtype)
        inputs = [whole[start:stop] for whole in wholes.values()]
        if is_for_all:
            reduce_and_hand_out(payload.op, inputs, range(self.size))
        else:
            reduce_in_blocks(payload.op, inputs, _given(payload.target))

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
        target = _given(payload.target)
        sent = self._exposer.view(payload.root, payload.wires[0], target.nbytes, target.dtype)
        copy(target, sent)

    def broadcast(self, payload: Payload, patience: Patience) -> None:
        """From the root; ranks whose target is shared may have it written by the root."""
        shown, mine, root = _shown(payload), _given(payload.source), payload.root
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

        Args:
            payload: The whole operation.
            parts: The counts of each rank's source.
            senders: The ranks to copy from.
            part: Which part of their sources.
            counts: How many elements each of them has for this rank.
            patience: For the waits.
            kept: The part of this rank's own source that no other rank reads.
        """
        starts, shown = offsets(counts), _shown(payload)
        if route("collect", [each.way for each in shown]) is ShmRoute.STAGED:
            self._collect_staged(payload, parts, senders, part, starts)
            return
        source = payload.source
        exposures = self._exposer.exposures(shown, parts, _dtype(payload))
        for window in self._exposer.windows(exposures, source, patience, kept):
            for index, sender in enumerate(senders):
                out = _given(payload.target)[starts[index] + window.start : starts[index + 1]]
                if sender == self.rank and source is not None:
                    exposures[sender].copy_own(out, source, part, window)
                else:
                    exposures[sender].copy_piece(out, part, window)

    def _collect_staged(
        self,
        payload: Payload,
        parts: Sequence[Sequence[int]],
        senders: Sequence[int],
        part: int,
        starts: Sequence[int],
    ) -> None:
        target = payload.target
        if target is None:
            return
        counts = [sum(each) for each in parts]
        wholes = self._exposer.staged_wholes(payload, counts, target.dtype)
        for index, sender in enumerate(senders):
            first = sum(parts[sender][:part])
            piece = wholes[sender][first : first + parts[sender][part]]
            target[starts[index] : starts[index + 1]].copy_(piece)


def _shown(payload: Payload) -> list[Shown]:
    return [decode_shown(wire) for wire in payload.wires]


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _dtype(payload: Payload) -> torch.dtype:
    return _given(payload.source if payload.source is not None else payload.target).dtype
