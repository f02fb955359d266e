"""Messages of any length over a stream socket: a header that says kind and length, then bytes."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from shoal.errors import LaunchError

_MAGIC = b"shoal"
_HEADER = struct.Struct("=5sBQ")
_PIECE_BYTES = 1 << 20


class Frame(NamedTuple):
    """A whole message."""

    kind: int
    body: bytearray


def send_frame(channel: socket.socket, kind: int, body: bytes) -> None:
    """Sends one frame, waiting as long as the reader needs."""
    channel.sendall(_HEADER.pack(_MAGIC, kind, len(body)))
    channel.sendall(body)


class FrameReader:
    """Reads one frame from a non-blocking socket, in as many pieces as it comes in.

    Example:
        >>> reader = FrameReader()
        >>> while reader.frame is None and reader.advance(channel):
        ...     pass
    """

    def __init__(self) -> None:
        """Starts before the header."""
        self.frame: Frame | None = None
        self._kind = 0
        self._in_header = True
        self._expect(_HEADER.size)

    def advance(self, channel: socket.socket) -> bool:
        """Reads once; False when there is nothing more to come.

        Raises:
            BlockingIOError: Nothing is there now.
            LaunchError: Something other than a frame is there.
        """
        piece = self._view[self._filled : self._filled + _PIECE_BYTES]
        try:
            count = channel.recv_into(piece)
        except ConnectionError:  # the writer ended without reading all that was sent to it
            return False
        self._filled += count
        if count and self._filled == len(self._buffer):
            self._complete()
        return count > 0

    def _expect(self, size: int) -> None:
        """Makes room for the next part."""
        self._buffer = bytearray(size)
        self._view = memoryview(self._buffer)
        self._filled = 0

    def _complete(self) -> None:
        """Goes from the header to the body, or from the body to the frame."""
        if not self._in_header:
            self.frame = Frame(self._kind, self._buffer)
            return
        magic, self._kind, size = _HEADER.unpack(self._buffer)
        if magic != _MAGIC:
            raise LaunchError(
                f"a rank's channel should start with {_MAGIC!r}, and starts with {magic!r}; "
                "does something else write to that descriptor?"
            )
        self._in_header = False
        self._expect(size)
        if size == 0:
            self._complete()
