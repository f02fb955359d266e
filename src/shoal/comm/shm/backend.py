"""`SharedMemoryBackend`: ranks are processes of one host, data moves through shared memory.

See [Note: exposures] and [Note: parts and windows] in `shoal.comm.shm.exposure`.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.backend import WorldState, check_tag
from shoal.comm.control.page.page import PageChannel, PageControl
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Message
from shoal.comm.operation import Operation, Payload, Send, writing
from shoal.comm.operation.header import Header, decode, encode
from shoal.comm.operation.partition import offsets, split_sizes
from shoal.comm.operation.reduction import reduce_into
from shoal.comm.shm.copying import copy, reduce_and_hand_out, reduce_in_blocks
from shoal.comm.shm.exposure import (
    DIRECT,
    SHARED,
    SMALL_BYTES,
    WINDOWED,
    Window,
    in_windows,
    windows_of,
)
from shoal.comm.shm.fast_path import SmallOperations, is_all_staged
from shoal.comm.shm.message_memory import MessageMemory
from shoal.comm.shm.pending import Carrier, Courier, Postbox, Posted, PostedSend
from shoal.comm.shm.segments import Arena, Location, Peer
from shoal.comm.shm.staging import Staging
from shoal.comm.work import ThreadedWork, Work
from shoal.system.site import call_site
from shoal.torch_support.private_view import PrivateView


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

    def share(self, num_bytes: int, owner: int) -> tuple[Tensor, PrivateView]:
        """Maps the owner's memory twice, once to write for everybody and once privately."""
        if self.rank == owner:
            shared = self._arena.empty(num_bytes, mmap.PAGESIZE)
            location = self._arena.locate(shared)
            assert location is not None
            self.broadcast_object(list(location), root=owner)
        else:
            location = Location(*self.broadcast_object(root=owner))
            shared = self._view(owner, location.encode(), num_bytes, torch.uint8)
        view = self._peers[self.ranks[owner]].private_view(location, shared)
        self.barrier()  # everybody has mapped what may be let go of from here on
        return shared, view

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

    def start(self, operation: Operation) -> Work[Any]:
        """All-reduces and reduce-scatters of memory from `empty` need no thread."""
        location = None if operation.source is None else self._arena.locate(operation.source)
        can_post = operation.kind in ("all_reduce", "reduce_scatter") and self.size > 1
        with self._lock:
            if can_post and location is not None and self._queue.is_idle():
                self._number += 1
                operation.signature += " posted"  # who does not post it moves other data
                wire = SHARED + location.encode()
                header = encode(Header(operation.signature, operation.meta, wire, call_site()))
                self._where(operation, self._number, call_site())
                return self._postbox.put(operation, self._number, header)
        return super().start(operation)

    def start_send(self, tensor: Tensor, dst: int, tag: int = 0) -> Work[None]:
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
            return self._start_errand(ThreadedWork(task, operation.signature))
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

    # Collectives ------------------------------------------------------------------------

    def _all_reduce(self, payload: Payload, patience: Patience) -> None:
        source, target = payload.source, payload.target
        assert source is not None
        assert target is not None
        kinds = {wire[:1] for wire in payload.wires}
        if source.nbytes <= SMALL_BYTES:
            wholes = self._staged_wholes(payload, [source.numel()] * self.size, target.dtype)
            reduce_into(payload.op, wholes, target)
        elif DIRECT in kinds and WINDOWED not in kinds:
            self._reduce_and_read(payload, source, target, patience)
        elif self.size == 2 and SHARED not in kinds:
            payload.wires = [in_windows(wire) for wire in payload.wires]
            self._reduce_everywhere(payload, source, target, patience)
        else:
            self._reduce_in_slices(payload, source, range(self.size), patience)

    def _reduce_and_read(
        self, payload: Payload, source: Tensor, target: Tensor, patience: Patience
    ) -> None:
        """Each of two ranks reduces its half in its own memory, where the other reads it then."""
        parts = split_sizes(source.numel(), self.size)
        exposures = self._exposures(payload, [parts] * self.size)
        mine, rest = self.rank, 1 - self.rank
        own, other = exposures[mine], exposures[rest]
        scratch = self._staging.scratch(source.dtype)  # everybody has met: nobody reads there now
        for window in windows_of(parts[mine], scratch.numel()):
            inputs = [own.private(source, mine, window)]
            inputs.insert(rest, other.found(mine, window, scratch))
            reduce_into(payload.op, inputs, own.private(target, mine, window))
        self._page_channel.sync(patience)
        other.copy_piece(target[offsets(parts)[rest] :], rest, Window(0, 0, parts[rest]))
        self._page_channel.sync(patience)

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
        if payload.wires[payload.root][:1] == SHARED:
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
        is_reached = [wire[:1] == SHARED for wire in payload.wires]
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
                out = payload.target[starts[place] + window.start : starts[place + 1]]
                if sender == self.rank and payload.source is not None:
                    exposures[sender].copy_own(out, payload.source, part, window)
                else:
                    exposures[sender].copy_piece(out, part, window)

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
