"""A traceback at the end of a rank's stderr is kept from the screen for a while.

If the rank ends with it, it is told once in the summary, for all ranks that say the same. If the
rank goes on, it goes to the screen after a moment, as all other lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_BEGINNINGS = (
    b"Traceback (most recent call last):",
    b"  + Exception Group Traceback",
    b"Exception ignored ",
)
MOMENT_SECONDS = 2.0
# A rank that has left a record of its failure will end, but others may have to be waited for.
LONGEST_SECONDS = 6.0
_MOST_LINES = 2000


class HeldTraceback:
    """The lines of one rank from a traceback on; `show` gets them if they are not asked for."""

    def __init__(self, show: Callable[[bytes], None], patience: Callable[[], float]) -> None:
        """``patience`` says how many seconds a traceback may be kept, as things are now."""
        self._show = show
        self._patience = patience
        self._lines: list[bytes] = []
        self._begin = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def take(self, line: bytes) -> bool:
        """Whether the line, or part of one, was kept."""
        if not self._lines:
            if not line.startswith(_BEGINNINGS):
                return False
            self._begin = asyncio.get_running_loop().time()
            self._look_later()
        self._lines.append(line)
        if len(self._lines) > _MOST_LINES:
            self.release()
        return True

    def text(self) -> str:
        """What is kept now."""
        return b"".join(self._lines).decode(errors="replace")

    def release(self) -> None:
        """Shows what was kept."""
        lines = self._lines
        self.drop()
        for line in lines:
            self._show(line)

    def drop(self) -> None:
        """Forgets what was kept: it has been told."""
        self._lines = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(MOMENT_SECONDS, self._look)

    def _look(self) -> None:
        age = asyncio.get_running_loop().time() - self._begin
        if age + MOMENT_SECONDS <= self._patience():
            self._look_later()
        else:
            self.release()
