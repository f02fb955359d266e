"""Tensors of any shape as flat memory, and the rows they are cut into."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shoal.comm.operation.header import spec


def flatten(tensor: Tensor) -> Tensor:
    """A flat contiguous view, or a copy where there can be no view; bool as bytes."""
    flat = tensor.detach()
    if flat.dim() == 1 and flat.stride(0) == 1 and flat.is_floating_point() and not flat.is_neg():
        return flat  # the usual case, and worth a few microseconds
    flat = flat.contiguous().view(-1)
    flat = flat.resolve_conj().resolve_neg()  # what lies in memory is what counts from here on
    if flat.stride(0) != 1:  # a single element of a longer row keeps that row's stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8) if flat.dtype is torch.bool else flat


def write_back(flat: Tensor, tensor: Tensor) -> None:
    """Copies a result into the caller's tensor where `flatten` had to copy."""
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        values = flat.view(torch.bool) if tensor.dtype is torch.bool else flat
        with writing(tensor):
            tensor.detach().copy_(values.view(tensor.shape))


# Autograd does not follow what `flatten` returns, so there is nothing to switch off.
_AS_IT_IS = nullcontext()


def writing(*tensors: Tensor | None) -> AbstractContextManager[object]:
    """Allows to write to flat tensors, also if they were made in inference mode."""
    for tensor in tensors:
        if tensor is not None and tensor.is_inference():
            return torch.inference_mode()
    return _AS_IT_IS


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
