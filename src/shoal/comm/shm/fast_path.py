"""The short way of operations over shared memory that fit into a half: see `Recipe`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.comm import operation as ops
from shoal.comm.control.patience import Patience
from shoal.comm.operation import APART, Operation, Payload, overlap
from shoal.comm.operation.header import Header, encode
from shoal.comm.operation.partition import offsets
from shoal.comm.operation.reduction import ReduceOp, reduce_into
from shoal.comm.shm.copying import copy
from shoal.comm.shm.exposure import DIRECT, SMALL_BYTES, STAGED, Exposing
from shoal.comm.shm.staging import HALF_BYTES
from shoal.system.site import call_frame
from shoal.torch_support.dtypes import PLAIN
from shoal.torch_support.process_memory import read_into

_MOST_RECIPES = 1024
_MOST_VARIANTS = 4
_MOST_WHOLES = 1024


class SmallOperations(Exposing):
    """Makes the operations of training loops from recipes, if they are small or not very long."""

    _recipes: dict[Call, Recipe]
    _wholes: dict[tuple[object, ...], list[Tensor]]

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM, *, async_op: bool = False
    ) -> Any:
        """Reduces ``tensor`` over all ranks, in place on every rank."""
        # Each rank reduces everything for itself: of long tensors, and of many, that is too much.
        most = HALF_BYTES if self.size == 2 else SMALL_BYTES
        if self._may_be_short(tensor, async_op, most):
            call = Call.of("all_reduce", op, tensor, tensor, 0)
            if call is not None:
                return self._cook(
                    call, tensor, tensor, lambda: ops.AllReduce(tensor, ReduceOp.parse(op))
                )
        return super().all_reduce(tensor, op, async_op=async_op)

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        out: Tensor | None = None,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces over all ranks; each rank keeps its own rows of the result."""
        if out is not None and sizes is None and self._may_be_short(tensor, async_op):
            call = Call.of("reduce_scatter", op, tensor, out, overlap(tensor, out))
            if call is not None:
                place = (self.rank, self.size)
                return self._cook(
                    call,
                    tensor,
                    out,
                    lambda: ops.ReduceScatter(tensor, ReduceOp.parse(op), out, None, place),
                )
        return super().reduce_scatter(tensor, op, out=out, sizes=sizes, async_op=async_op)

    def all_gather(
        self, tensor: Tensor, *, out: Tensor | None = None, async_op: bool = False
    ) -> Any:
        """Joins the rows of all ranks, on every rank. Ranks may give different numbers."""
        if out is not None and self._may_be_short(tensor, async_op):
            call = Call.of("all_gather", None, tensor, out, overlap(out, tensor))
            if call is not None:
                return self._cook(call, tensor, out, lambda: ops.AllGather(tensor, out))
        return super().all_gather(tensor, out=out, async_op=async_op)

    def broadcast(
        self, tensor: Tensor | None = None, *, root: int = 0, async_op: bool = False
    ) -> Any:
        """Fills ``tensor`` with the root's; without one, a new tensor comes back."""
        if tensor is not None and self._may_be_short(tensor, async_op) and 0 <= root < self.size:
            call = Call.of("broadcast", root, tensor, tensor, APART)
            if call is not None:
                is_root = root == self.rank
                return self._cook(
                    call,
                    tensor if is_root else None,
                    tensor,
                    lambda: ops.Broadcast(tensor, root, is_root, self.device),
                )
        return super().broadcast(tensor, root=root, async_op=async_op)

    def _may_be_short(self, tensor: Tensor, async_op: bool, most: int = HALF_BYTES) -> bool:
        """Whether it can be staged at once, and need not be where others see it anyway."""
        if async_op or self.size == 1 or tensor.nbytes > most:
            return False
        return tensor.nbytes <= SMALL_BYTES or self._arena.locate(tensor) is None

    def _cook(
        self, call: Call, source: Tensor | None, target: Tensor, make: Callable[[], Operation]
    ) -> Tensor:
        """Carries out a call; ``make`` is for what a recipe does not know."""
        self._check_open()
        recipe = self._recipes.get(call) or self._write_down(call, make())
        with self._lock:
            self._finish_posted()
            if self._queue.is_idle():
                return self._cook_now(call, recipe, source, target, make)
        result: Tensor = self.run(make())
        return result

    def _write_down(self, call: Call, operation: Operation) -> Recipe:
        if len(self._recipes) >= _MOST_RECIPES:
            self._recipes.clear()
        note = f"{operation.signature} at {call.site}"
        recipe = self._recipes[call] = Recipe(operation.signature, operation.meta, note)
        return recipe

    def _cook_now(
        self,
        call: Call,
        recipe: Recipe,
        source: Tensor | None,
        target: Tensor,
        make: Callable[[], Operation],
    ) -> Tensor:
        begin = time.perf_counter()
        self._number += 1
        number = self._number
        self._control.note(recipe.note)
        patience = self._patience(
            lambda: self._named(recipe.signature, number, call.site), eager=True
        )
        patience.check()
        variant = self._stage(call, recipe, source)
        shown = self._or_fail(self._page_channel.exchange, number, variant.header, patience)
        waited = time.perf_counter() - begin
        if shown != variant.shown:
            operation = make()
            headers = self._compare(operation, number, variant.header, shown)
            payload = operation.prepare(headers, self.rank)
            payload.wires = [header.wire for header in headers]
            if not (is_all_staged(payload) or _is_read_from_root(payload, call.kind)):
                # Another rank has so much, or has it in such a place, that it takes the long way.
                result: Tensor = self._carry_out(operation, payload, patience, (begin, waited))
                return result
            self._transport(self._complete, call, variant, payload, shown)
        if variant.is_direct:
            self._or_fail(self._transport, self._finish_directly, variant, target, patience)
        else:
            variant.finish(target)
        self._settle()
        seconds = time.perf_counter() - begin
        self._state.statistics.count(call.kind, variant.num_bytes, seconds, waited)
        return target

    def _stage(self, call: Call, recipe: Recipe, source: Tensor | None) -> Variant:
        """Shows the data where it was shown before, if that place is still the right one."""
        if source is not None and self._is_read_directly(call.kind, source):
            place = self._direct_wire(source)
            return recipe.variants.get(place) or self._add(call, recipe, place, place, None)
        self._staging.turn += 1  # of a rank that shows nothing too: the others' places alternate
        place = STAGED + self._staging.wire()
        variant = recipe.variants.get(place)
        if variant is None:
            room = None if source is None else self._staging.room(source).view(call.shape)
            wire = b"" if source is None else place
            variant = self._add(call, recipe, place, wire, room)
        if variant.staged is not None and source is not None:
            variant.staged.copy_(source)
        return variant

    def _add(
        self, call: Call, recipe: Recipe, place: bytes, wire: bytes, room: Tensor | None
    ) -> Variant:
        if len(recipe.variants) >= _MOST_VARIANTS:
            recipe.variants.clear()
        header = Header(recipe.signature, recipe.meta, wire, call.site)
        variant = recipe.variants[place] = Variant(encode(header), room)
        return variant

    def _complete(
        self, call: Call, variant: Variant, payload: Payload, shown: Sequence[bytes]
    ) -> None:
        is_direct = _is_read_from_root(payload, call.kind)
        if is_direct:
            finish = self._reader_of_root(payload)
        else:
            counts = payload.counts if call.kind == "all_gather" else [payload.total] * self.size
            wholes = self._staged_wholes(payload, counts, call.dtype)
            finish = finisher(call, payload, wholes, self.rank)
        # All at once, and only now: a variant that is known by what was shown must be complete.
        variant.finish, variant.is_direct = finish, is_direct
        variant.shown, variant.num_bytes = shown, payload.num_bytes

    def _reader_of_root(self, payload: Payload) -> Finisher:
        if self.rank == payload.root:
            return lambda target: None
        pid, address = self._process_and_address(payload.root, payload.wires[payload.root])
        return lambda target: read_into(target, pid, address)

    def _finish_directly(self, variant: Variant, target: Tensor, patience: Patience) -> None:
        variant.finish(target)
        self._page_channel.sync(patience)  # what is read where it lies may not change before

    # What is staged -----------------------------------------------------------------------

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
        wholes = self._staged_wholes(payload, [sum(counts) for counts in parts], target.dtype)
        for place, sender in enumerate(senders):
            first = sum(parts[sender][:part])
            piece = wholes[sender][first : first + parts[sender][part]]
            target[starts[place] : starts[place + 1]].copy_(piece)

    def _staged_wholes(
        self, payload: Payload, counts: Sequence[int], dtype: torch.dtype
    ) -> list[Tensor]:
        """Everybody's staged source, the short way: small operations are all overhead."""
        key = (*payload.wires, *counts, dtype)
        wholes = self._wholes.get(key)
        if wholes is None:
            wholes = [
                self._view(rank, wire[1:], counts[rank] * dtype.itemsize, dtype)
                if wire
                else _nothing(dtype)
                for rank, wire in enumerate(payload.wires)
            ]
            if len(self._wholes) >= _MOST_WHOLES:
                self._wholes.clear()
            self._wholes[key] = wholes
        return wholes


def is_all_staged(payload: Payload) -> bool:
    """Whether everybody has copied all it gives to where the others see it."""
    return all(wire[:1] in (STAGED, b"") for wire in payload.wires)


def _is_read_from_root(payload: Payload, kind: str) -> bool:
    """Whether it is a broadcast to plain memory that everybody reads where the root has it."""
    kinds = [wire[:1] for wire in payload.wires]
    return kind == "broadcast" and kinds.pop(payload.root) == DIRECT and not any(kinds)


@lru_cache
@torch.inference_mode(mode=False)
def _nothing(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype)


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
    place: int
    """Where the one lies in the other, see [Note: results inside inputs]."""
    code: CodeType
    line: int

    @property
    def site(self) -> str:
        """Where in the user's code it is made."""
        return f"{self.code.co_filename}:{self.line}"

    @classmethod
    def of(cls, kind: str, detail: object, tensor: Tensor, out: Tensor, place: int) -> Call | None:
        """None for what is out of the ordinary."""
        if not (_is_plain(tensor) and (out is tensor or _is_plain(out))):
            return None
        if out.dtype is not tensor.dtype:
            return None
        frame = call_frame()
        if frame is None:
            return None
        shapes = (tensor.shape, out.shape)
        return cls(kind, detail, tensor.dtype, *shapes, place, frame.f_code, frame.f_lineno)


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
class Variant:
    """A recipe for one place of this rank's data."""

    header: bytes
    staged: Tensor | None
    """Where the data is copied to; nowhere if this rank contributes none."""
    shown: Sequence[bytes] = ()
    """Everybody's headers the last time, which fit together."""
    finish: Finisher = lambda target: None
    is_direct: bool = False
    """Whether it is read where its owner has it, so that ranks meet again afterwards."""
    num_bytes: int = 0


@dataclass(slots=True)
class Recipe:
    """All that calls have in common, for each place that this rank's data may lie in."""

    signature: str
    meta: tuple[int, ...]
    note: str
    variants: dict[bytes, Variant] = field(default_factory=dict)


def finisher(call: Call, payload: Payload, wholes: Sequence[Tensor], rank: int) -> Finisher:
    """What is left to do once everybody's data is staged."""
    if call.kind == "all_reduce":
        inputs = [whole.view(call.shape) for whole in wholes]
        return lambda target: reduce_into(payload.op, inputs, target)
    if call.kind == "reduce_scatter":
        start, stop = offsets(payload.counts)[rank : rank + 2]
        parts = [whole[start:stop].view(call.out_shape) for whole in wholes]
        return lambda target: reduce_into(payload.op, parts, target)
    if call.kind == "all_gather":
        rows = [whole.view(-1, *call.out_shape[1:]) for whole in wholes]
        return lambda target: torch.cat(rows, out=target)
    if rank == payload.root:
        return lambda target: None
    sent = wholes[payload.root]
    return lambda target: copy(target.view(-1), sent)
