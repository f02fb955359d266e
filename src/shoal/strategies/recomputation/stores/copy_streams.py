"""Copies between a GPU and pinned host memory, beside what the GPU computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor


class CopyStream:
    """Copies one after the other; the host waits for none of them."""

    def __init__(self, device: torch.device) -> None:
        """``device``: the GPU."""
        self._device, self._stream = device, torch.cuda.Stream(device)

    def current(self) -> torch.cuda.Stream:
        """The stream that computes at the moment."""
        return torch.cuda.current_stream(self._device)

    def copy(
        self, target: Tensor, source: Tensor, after: Iterable[torch.cuda.Event] = ()
    ) -> torch.cuda.Event:
        """Begins behind all that was computed so far, and ``after``; returns its end."""
        self._stream.wait_stream(self.current())
        for event in after:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            end: torch.cuda.Event = self._stream.record_event()
        return end

    def outlast(self, tensor: Tensor) -> None:
        """Nobody gets the tensor's memory before this stream is through with it."""
        tensor.record_stream(self._stream)


class PinnedMemory:
    """Pinned host memory that is used again and again.

    What is given back may still be read or written by a copy. Whoever gets it next has the GPU wait
    for that. So a host that is a whole step ahead of its GPU takes no more than one that is not.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[tuple[Tensor, torch.cuda.Event]]] = {}

    def take(self, num_bytes: int) -> tuple[Tensor, list[torch.cuda.Event]]:
        """So many bytes, and what must have ended before they are written to."""
        size = _size_of(num_bytes)
        try:
            whole, last = self._free.setdefault(size, deque()).popleft()
        except IndexError:
            return self.allocate(size)[:num_bytes], []
        return whole[:num_bytes], [last]

    def give_back(self, part: Tensor, last: torch.cuda.Event) -> None:
        """What was taken; ``last`` is the end of the last copy from it or to it."""
        size = _size_of(part.numel())
        self._free[size].append((part.as_strided((size,), (1,)), last))

    @staticmethod
    def allocate(size: int) -> Tensor:
        """New memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _size_of(num_bytes: int) -> int:
    """A power of two, which is what torch takes anyway; so other lengths find memory, too."""
    return 1 << (num_bytes - 1).bit_length()
