"""A rank's source as the other ranks see it in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from shoal.comm.partition import offsets


class Window(NamedTuple):
    """A range inside every part of a source, and its number."""

    number: int
    start: int
    stop: int


class Exposure:
    """Parts of a source that lie in mapped memory.

    Either the whole source is there, or a window of each part at a time, in two halves
    that take turns.
    """

    def __init__(self, memory: Sequence[Tensor], parts: Sequence[int], *, is_shared: bool) -> None:
        """``memory`` is the whole source, or two halves; ``is_shared`` if it is no copy."""
        self._memory = memory
        self._parts = parts
        self._starts = offsets(parts)
        self.is_shared = is_shared
        self.is_windowed = len(memory) == 2

    @property
    def longest(self) -> int:
        """Elements of the longest part."""
        return max(self._parts, default=0)

    @property
    def width(self) -> int:
        """Elements of each part that a half has room for."""
        return max(1, self._memory[0].numel() // len(self._parts))

    def piece(self, part: int, window: Window) -> Tensor:
        """The elements of a part that the window covers; shorter or empty at its end."""
        start, stop = (min(edge, self._parts[part]) for edge in (window.start, window.stop))
        if not self.is_windowed:
            return self._memory[0][self._starts[part] + start : self._starts[part] + stop]
        first = part * (window.stop - window.start)
        return self._memory[window.number % 2][first : first + stop - start]

    def private(self, source: Tensor, part: int, window: Window) -> Tensor:
        """The same elements where their owner has them: it need not look at its own copy."""
        start, stop = (min(edge, self._parts[part]) for edge in (window.start, window.stop))
        return source[self._starts[part] + start : self._starts[part] + stop]

    def stage(self, source: Tensor, window: Window, but: int | None = None) -> None:
        """Copies the window of each part to where others see it, ``but`` one that nobody reads."""
        for part in range(len(self._parts)):
            if part != but:
                self.piece(part, window).copy_(self.private(source, part, window))

    def unstage(self, target: Tensor, window: Window) -> None:
        """Copies the window back, after others have written to it."""
        for part in range(len(self._parts)):
            self.private(target, part, window).copy_(self.piece(part, window))
