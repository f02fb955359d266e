"""Bytes in an anonymous file, so that any number of them cross a socket as one descriptor."""

from __future__ import annotations

import os
from typing import Self


class MemoryFile:
    """An anonymous file in memory; it is gone when the last descriptor of it is.

    A memfd does not count against the size of `/dev/shm`, which containers keep small.

    Example:
        >>> with MemoryFile(b"hello") as file:
        ...     MemoryFile.read(file.fileno())
        b'hello'
    """

    def __init__(self, data: bytes) -> None:
        self._fd = os.memfd_create("shoal", os.MFD_CLOEXEC)
        try:
            _write_all(self._fd, data)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """The descriptor to hand over."""
        return self._fd

    def close(self) -> None:
        """Gives this descriptor back; descriptors held elsewhere stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @staticmethod
    def read(fd: int) -> bytes:
        """All bytes of the file behind `fd`."""
        size = os.fstat(fd).st_size
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            # Processes that got the descriptor share one file offset, so it must not be used.
            count = os.preadv(fd, [view[done:]], done)
            if count == 0:
                raise EOFError(f"the file should hold {size} bytes, and ended after {done}")
            done += count
        return bytes(data)


def _write_all(fd: int, data: bytes) -> None:
    """Writes in as many pieces as the kernel likes (at most 2 GiB go at once)."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.write(fd, view[done:])
