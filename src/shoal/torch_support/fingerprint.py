"""What a structure of tensors and plain values is like, in a few bytes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Of a large tensor that many elements are looked at, evenly spaced.
_MOST_ELEMENTS = 1 << 16
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def fingerprint(value: Any) -> str:
    """Equal for equal values, and hardly ever for others; empty if there is nothing to look at."""
    found = hashlib.blake2b(digest_size=8)
    num_seen = 0
    for leaf in tree_leaves(value):
        seen = _bytes_of(leaf)
        num_seen += len(seen)
        found.update(type(leaf).__name__.encode() + seen)
    return found.hexdigest() if num_seen else ""


def _bytes_of(leaf: Any) -> bytes:
    """Shape and elements of a tensor, other things as they print; nothing of unknown kinds."""
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        leaf = torch.frombuffer(bytearray(leaf.tobytes()), dtype=torch.uint8) if leaf.size else None
    if isinstance(leaf, Tensor):
        return _elements_of(leaf)
    return repr(leaf).encode() if isinstance(leaf, _PLAIN) else b""


def _elements_of(tensor: Tensor) -> bytes:
    if tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        return b""
    flat = tensor.detach().reshape(-1)
    # The stride is odd, so that of a table not only one column is looked at.
    spaced = flat[:: (flat.numel() // _MOST_ELEMENTS) | 1]
    # A copy, because torch never again frees a storage that numpy has seen.
    here = torch.empty(spaced.shape, dtype=spaced.dtype).copy_(spaced)
    shape = repr((tuple(tensor.shape), tensor.dtype)).encode()
    return shape + here.unsqueeze(-1).view(torch.uint8).numpy().tobytes() if len(here) else b""
