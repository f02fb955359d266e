"""`SharedMemoryBackend`: ranks are processes of one host, data moves through shared memory.

[Note: exposures]
Each rank exposes its source to the others. A tensor from `Backend.empty` lies in a segment
that they can map, and is *shared* as it is. Any other tensor is *staged*: copied into one of
two halves of a segment, whole if it fits and otherwise a window at a time. A rank may
overwrite a half once everybody is done with what it held before, and it knows that, because
everybody has met since then, over the other half.

[Note: parts and windows]
A source is a row of parts, one for each rank that will work on it. A window is a range
inside every part, so that all ranks have work in each window.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.backend import WorldState, check_tag
from shoal.comm.blocks import reduce_and_hand_out, reduce_in_blocks
from shoal.comm.control.page import PageChannel, PageControl
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Message
from shoal.comm.copying import copy
from shoal.comm.exposure import Exposure, Window
from shoal.comm.header import Header, decode, encode
from shoal.comm.message_memory import MessageMemory
from shoal.comm.operation import Operation, Payload, Send, writing
from shoal.comm.partition import offsets, split_sizes
from shoal.comm.posted_message import Courier, PostedSend
from shoal.comm.posting import Carrier, Postbox, Posted
from shoal.comm.reduction import reduce_into
from shoal.comm.segments import Arena, Location, Peer
from shoal.comm.site import call_site
from shoal.comm.small_operations import SMALL_BYTES, STAGED, SmallOperations, is_all_staged
from shoal.comm.staging import HALF_BYTES, Staging
from shoal.comm.work import PendingWork, Work

_SHARED, _WINDOWED = b"m", b"w"


class SharedMemoryBackend(SmallOperations):
    """Collectives at memory speed between the processes of one host.

    Example:
        >>> import shoal, torch
        >>> def gather():
        ...     backend = shoal.world().backend
        ...     return backend.all_gather(torch.tensor([backend.rank])).tolist()
        >>> shoal.run(gather, ranks=2, backend="shm")
        [[0, 1], [0, 1]]
    """

    name = "shm"
    shares_memory = True

    def __init__(
        self,
        state: WorldState,
        control: PageControl,
        channel: PageChannel,
        ranks: Sequence[int],
        arena: Arena,
        peers: Sequence[Peer],
    ) -> None:
        """``arena`` and ``peers`` (by world rank) are shared by all groups of the world."""
        super().__init__(state, control, channel, ranks)
        self._page_control, self._page_channel = control, channel
        self._arena, self._peers = arena, peers
        self._staging = Staging(arena)
        self._message_memory = MessageMemory(arena)
        self._postbox = Postbox(Carrier(channel, self._patience_for, self._or_fail, self._do_part))
        self._wholes = {}
        self._recipes = {}

    def empty(
        self, numel: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """A flat tensor in a segment that the other ranks can map."""
        if torch.device(device or "cpu").type != "cpu":
            return super().empty(numel, dtype, device)
        dtype = dtype or torch.get_default_dtype()
        return self._arena.empty(numel * dtype.itemsize).view(dtype)

    def reach(self, memory: Tensor) -> list[Tensor]:
        """Maps the other ranks' memory."""
        location = self._arena.locate(memory)
        if location is None:
            raise ValueError("only memory from Backend.empty can be reached by other ranks")
        found = self.all_gather_object([list(location), memory.nbytes])
        mapped = []
        for rank, (place, num_bytes) in enumerate(found):
            wire = Location(*place).encode()
            mapped.append(
                memory if rank == self.rank else self._view(rank, wire, num_bytes, memory.dtype)
            )
        self.barrier()  # everybody has mapped what may be let go of from here on
        return mapped

    def _make_group(self, members: Sequence[int], slot: int) -> SharedMemoryBackend:
        ranks = [self.ranks[member] for member in members]
        channel = self._page_control.channel(slot, ranks)
        return SharedMemoryBackend(
            self._state, self._page_control, channel, ranks, self._arena, self._peers
        )

    def _check_tensor(self, tensor: Tensor) -> None:
        if not tensor.is_cpu:
            raise TypeError(
                f"the shm backend carries CPU tensors; got one on {tensor.device}. "
                "Use backend='nccl' or 'gloo' for it, or move it to the CPU."
            )

    # Posting ----------------------------------------------------------------------------

    def post(self, operation: Operation) -> Work[Any]:
        """All-reduces and reduce-scatters of memory from `empty` need no thread."""
        location = None if operation.source is None else self._arena.locate(operation.source)
        can_post = operation.kind in ("all_reduce", "reduce_scatter") and self.size > 1
        with self._lock:
            if can_post and location is not None and self._queue.is_idle():
                self._number += 1
                operation.signature += " posted"  # who does not post it moves other data
                wire = _SHARED + location.encode()
                header = encode(Header(operation.signature, operation.meta, wire, call_site()))
                self._where(operation, self._number, call_site())
                return self._postbox.put(operation, self._number, header)
        return super().post(operation)

    def post_send(self, tensor: Tensor, dst: int, tag: int = 0) -> Work[None]:
        """Shows the receiver where to read; the rest is up to it."""
        self._check_peer("dst", dst)
        check_tag(tag)
        self._check_open()
        operation, site, begin = Send(tensor, dst, tag), call_site(), time.perf_counter()
        assert operation.source is not None
        self._check_tensor(operation.source)
        key = self._message_key(operation, dst, tag)
        where = self._where(operation, key[1], site)
        self._patience(where, True).check()
        piece = self._copy_for_message(operation)
        header = Header(operation.signature, operation.meta, self._expose_message(operation), site)

        def finish(theirs: bytes) -> None:
            other = decode(theirs)
            self._check_message(header, other, dst, is_sender=True)
            payload = operation.prepare([other], self.rank)
            self._count(operation.kind, payload, begin, 0.0)

        def let_go() -> None:
            if piece is not None:
                self._message_memory.give_back(piece)

        message = self._page_channel.post(dst, key, encode(header))
        if message is None:  # too many are open: a thread waits for a place
            task = partial(self._deliver, operation, dst, key, site, False)
            return self._start_errand(PendingWork(task, operation.signature))
        courier = Courier(lambda: self._patience(where, True), self._or_fail, finish, let_go)
        return PostedSend(message, self.ranks[dst], operation.signature, courier)

    def _copy_for_message(self, operation: Operation) -> Tensor | None:
        """Moves what others cannot read to where they can; returns that place."""
        source = operation.source
        if source is None or not source.numel() or self._arena.locate(source) is not None:
            return None
        piece = self._message_memory.take(source.nbytes)
        operation.source = piece[: source.nbytes].view(source.dtype).copy_(source)
        return piece

    def _patience_for(self, operation: Operation, number: int) -> Patience:
        return self._patience(self._where(operation, number, call_site()), True)

    def _do_part(self, posted: Posted) -> int:
        shown = self._page_channel.shown(posted.number)
        headers = self._compare(posted.operation, posted.number, posted.header, shown)
        waited = time.perf_counter() - posted.begin
        payload = posted.operation.prepare(headers, self.rank)
        payload.wires = [header.wire for header in headers]
        with writing(payload.target):
            is_for_all = posted.operation.kind == "all_reduce"
            self._transport(
                self._reduce_slice_of_all if is_for_all else self._reduce_own_slice, payload
            )
        self._settle()
        posted.result = posted.operation.result()
        self._count(posted.operation.kind, payload, posted.begin, waited)
        return self._num_settled

    def _reduce_slice_of_all(self, payload: Payload) -> None:
        parts = split_sizes(payload.total, self.size)
        start, stop = offsets(parts)[self.rank : self.rank + 2]
        inputs = [whole[start:stop] for whole in self._shared_wholes(payload).values()]
        reduce_and_hand_out(payload.op, inputs, range(self.size))

    def _reduce_own_slice(self, payload: Payload) -> None:
        assert payload.target is not None
        start, stop = offsets(payload.counts)[self.rank : self.rank + 2]
        inputs = [whole[start:stop] for whole in self._shared_wholes(payload).values()]
        reduce_in_blocks(payload.op, inputs, payload.target)

    def _shared_wholes(
        self, payload: Payload, among: Sequence[bool] | None = None
    ) -> dict[int, Tensor]:
        """What ranks share, by rank."""
        assert payload.source is not None
        dtype = payload.source.dtype
        num_bytes = payload.total * dtype.itemsize
        return {
            rank: self._view(rank, wire[1:], num_bytes, dtype)
            for rank, wire in enumerate(payload.wires)
            if among is None or among[rank]
        }

    def _finish_posted(self) -> None:
        self._postbox.finish_all()

    def _close_transport(self) -> None:
        self._staging.close()
        self._message_memory.close()
        self._wholes.clear()
        self._recipes.clear()
        self._arena.close()
        for peer in self._peers:
            peer.close()

    # Exposing ---------------------------------------------------------------------------

    def _expose(self, operation: Operation, number: int) -> bytes:
        """What fits is staged before the ranks meet, so that small operations meet once."""
        source = operation.source
        if self.size == 1:
            return b""
        shared = source if source is not None else operation.sink
        if shared is not None and shared.nbytes > SMALL_BYTES:
            location = self._arena.locate(shared)
            if location is not None:
                return _SHARED + location.encode()
        if source is None:
            return b""
        self._staging.turn += 1
        if source.nbytes > HALF_BYTES:
            return _WINDOWED + self._staging.wire()
        self._staging.put(source)
        return STAGED + self._staging.wire()

    def _exposures(self, payload: Payload, parts: Sequence[Sequence[int]]) -> list[Exposure]:
        """Everybody's source; ``parts`` are the counts of each rank's."""
        tensor = payload.source if payload.source is not None else payload.target
        assert tensor is not None
        return [
            self._exposure(rank, wire, counts, tensor.dtype)
            for rank, (wire, counts) in enumerate(zip(payload.wires, parts, strict=True))
        ]

    def _exposure(
        self, rank: int, wire: bytes, parts: Sequence[int], dtype: torch.dtype
    ) -> Exposure:
        kind = wire[:1]
        if not kind:
            return Exposure([], [], is_shared=False)
        if kind == _WINDOWED:
            first = Location.decode(wire[1:])
            second = first._replace(offset=HALF_BYTES - first.offset)
            wires = (first.encode(), second.encode())
            halves = [self._view(rank, half, HALF_BYTES, dtype) for half in wires]
            return Exposure(halves, parts, is_shared=False)
        whole = self._view(rank, wire[1:], sum(parts) * dtype.itemsize, dtype)
        return Exposure([whole], parts, is_shared=kind == _SHARED)

    def _view(self, rank: int, wire: bytes, num_bytes: int, dtype: torch.dtype) -> Tensor:
        return self._peers[self.ranks[rank]].view(wire, num_bytes, dtype)

    def _windows(
        self,
        exposures: Sequence[Exposure],
        source: Tensor | None,
        patience: Patience,
        kept: int | None = None,
    ) -> Iterator[Window]:
        """Stages what is windowed here, meets the others, and says what to work on, in turn.

        ``kept`` is a part that only this rank reads. What is shared stays readable until everybody
        is through: hence the meeting at the end.
        """
        windowed = [exposure for exposure in exposures if exposure.is_windowed]
        if not windowed:
            yield Window(0, 0, max(exposure.longest for exposure in exposures))
        width = min((exposure.width for exposure in windowed), default=1)
        # What is not windowed may be longer than what is, and is worked on in the same windows.
        longest = max(exposure.longest for exposure in exposures) if windowed else 0
        rounds = -(-longest // width)
        for number in range(rounds):
            window = Window(number, number * width, (number + 1) * width)
            if exposures[self.rank].is_windowed and source is not None:
                exposures[self.rank].stage(source, window, but=kept)
            self._page_channel.sync(patience)
            yield window
        if exposures[self.rank].is_windowed:
            self._staging.turn += rounds - 1
        if any(exposure.is_shared for exposure in exposures):
            self._page_channel.sync(patience)

    def _pieces(
        self, exposures: Sequence[Exposure], source: Tensor, part: int, window: Window
    ) -> list[Tensor]:
        """One part of everybody's source; this rank's own where it always was."""
        return [
            exposure.private(source, part, window)
            if rank == self.rank
            else exposure.piece(part, window)
            for rank, exposure in enumerate(exposures)
        ]

    # Collectives ------------------------------------------------------------------------

    def _all_reduce(self, payload: Payload, patience: Patience) -> None:
        source, target = payload.source, payload.target
        assert source is not None
        assert target is not None
        if source.nbytes <= SMALL_BYTES:
            wholes = self._staged_wholes(payload, [source.numel()] * self.size, target.dtype)
            reduce_into(payload.op, wholes, target)
        elif self.size == 2 and all(wire[:1] != _SHARED for wire in payload.wires):
            self._reduce_everywhere(payload, source, target, patience)
        else:
            self._reduce_in_slices(payload, source, range(self.size), patience)

    def _reduce_everywhere(
        self, payload: Payload, source: Tensor, target: Tensor, patience: Patience
    ) -> None:
        """Each rank reduces everything for itself: more work, but one meeting less."""
        exposures = self._exposures(payload, [[source.numel()]] * self.size)
        for window in self._windows(exposures, source, patience):
            inputs = self._pieces(exposures, source, 0, window)
            reduce_into(payload.op, inputs, target[window.start : window.stop])

    def _reduce_in_slices(
        self, payload: Payload, source: Tensor, receivers: Sequence[int], patience: Patience
    ) -> None:
        """Each rank reduces its slice and writes it to where the receivers find it."""
        parts = split_sizes(source.numel(), self.size)
        exposures = self._exposures(payload, [parts] * self.size)
        is_staged = self.rank in receivers and not exposures[self.rank].is_shared
        for window in self._windows(exposures, source, patience):
            inputs = [exposure.piece(self.rank, window) for exposure in exposures]
            reduce_and_hand_out(payload.op, inputs, receivers)
            if not all(exposure.is_shared for exposure in exposures):
                self._page_channel.sync(patience)
            if is_staged:
                exposures[self.rank].unstage(source, window)

    def _reduce(self, payload: Payload, patience: Patience) -> None:
        assert payload.source is not None
        self._reduce_in_slices(payload, payload.source, [payload.root], patience)

    def _reduce_scatter(self, payload: Payload, patience: Patience) -> None:
        source, target = payload.source, payload.target
        assert source is not None
        assert target is not None
        if is_all_staged(payload):
            start, stop = offsets(payload.counts)[self.rank : self.rank + 2]
            wholes = self._staged_wholes(payload, [payload.total] * self.size, target.dtype)
            reduce_into(payload.op, [whole[start:stop] for whole in wholes], target)
            return
        exposures = self._exposures(payload, [payload.counts] * self.size)
        for window in self._windows(exposures, source, patience, kept=self.rank):
            inputs = self._pieces(exposures, source, self.rank, window)
            reduce_in_blocks(payload.op, inputs, target[window.start : window.stop])

    def _broadcast(self, payload: Payload, patience: Patience) -> None:
        assert payload.source is not None
        if payload.wires[payload.root][:1] == _SHARED:
            self._broadcast_together(payload, payload.source)
            self._page_channel.sync(patience)
            return
        payload.wires = [
            wire if rank == payload.root else b"" for rank, wire in enumerate(payload.wires)
        ]
        parts = [[payload.source.numel()] if wire else [] for wire in payload.wires]
        senders = [payload.root] if self.rank != payload.root else []
        self._collect(payload, parts, senders, 0, [payload.source.numel()], patience)

    def _broadcast_together(self, payload: Payload, mine: Tensor) -> None:
        """The root writes the first part for whom it can reach, so that all have as much to do."""
        is_reached = [wire[:1] == _SHARED for wire in payload.wires]
        helped = split_sizes(mine.numel(), self.size)[0]
        wholes = self._shared_wholes(payload, among=is_reached)
        if self.rank != payload.root:
            start = helped if is_reached[self.rank] else 0
            copy(mine[start:], wholes[payload.root][start:])
            return
        for rank, whole in wholes.items():
            if rank != payload.root:
                copy(whole[:helped], mine[:helped])

    def _all_gather(self, payload: Payload, patience: Patience) -> None:
        parts = [[count] for count in payload.counts]
        self._collect(payload, parts, range(self.size), 0, payload.counts, patience)

    def _gather(self, payload: Payload, patience: Patience) -> None:
        parts = [[count] for count in payload.counts]
        senders = range(self.size) if self.rank == payload.root else []
        self._collect(payload, parts, senders, 0, payload.counts, patience)

    def _scatter(self, payload: Payload, patience: Patience) -> None:
        parts = [payload.counts if wire else [] for wire in payload.wires]
        counts = [payload.counts[self.rank]]
        self._collect(payload, parts, [payload.root], self.rank, counts, patience, self.rank)

    def _all_to_all(self, payload: Payload, patience: Patience) -> None:
        self._collect(
            payload,
            payload.matrix,
            range(self.size),
            self.rank,
            payload.arriving,
            patience,
            self.rank,
        )

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
        """Copies one part of each sender's source into the target, one after the other."""
        starts = offsets(counts)
        if is_all_staged(payload):
            self._collect_staged(payload, parts, senders, part, starts)
            return
        exposures = self._exposures(payload, parts)
        for window in self._windows(exposures, payload.source, patience, kept):
            for place, sender in enumerate(senders):
                assert payload.target is not None
                if sender == self.rank and payload.source is not None:
                    piece = exposures[sender].private(payload.source, part, window)
                else:
                    piece = exposures[sender].piece(part, window)
                start = starts[place] + window.start
                out = payload.target[start : start + piece.numel()]
                if out.data_ptr() != piece.data_ptr():  # rows may lie in their place already
                    copy(out, piece)

    # Messages ---------------------------------------------------------------------------

    def _expose_message(self, operation: Operation) -> bytes:
        source = operation.source
        if source is None or not source.numel():
            return b""
        location = self._arena.locate(source)
        if location is None:
            # The operation keeps the copy alive until the receiver is through with it.
            operation.source = self._arena.empty(source.nbytes).view(source.dtype).copy_(source)
            location = self._arena.locate(operation.source)
        assert location is not None
        return location.encode()

    def _send(self, payload: Payload, message: Message, patience: Patience) -> None:
        """Nothing to do: the receiver reads."""

    def _recv(self, payload: Payload, message: Message, patience: Patience) -> None:
        target = payload.target
        assert target is not None
        copy(target, self._view(payload.root, payload.wires[0], target.nbytes, target.dtype))
