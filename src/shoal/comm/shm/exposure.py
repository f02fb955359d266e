"""How a rank shows its data to the other ranks of its host, and finds theirs.

`Exposer` shows and finds, `Exposure` is the data of one rank as the others see it. Which way is
taken when is decided in `routing.py`, see [Note: ways to show data].

[Note: parts and windows]
A source is a row of parts, one for each rank that will work on it. A window is a range
inside every part, so that all ranks have work in each window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.control.page.control import PageControl
from shoal.comm.control.page.page import PageChannel
from shoal.comm.control.patience import Patience
from shoal.comm.operation import Operation, Payload
from shoal.comm.operation.partition import offsets
from shoal.comm.shm import routing
from shoal.comm.shm.routing import (
    HALF_BYTES,
    NOTHING,
    SMALL_BYTES,
    WINDOW_BYTES,
    Shown,
    Way,
    decode_shown,
)
from shoal.comm.shm.segments import Arena, Location, Peer, Staging
from shoal.torch_support.memory import copy
from shoal.torch_support.process_memory import is_readable, read_into

_MOST_WHOLES = 1024


class Window(NamedTuple):
    """A range inside every part of a source, and its number."""

    number: int
    start: int
    stop: int


def windows_of(length: int, width: int) -> Iterator[Window]:
    """Windows of one width over a part of some length."""
    for number, start in enumerate(range(0, length, width)):
        yield Window(number, start, start + width)


class Exposure:
    """Parts of a source that lie in mapped memory.

    Either the whole source is there, or a window of each part at a time, in two halves
    that take turns.
    """

    def __init__(self, memory: Sequence[Tensor], parts: Sequence[int], *, is_shared: bool) -> None:
        """``memory`` is the whole source, or two halves; ``is_shared`` if it is not a copy."""
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
        """The same elements, copied into ``scratch`` where they cannot be mapped."""
        return self.piece(part, window)

    def copy_piece(self, target: Tensor, part: int, window: Window) -> None:
        """Copies the elements to the beginning of a target, unless they lie there already."""
        _copy_to_front(target, self.piece(part, window))

    def copy_own(self, target: Tensor, source: Tensor, part: int, window: Window) -> None:
        """The same, on the rank that owns the source."""
        _copy_to_front(target, self.private(source, part, window))

    def private(self, source: Tensor, part: int, window: Window) -> Tensor:
        """The same elements in their owner's own memory, for the owner itself."""
        start, stop = self._range(part, window)
        return source[start:stop]

    def _range(self, part: int, window: Window) -> tuple[int, int]:
        first, length = self._starts[part], self._parts[part]
        return first + min(window.start, length), first + min(window.stop, length)

    def stage(self, source: Tensor, window: Window, but: int | None = None) -> None:
        """Copies the window of each part to where others see it, ``but`` one nobody reads."""
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


class Exposer:
    """Shows the sources of one rank of a group and finds those of the others."""

    def __init__(
        self, control: PageControl, channel: PageChannel, arena: Arena, peers: Sequence[Peer]
    ) -> None:
        self._control, self._channel, self._arena = control, channel, arena
        self._ranks = channel.ranks
        self._peers = [peers[rank] for rank in channel.ranks]
        self._rank = list(channel.ranks).index(control.rank)
        self.staging = Staging(arena)
        self._wholes: dict[tuple[object, ...], list[Tensor]] = {}

    # Showing ----------------------------------------------------------------------------

    def show(self, operation: Operation) -> Shown:
        """Shows this rank's data. What fits is staged here, so that small operations meet once."""
        if len(self._peers) == 1:
            return NOTHING
        source = operation.source
        if source is None:
            return NOTHING if operation.sink is None else self._show_sink(operation.sink)
        location = self.locate(source)
        way = routing.how_to_show(
            source.nbytes,
            is_in_segment=location is not None,
            is_read_directly=location is None and self.is_read_directly(operation.kind, source),
        )
        if location is not None and way is Way.SHARED:
            return Shown(way, location.encode())
        self.staging.turn += 1
        if way is Way.STAGED:
            self.staging.put(source)
        return Shown(way, self.staging.location(), source.data_ptr())

    def _show_sink(self, sink: Tensor) -> Shown:
        location = self.locate(sink)
        return NOTHING if location is None else Shown(Way.SHARED, location.encode())

    def locate(self, tensor: Tensor) -> Location | None:
        """Where a tensor lies, if it is in a segment and long enough for that to matter."""
        return self._arena.locate(tensor) if tensor.nbytes > SMALL_BYTES else None

    def is_read_directly(self, kind: str, source: Tensor) -> bool:
        """Whether others should read a source in this rank's own memory, and can."""
        return (
            routing.is_length_for_direct_reads(kind, source.nbytes, len(self._peers))
            and self._control.ranks_read_directly
            and not torch.cuda.is_initialized()  # others cannot read memory it pins
            and is_readable()
        )

    # Finding ----------------------------------------------------------------------------

    def view(self, rank: int, location: bytes, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """Memory in a segment of another rank."""
        return self._peers[rank].view(location, num_bytes, dtype)

    def process_of(self, rank: int) -> int:
        """The process that a rank is."""
        return self._control.pids[self._ranks[rank]]

    def exposures(
        self, shown: Sequence[Shown], parts: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[Exposure]:
        """The sources of all ranks; ``parts`` are the counts of each of them."""
        return [
            self._exposure(rank, found, counts, dtype)
            for rank, (found, counts) in enumerate(zip(shown, parts, strict=True))
        ]

    def _exposure(
        self, rank: int, shown: Shown, parts: Sequence[int], dtype: torch.dtype
    ) -> Exposure:
        way, location, address = shown
        if way is Way.NOTHING:
            return Exposure([], [], is_shared=False)
        if way is Way.DIRECT:
            return DirectExposure(self.process_of(rank), address, parts, dtype.itemsize)
        if way is Way.WINDOWED:
            first = Location.decode(location)
            second = first._replace(offset=HALF_BYTES - first.offset).encode()
            halves = [self.view(rank, half, WINDOW_BYTES, dtype) for half in (location, second)]
            return Exposure(halves, parts, is_shared=False)
        whole = self.view(rank, location, sum(parts) * dtype.itemsize, dtype)
        return Exposure([whole], parts, is_shared=way is Way.SHARED)

    def staged_wholes(
        self, payload: Payload, counts: Sequence[int], dtype: torch.dtype
    ) -> list[Tensor]:
        """What all ranks have staged whole, from a cache: small operations are all overhead."""
        key = (*payload.wires, *counts, dtype)
        wholes = self._wholes.get(key)
        if wholes is None:
            found = self.shared_wholes(payload, counts, dtype)
            wholes = [found.get(rank, _nothing(dtype)) for rank in range(len(counts))]
            if len(self._wholes) >= _MOST_WHOLES:
                self._wholes.clear()
            self._wholes[key] = wholes
        return wholes

    def shared_wholes(
        self, payload: Payload, counts: Sequence[int], dtype: torch.dtype
    ) -> dict[int, Tensor]:
        """What ranks have in segments, by rank; ``counts`` are its elements."""
        every = enumerate(map(decode_shown, payload.wires))
        return {
            rank: self.view(rank, shown.location, counts[rank] * dtype.itemsize, dtype)
            for rank, shown in every
            if shown.way in (Way.SHARED, Way.STAGED)
        }

    # Windows ----------------------------------------------------------------------------

    def windows(
        self,
        exposures: Sequence[Exposure],
        source: Tensor | None,
        patience: Patience,
        kept: int | None = None,
    ) -> Iterator[Window]:
        """Stages this rank's source where it is windowed, meets the others, and yields a window.

        ``kept`` is a part that only this rank reads. Shared memory stays readable until all ranks
        are done with it: hence the meeting at the end.
        """
        windowed = [exposure for exposure in exposures if exposure.is_windowed]
        if not windowed:
            yield Window(0, 0, max(exposure.longest for exposure in exposures))
        width = min((exposure.width for exposure in windowed), default=1)
        # A source that is not windowed may be longer, and is worked on in the same windows.
        longest = max(exposure.longest for exposure in exposures) if windowed else 0
        rounds = -(-longest // width)
        own = exposures[self._rank]
        for number in range(rounds):
            window = Window(number, number * width, (number + 1) * width)
            if own.is_windowed and source is not None:
                own.stage(source, window, but=kept)
            self._channel.sync(patience)
            yield window
        if own.is_windowed:
            self.staging.turn += rounds - 1
        if any(exposure.is_shared for exposure in exposures):
            self._channel.sync(patience)

    def pieces(
        self, exposures: Sequence[Exposure], source: Tensor, part: int, window: Window
    ) -> list[Tensor]:
        """One part of the sources of all ranks; this rank's own in its own memory."""
        return [
            exposure.private(source, part, window)
            if rank == self._rank
            else exposure.piece(part, window)
            for rank, exposure in enumerate(exposures)
        ]

    def close(self) -> None:
        """Frees the staging memory and forgets the views."""
        self.staging.close()
        self._wholes.clear()


@lru_cache
@torch.inference_mode(mode=False)
def _nothing(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype)
