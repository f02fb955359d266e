"""A rank's source as the other ranks see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from shoal.comm.operation.partition import offsets
from shoal.comm.shm.copying import copy
from shoal.torch_support.process_memory import read_into


class Window(NamedTuple):
    """A range inside every part of a source, and its number."""

    number: int
    start: int
    stop: int


def windows_of(length: int, width: int) -> Iterator[Window]:
    """The whole of a part of some length, so much at a time."""
    for number, start in enumerate(range(0, length, width)):
        yield Window(number, start, start + width)


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
        """Elements of each part that there is room for at a time."""
        return max(1, self._memory[0].numel() // len(self._parts))

    def piece(self, part: int, window: Window) -> Tensor:
        """The elements of a part that the window covers; shorter or empty at its end."""
        start, stop = self._range(part, window)
        if not self.is_windowed:
            return self._memory[0][start:stop]
        first = part * (window.stop - window.start)
        return self._memory[window.number % 2][first : first + stop - start]

    def found(self, part: int, window: Window, scratch: Tensor) -> Tensor:
        """These elements, wherever they can be read: in a scratch if nowhere else."""
        return self.piece(part, window)

    def copy_piece(self, target: Tensor, part: int, window: Window) -> None:
        """Copies these elements to the beginning of a target, unless they are there already."""
        _copy_to_front(target, self.piece(part, window))

    def copy_own(self, target: Tensor, source: Tensor, part: int, window: Window) -> None:
        """The same, on the rank that owns the source."""
        _copy_to_front(target, self.private(source, part, window))

    def private(self, source: Tensor, part: int, window: Window) -> Tensor:
        """The same elements where their owner has them: it need not look at its own copy."""
        start, stop = self._range(part, window)
        return source[start:stop]

    def _range(self, part: int, window: Window) -> tuple[int, int]:
        first, length = self._starts[part], self._parts[part]
        return first + min(window.start, length), first + min(window.stop, length)

    def stage(self, source: Tensor, window: Window, but: int | None = None) -> None:
        """Copies the window of each part to where others see it, ``but`` one that nobody reads."""
        for part in range(len(self._parts)):
            if part != but:
                self.piece(part, window).copy_(self.private(source, part, window))

    def unstage(self, target: Tensor, window: Window) -> None:
        """Copies the window back, after others have written to it."""
        for part in range(len(self._parts)):
            self.private(target, part, window).copy_(self.piece(part, window))


def _copy_to_front(target: Tensor, piece: Tensor) -> None:
    target = target[: piece.numel()]
    if target.data_ptr() != piece.data_ptr():
        copy(target, piece)


class DirectExposure(Exposure):
    """A source that stays in its owner's own memory, where others read it."""

    def __init__(self, pid: int, address: int, parts: Sequence[int], itemsize: int) -> None:
        """``address`` is where the process has its source."""
        super().__init__([], parts, is_shared=True)
        self._pid, self._address, self._itemsize = pid, address, itemsize

    def found(self, part: int, window: Window, scratch: Tensor) -> Tensor:
        """A copy of the elements."""
        self.copy_piece(scratch, part, window)
        start, stop = self._range(part, window)
        return scratch[: stop - start]

    def copy_piece(self, target: Tensor, part: int, window: Window) -> None:
        """Straight into the target."""
        start, stop = self._range(part, window)
        read_into(target[: stop - start], self._pid, self._address + start * self._itemsize)
