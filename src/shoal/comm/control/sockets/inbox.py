"""Addressed frames that have arrived, and the threads that wait for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from shoal.comm.control.patience import Patience
from shoal.comm.control.sockets.frames import Key
from shoal.errors import ClosedError

# Bad news wakes the waiting threads by itself; this is for warnings and deadlines.
_LOOK_EVERY_S = 0.02


class Inbox:
    """Hands each frame's content to the thread that waits for its key, now or later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contents: dict[Key, bytes] = {}
        self._waits: dict[Key, _Wait] = {}
        self._is_closed = False

    def put(self, key: Key, content: bytes) -> None:
        """Keeps a content; wakes the thread that waits for it once that misses nothing else."""
        with self._lock:
            wait = self._waits.pop(key, None)
            if wait is None:
                self._contents[key] = content
            else:
                wait.take(key, content)

    def collect(self, wanted: Mapping[Key, int], patience: Patience) -> dict[int, bytes]:
        """Waits for contents, one from each of some ranks; ``wanted`` names the ranks by key."""
        wait = self._begin(wanted)
        try:
            while wait.missing:
                wait.wake.acquire(timeout=_LOOK_EVERY_S)
                if wait.missing:
                    self._check_open()
                    patience.look(lambda: self._missing(wait))
        finally:
            self._end(wait)
        return wait.contents

    def alarm(self) -> None:
        """Wakes every waiting thread, so that it looks around now."""
        with self._lock:
            for wait in self._waits.values():
                wait.rouse()

    def close(self) -> None:
        """Ends all waits, begun or to come."""
        self._is_closed = True
        self.alarm()

    def _begin(self, wanted: Mapping[Key, int]) -> _Wait:
        wait = _Wait(wanted)
        with self._lock:
            for key in wanted:
                content = self._contents.pop(key, None)
                if content is None:
                    self._waits[key] = wait
                else:
                    wait.take(key, content)
        return wait

    def _end(self, wait: _Wait) -> None:
        """Forgets a wait that was given up; one that was fulfilled is forgotten already."""
        if wait.missing:
            with self._lock:
                for key in wait.missing:
                    self._waits.pop(key, None)

    def _missing(self, wait: _Wait) -> list[int]:
        with self._lock:
            return list(wait.missing.values())

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this world was shut down while an operation was under way")


class _Wait:
    """One thread's wait. A bare lock wakes it: half the time of a condition or an event."""

    __slots__ = ("contents", "missing", "wake")

    def __init__(self, wanted: Mapping[Key, int]) -> None:
        self.missing = dict(wanted)
        self.contents: dict[int, bytes] = {}
        self.wake = threading.Lock()
        self.wake.acquire()

    def take(self, key: Key, content: bytes) -> None:
        """The content first: the waiting thread takes an empty ``missing`` for the end."""
        self.contents[self.missing[key]] = content
        del self.missing[key]
        if not self.missing:
            self.rouse()

    def rouse(self) -> None:
        if self.wake.locked():
            self.wake.release()
