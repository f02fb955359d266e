"""`GlooBackend`: ranks are processes on any hosts, data moves over TCP."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.bootstrap.bootstrap import Bootstrap
from shoal.comm.control.addresses import usable_loopback
from shoal.comm.control.page.control import PageControl
from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Control, Message
from shoal.comm.operation import Operation, Payload
from shoal.comm.process_backend import by_host_memory
from shoal.comm.torch_groups.base import (
    NEVER,
    ProcessGroupBackend,
    byte_view,
    in_bytes,
)
from shoal.comm.torch_groups.groups import Maker, ProcessGroup
from shoal.comm.torch_groups.port import Port
from shoal.comm.torch_groups.watchdog import Flight
from shoal.comm.work import ThreadedWork
from shoal.comm.world_state import WorldState
from shoal.errors import BackendUnavailableError
from shoal.torch_internals.process_groups import gloo_options, set_timeout

if TYPE_CHECKING:
    from torch.distributed import Store, Work

_FIRST_TAG = 1 << 30
# How long works whose connections are closed are waited for.
_END_S = timedelta(seconds=2)
_ABORT_TAG = (1 << 30) - 16
_EXCHANGE_TAG = (1 << 30) - 32
# Below, one exchange beats a broadcast from each rank though everybody sends copies.
_SMALL_BYTES = 64 << 10
# Above, between hosts, ranks send each other messages.
_LONG_BYTES = 1 << 20
# Fresh memory costs as much as what is done with it: up to here it is kept.
_MAX_KEPT_BYTES = 64 << 20
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


class GlooBackend(ProcessGroupBackend):
    """Collectives over TCP, between any hosts. CUDA tensors travel by way of host memory.

    Example:
        >>> import shoal, torch
        >>> def total():
        ...     return shoal.world().all_reduce(torch.ones(2)).tolist()
        >>> shoal.run(total, ranks=2, backend="gloo")
        [[2.0, 2.0], [2.0, 2.0]]
    """

    name = "gloo"
    _kept = torch.empty(0, dtype=torch.uint8)

    def _spread(self, target: Tensor, counts: Sequence[int], patience: Patience) -> None:
        if self._is_long(target.nbytes):
            parts = byte_view(target).split(in_bytes(counts, target))
            self._exchange([parts[self.rank]] * self.size, parts, patience)
        elif target.nbytes > _SMALL_BYTES:
            super()._spread(target, counts, patience)
        else:
            leaving = [counts[self.rank]] * self.size
            copies = target.split(list(counts))[self.rank].repeat(self.size)
            self._swap(copies, leaving, target, counts, patience, target.numel())

    def _swap(
        self,
        source: Tensor,
        leaving: Sequence[int],
        target: Tensor,
        arriving: Sequence[int],
        patience: Patience,
        total: int,
    ) -> None:
        if not self._is_long(total * source.itemsize):
            super()._swap(source, leaving, target, arriving, patience, total)
            return
        sent = byte_view(source).split(in_bytes(leaving, source))
        received = byte_view(target).split(in_bytes(arriving, target))
        if leaving[self.rank]:
            received[self.rank].copy_(sent[self.rank])
        self._exchange(sent, received, patience)

    def _is_long(self, num_bytes: int) -> bool:
        """Whether messages in both directions are worth their questions and answers."""
        return num_bytes > _LONG_BYTES and not isinstance(self._links.control, PageControl)

    def _exchange(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], patience: Patience
    ) -> None:
        """Bytes to and from every other rank; empty ones do not travel.

        Receives begin first. Gloo asks for the bytes of a receive over the connection that it sends
        on: after a long send, the question would wait behind it, and a cable be idle one way.
        """
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]

        def works() -> Iterator[Work]:
            for peer in reversed(peers):
                if received[peer].numel():
                    yield self._group.recv([received[peer]], peer, _EXCHANGE_TAG)
            for peer in peers:
                if sent[peer].numel():
                    yield self._group.send([sent[peer]], peer, _EXCHANGE_TAG)

        self._carry(works(), patience)

    def _scratch(self, numel: int, like: Tensor) -> Tensor:
        num_bytes = numel * like.itemsize
        if num_bytes > _MAX_KEPT_BYTES:
            return super()._scratch(numel, like)
        if self._kept.numel() < num_bytes:
            with torch.inference_mode(mode=False):  # the next caller may not be in it
                self._kept = torch.empty(num_bytes, dtype=torch.uint8)
        return self._kept[:num_bytes].view(like.dtype)

    def _send(self, payload: Payload, message: Message, patience: Patience) -> None:
        data, peer, tag = byte_view(payload.given), payload.root, _FIRST_TAG + message.ticket
        self._carry_one(lambda: self._group.send([data], peer, tag), patience, peer)

    def _recv(self, payload: Payload, message: Message, patience: Patience) -> None:
        data, peer, tag = byte_view(payload.gotten), payload.root, _FIRST_TAG + message.ticket
        self._carry_one(lambda: self._group.recv([data], peer, tag), patience, peer)

    def _mover(self, kind: str) -> Callable[..., None]:
        return by_host_memory(super()._mover(kind))

    def _queued_work(self, operation: Operation, task: Callable[[], Any]) -> ThreadedWork[Any]:
        return ThreadedWork(_on_stream_of_caller(task), operation.signature)

    _message_work = _queued_work

    # Waiting --------------------------------------------------------------------------------

    def _carry(self, works: Iterable[Work], patience: Patience, peer: int | None = None) -> None:
        """Blocks, deaf to everything; the watchdog makes it return if need be."""
        begun: list[Work] = []
        flight = Flight(patience, self._needed(peer), self._abort, is_stubborn=True)
        self._links.watchdog.watch(flight)
        try:
            begun.extend(works)
            for work in begun:
                work.wait()
        except BaseException as error:
            self._abort(error)
            _await_end(begun)  # the caller's memory is in use until then
            verdict = flight.await_verdict() if isinstance(error, RuntimeError) else None
            if verdict is None:
                raise
            raise verdict from error
        finally:
            self._links.watchdog.release(flight)

    def _abort(self, reason: BaseException) -> None:
        """Gloo ends all connections of a group when a receive of one message is late."""
        for peer in range(self.size):
            if peer != self.rank:
                # Over a connection that has ended already it fails at once, and ends nothing.
                with contextlib.suppress(RuntimeError):
                    late = self._group.recv([torch.empty(1)], peer, _ABORT_TAG)
                    late.wait(timedelta(milliseconds=1))


def _on_stream_of_caller(task: Callable[[], Any]) -> Callable[[], Any]:
    """A thread begins with another stream; copies to host memory come after the caller's work."""
    if not torch.cuda.is_initialized():
        return task
    stream = torch.cuda.current_stream()

    def run() -> Any:
        with torch.cuda.stream(stream):
            return task()

    return run


def _await_end(works: Iterable[Work]) -> None:
    """Connections are closed, so works end; one that met that at a bad moment never does."""
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait(_END_S)


def connect_gloo(bootstrap: Bootstrap, state: WorldState) -> GlooBackend:
    """The world's backend on this rank."""
    if not (dist.is_available() and dist.is_gloo_available()):
        raise BackendUnavailableError(
            "backend='gloo' needs a PyTorch that was built with Gloo; this one was not. Install "
            "one from pytorch.org, or use backend='shm' (one host) or 'mpi'."
        )
    return GlooBackend.connect(bootstrap, state, _maker)


def _maker(control: Control, address: str) -> Maker:
    is_one_host = isinstance(control, PageControl)
    if is_one_host and control.size > 1:
        address = _loopback()

    def make(store: Store, rank: int, size: int, timeout: timedelta, port: Port) -> ProcessGroup:
        kind: Any = dist.ProcessGroupGloo  # torch's types do not know its options
        device = port.make(lambda: _device(address, is_one_host))
        options = gloo_options(device, timeout)
        group = kind(store, rank, size, options)
        set_timeout(group, NEVER)
        return group

    return make


def _loopback() -> str:
    address = usable_loopback()
    if address is None:
        raise BackendUnavailableError(
            "backend='gloo' needs the loopback interface, and this host has no address there "
            "(127.0.0.1 or ::1), or the interface is down. Have it brought up (ip link set lo "
            "up), or use backend='shm', which needs no network."
        )
    return address


def _device(address: str, is_one_host: bool) -> Any:
    named = os.environ.get(_INTERFACE_VARIABLE)
    if named and not is_one_host:
        return dist.ProcessGroupGloo.create_device(interface=named.partition(",")[0])
    return dist.ProcessGroupGloo.create_device(hostname=address)
