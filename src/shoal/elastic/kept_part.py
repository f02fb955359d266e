"""What one rank would save of a step, kept in memory: values, and one run of bytes.

[Note: a checkpoint in memory]
Each rank keeps its part of the last committed step, and a copy of its neighbour's part, the
*buddy's*. Together the ranks have all that a checkpoint of that step would have, in the same terms:
keys, extents, values as JSON. So it is loaded as a checkpoint is, at any number of ranks. Where
ranks that see other data have the same values (`ddp`) a rank's part is its slice of each tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.checkpoint.save.rank_state import HeldTensor, RankState
from shoal.sharding.extent import Extent
from shoal.sharding.split import Split
from shoal.torch_support.dtypes import dtype_called, dtype_name

BUFFER = "buffer/"
"""What the keys of buffers begin with that a checkpoint would not have."""
_ALIGNMENT = 64
_ROW_BYTES = 4096


class Seat(NamedTuple):
    """A rank of one generation."""

    generation: int
    rank: int
    size: int


class Share(NamedTuple):
    """Which slice of what several ranks have the same values of is a rank's."""

    number: int
    num_shares: int

    def of(self, extent: Extent) -> Extent:
        """This one's slice."""
        size = extent.num_elements
        bounds = (size * each // self.num_shares for each in (self.number, self.number + 1))
        start, stop = (extent.start + bound for bound in bounds)
        return extent.narrowed(start, stop)


class Entry(NamedTuple):
    """Elements of one tensor, and where in the bytes they are; plain data."""

    key: str
    dtype: str
    shape: list[int]
    start: int
    stop: int
    offset: int
    is_same_everywhere: bool
    split: list[Any] | None = None  # along which dim the rank has which runs, of a split tensor

    @property
    def extent(self) -> Extent:
        """Which elements."""
        shape = torch.Size(self.shape)
        return Extent(shape, self.start, self.stop, _split_from(self.split, shape))

    @property
    def num_bytes(self) -> int:
        """How long they are."""
        return (self.stop - self.start) * dtype_called(self.dtype).itemsize


@dataclass(eq=False)
class KeptPart:
    """One rank's part of one step; see [Note: a checkpoint in memory].

    Attributes:
        seat: The rank whose part it is.
        step: How many steps were committed with it.
        entries: What lies where in ``data``.
        values: What is no tensor, as JSON.
        data: The bytes.
        local: What only the rank itself needs to go on from this step; None in a copy.
    """

    seat: Seat
    step: int
    entries: list[Entry]
    values: dict[str, Any]
    data: Tensor
    local: Any = field(default=None)

    def checksum(self) -> int:
        """Of the bytes: of the sum of each row of them, since to add is as fast as to read."""
        rows, rest = self.data.split(
            [len(self.data) // _ROW_BYTES * _ROW_BYTES, len(self.data) % _ROW_BYTES]
        )
        sums = rows.view(torch.int64).view(-1, _ROW_BYTES // 8).sum(1)
        return zlib.crc32(rest.numpy().data, zlib.crc32(sums.numpy().data))

    def about(self) -> list[Any]:
        """All but the bytes, as plain data."""
        return [list(self.seat), self.step, [list(each) for each in self.entries], self.values]

    @classmethod
    def of(cls, about: list[Any], data: Tensor) -> KeptPart:
        """The inverse of `about`."""
        seat, step, entries, values = about
        return cls(Seat(*seat), step, [Entry(*each) for each in entries], values, data)


class Room(NamedTuple):
    """Where a part can be copied to: memory that may fit, and how to make some that does."""

    known: Tensor | None
    make: Callable[[int], Tensor]

    def of(self, num_bytes: int) -> Tensor:
        """So many bytes."""
        if self.known is not None and self.known.numel() == num_bytes:
            return self.known
        return self.make(num_bytes)


def keep(state: RankState, seat: Seat, step: int, *, share: Share | None, room: Room) -> KeptPart:
    """Copies what a rank holds, or its ``share`` of what others have the same values of."""
    entries: list[Entry] = []
    pieces: list[list[Tensor]] = []
    offset = 0
    for key, extent, held, memory in _own(state, share):
        entry = Entry(
            key,
            dtype_name(held.dtype),
            list(extent.shape),
            extent.start,
            extent.stop,
            offset,
            held.is_same_everywhere,
            _split_as_plain(extent.split),
        )
        entries.append(entry)
        pieces.append(memory)
        offset += -(-entry.num_bytes // _ALIGNMENT) * _ALIGNMENT
    data = room.of(offset)
    for entry, runs in zip(entries, pieces, strict=True):
        _copy(runs, data[entry.offset : entry.offset + entry.num_bytes])
    return KeptPart(seat, step, entries, state.values, data)


def _own(
    state: RankState, share: Share | None
) -> Iterator[tuple[str, Extent, HeldTensor, list[Tensor]]]:
    for key, held in state.tensors.items():
        is_whole = share is None or not held.is_same_everywhere or key.startswith("residual/")
        for extent, memory in held.pieces:
            own = extent if is_whole or share is None else share.of(extent)
            yield key, own, held, [memory[own.start - extent.start : own.stop - extent.start]]


def _split_as_plain(split: Split | None) -> list[Any] | None:
    return None if split is None else [split.dim, [list(run) for run in split.runs]]


def _split_from(plain: list[Any] | None, shape: torch.Size) -> Split | None:
    if plain is None:
        return None
    dim, runs = plain
    return Split(shape, dim, tuple((start, stop) for start, stop in runs))


@torch.no_grad()
def _copy(runs: list[Tensor], target: Tensor) -> None:
    offset = 0
    for run in runs:
        num_bytes = run.numel() * run.itemsize
        if num_bytes:
            target[offset : offset + num_bytes].view(run.dtype).copy_(run)
        offset += num_bytes
