"""Copies and reductions of memory that ranks share, in pieces that suit the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shoal.comm.operation.reduction import ReduceOp, reduce_into

# From here on the C library's copy, which writes past the cache (where shoal started the rank, see
# `shoal.launch.rank_settings`), is clearly ahead of torch's: two ranks that copied 8 MiB at once
# took 0.9 instead of 1.7 ms on the machine where it was measured.
_LARGE_BYTES = 1 << 20


def copy(target: Tensor, source: Tensor) -> None:
    """Copies between flat tensors: as fast as can be if they are CPU memory of one dtype."""
    if source.nbytes < _LARGE_BYTES or not _is_memory_like(target, source):
        target.copy_(source)
        return
    np.copyto(_bytes_of(target), _bytes_of(source))
    if not target.is_inference():
        increment_version(target)  # numpy does not tell autograd


def _is_memory_like(target: Tensor, source: Tensor) -> bool:
    return (
        target.is_cpu
        and source.is_cpu
        and target.dtype is source.dtype
        and target.is_contiguous()
        and source.is_contiguous()
        and not (source.is_conj() or source.is_neg())
        and not (target.is_conj() or target.is_neg())
    )


def _bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return tensor.detach().view(torch.uint8).numpy()


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
