"""Which way data takes over shared memory: pure functions of kinds and sizes.

First each rank decides how it shows its own data (`how_to_show`), and the headers tell the others
(`Shown`). Then, from what all ranks have shown, every rank derives the same `ShmRoute`.

[Note: ways to show data]
A tensor from `Backend.empty` lies in a segment that other ranks can map, and is *shared* as it is.
Any other tensor is *staged*: copied into one of two halves of a segment, whole if it fits and
otherwise one *window* at a time. A rank may overwrite a half once all ranks are done with its
former content, and it knows that, because they all have met since then, over the other half. Or
others read a tensor *directly* in its owner's own memory, if the system lets them (see
`process_memory.py`) and that was measured to be faster.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum, auto
from functools import lru_cache
from math import inf
from typing import NamedTuple

HALF_BYTES = 2 << 20
"""How much can be staged at once."""
WINDOW_BYTES = 1 << 20
"""How much of a longer tensor is staged at a time: the second cache should hold it."""
SMALL_BYTES = 128 << 10
"""Up to here copying is cheaper than the extra meeting that a shared tensor needs."""

# Read directly: more than the first and up to the second number of bytes, by measurement. Shorter
# tensors are staged with less effort, longer ones faster through windows that stay in the cache.
_COLLECTED = (HALF_BYTES, 16 << 20)
_READ_DIRECTLY: dict[str, tuple[int, float]] = {
    "broadcast": (512 << 10, HALF_BYTES),
    "all_reduce": (HALF_BYTES, inf),
    "all_gather": _COLLECTED,
    "gather": _COLLECTED,
    "scatter": _COLLECTED,
    "all_to_all": _COLLECTED,
}
_ADDRESS = struct.Struct("<Q")


class Way(bytes, Enum):
    """How a rank shows its data, as the first byte of a wire; see [Note: ways to show data]."""

    NOTHING = b""
    SHARED = b"m"
    STAGED = b"s"
    WINDOWED = b"w"
    DIRECT = b"d"


class Shown(NamedTuple):
    """What a header says of a rank's data.

    Attributes:
        way: How it is shown.
        location: Where in which segment (see `Location`): the data, or the half it is staged in.
        address: For direct reads, where the owner has it.
    """

    way: Way
    location: bytes = b""
    address: int = 0

    def encode(self) -> bytes:
        """As bytes for a header."""
        if self.way is Way.DIRECT:
            return self.way + _ADDRESS.pack(self.address) + self.location
        return self.way + self.location

    def in_windows(self) -> Shown:
        """What can be read directly, for ranks that stage it after all."""
        return Shown(Way.WINDOWED, self.location) if self.way is Way.DIRECT else self


NOTHING = Shown(Way.NOTHING)


@lru_cache(maxsize=4096)
def decode_shown(wire: bytes) -> Shown:
    """The inverse of `Shown.encode`."""
    way = Way(wire[:1])
    if way is Way.DIRECT:
        return Shown(way, wire[1 + _ADDRESS.size :], *_ADDRESS.unpack_from(wire, 1))
    return Shown(way, wire[1:])


class ShmRoute(Enum):
    """How a collective moves data; one method of `Transfers` or `FastPath` for each."""

    STAGED = auto()
    """Ranks read all they need where the others have staged it, and are done."""
    ROOT_DIRECT = auto()
    """All ranks read the root's own memory, then meet."""
    ROOT_SHARED = auto()
    """All ranks copy from the root's segment, and the root helps them."""
    HALVES = auto()
    """Each of two ranks reduces its half in its own memory, where the other then reads it."""
    EVERYWHERE = auto()
    """Each rank reduces everything for itself, a window at a time: one meeting less."""
    SLICES = auto()
    """Each rank reduces its slice and writes the result to where the others find it."""
    WINDOWS = auto()
    """Ranks read their parts of the others' data, a window at a time where it is windowed."""


def is_length_for_direct_reads(kind: str, num_bytes: int, size: int) -> bool:
    """Whether reading a tensor directly is the fastest way, where the system allows it."""
    least, most = _READ_DIRECTLY.get(kind, (0, 0))
    return least < num_bytes <= most and (kind != "all_reduce" or size == 2)


def how_to_show(num_bytes: int, *, is_in_segment: bool, is_read_directly: bool) -> Way:
    """How a rank shows a tensor that it contributes."""
    if is_in_segment and num_bytes > SMALL_BYTES:
        return Way.SHARED
    if is_read_directly:
        return Way.DIRECT
    return Way.STAGED if num_bytes <= HALF_BYTES else Way.WINDOWED


def longest_cached(size: int) -> dict[str, int]:
    """Up to how many bytes the fast path takes each kind of collective.

    In an all-reduce each rank reduces everything for itself: for long tensors, or many ranks, that
    is too much.
    """
    if size == 1:
        return {}
    return {
        "all_reduce": HALF_BYTES if size == 2 else SMALL_BYTES,
        "reduce_scatter": HALF_BYTES,
        "all_gather": HALF_BYTES,
        "broadcast": HALF_BYTES,
    }


def route(kind: str, ways: Sequence[Way], *, num_bytes: int = 0, root: int = 0) -> ShmRoute:
    """The route of a collective, the same on every rank.

    Args:
        kind: Of the collective; "collect" for those that only copy parts of each source.
        ways: How each rank shows its data.
        num_bytes: Of one rank's data, for an all-reduce.
        root: For a broadcast.
    """
    if kind == "broadcast":
        return _ROUTE_FROM_ROOT[ways[root]]
    if kind == "reduce":
        return ShmRoute.SLICES
    if kind == "all_reduce":
        return _route_of_all_reduce(ways, num_bytes)
    is_all_staged = all(way in (Way.STAGED, Way.NOTHING) for way in ways)
    return ShmRoute.STAGED if is_all_staged else ShmRoute.WINDOWS


_ROUTE_FROM_ROOT = {
    Way.STAGED: ShmRoute.STAGED,
    Way.DIRECT: ShmRoute.ROOT_DIRECT,
    Way.SHARED: ShmRoute.ROOT_SHARED,
    Way.WINDOWED: ShmRoute.WINDOWS,
}


def _route_of_all_reduce(ways: Sequence[Way], num_bytes: int) -> ShmRoute:
    size = len(ways)
    if ways.count(Way.STAGED) == size and (size == 2 or num_bytes <= SMALL_BYTES):
        return ShmRoute.STAGED
    if Way.DIRECT in ways and Way.WINDOWED not in ways:
        return ShmRoute.HALVES
    if size == 2 and Way.SHARED not in ways:
        return ShmRoute.EVERYWHERE
    return ShmRoute.SLICES
