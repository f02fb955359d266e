"""Reductions of memory that ranks share, in blocks that suit the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from shoal.comm.operation.reduction import ReduceOp, reduce_into
from shoal.torch_support.memory import copy

# Small enough for the cache: what was just reduced is still there when it is handed out.
_BLOCK_BYTES = 256 << 10
_LONG_BYTES = 8 << 20
_FEW = 2
_WIDE_BYTES = 4


def reduce_and_hand_out(op: ReduceOp, inputs: Sequence[Tensor], receivers: Sequence[int]) -> None:
    """Reduces the slices of all ranks and writes the result over those of the receivers."""
    first, *others = receivers
    for parts in _blocks(inputs):
        reduce_into(op, parts, parts[first])
        for receiver in others:
            copy(parts[receiver], parts[first])


def reduce_in_blocks(op: ReduceOp, inputs: Sequence[Tensor], out: Tensor) -> None:
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
