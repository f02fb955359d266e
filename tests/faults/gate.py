"""A gate between ranks, be they threads or processes: one opens it, others wait for that."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass

PATIENCE_S = 30.0


@dataclass(frozen=True)
class Gate:
    """A named pipe; each `open` lets one `wait` through, whichever comes first."""

    path: str

    def make(self) -> int:
        """Makes the pipe; while the returned descriptor is open, nothing in it is lost."""
        os.mkfifo(self.path)
        return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def open(self, times: int = 1) -> None:
        """Lets that many through."""
        fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"." * times)
        finally:
            os.close(fd)

    def wait(self, seconds: float = PATIENCE_S) -> None:
        """Returns once the gate was opened."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not select.select([fd], [], [], seconds)[0]:
                raise TimeoutError(f"{self.path} was not opened within {seconds} s")
            os.read(fd, 1)
        finally:
            os.close(fd)
