"""Memory as a tensor of bytes."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch import Tensor

from shoal.torch_support.dtypes import traits


def as_bytes(memory: mmap.mmap | bytearray) -> Tensor:
    """The same memory as a tensor on the CPU, also under ``with torch.device(...)``.

    It is no tensor of inference mode: memory is kept, and its next user may train in it.
    """
    with torch.inference_mode(mode=False):
        return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))


def of_dtype(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory as numbers; like `as_bytes` not of inference mode, whose views are."""
    with torch.inference_mode(mode=False):
        return memory.view(dtype)


def are_equal(left: Tensor, right: Tensor) -> bool:
    """`torch.equal`, which does not know every dtype; of those it may not, the bytes count."""
    if not traits(left.dtype).is_computed:
        left, right = (each.reshape(-1).contiguous().view(torch.uint8) for each in (left, right))
    return torch.equal(left, right)
