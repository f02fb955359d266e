"""Where a rank's output goes: to the screen with everyone's, or to a file of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from shoal.launch.script.output import Sink, Source, Voice

_TAIL_BYTES = 64 * 1024


class RankOutput(Protocol):
    """The two ends of a rank's output: descriptors that it inherits, and what became of them."""

    fds: tuple[int, int]
    """The rank's stdout and stderr."""

    def started(self) -> None:
        """The rank has its own copies: closes ours, so that its end is the end of the stream."""

    def tail(self) -> bytes:
        """The last of what the rank wrote to stderr."""

    def close(self) -> None:
        """The rank has ended: passes on what is left."""


class ScreenOutput:
    """Lines on the launcher's own stdout and stderr, with a label before each."""

    def __init__(self, label: str, out: Sink, err: Sink) -> None:
        """Opens a pipe for each stream and begins to read."""
        read_out, write_out = os.pipe()
        read_err, write_err = os.pipe()
        self.fds = (write_out, write_err)
        self._out = Source(Voice(label, "stdout"), read_out, out)
        self._err = Source(Voice(label, "stderr"), read_err, err)

    def started(self) -> None:
        """Closes the ends that the rank writes to."""
        for fd in self.fds:
            os.close(fd)

    def tail(self) -> bytes:
        """The last of what came through stderr."""
        return self._err.tail()

    def close(self) -> None:
        """Prints what is left in the pipes and closes them."""
        self._out.close()
        self._err.close()


class FileOutput:
    """A file that gets both streams in the order they were written; no launcher in between."""

    def __init__(self, path: Path) -> None:
        """Opens the file afresh."""
        self._path = path
        self._file = path.open("wb")
        self.fds = (self._file.fileno(), self._file.fileno())

    def started(self) -> None:
        """Closes the file here."""
        self._file.close()

    def tail(self) -> bytes:
        """The end of the file."""
        with self._path.open("rb") as file:
            file.seek(max(0, self._path.stat().st_size - _TAIL_BYTES))
            return file.read()

    def close(self) -> None:
        """Nothing is left to pass on."""
