"""What a member of an elastic run says of its own progress: how much of its time it has waited."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shoal.comm.backend import Backend

_EVERY_S = 2.0


class ProgressTeller:
    """Tells the holder now and then; to be called often."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self._since, self._waited = 0.0, 0.0

    def begin(self, backend: Backend) -> None:
        """A new world: what was before counts no more."""
        self._since, self._waited = time.monotonic(), _waited(backend)

    def look(self, backend: Backend, generation: int) -> None:
        """Tells, if it is time to."""
        seconds = time.monotonic() - self._since
        if seconds < _EVERY_S:
            return
        waiting = max(0.0, _waited(backend) - self._waited)  # a user may reset the counters
        self.begin(backend)
        share = min(1.0, waiting / seconds)
        self._tell({"kind": "progress", "generation": generation, "waiting": share})


def _waited(backend: Backend) -> float:
    return sum(counter.waiting_seconds for counter in backend.stats().values())
