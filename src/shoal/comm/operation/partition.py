"""Rows of tensors, and how they are shared out over ranks, the remainder to the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shoal.comm.operation.base import spec


def split_sizes(length: int, num_parts: int) -> list[int]:
    """Sizes of ``num_parts`` contiguous parts that differ by at most one.

    Example:
        >>> split_sizes(10, 4)
        [3, 3, 2, 2]
    """
    base, extra = divmod(length, num_parts)
    return [base + (part < extra) for part in range(num_parts)]


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each part begins, and at the end the total.

    Example:
        >>> offsets([3, 3, 2])
        [0, 3, 6, 8]
    """
    return [0, *accumulate(sizes)]


def check_sizes(sizes: Sequence[int], length: int, num_parts: int) -> list[int]:
    """A caller's own split, once it adds up."""
    parts = [int(size) for size in sizes]
    if len(parts) != num_parts or min(parts) < 0 or sum(parts) != length:
        raise ValueError(
            f"sizes must be {num_parts} non-negative numbers that add up to {length} rows; "
            f"got {parts}"
        )
    return parts


def num_rows(tensor: Tensor) -> int:
    """The length of the first dimension; a scalar counts as one row."""
    return tensor.shape[0] if tensor.dim() else 1


def row_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of one row."""
    return tuple(tensor.shape[1:])


def row_elements(tensor: Tensor) -> int:
    """How many elements a row has."""
    return math.prod(row_shape(tensor))


def with_rows(like: Tensor, rows: int) -> Tensor:
    """A new tensor of as many rows like those of another."""
    return torch.empty((rows, *row_shape(like)), dtype=like.dtype, device=like.device)


def check_out(out: Tensor, like: Tensor) -> None:
    """Refuses a result of other rows than the input's."""
    if out.dtype != like.dtype or row_shape(out) != row_shape(like) or out.device != like.device:
        raise ValueError(
            f"out must have the dtype, device and trailing shape of the input, "
            f"{spec(like.dtype, ('rows', *row_shape(like)))} on {like.device}; "
            f"got {spec(out.dtype, tuple(out.shape))} on {out.device}"
        )


# [Note: results inside inputs]
# A result may lie where this rank's own rows are (a shard inside its buffer), and nowhere else
# in the input: transports write one while peers still read the other.
APART = -1


def overlap(whole: Tensor, part: Tensor) -> int:
    """How many bytes into ``whole`` an overlapping part begins; `APART` if none does."""
    if not (whole.is_contiguous() and part.is_contiguous() and whole.numel() and part.numel()):
        return APART  # what is not contiguous is copied
    start = part.data_ptr() - whole.data_ptr()
    if not -part.nbytes < start < whole.nbytes:
        return APART
    return start if start >= 0 else APART - 1


def check_overlap(whole: Tensor, part: Tensor, own_rows: int) -> None:
    """Allows a part of some input only where this rank's own rows begin."""
    own_start = own_rows * row_elements(whole) * whole.itemsize
    if overlap(whole, part) not in (APART, own_start):
        raise ValueError(
            "out may share memory with the input only where this rank's own rows are; "
            "give it memory of its own, or clone the input"
        )
