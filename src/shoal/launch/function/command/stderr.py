"""A command's standard error: passed on as it comes, and its end kept for error messages."""

from __future__ import annotations

import contextlib
import os

_KEPT_BYTES = 4096
_PIECE_BYTES = 1 << 16


class CapturedStderr:
    """A pipe whose write end a command gets as its standard error.

    Example:
        >>> stderr = CapturedStderr()
        >>> os.write(stderr.write_end, b"oops")
        4
        >>> stderr.drain()
        >>> stderr.text
        'oops'
    """

    def __init__(self) -> None:
        """Opens the pipe."""
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._kept = b""

    @property
    def text(self) -> str:
        """The last lines that came."""
        return self._kept.decode(errors="replace").strip()

    def fileno(self) -> int:
        """The end to watch: readable when there is something to pass on."""
        return self._read_end

    def hand_over(self) -> None:
        """Closes the write end here, once the command has it, so that its end can be seen."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def copy(self) -> bool:
        """Passes on one piece; False when no more will come."""
        piece = os.read(self._read_end, _PIECE_BYTES)
        self._kept = (self._kept + piece)[-_KEPT_BYTES:]
        with contextlib.suppress(OSError):  # a closed standard error is no reason to fail
            os.write(2, piece)
        return bool(piece)

    def drain(self) -> None:
        """Passes on all that is there now."""
        with contextlib.suppress(BlockingIOError):
            while self.copy():
                pass

    def close(self) -> None:
        """Gives both ends back."""
        self.hand_over()
        if self._read_end >= 0:
            os.close(self._read_end)
            self._read_end = -1
