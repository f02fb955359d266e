"""The page itself: where things are on it, and how texts and counters are read and written."""

from __future__ import annotations

import mmap
import os
import struct
import threading

from shoal.errors import ShoalError

LINE = 64
WORD = 8
MAX_GROUPS = 1024
RING = 8  # headers that a rank keeps in each group, see [Note: the ring of headers]
MESSAGES = 256
MESSAGE_HEADER = 768
_ROSTER_ROW = 8192
_LENGTH = struct.Struct("<I")


class PageLayout:
    """Where things are on the page of a world of ``size`` ranks. Untouched parts cost nothing."""

    def __init__(self, size: int) -> None:
        """Sizes everything by the number of ranks."""
        self.size = size
        self.header_bytes = 1024 + 16 * size
        self.channel_row = 2 * LINE + RING * self.header_bytes
        self.channel_row += -self.channel_row % LINE
        self._message_row = LINE + 2 * MESSAGE_HEADER
        self._roster = LINE
        self._channels = self._roster + size * _ROSTER_ROW
        self._states = self._channels + MAX_GROUPS * size * self.channel_row
        self._messages = self._states + size * size * MESSAGES * WORD
        self.total_bytes = self._messages + size * size * MESSAGES * self._message_row

    def roster(self, rank: int) -> int:
        """Offset of a rank's row of the roster."""
        return self._roster + rank * _ROSTER_ROW

    def channel(self, group_id: int, rank: int) -> int:
        """Offset of a rank's row in a group's channel."""
        return self._channels + (group_id * self.size + rank) * self.channel_row

    def message(self, source: int, destination: int, index: int) -> int:
        """Offset of one of the open messages from one rank to another."""
        box = source * self.size + destination
        return self._messages + (box * MESSAGES + index) * self._message_row

    def message_states(self, source: int, destination: int) -> int:
        """Offset of the states of all these messages, side by side: they are searched often."""
        return self._states + (source * self.size + destination) * MESSAGES * WORD


class Page:
    """The mapped memory: words that are counters and flags, and texts between them."""

    def __init__(self, fd: int, size: int) -> None:
        """Maps the file; the descriptor stays the caller's."""
        self.layout = PageLayout(size)
        self._map = mmap.mmap(fd, self.layout.total_bytes)
        self.words = memoryview(self._map).cast("Q")
        self.lock = threading.Lock()

    @staticmethod
    def create(size: int) -> int:
        """A new anonymous file of the right size; it vanishes with its last user."""
        fd = os.memfd_create("shoal-control")
        os.ftruncate(fd, PageLayout(size).total_bytes)
        return fd

    def write(self, offset: int, data: bytes, capacity: int) -> None:
        """Writes a text that must fit."""
        if len(data) + 4 > capacity:
            raise ShoalError(
                f"an operation's header takes {len(data)} bytes where {capacity - 4} fit: "
                "a tensor with this many dimensions or split sizes cannot be described"
            )
        self._map[offset : offset + 4 + len(data)] = _LENGTH.pack(len(data)) + data

    def read(self, offset: int) -> bytes:
        """Reads a text."""
        start = offset + 4
        (length,) = _LENGTH.unpack(self._map[offset:start])
        return self._map[start : start + length]

    def close(self) -> None:
        """Unmaps the memory; twice is fine."""
        self.words.release()
        self._map.close()
