"""Processes that are stopped (SIGSTOP): they hear no signal but SIGCONT and SIGKILL."""

from __future__ import annotations

import time
from collections.abc import Iterable

_MOMENT_S = 0.5


class StoppedProcesses:
    """Finds those that have been stopped for more than a moment, from one look to the next.

    One that a debugger holds is not meant: someone is at work there.
    """

    def __init__(self, moment: float = _MOMENT_S) -> None:
        self._moment = moment
        self._since: dict[int, float] = {}

    def among(self, pids: Iterable[int]) -> set[int]:
        """The pids of processes that were stopped at all looks of the last moment."""
        now = time.monotonic()
        self._since = {pid: self._since.get(pid, now) for pid in pids if _is_stopped(pid)}
        return {pid for pid, since in self._since.items() if now - since >= self._moment}


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b") ")[2].startswith(b"T")
    except OSError:
        return False
