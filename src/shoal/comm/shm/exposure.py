"""How a rank shows what it has to the other ranks of its host.

[Note: exposures]
Each rank exposes its source to the others. A tensor from `Backend.empty` lies in a segment
that they can map, and is *shared* as it is. Any other tensor is *staged*: copied into one of
two halves of a segment, whole if it fits and otherwise a window at a time. A rank may
overwrite a half once everybody is done with what it held before, and it knows that, because
everybody has met since then, over the other half. Or others read a tensor *directly* where its
owner has it, if the system lets them (see `process_memory.py`) and that was measured to be faster.

[Note: parts and windows]
A source is a row of parts, one for each rank that will work on it. A window is a range
inside every part, so that all ranks have work in each window.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.control.page.page import PageChannel, PageControl
from shoal.comm.control.patience import Patience
from shoal.comm.operation import Operation, Payload
from shoal.comm.operation.partition import offsets
from shoal.comm.process_backend import ProcessBackend
from shoal.comm.shm.copying import copy
from shoal.comm.shm.segments import Arena, Location, Peer
from shoal.comm.shm.staging import HALF_BYTES, WINDOW_BYTES, Staging
from shoal.torch_support.process_memory import is_readable, read_into


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


# Up to here copying is cheaper than the extra meeting that a shared tensor needs.
SMALL_BYTES = 128 << 10
SHARED, STAGED, WINDOWED, DIRECT = b"m", b"s", b"w", b"d"
_ADDRESS = struct.Struct("<Q")
# More than the first and up to the second number of bytes, by measurement: shorter ones are staged
# with less ado, longer ones faster through windows that stay in the cache.
_COLLECTED = (HALF_BYTES, 16 << 20)
_READ_DIRECTLY: dict[str, tuple[int, float]] = {
    "broadcast": (512 << 10, HALF_BYTES),
    "all_reduce": (HALF_BYTES, inf),
    "all_gather": _COLLECTED,
    "gather": _COLLECTED,
    "scatter": _COLLECTED,
    "all_to_all": _COLLECTED,
}


class Exposing(ProcessBackend):
    """Shows sources and finds those of others."""

    _page_control: PageControl
    _page_channel: PageChannel
    _arena: Arena
    _peers: Sequence[Peer]
    _staging: Staging

    def _expose(self, operation: Operation, number: int) -> bytes:
        """What fits is staged before the ranks meet, so that small operations meet once."""
        source = operation.source
        if self.size == 1:
            return b""
        shared = source if source is not None else operation.sink
        if shared is not None and shared.nbytes > SMALL_BYTES:
            location = self._arena.locate(shared)
            if location is not None:
                return SHARED + location.encode()
        if source is None:
            return b""
        self._staging.turn += 1
        if self._is_read_directly(operation.kind, source):
            return self._direct_wire(source) + self._staging.wire()
        if source.nbytes > HALF_BYTES:
            return WINDOWED + self._staging.wire()
        self._staging.put(source)
        return STAGED + self._staging.wire()

    def _is_read_directly(self, kind: str, source: Tensor) -> bool:
        least, most = _READ_DIRECTLY.get(kind, (0, 0))
        return (
            least < source.nbytes <= most
            and (kind != "all_reduce" or self.size == 2)
            and self._page_control.ranks_read_directly
            and not torch.cuda.is_initialized()  # memory that CUDA pins is out of others' reach
            and is_readable()
        )

    def _direct_wire(self, source: Tensor) -> bytes:
        return DIRECT + _ADDRESS.pack(source.data_ptr())

    def _process_and_address(self, rank: int, wire: bytes) -> tuple[int, int]:
        return self._page_control.pids[self.ranks[rank]], _ADDRESS.unpack_from(wire, 1)[0]

    def _exposures(self, payload: Payload, parts: Sequence[Sequence[int]]) -> list[Exposure]:
        """Everybody's source; ``parts`` are the counts of each rank's."""
        tensor = payload.source if payload.source is not None else payload.target
        assert tensor is not None
        return [
            self._exposure(rank, wire, counts, tensor.dtype)
            for rank, (wire, counts) in enumerate(zip(payload.wires, parts, strict=True))
        ]

    def _exposure(
        self, rank: int, wire: bytes, parts: Sequence[int], dtype: torch.dtype
    ) -> Exposure:
        kind = wire[:1]
        if not kind:
            return Exposure([], [], is_shared=False)
        if kind == DIRECT:
            return DirectExposure(*self._process_and_address(rank, wire), parts, dtype.itemsize)
        if kind == WINDOWED:
            first = Location.decode(wire[1:])
            second = first._replace(offset=HALF_BYTES - first.offset)
            wires = (first.encode(), second.encode())
            halves = [self._view(rank, half, WINDOW_BYTES, dtype) for half in wires]
            return Exposure(halves, parts, is_shared=False)
        whole = self._view(rank, wire[1:], sum(parts) * dtype.itemsize, dtype)
        return Exposure([whole], parts, is_shared=kind == SHARED)

    def _view(self, rank: int, wire: bytes, num_bytes: int, dtype: torch.dtype) -> Tensor:
        return self._peers[self.ranks[rank]].view(wire, num_bytes, dtype)

    def _windows(
        self,
        exposures: Sequence[Exposure],
        source: Tensor | None,
        patience: Patience,
        kept: int | None = None,
    ) -> Iterator[Window]:
        """Stages what is windowed here, meets the others, and says what to work on, in turn.

        ``kept`` is a part that only this rank reads. What is shared stays readable until everybody
        is through: hence the meeting at the end.
        """
        windowed = [exposure for exposure in exposures if exposure.is_windowed]
        if not windowed:
            yield Window(0, 0, max(exposure.longest for exposure in exposures))
        width = min((exposure.width for exposure in windowed), default=1)
        # What is not windowed may be longer than what is, and is worked on in the same windows.
        longest = max(exposure.longest for exposure in exposures) if windowed else 0
        rounds = -(-longest // width)
        for number in range(rounds):
            window = Window(number, number * width, (number + 1) * width)
            if exposures[self.rank].is_windowed and source is not None:
                exposures[self.rank].stage(source, window, but=kept)
            self._page_channel.sync(patience)
            yield window
        if exposures[self.rank].is_windowed:
            self._staging.turn += rounds - 1
        if any(exposure.is_shared for exposure in exposures):
            self._page_channel.sync(patience)

    def _pieces(
        self, exposures: Sequence[Exposure], source: Tensor, part: int, window: Window
    ) -> list[Tensor]:
        """One part of everybody's source; this rank's own where it always was."""
        return [
            exposure.private(source, part, window)
            if rank == self.rank
            else exposure.piece(part, window)
            for rank, exposure in enumerate(exposures)
        ]


def in_windows(wire: bytes) -> bytes:
    """The wire of what can be read directly, for ranks that stage it after all."""
    return WINDOWED + wire[1 + _ADDRESS.size :] if wire[:1] == DIRECT else wire
