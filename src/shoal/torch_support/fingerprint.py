"""Tensors and structures of them in a few bytes, to compare what ranks have."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.torch_internals.autograd import transforms
from shoal.torch_internals.trees import tree_leaves

_MOST_ELEMENTS = 1 << 16
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def fingerprint(value: Any, most_elements: int | None = _MOST_ELEMENTS) -> str:
    """Equal for equal values, and hardly ever for others; empty if there is nothing to look at.

    Args:
        value: A structure of tensors and plain values; other kinds of values do not count.
        most_elements: How many elements of a large tensor are looked at, evenly spaced; None: all.
    """
    found = hashlib.blake2b(digest_size=8)
    num_seen = 0
    for leaf in tree_leaves(value):
        seen = _bytes_of(leaf, most_elements)
        num_seen += len(seen)
        found.update(type(leaf).__name__.encode() + seen)
    return found.hexdigest() if num_seen else ""


def fingerprint_number(value: Any, most_elements: int = _MOST_ELEMENTS) -> int:
    """The same as a number that an int64 can hold; 0 if there is nothing to look at."""
    return int(fingerprint(value, most_elements) or "0", 16) >> 1


def _bytes_of(leaf: Any, most_elements: int | None) -> bytes:
    """Shape and elements of a tensor, other things as they print; nothing of unknown kinds."""
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        leaf = torch.frombuffer(bytearray(leaf.tobytes()), dtype=torch.uint8) if leaf.size else None
    if isinstance(leaf, Tensor):
        is_hidden = leaf.is_meta or leaf.is_nested or leaf.layout is not torch.strided
        return b"" if is_hidden or transforms() else _elements_of(leaf, most_elements)
    return repr(leaf).encode() if isinstance(leaf, _PLAIN) else b""


def _elements_of(tensor: Tensor, most_elements: int | None) -> bytes:
    flat = tensor.detach().reshape(-1)
    # An odd stride does not stay in one column.
    spaced = flat if most_elements is None else flat[:: flat.numel() // most_elements | 1]
    # A copy, because torch never again frees a storage that numpy has seen.
    here = torch.empty(spaced.shape, dtype=spaced.dtype, device="cpu").copy_(spaced)
    shape = repr((tuple(tensor.shape), tensor.dtype)).encode()
    return shape + here.unsqueeze(-1).view(torch.uint8).numpy().tobytes() if len(here) else b""


def checksum(tensor: Tensor | None) -> Tensor:
    """One number of all bits of a tensor, whatever their order, on its device."""
    if tensor is None:
        return torch.zeros((), dtype=torch.int64)
    bits = tensor.detach()
    if bits.is_complex():
        bits = torch.view_as_real(bits.resolve_conj()).flatten()
    bits = bits.view(_INTEGERS[bits.itemsize])
    # Two changes that cancel out in the sum do not in the other, and a last bit counts in both.
    return bits.sum(dtype=torch.int64) * 31 + (bits ^ (bits >> 3)).sum(dtype=torch.int64)
