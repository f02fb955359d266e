"""Shape and dtype of a tensor, as the numbers of a header."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# The order is part of what ranks tell each other, so it may only ever grow at the end.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}


def encode_spec(tensor: Tensor) -> tuple[int, ...]:
    """A code of the dtype, whether it is on a GPU, and the shape."""
    return (_DTYPE_CODE[tensor.dtype], int(tensor.is_cuda), *tensor.shape)


def decode_spec(meta: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of what `encode_spec` was given."""
    return _DTYPES[meta[0]], tuple(meta[2:])


def are_alike(meta: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two tensors have the same dtype and shape, wherever they are."""
    return decode_spec(meta) == decode_spec(other)


def make_like(meta: Sequence[int], device: torch.device) -> Tensor:
    """A tensor like another rank's; on a GPU if that one is, else on ``device``."""
    dtype, shape = decode_spec(meta)
    if meta[1] and device.type == "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.empty(shape, dtype=dtype, device=device)
