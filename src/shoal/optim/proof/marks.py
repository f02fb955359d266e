"""Which memory has data of which parameter.

[Note: marks]
Each parameter that is followed has an *owner* number. Memory that has been computed from it or from
its gradient is marked with that number; so is memory that was made like it (``zeros_like``), which
has no data of it yet. Step counters, learning rates and constants are not marked. Marks belong to
memory, not to tensor objects, so views share them and writes through a view count.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.torch_internals.tensors import storage_id

MIXED = -1
"""The owner of what was computed from several parameters."""


class Level(IntEnum):
    """How much memory has to do with its owner."""

    UNIFORM = 0
    """It has the owner's shape and the same number everywhere."""
    SHAPED = 1
    """It was made like the owner, and its numbers may depend on their position."""
    DATA = 2
    """It was computed from the owner's elements, or drawn for them."""


class Mark(NamedTuple):
    """Whose memory it is."""

    owner: int
    level: Level


@dataclass
class _Memory:
    """The marks of one storage; ``ref`` keeps its address from being used for another."""

    ref: StorageWeakRef
    mark: Mark | None = None
    starts: list[int] = field(default_factory=list)
    parts: list[tuple[int, int, Mark]] = field(default_factory=list)

    def part_of(self, tensor: Tensor) -> int:
        """The part in which a tensor begins; -1 for none."""
        low = tensor.storage_offset() * tensor.itemsize
        index = bisect.bisect_right(self.starts, low) - 1
        return index if index >= 0 and low < self.parts[index][1] else -1


class Marks:
    """The marks of all memory that is followed; see [Note: marks]."""

    def __init__(self) -> None:
        """None yet."""
        self._memories: dict[int, _Memory] = {}

    def find(self, tensor: Tensor) -> Mark | None:
        """The mark of a tensor's memory."""
        memory = self._memories.get(storage_id(tensor))
        if memory is None:
            return None
        index = memory.part_of(tensor) if memory.parts else -1
        if index < 0:
            return memory.mark
        start, stop, mark = memory.parts[index]
        is_whole = tensor.nbytes == stop - start and tensor.is_contiguous()
        return mark if is_whole or _extent(tensor)[1] <= stop else Mark(MIXED, Level.DATA)

    def write(self, tensor: Tensor, mark: Mark) -> None:
        """The memory of a tensor has been written to."""
        memory = self._memory_of(tensor)
        index = memory.part_of(tensor) if memory.parts else -1
        if index < 0:
            memory.mark = mark
        else:
            memory.parts[index] = (*memory.parts[index][:2], mark)

    def divide(self, owned: Iterable[tuple[Tensor, Mark]]) -> None:
        """Marks tensors that may be parts of the same memory, each with its owner."""
        divided: dict[int, _Memory] = {}
        for tensor, mark in owned:
            memory = self._memory_of(tensor)
            if id(memory) not in divided:
                divided[id(memory)] = memory
                memory.parts = []
            memory.parts.append((*_extent(tensor), mark))
        for memory in divided.values():
            memory.parts.sort()
            memory.starts = [start for start, _, _ in memory.parts]

    def _memory_of(self, tensor: Tensor) -> _Memory:
        identity = storage_id(tensor)
        if identity not in self._memories:
            self._memories[identity] = _Memory(StorageWeakRef(tensor.untyped_storage()))
        return self._memories[identity]

    def forget_dead(self) -> None:
        """Forgets memory that has been freed."""
        dead = [key for key, memory in self._memories.items() if memory.ref.expired()]
        for key in dead:
            del self._memories[key]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and last, in its memory."""
    size = tensor.itemsize
    low = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return low, low
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return low, low + (int(sum((length - 1) * step for length, step in steps)) + 1) * size
