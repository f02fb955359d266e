"""One large piece of memory for many tensors, which can be used again.

The system clears memory page by page when it is first touched, which takes longer than filling it
does. Memory that was used before is there at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_ALIGNMENT = 64


class CopyBuffer:
    """Memory that is handed out from its beginning to its end.

    Example:
        >>> arena = CopyBuffer([(torch.float32, 10), (torch.int8, 3)])
        >>> arena.take(torch.float32, 10).shape
        torch.Size([10])
    """

    def __init__(
        self, pieces: Iterable[tuple[torch.dtype, int]], old: CopyBuffer | None = None
    ) -> None:
        """With room for flat tensors of these dtypes and lengths.

        Args:
            pieces: Dtypes and lengths.
            old: One that is not used any more; its memory is taken if it is large enough.
        """
        total = sum(_padded(length * dtype.itemsize) for dtype, length in pieces)
        is_enough = old is not None and total <= old.num_bytes <= 2 * total
        self._memory: Tensor
        if old is not None and is_enough:
            self._memory = old._memory
        else:
            with torch.inference_mode(mode=False):  # the next save may not be in it
                self._memory = torch.empty(total, dtype=torch.uint8)
        self._used = 0

    @property
    def num_bytes(self) -> int:
        """The size of the memory."""
        return self._memory.numel()

    def take(self, dtype: torch.dtype, length: int) -> Tensor:
        """A flat tensor without values."""
        num_bytes = length * dtype.itemsize
        piece = self._memory[self._used : self._used + num_bytes]
        assert len(piece) == num_bytes, "more was taken than there was to be"
        self._used += _padded(num_bytes)
        return piece.view(dtype)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
