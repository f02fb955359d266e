"""What is the same each time a small operation is made again with other data.

Up to some size an operation is all overhead: names, headers and views are made, shown and
compared, and then a few kilobytes are copied. A training loop makes the same calls again and
again, so all but the data is kept. Other ranks see no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.operation import Payload
from shoal.comm.operation.partition import offsets
from shoal.comm.operation.reduction import reduce_into
from shoal.comm.shm.copying import copy
from shoal.system.site import call_frame

_DTYPES = frozenset(
    (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
)
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
        and tensor.dtype in _DTYPES
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
