"""One large piece of memory for many tensors: quicker to get than many pieces.

The system clears memory when it is first touched, page by page, which takes as long as filling it.
Of large pieces it can do that with large pages, if it is asked to, as numpy does.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64


class Arena:
    """Memory that is handed out once, from its beginning to its end.

    Example:
        >>> arena = Arena([(torch.float32, 10), (torch.int8, 3)])
        >>> arena.take(torch.float32, 10).shape
        torch.Size([10])
    """

    def __init__(self, pieces: Iterable[tuple[torch.dtype, int]]) -> None:
        """With room for flat tensors of these dtypes and lengths."""
        total = sum(_padded(length * dtype.itemsize) for dtype, length in pieces)
        self._memory = torch.from_numpy(np.empty(total, np.uint8))
        self._used = 0

    def take(self, dtype: torch.dtype, length: int) -> Tensor:
        """A flat tensor without values."""
        num_bytes = length * dtype.itemsize
        piece = self._memory[self._used : self._used + num_bytes]
        assert len(piece) == num_bytes, "more was taken than there was to be"
        self._used += _padded(num_bytes)
        return piece.view(dtype)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
