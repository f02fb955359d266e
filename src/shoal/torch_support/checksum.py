"""One number of the bits of a tensor, to compare what ranks hold."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def checksum(tensor: Tensor | None) -> Tensor:
    """One number of the bits of a tensor, on its device."""
    if tensor is None:
        return torch.zeros((), dtype=torch.int64)
    bits = tensor.detach()
    if bits.is_complex():
        bits = torch.view_as_real(bits.resolve_conj()).flatten()
    bits = bits.view(_INTEGERS[bits.itemsize])
    # Two changes that cancel out in the sum do not in the other, and a last bit counts in both.
    return bits.sum(dtype=torch.int64) * 31 + (bits ^ (bits >> 3)).sum(dtype=torch.int64)
