"""The fast path: collectives of a training loop, called again with other data of the same shape.

Up to some size an operation is all overhead: names, headers and views are made, shown and
compared, and then a few kilobytes are copied. A training loop makes the same calls again and
again, so all but the data is cached here. Other ranks see no difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.control.page.page import PageChannel
from shoal.comm.control.patience import Patience
from shoal.comm.coordination import Coordination
from shoal.comm.operation import APART, Operation, Payload, overlap
from shoal.comm.operation.base import Header, encode
from shoal.comm.operation.partition import offsets
from shoal.comm.operation.reduction import reduce_into
from shoal.comm.shm import routing
from shoal.comm.shm.exposure import Exposer
from shoal.comm.shm.pending import PendingOperations
from shoal.comm.shm.routing import NOTHING, SMALL_BYTES, ShmRoute, Shown, Way, decode_shown
from shoal.comm.shm.transfers import Transfers
from shoal.system.public_call import call_frame, near_origin, told
from shoal.torch_support.dtypes import PLAIN
from shoal.torch_support.memory import copy
from shoal.torch_support.process_memory import read_into

_MOST_CALLS = 1024
_MOST_VARIANTS = 4
Finisher = Callable[[Tensor], object]
"""Makes the result out of what all ranks have shown."""


class Call(NamedTuple):
    """What two calls have in common that differ in their data only."""

    kind: str
    detail: object
    """The reduction, or the root."""
    dtype: torch.dtype
    shape: torch.Size
    out_shape: torch.Size
    overlap: int
    """Where the one lies in the other, see [Note: results inside inputs]."""
    code: CodeType
    line: int

    @classmethod
    def of(cls, kind: str, detail: object, tensor: Tensor, out: Tensor) -> Call | None:
        """None for tensors that need any conversion, and for calls without a line."""
        if not (_is_plain(tensor) and (out is tensor or _is_plain(out))):
            return None
        frame = call_frame()
        if frame is None or out.dtype is not tensor.dtype:
            return None
        lies = APART if out is tensor else _OVERLAP[kind](tensor, out)
        shapes = (tensor.shape, out.shape)
        return cls(kind, detail, tensor.dtype, *shapes, lies, frame.f_code, frame.f_lineno)


_OVERLAP: dict[str, Callable[[Tensor, Tensor], int]] = {
    "reduce_scatter": overlap,
    "all_gather": lambda tensor, out: overlap(out, tensor),
}


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_inference()
        and not tensor.is_neg()
        and tensor.dtype in PLAIN
        and tensor.numel() > 0
    )


@dataclass(slots=True)
class _Variant:
    """A cached call for one location of this rank's data."""

    header: bytes
    staged: Tensor | None
    """Memory the data is copied to; None if this rank contributes none, or is read directly."""
    shown: Sequence[bytes] = ()
    """The headers of all ranks the last time, which fit together."""
    finish: Finisher = lambda target: None
    is_direct: bool = False
    """Whether the root's own memory is read, so that ranks meet again afterwards."""
    num_bytes: int = 0


@dataclass(slots=True)
class _CachedCall:
    """All that calls have in common, for each location that this rank's data may have."""

    signature: str
    meta: tuple[int, ...]
    site: str
    note: str
    variants: dict[bytes | int, _Variant] = field(default_factory=dict)


class FastPath:
    """The cached calls of one group."""

    def __init__(
        self,
        coordination: Coordination,
        channel: PageChannel,
        exposer: Exposer,
        transfers: Transfers,
        pending: PendingOperations,
    ) -> None:
        """``transfers`` move what turns out not to be staged."""
        self._coordination, self._channel, self._pending = coordination, channel, pending
        self._exposer, self._staging, self._transfers = exposer, exposer.staging, transfers
        self._rank, self._size = transfers.rank, transfers.size
        self._longest = routing.longest_cached(transfers.size)
        self._calls: dict[Call, _CachedCall] = {}

    def run(
        self,
        kind: str,
        detail: object,
        tensor: Tensor,
        out: Tensor,
        make: Callable[[], Operation],
    ) -> Tensor | None:
        """See `shoal.comm.backend.RunCached`."""
        num_bytes = tensor.nbytes
        if num_bytes > self._longest.get(kind, -1):
            return None
        if num_bytes > SMALL_BYTES and self._exposer.locate(tensor) is not None:
            return None  # others can read it in its segment, without a copy
        call = Call.of(kind, detail, tensor, out)
        if call is None:
            return None
        cached = self._calls.get(call) or self._add_call(call, make())
        source = None if kind == "broadcast" and detail != self._rank else tensor
        self._coordination.enter()
        try:
            if not self._pending.is_idle:
                self._pending.finish_all()
            if not self._coordination.is_idle():
                return None
            return self._run_cached(call, cached, source, out, make)
        finally:
            self._coordination.leave()

    def _add_call(self, call: Call, operation: Operation) -> _CachedCall:
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        signature = operation.signature
        site = near_origin(signature, self._coordination.called)
        cached = _CachedCall(signature, operation.meta, site, told(signature, site))
        self._calls[call] = cached
        return cached

    def _run_cached(
        self,
        call: Call,
        cached: _CachedCall,
        source: Tensor | None,
        target: Tensor,
        make: Callable[[], Operation],
    ) -> Tensor:
        begin, coordination = time.perf_counter(), self._coordination
        coordination.number = number = coordination.number + 1
        patience = coordination.begin(
            cached.signature, number, cached.site, eager=True, note=cached.note
        )
        variant = self._show(call, cached, source)
        shown = coordination.or_fail(self._channel.exchange, number, variant.header, patience)
        waited = time.perf_counter() - begin
        complete: Callable[[], None] | None = None
        if shown != variant.shown:
            operation = make()
            payload = coordination.prepare(operation, number, variant.header, shown)
            route = self._route(call.kind, payload)
            # The data of another rank is elsewhere.
            if route not in (ShmRoute.STAGED, ShmRoute.ROOT_DIRECT):
                mover, times = partial(getattr, self._transfers), (begin, waited)
                result: Tensor = coordination.carry_out(operation, payload, mover, patience, times)
                return result
            complete = partial(self._complete, call, variant, payload, shown, route)
        try:
            self._finish(variant, complete, target, patience)
        finally:  # a rank whose transfer failed is done with it as well: counts stay equal
            coordination.settle()
        coordination.count(call.kind, variant.num_bytes, begin, waited)
        return target

    def _finish(
        self,
        variant: _Variant,
        complete: Callable[[], None] | None,
        target: Tensor,
        patience: Patience,
    ) -> None:
        if complete is not None:
            self._coordination.transport(complete)
        if variant.is_direct:
            self._coordination.transport(self._finish_directly, variant, target, patience)
        else:
            variant.finish(target)

    def _route(self, kind: str, payload: Payload) -> ShmRoute:
        ways = [decode_shown(wire).way for wire in payload.wires]
        return routing.route(kind, ways, num_bytes=payload.num_bytes, root=payload.root)

    def _show(self, call: Call, cached: _CachedCall, source: Tensor | None) -> _Variant:
        """Shows the data as it was shown before, if it is to be found at the same location."""
        # Other kinds are read directly only where they are too long for this path.
        sent = source if call.kind == "broadcast" else None
        if sent is not None and self._exposer.is_read_directly("broadcast", sent):
            address = sent.data_ptr()
            shown = Shown(Way.DIRECT, address=address)
            return cached.variants.get(address) or self._add(cached, address, shown, None)
        # Also on ranks that contribute nothing, so that all ranks switch halves in step.
        self._staging.turn += 1
        location = self._staging.location()
        variant = cached.variants.get(location)
        if variant is None:
            room = None if source is None else self._staging.room(source).view(call.shape)
            shown = NOTHING if source is None else Shown(Way.STAGED, location)
            variant = self._add(cached, location, shown, room)
        if variant.staged is not None and source is not None:
            variant.staged.copy_(source)
        return variant

    def _add(
        self, cached: _CachedCall, location: bytes | int, shown: Shown, room: Tensor | None
    ) -> _Variant:
        if len(cached.variants) >= _MOST_VARIANTS:
            cached.variants.clear()
        header = Header(cached.signature, cached.meta, shown.encode(), cached.site)
        variant = cached.variants[location] = _Variant(encode(header), room)
        return variant

    def _complete(
        self,
        call: Call,
        variant: _Variant,
        payload: Payload,
        shown: Sequence[bytes],
        route: ShmRoute,
    ) -> None:
        if route is ShmRoute.ROOT_DIRECT:
            finish = self._reader_of_root(payload)
        else:
            counts = payload.counts if call.kind == "all_gather" else [payload.total] * self._size
            wholes = self._exposer.staged_wholes(payload, counts, call.dtype)
            finish = _finisher(call, payload, wholes, self._rank)
        # All at once, and only now: a variant that is known by what was shown must be complete.
        variant.finish, variant.is_direct = finish, route is ShmRoute.ROOT_DIRECT
        variant.shown, variant.num_bytes = shown, payload.num_bytes

    def _reader_of_root(self, payload: Payload) -> Finisher:
        root = payload.root
        if self._rank == root:
            return lambda target: None
        pid, address = self._exposer.process_of(root), decode_shown(payload.wires[root]).address
        return lambda target: read_into(target, pid, address)

    def _finish_directly(self, variant: _Variant, target: Tensor, patience: Patience) -> None:
        variant.finish(target)
        self._channel.sync(patience)  # the root may change its memory only after all have read it

    def close(self) -> None:
        """Forgets all calls."""
        self._calls.clear()


def _finisher(call: Call, payload: Payload, wholes: Sequence[Tensor], rank: int) -> Finisher:
    """The rest of a call, once the data of all ranks is staged."""
    op = payload.op  # cached without the payload, whose tensors are the caller's
    if call.kind == "all_reduce":
        inputs = [whole.view(call.shape) for whole in wholes]
        return lambda target: reduce_into(op, inputs, target)
    if call.kind == "reduce_scatter":
        start, stop = offsets(payload.counts)[rank : rank + 2]
        parts = [whole[start:stop].view(call.out_shape) for whole in wholes]
        return lambda target: reduce_into(op, parts, target)
    if call.kind == "all_gather":
        rows = [whole.view(-1, *call.out_shape[1:]) for whole in wholes]
        return lambda target: torch.cat(rows, out=target)
    if rank == payload.root:
        return lambda target: None
    sent = wholes[payload.root]
    return lambda target: copy(target.view(-1), sent)
