"""Shape and dtype of a tensor, as the numbers of a header."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.torch_support.dtypes import dtype_number, dtype_numbered


def encode_spec(tensor: Tensor) -> tuple[int, ...]:
    """The number of the dtype, whether it is on a GPU, and the shape."""
    return (dtype_number(tensor.dtype), int(tensor.is_cuda), *tensor.shape)


def decode_spec(meta: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of what `encode_spec` was given."""
    return dtype_numbered(meta[0]), tuple(meta[2:])


def are_alike(meta: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two tensors have the same dtype and shape, wherever they are."""
    return decode_spec(meta) == decode_spec(other)


def make_like(meta: Sequence[int], device: torch.device) -> Tensor:
    """A tensor like another rank's; on a GPU if that one is, else on ``device``."""
    dtype, shape = decode_spec(meta)
    if meta[1] and device.type == "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.empty(shape, dtype=dtype, device=device)
