"""Memory as a tensor of bytes."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch import Tensor


def as_bytes(memory: mmap.mmap | bytearray) -> Tensor:
    """The same memory as a tensor on the CPU, also under ``with torch.device(...)``."""
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
