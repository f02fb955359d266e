"""`NCCLBackend`: a GPU for every rank, data moves between GPUs.

[Note: the host does not wait]
A collective that was called (not ``async_op``) returns once it is in the GPU's queue: what the
caller puts there next waits for it, the host does not. The watchdog aborts what cannot end any
more; the GPU then goes on, with results that mean nothing, and the next operation raises why.
An asynchronous operation runs on a stream of its own, beside what the caller computes. A thread
compares headers with the others and then launches it, so the caller's thread seldom waits for
anything; `Work.wait` makes the caller's stream wait.

Messages from one rank to another have a process group of these two, see [Note: the order of
messages]. A message is a broadcast there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.bootstrap.bootstrap import Bootstrap
from shoal.comm.control.connect import host_id
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Channel, Message
from shoal.comm.operation import Barrier, Operation, Payload
from shoal.comm.operation.reduction import finish
from shoal.comm.torch_groups.base import NEVER, REDUCE_OPS, byte_view
from shoal.comm.torch_groups.foreseeing import ForeseeingBackend
from shoal.comm.torch_groups.groups import Links, Maker, ProcessGroup, exchange_between_two
from shoal.comm.torch_groups.one_way import OneWay
from shoal.comm.torch_groups.port import Port
from shoal.comm.torch_groups.streams import SideStream
from shoal.comm.torch_groups.watchdog import Flight
from shoal.comm.work import ThreadedWork, Work
from shoal.comm.world_state import WorldState
from shoal.errors import BackendUnavailableError
from shoal.torch_internals.process_groups import (
    all_gather_flat,
    nccl_options,
    reduce_scatter_flat,
    set_timeout,
)

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed import Work as TorchWork

_POLL_S = 0.002
# For NCCL 2.30 and later: several ranks on one GPU, as in tests.
_SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
# Left alone, torch ends the whole process when NCCL reports an error, or seems stuck.
_LEAVE_ERRORS_TO_US = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # One id for the whole group, however large.
    "TORCH_NCCL_RANKS_PER_ROOT": str(1 << 20),
}
# Above the tags of users.
_PAIR_TAG = 1 << 40


class NCCLBackend(ForeseeingBackend):
    """Collectives between GPUs, one for each rank.

    Example:
        >>> import shoal, torch
        >>> def total():
        ...     backend = shoal.world().backend
        ...     return backend.all_reduce(torch.ones(2, device=backend.device)).tolist()
        >>> shoal.run(total, ranks=torch.cuda.device_count(), backend="nccl")
    """

    name = "nccl"
    worthwhile_bytes = 24 << 20
    _proves = False

    def __init__(
        self,
        state: WorldState,
        channel: Channel,
        ranks: Sequence[int],
        links: Links,
        group: ProcessGroup | None,
    ) -> None:
        """``group`` connects the ranks; one rank alone needs none."""
        super().__init__(state, channel, ranks, links, group)
        self._device = local_device(links.control.rank)
        self._coordination.is_through_at_once = False
        self._side: SideStream | None = None
        self._verdict: BaseException | None = None
        self._num_begun = self._coordination.num_settled
        self._one_ways: dict[tuple[str, int], OneWay] = {}
        self._one_ways_lock = threading.Lock()

    @property
    def device(self) -> torch.device:
        """The GPU of this rank."""
        return self._device

    def carries(self, tensor: Tensor) -> bool:
        """Only what is on this rank's GPU."""
        return tensor.device == self._device

    def _check_tensor(self, tensor: Tensor) -> None:
        if not self.carries(tensor):
            raise TypeError(
                f"the nccl backend carries tensors on this rank's {self._device}; got one on "
                f"{tensor.device}. Move it there, or use backend='gloo' for tensors on the CPU."
            )

    def _check_message_tensor(self, tensor: Tensor) -> None:
        if not tensor.is_cpu:  # others go by way of the GPU
            self._check_tensor(tensor)

    @staticmethod
    def _leaves(rank: int) -> bool:
        """Rank 0 leaves the id of a new group."""
        return rank == 0

    # Collectives ----------------------------------------------------------------------------

    def _all_gather(self, payload: Payload, patience: Patience) -> None:
        if len(set(payload.counts)) > 1:
            super()._all_gather(payload, patience)
            return
        whole, own = byte_view(payload.gotten), byte_view(payload.given)
        self._carry_one(lambda: all_gather_flat(self._group, whole, own), patience)

    def _reduce_scatter(self, payload: Payload, patience: Patience) -> None:
        source, target, op = payload.given, payload.gotten, payload.op
        if len(set(payload.counts)) > 1 or not self._can_reduce(op, source.dtype):
            super()._reduce_scatter(payload, patience)
            return
        start = partial(reduce_scatter_flat, self._group, target, source, REDUCE_OPS[op], NEVER)
        self._carry_one(start, patience)
        finish(op, target, self.size)

    def _spread(self, target: Tensor, counts: Sequence[int], patience: Patience) -> None:
        if len(set(counts)) > 1:
            super()._spread(target, counts, patience)
            return
        whole = byte_view(target)
        own = whole.split(whole.numel() // self.size)[self.rank]
        self._carry_one(lambda: all_gather_flat(self._group, whole, own), patience)

    # Messages -------------------------------------------------------------------------------

    def _send(self, payload: Payload, message: Message, patience: Patience) -> None:
        data, peer = byte_view(payload.given.to(self._device)), payload.root
        group = self._one_way("send", peer).await_turn(payload.wires[0], patience)
        self._carry_one(lambda: _broadcast_to_receiver(group, data), patience, peer)

    def _recv(self, payload: Payload, message: Message, patience: Patience) -> None:
        target, peer = payload.gotten, payload.root
        arriving = target if target.is_cuda else torch.empty_like(target, device=self._device)
        data = byte_view(arriving)
        group = self._one_way("recv", peer).await_turn(payload.wires[0], patience)
        self._carry_one(lambda: _broadcast_to_receiver(group, data), patience, peer)
        if arriving is not target:
            target.copy_(arriving)  # waits for the GPU
            self._check_verdict()

    def _number_message(self, peer: int) -> bytes:
        return self._one_way("recv", peer).meet()

    def _end_message(self, kind: str, peer: int, number: bytes) -> None:
        if number:
            self._one_way(kind, peer).end(number)

    def _one_way(self, kind: str, peer: int) -> OneWay:
        """Messages to a peer ("send"), or from one."""
        with self._one_ways_lock:
            known = self._one_ways.get((kind, peer))
            if known is None:
                connect = partial(self._connect_one_way, kind, peer)
                known = self._one_ways[kind, peer] = OneWay(self.ranks[peer], connect)
            return known

    def _prepare_message(self, kind: str, peer: int, patience: Patience) -> None:
        self._one_way(kind, peer).connect(patience)

    def _connect_one_way(self, kind: str, peer: int, patience: Patience) -> ProcessGroup | None:
        """Both ranks will come here, for the message has a sender and a receiver."""
        is_sender = kind == "send"
        ends = (self.rank, peer) if is_sender else (peer, self.rank)
        pair = [self.ranks[end] for end in ends]
        exchange = exchange_between_two(self._channel, peer, (_PAIR_TAG, 0), is_sender)
        name = f"{self._group_id}/{pair[0]}-{pair[1]}"
        return self._links.connect(name, pair, exchange, patience)

    # Streams --------------------------------------------------------------------------------

    def _launch(
        self, operation: Operation, move: Callable[[], Any], confirmation: Work[None]
    ) -> Work[Any]:
        return self._side_stream().launch(operation, move, confirmation)

    def _side_stream(self) -> SideStream:
        if self._side is None:
            self._side = SideStream(self._device, self._check_verdict)
        return self._side

    def _queued_work(self, operation: Operation, task: Callable[[], Any]) -> ThreadedWork[Any]:
        if isinstance(operation, Barrier):  # nothing of it is on the GPU
            return super()._queued_work(operation, task)
        return self._side_stream().work(operation, task)

    def _message_work(self, operation: Operation, task: Callable[[], Any]) -> ThreadedWork[Any]:
        """It ends on the host: on streams, messages could wait for each other in a circle."""
        caller = torch.cuda.current_stream(self._device)
        begin = caller.record_event()

        def deliver() -> Any:
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                stream.wait_event(begin)
                result = task()
                stream.synchronize()
                self._check_verdict()
            if isinstance(result, Tensor) and result.is_cuda:
                result.record_stream(caller)  # made on the side, it must outlast its use there
            return result

        return ThreadedWork(deliver, operation.signature)

    def _carry(
        self, works: Iterable[TorchWork], patience: Patience, peer: int | None = None
    ) -> None:
        """See [Note: the host does not wait]."""
        self._check_verdict()
        for work in list(works):  # which begins all of them
            work.wait()  # the stream does
        is_common = peer is None
        self._num_begun += is_common
        # A work of torch's would keep its memory, until the watchdog looks.
        end = torch.cuda.current_stream(self._device).record_event()
        is_over = partial(self._is_over, end, is_common)
        self._links.watchdog.watch(Flight(patience, self._needed(peer), self._abort, is_over))

    def _is_over(self, end: torch.cuda.Event, is_common: bool) -> bool:
        """Asked by the watchdog, until it is so."""
        try:
            is_over = bool(end.query())
        except RuntimeError:  # of the GPU; whoever uses it next is told
            is_over = True
        if is_over and is_common:
            self._coordination.settle()
        return is_over

    def _check_verdict(self) -> None:
        if self._verdict is not None:
            raise self._verdict

    def _abort(self, reason: BaseException) -> None:
        self._verdict = reason
        for group in self._groups():
            group.abort()

    def _groups(self) -> list[ProcessGroup]:
        with self._one_ways_lock:
            groups = [self._group, *(each.group for each in self._one_ways.values())]
        return [group for group in groups if group is not None]

    # The end --------------------------------------------------------------------------------

    def _finish_transfers(self) -> None:
        """What is in the GPU's queue counts as started."""
        if self._group is None:
            return
        torch.cuda.synchronize(self._device)
        while self._coordination.num_settled < self._num_begun and self._verdict is None:
            time.sleep(_POLL_S)

    def _close_transport(self) -> None:
        for one_way in self._one_ways.values():
            self._close_group(one_way.group)
        self._one_ways.clear()
        super()._close_transport()

    def _close_group(self, group: ProcessGroup | None) -> None:
        if group is not None and self._verdict is None:
            group.shutdown()


def connect_nccl(bootstrap: Bootstrap, state: WorldState) -> NCCLBackend:
    """The world's backend on this rank."""
    _check_available()
    device = local_device(bootstrap.rank)
    _check_own_gpu(bootstrap, device)
    kind: Any = dist.ProcessGroupNCCL
    return NCCLBackend.connect(bootstrap, state, lambda *_: _maker(kind, device))


def _check_available() -> None:
    if not (dist.is_available() and dist.is_nccl_available()):
        raise BackendUnavailableError(
            "backend='nccl' needs a PyTorch that was built with NCCL; this one was not. Install a "
            "CUDA build from pytorch.org, or use backend='shm' or 'gloo' on the CPU."
        )
    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            "backend='nccl' needs a GPU for every rank; PyTorch sees none here. Check nvidia-smi "
            "and CUDA_VISIBLE_DEVICES, or use backend='shm' or 'gloo' on the CPU."
        )


def local_device(rank: int) -> torch.device:
    """The GPU of a rank: that of its number on the host, or the only one it sees."""
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _check_own_gpu(bootstrap: Bootstrap, device: torch.device) -> None:
    """NCCL fails where ranks share a GPU, in its own words only, unless it was told to allow it."""
    mine = f"{host_id()}/{torch.cuda.get_device_properties(device).uuid}"
    everybody = bootstrap.all_gather(mine.encode())
    same = [rank for rank, gpu in enumerate(everybody) if gpu == mine.encode()]
    if len(same) > 1 and os.environ.get(_SHARING_VARIABLE) != "1":
        raise BackendUnavailableError(
            f"backend='nccl' needs a GPU for every rank; ranks {same} share one. Start fewer "
            "ranks on this host, or use backend='gloo', which can share."
        )


def _maker(kind: Any, device: torch.device) -> Maker:
    def make(store: Store, rank: int, size: int, timeout: timedelta, _: Port) -> ProcessGroup:
        options = nccl_options(kind, timeout)
        with _environment(_LEAVE_ERRORS_TO_US):
            group = kind(store, rank, size, options)
            group.eager_connect_single_device(device)
        set_timeout(group, NEVER)
        return group

    return make


def _broadcast_to_receiver(group: Any, data: Tensor) -> TorchWork:
    """In a group of two, whose rank 0 sends. A send would make connections of its own."""
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, NEVER
    work: TorchWork = group.broadcast([data], options)
    return work


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for a moment, where the user has not."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
