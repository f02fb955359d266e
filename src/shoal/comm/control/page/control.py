"""The control plane between ranks of one host: who is alive, who failed, where everybody is.

[Note: memory order]
Ranks publish by writing data and then a counter, and read the counter before the data.
Nothing in Python fences memory, so this is right only where the processor keeps stores in
order and loads in order. x86 does; ARM does not, and there the page refuses to start.
No step relies on a store being seen before a later load (the one order x86 gives up).
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import threading
import time
from collections.abc import Sequence
from functools import lru_cache

from shoal.comm.control.deadlock.record import MOST_RECORD_BYTES
from shoal.comm.control.page.page import MAX_GROUPS, WAIT_AT, WORD, Page, PageChannel
from shoal.comm.control.plane import Control, Failure, absence_text
from shoal.errors import BackendUnavailableError, ShoalError

_JOINING, _RUNNING, _LEFT, _FAILED = range(4)
# Words of a rank's row in the roster; texts follow them.
_PID, _STATE, _FAILED_AT, _CULPRIT, _IS_ECHO = range(5)
_WHERE_AT, _WHERE_BYTES = 64, 960
_REASON_AT, _REASON_BYTES = 1024, 7168
_STOPPED_FOR_S = 1.0
_LOOK_FOR_DEATHS_EVERY_S = 0.01


class PageControl(Control):
    """The control plane of a world whose ranks are processes of one host."""

    is_one_host = True

    def __init__(
        self, page: Page, rank: int, pids: Sequence[int], *, ranks_read_directly: bool = False
    ) -> None:
        """``pids`` are the processes of all ranks, by rank.

        ``ranks_read_directly`` if each can read the others' memory, see `process_memory.py`.
        """
        self.rank, self.size = rank, len(pids)
        self._page = page
        self.pids = pids
        self.ranks_read_directly = ranks_read_directly
        self._words = page.words
        self._row = page.layout.roster(rank)
        self._death = DeathWatch({pid: peer for peer, pid in enumerate(pids) if pid != os.getpid()})
        self._next_look_for_deaths = 0.0
        self._stopped: dict[int, tuple[float, bytes]] = {}
        self._is_closed = False
        self._noted = ""
        self._words[self._row // WORD + _PID] = os.getpid()
        self._set_state(_RUNNING)

    def _set_state(self, state: int) -> None:
        self._words[self._row // WORD + _STATE] = state

    def channel(self, group_id: int, ranks: Sequence[int]) -> PageChannel:
        """A row per member in the channel area; no communication needed."""
        if group_id >= MAX_GROUPS:
            raise ShoalError(
                f"this world has made {MAX_GROUPS} groups, which is all there is room for: "
                "make groups once and keep them instead of making them in a loop"
            )
        return PageChannel(self._page, group_id, ranks, self.rank)

    def publish(self, failure: Failure) -> None:
        """Writes the failure into this rank's row, then raises the world's alarm."""
        self._record(self.rank, failure)

    def _record(self, reporter: int, failure: Failure) -> None:
        if self._is_closed:
            return
        row = self._page.layout.roster(reporter)
        word = row // WORD
        if self._words[word + _STATE] == _FAILED:
            return
        self._write_reason(row, failure.reason)
        self._words[word + _FAILED_AT] = failure.time_ns
        self._words[word + _CULPRIT] = failure.rank
        self._words[word + _IS_ECHO] = failure.is_echo
        self._words[word + _STATE] = _FAILED
        self._words[0] = 1

    def failure(self) -> Failure | None:
        """The first failure; deaths of ranks are recorded here."""
        now = time.monotonic()
        if now >= self._next_look_for_deaths:
            self._next_look_for_deaths = now + _LOOK_FOR_DEATHS_EVERY_S
            self._record_deaths()
        if not self._words[0]:
            return None
        failures = [self._read_failure(rank) for rank in range(self.size)]
        known = [failure for failure in failures if failure is not None]
        return min(known, key=lambda failure: (failure.is_echo, failure.time_ns), default=None)

    def _record_deaths(self) -> None:
        for rank in self._death.died():
            if self._state(rank) not in (_LEFT, _FAILED):
                reason = f"its process (pid {self.pids[rank]}) died without an exception"
                self._record(rank, Failure(rank, reason, time.monotonic_ns()))

    def _state(self, rank: int) -> int:
        return self._words[self._page.layout.roster(rank) // WORD + _STATE]

    def _read_failure(self, reporter: int) -> Failure | None:
        row = self._page.layout.roster(reporter)
        word = row // WORD
        if self._words[word + _STATE] != _FAILED:
            return None
        reason = self._read_reason(reporter)
        culprit, is_echo = self._words[word + _CULPRIT], bool(self._words[word + _IS_ECHO])
        return Failure(culprit, reason, self._words[word + _FAILED_AT], is_echo)

    def _write_reason(self, row: int, text: str) -> None:
        data = text.encode(errors="replace")[: _REASON_BYTES - 4]
        self._page.write(row + _REASON_AT, data, _REASON_BYTES)

    def _read_reason(self, rank: int) -> str:
        row = self._page.layout.roster(rank)
        return self._page.read(row + _REASON_AT).decode(errors="replace")

    def absence(self, rank: int) -> str | None:
        """A rank that left, or whose process has been stopped for more than a moment."""
        if self._state(rank) == _LEFT:
            return absence_text(self._read_reason(rank))
        spent = spent_if_stopped(self.pids[rank])
        if spent is None:
            self._stopped.pop(rank, None)
            return None
        now = time.monotonic()
        since, spent_then = self._stopped.get(rank, (now, spent))
        if spent != spent_then:  # it has run in the meantime: this is another stop
            since = now
        self._stopped[rank] = (since, spent)
        if now - since < _STOPPED_FOR_S:
            return None
        return f"its process (pid {self.pids[rank]}) is stopped (SIGSTOP or a debugger)"

    def note(self, where: str) -> None:
        """Writes into this rank's row."""
        if where != self._noted:  # most of what a rank does it does again and again
            self._noted = where
            self._page.write(self._row + _WHERE_AT, _clipped(where), _WHERE_BYTES)

    def whereabouts(self, rank: int) -> str:
        """Reads from the other's row; it may be writing, so this is a hint only."""
        data = self._page.read(self._page.layout.roster(rank) + _WHERE_AT)
        return data.decode(errors="replace") or "its own code, before any operation"

    def show_wait(self, record: bytes) -> None:
        """The counter is odd while the record is written."""
        if self._is_closed:
            return
        offset = self._page.layout.wait(self.rank)
        counter = offset // WORD
        self._words[counter] += 1
        self._page.write(offset + WAIT_AT, record, MOST_RECORD_BYTES + 4)
        self._words[counter] += 1

    def shown_waits(self) -> dict[int, bytes]:
        """Those that are not being written just now."""
        shown = ((rank, self._shown_wait(rank)) for rank in range(self.size))
        return {rank: record for rank, record in shown if record}

    def _shown_wait(self, rank: int) -> bytes:
        offset = self._page.layout.wait(rank)
        counter = offset // WORD
        before = self._words[counter]
        record = self._page.read(offset + WAIT_AT) if before % 2 == 0 else b""
        return record if self._words[counter] == before else b""

    def leave(self, how: str = "") -> None:
        """Marks this rank as gone, unless it failed."""
        if not self._is_closed and self._state(self.rank) != _FAILED:
            self._write_reason(self._row, how)
            self._set_state(_LEFT)

    def close(self) -> None:
        """Closes the death watch and unmaps the page."""
        if not self._is_closed:
            self._is_closed = True
            self._death.close()
            self._page.close()


@lru_cache(maxsize=1024)
def _clipped(where: str) -> bytes:
    return where.encode(errors="replace")[: _WHERE_BYTES - 4]


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


def is_supported() -> bool:
    """Whether a control page works here: see [Note: memory order]."""
    return platform.system() == "Linux" and platform.machine() in ("x86_64", "AMD64")


def check_platform() -> None:
    """Raises where a control page cannot work."""
    if not is_supported():
        raise BackendUnavailableError(
            f"shared memory between ranks needs Linux on x86-64; this is {platform.system()} on "
            f"{platform.machine()}. Use backend='gloo' (processes) or backend='memory' (threads)."
        )
