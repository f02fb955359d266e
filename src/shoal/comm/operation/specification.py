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
    """A code of the dtype, and the shape."""
    return (_DTYPE_CODE[tensor.dtype], *tensor.shape)


def decode_spec(meta: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The inverse of `encode_spec`."""
    return _DTYPES[meta[0]], tuple(meta[1:])
