"""Memory that the ranks of one host map together: tensors, staged copies, messages.

A segment is an anonymous file (memfd): it has no name that could be left behind, does not
care how small ``/dev/shm`` is, and is gone with the last process that maps it, however that
process ends. A peer opens it through ``/proc`` by the owner's process and descriptor.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.shm.routing import HALF_BYTES, WINDOW_BYTES
from shoal.torch_support.memory import PrivateView, as_bytes, of_dtype

_ALIGNMENT = 128
_SLAB_BYTES = 8 << 20
_LARGEST_IN_SLAB = 1 << 20
_MOST_VIEWS = 1024
_MOST_IDLE_BYTES = 64 << 20
_SMALLEST_BYTES = 256
_FIELDS = struct.Struct("<QQQQQ")


class Location(NamedTuple):
    """Where a tensor lies, in terms that a peer can use.

    Attributes:
        inode: Tells the segment from every other, also from later ones with its descriptor.
        fd: The owner's descriptor of it.
        segment_bytes: How much to map.
        offset: Where in the segment the tensor begins.
        num_freed: How many segments the owner has freed, so that peers unmap theirs.
    """

    inode: int
    fd: int
    segment_bytes: int
    offset: int
    num_freed: int

    def encode(self) -> bytes:
        """As bytes for a header."""
        return _FIELDS.pack(*self)

    @classmethod
    def decode(cls, encoded: bytes) -> Location:
        """The inverse of `encode`."""
        return cls(*_FIELDS.unpack(encoded))


@dataclass(slots=True)
class _Segment:
    fd: int
    inode: int
    num_bytes: int
    address: int


class _Mapping(mmap.mmap):
    """Tells that it ends while nothing else can lie at its address.

    A callback of a weak reference comes too late: between unmapping and the callback another
    thread may have mapped a segment there, which would be freed in its place.
    """

    on_end: Callable[[], None]

    def __del__(self) -> None:
        self.on_end()


class Arena:
    """The segments of this process: made here, found by address, freed with their tensors."""

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}
        self._addresses: list[int] = []
        self._slab: mmap.mmap | None = None
        self._slab_used = 0
        # Messages are sent from threads of their own; tensors die in any thread, at any time.
        self._lock = threading.RLock()
        self.num_freed = 0

    def empty(self, num_bytes: int, alignment: int = _ALIGNMENT) -> Tensor:
        """Bytes in a segment; small requests share one."""
        if num_bytes > _LARGEST_IN_SLAB:
            return as_bytes(self._new_segment(num_bytes))[:num_bytes]
        with self._lock:
            start = self._slab_used + -self._slab_used % alignment
            if self._slab is None or start + num_bytes > _SLAB_BYTES:
                self._slab, start = self._new_segment(_SLAB_BYTES), 0
            slab = self._slab
            self._slab_used = start + max(num_bytes, 1) + -max(num_bytes, 1) % alignment
        # A slice of the whole keeps the segment alive and its storage begins at its address.
        return as_bytes(slab)[start : start + num_bytes]

    def _new_segment(self, num_bytes: int) -> mmap.mmap:
        num_bytes += -num_bytes % mmap.PAGESIZE
        fd = os.memfd_create("shoal-data")
        os.ftruncate(fd, num_bytes)
        memory = _Mapping(fd, num_bytes)
        _prefer_huge_pages(memory)
        address = as_bytes(memory).data_ptr()
        with self._lock:
            self._segments[address] = _Segment(fd, os.fstat(fd).st_ino, num_bytes, address)
            self._addresses = sorted(self._segments)
        memory.on_end = partial(self._free, address)
        return memory

    def _free(self, address: int) -> None:
        with self._lock:
            segment = self._segments.pop(address)
            self._addresses = sorted(self._segments)
            self.num_freed += 1
        os.close(segment.fd)

    def locate(self, tensor: Tensor) -> Location | None:
        """Where a tensor lies if it is in a segment of this process."""
        address = tensor.data_ptr()
        addresses = self._addresses
        index = bisect_right(addresses, address) - 1
        if index < 0:
            return None
        segment = self._segments.get(addresses[index])  # none if it was freed just now
        if segment is None or address + tensor.nbytes > segment.address + segment.num_bytes:
            return None
        offset = address - segment.address
        return Location(segment.inode, segment.fd, segment.num_bytes, offset, self.num_freed)

    def encoded_location(self, memory: Tensor) -> bytes:
        """The location of memory of this arena, as bytes for a header."""
        location = self.locate(memory)
        assert location is not None
        return location.encode()

    def close(self) -> None:
        """Frees the slab; segments live as long as their tensors."""
        self._slab = None


class Staging:
    """Two halves of a segment, so that one can be filled while the other is still read.

    Views and locations are cached, because small operations are all overhead.

    Attributes:
        turn: How often a half was taken; its parity says which.
    """

    def __init__(self, arena: Arena) -> None:
        """The segment is made when it is first used."""
        self._arena = arena
        self._halves: list[Tensor] = []
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._locations: list[bytes] = []
        self._num_freed = -1
        self.turn = 0

    def put(self, source: Tensor) -> None:
        """Copies a source that fits into the half whose turn it is."""
        self.room(source).copy_(source)

    def room(self, source: Tensor) -> Tensor:
        """Flat memory for a source that fits, in the half whose turn it is."""
        key = (self.turn % 2, source.nbytes, source.dtype)
        view = self._views.get(key)
        if view is None:
            self._allocate()
            view = of_dtype(self._halves[key[0]][: source.nbytes], source.dtype)
            if len(self._views) < 1024:
                self._views[key] = view
        return view

    def scratch(self, dtype: torch.dtype) -> Tensor:
        """Memory for a window in the half whose turn it is, for this rank alone."""
        self._allocate()
        return of_dtype(self._halves[self.turn % 2][:WINDOW_BYTES], dtype)

    def location(self) -> bytes:
        """Where the half lies whose turn it is, encoded."""
        if self._num_freed != self._arena.num_freed:
            self._allocate()
            self._num_freed = self._arena.num_freed
            self._locations = [self._arena.encoded_location(half) for half in self._halves]
        return self._locations[self.turn % 2]

    def _allocate(self) -> None:
        if not self._halves:
            whole = self._arena.empty(2 * HALF_BYTES)
            self._halves = [whole[:HALF_BYTES], whole[HALF_BYTES:]]

    def close(self) -> None:
        """Frees the segment."""
        self._halves, self._views, self._locations = [], {}, []
        self._num_freed = -1


class MessageMemory:
    """Pieces of an arena for messages whose tensors are not in shared memory already.

    They are used again and again: fresh pages cost more than the copy into them, and a receiver
    that has mapped a piece once finds it again at once.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._idle: dict[int, list[Tensor]] = {}
        self._idle_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        """At least so many bytes; `give_back` them when the receiver has read them."""
        rounded = max(1 << (num_bytes - 1).bit_length(), _SMALLEST_BYTES)
        try:
            piece = self._idle[rounded].pop()
        except (KeyError, IndexError):
            return self._arena.empty(rounded)
        self._idle_bytes -= rounded
        return piece

    def give_back(self, piece: Tensor) -> None:
        """Keeps a piece for later messages, unless enough are kept."""
        if self._idle_bytes + piece.nbytes <= _MOST_IDLE_BYTES:
            self._idle_bytes += piece.nbytes
            self._idle.setdefault(piece.nbytes, []).append(piece)

    def close(self) -> None:
        """Frees everything."""
        self._idle.clear()


class Peer:
    """The segments of one other process, mapped here when first seen."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._mapped: dict[int, tuple[int, Tensor]] = {}
        self._views: dict[tuple[bytes, int, torch.dtype], Tensor] = {}
        self._num_freed = 0
        self._lock = threading.Lock()

    def view(self, encoded: bytes, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """The peer's memory at a location, writable."""
        key = (encoded, num_bytes, dtype)
        view = self._views.get(key)
        if view is None:
            with self._lock:
                view = of_dtype(self._find(Location.decode(encoded), num_bytes), dtype)
                if len(self._views) >= _MOST_VIEWS:
                    self._views.clear()
                self._views[key] = view
        return view

    def private_view(self, location: Location, shared: Tensor) -> PrivateView:
        """The peer's memory at a location that begins a page; ``shared`` is its usual view."""
        return PrivateView(self._path(location.fd), location.offset, shared)

    def _find(self, location: Location, num_bytes: int) -> Tensor:
        # A location names how much its owner has freed, so an old view is never found again.
        if location.num_freed != self._num_freed:
            self._forget_freed(location.num_freed)
        if location.inode not in self._mapped:
            self._mapped[location.inode] = (location.fd, self._map(location))
        memory = self._mapped[location.inode][1]
        return memory[location.offset : location.offset + num_bytes]

    def _map(self, location: Location) -> Tensor:
        fd = os.open(self._path(location.fd), os.O_RDWR)
        try:
            memory = mmap.mmap(fd, location.segment_bytes)
            _prefer_huge_pages(memory)
        finally:
            os.close(fd)
        return as_bytes(memory)

    def _path(self, fd: int) -> str:
        return f"/proc/{self._pid}/fd/{fd}"

    def _forget_freed(self, num_freed: int) -> None:
        self._num_freed = num_freed
        self._views.clear()
        for inode, (fd, _) in list(self._mapped.items()):
            try:
                is_there = os.stat(self._path(fd)).st_ino == inode
            except OSError:
                is_there = False
            if not is_there:
                del self._mapped[inode]

    def close(self) -> None:
        """Unmaps everything."""
        self._views.clear()
        self._mapped.clear()


def _prefer_huge_pages(memory: mmap.mmap) -> None:
    """Copies are much faster with huge pages, where the system has them for shared memory."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
