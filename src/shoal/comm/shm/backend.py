"""`SharedMemoryBackend`: ranks are processes of one host, data moves through shared memory.

It has an `Exposer` (shows data and finds that of others), `Transfers` (move data along the routes
of `routing.py`), `PendingOperations` (end without a thread) and a `FastPath` (cached calls).
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.backend import check_tag
from shoal.comm.bootstrap.bootstrap import Bootstrap
from shoal.comm.control.connect import connect
from shoal.comm.control.page.control import PageControl, check_platform
from shoal.comm.control.page.page import PageChannel
from shoal.comm.operation import Operation, Send
from shoal.comm.operation.base import Header, decode, encode
from shoal.comm.process_backend import ProcessBackend
from shoal.comm.shm.exposure import Exposer
from shoal.comm.shm.fast_path import FastPath
from shoal.comm.shm.pending import PendingOperations, PendingSend
from shoal.comm.shm.routing import Shown, Way
from shoal.comm.shm.segments import Arena, Location, MessageMemory, Peer
from shoal.comm.shm.transfers import Transfers
from shoal.comm.work import ThreadedWork, Work
from shoal.comm.world_state import WorldState
from shoal.errors import BackendUnavailableError
from shoal.system.public_call import origin
from shoal.torch_support.memory import PrivateView


class SharedMemoryBackend(ProcessBackend):
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
        self._message_memory = MessageMemory(arena)
        self._exposer = Exposer(control, channel, arena, peers)
        self._transfers = Transfers(self._exposer, channel, self.rank, self.size)
        self._pending = PendingOperations(self._coordination, channel, self._transfers)
        self._fast_path = FastPath(
            self._coordination, channel, self._exposer, self._transfers, self._pending
        )
        self._run_cached = self._fast_path.run

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
        for rank, (fields, num_bytes) in enumerate(found):
            there = Location(*fields).encode()
            is_own = rank == self.rank
            mapped.append(
                memory if is_own else self._exposer.view(rank, there, num_bytes, memory.dtype)
            )
        self.barrier()  # all ranks have mapped it: from here on its owner may free it
        return mapped

    def share(self, num_bytes: int, owner: int) -> tuple[Tensor, PrivateView]:
        """Maps the owner's memory twice: as all ranks see it, and privately."""
        if self.rank == owner:
            shared = self._arena.empty(num_bytes, mmap.PAGESIZE)
            location = self._arena.locate(shared)
            assert location is not None
            self.broadcast_object(list(location), root=owner)
        else:
            location = Location(*self.broadcast_object(root=owner))
            shared = self._exposer.view(owner, location.encode(), num_bytes, torch.uint8)
        view = self._peers[self.ranks[owner]].private_view(location, shared)
        self.barrier()  # all ranks have mapped it: from here on its owner may free it
        return shared, view

    def _make_group(self, members: Sequence[int], group_id: int) -> SharedMemoryBackend:
        ranks = [self.ranks[member] for member in members]
        channel = self._page_control.channel(group_id, ranks)
        return SharedMemoryBackend(
            self._state, self._page_control, channel, ranks, self._arena, self._peers
        )

    def _check_tensor(self, tensor: Tensor) -> None:
        if not tensor.is_cpu:
            raise TypeError(
                f"the shm backend carries CPU tensors; got one on {tensor.device}. "
                "Use backend='nccl' or 'gloo' for it, or move it to the CPU."
            )

    # Without a thread -------------------------------------------------------------------

    def start(self, operation: Operation) -> Work[Any]:
        """All-reduces and reduce-scatters of memory from `empty` need no thread."""
        self._check_open()
        location = None if operation.source is None else self._arena.locate(operation.source)
        can_pend = operation.kind in ("all_reduce", "reduce_scatter") and self.size > 1
        self._coordination.enter()
        try:
            if can_pend and location is not None:
                # How far a queue is differs between ranks, so that must not decide what is done.
                self._coordination.finish_queued(operation.signature)
                # A rank that carries it out at once moves data differently: a mismatch.
                operation.signature += " in the background"
                return self._pending.put(operation, Shown(Way.SHARED, location.encode()).encode())
        finally:
            self._coordination.leave()
        return super().start(operation)

    def _finish_pending(self) -> None:
        if not self._pending.is_idle:
            self._pending.finish_all()

    def start_send(self, tensor: Tensor, dst: int, tag: int = 0) -> Work[None]:
        """Shows the receiver where to read; the receiver does the rest."""
        self._check_peer("dst", dst)
        check_tag(tag)
        self._check_open()
        operation, begin = Send(tensor, dst, tag), time.perf_counter()
        site = origin(operation.signature, self._coordination.called)
        assert operation.source is not None
        self._check_tensor(operation.source)
        key, what = self._message_key(operation, dst, tag), operation.signature
        self._coordination.begin(what, key[1], site, eager=True)
        piece = self._copy_for_message(operation)
        header = Header(what, operation.meta, self._expose_message(operation), site)

        def check(theirs: bytes) -> None:
            other = decode(theirs)
            self._check_message(header, other, dst, is_sender=True)
            payload = operation.prepare([other], self.rank)
            self._coordination.count(operation.kind, payload.num_bytes, begin, 0.0)

        def give_back() -> None:
            if piece is not None:
                self._message_memory.give_back(piece)

        message = self._page_channel.post(dst, key, encode(header))
        if message is None:  # too many are open: a thread waits until one has ended
            task = partial(self._deliver, operation, dst, key, site, False)
            return self._start_message_thread(ThreadedWork(task, what))
        call = (what, key[1], site)
        peer, awaited = self.ranks[dst], self._awaited(operation, key)
        return PendingSend(message, peer, self._coordination, call, awaited, check, give_back)

    def _copy_for_message(self, operation: Operation) -> Tensor | None:
        """Copies a source that others cannot read; returns the memory that it is copied to."""
        source = operation.source
        if source is None or not source.numel() or self._arena.locate(source) is not None:
            return None
        piece = self._message_memory.take(source.nbytes)
        operation.source = piece[: source.nbytes].view(source.dtype).copy_(source)
        return piece

    def _close_transport(self) -> None:
        self._fast_path.close()
        self._exposer.close()
        self._message_memory.close()
        self._arena.close()
        for peer in self._peers:
            peer.close()

    # The transport ----------------------------------------------------------------------

    def _mover(self, kind: str) -> Callable[..., None]:
        if self.size == 1:
            return super()._mover(kind)
        move: Callable[..., None] = getattr(self._transfers, kind)
        return move

    def _expose(self, operation: Operation) -> bytes:
        return self._exposer.show(operation).encode()

    def _expose_message(self, operation: Operation) -> bytes:
        source = operation.source
        if source is None or not source.numel():
            return b""
        location = self._arena.locate(source)
        if location is None:
            # The operation keeps the copy alive until the receiver has read it.
            operation.source = self._arena.empty(source.nbytes).view(source.dtype).copy_(source)
            location = self._arena.locate(operation.source)
        assert location is not None
        return location.encode()


def connect_shm(bootstrap: Bootstrap, state: WorldState) -> SharedMemoryBackend:
    """The world's backend on this rank."""
    check_platform()
    control = connect(bootstrap, reads_memory=True)
    if not isinstance(control, PageControl):
        control.close()
        raise BackendUnavailableError(
            "backend='shm' needs all ranks on one host, as one user; these are spread over "
            "several. Use backend='gloo', 'nccl' or 'mpi'."
        )
    ranks = range(bootstrap.size)
    peers = [Peer(pid) for pid in control.pids]
    return SharedMemoryBackend(state, control, control.channel(0, ranks), ranks, Arena(), peers)
