"""What the system knows of other processes of this host: whether they died, or are stopped."""

from __future__ import annotations

import contextlib
import os
import select
import threading


class DeathWatch:
    """Notices the end of other processes without their help, through pidfds."""

    def __init__(self, ranks_by_pid: dict[int, int]) -> None:
        self._dead: set[int] = set()
        self._fds: dict[int, int] = {}
        self._poll = select.poll()
        self._lock = threading.Lock()
        for pid, rank in ranks_by_pid.items():
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead.add(rank)
                continue
            self._fds[fd] = rank
            self._poll.register(fd, select.POLLIN)

    def died(self) -> set[int]:
        """The ranks whose processes have ended."""
        with self._lock:
            for fd, _ in self._poll.poll(0):
                self._poll.unregister(fd)
                self._dead.add(self._fds.pop(fd))
                os.close(fd)
            return set(self._dead)

    def close(self) -> None:
        """Lets go of the descriptors."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def spent_if_stopped(pid: int) -> bytes | None:
    """The processor time that a stopped process has spent; None if it is not stopped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state, *fields = stat.read().rpartition(b") ")[2].split()
        if state not in (b"T", b"t"):
            return None
        spent = b" ".join(fields[10:12])  # all threads, in coarse ticks
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/schedstat", "rb") as exact:
            spent += exact.read()  # the main thread, in nanoseconds; not every kernel has it
        return spent
    except OSError:
        return None
