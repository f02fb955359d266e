"""One rank's part in finding deadlocks: it shows its long waits and looks at the others'."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from shoal.comm.control.deadlock.finding import (
    Deadlock,
    decode_reason,
    encode_reason,
    report,
    stuck_with,
)
from shoal.comm.control.deadlock.record import Awaited, LongWait, RankProgress, WaitRecord
from shoal.comm.control.plane import Failure
from shoal.comm.work import WorkQueue
from shoal.errors import DeadlockError
from shoal.system.public_call import public_call
from shoal.system.site import is_torch
from shoal.system.threads import busy_threads

if TYPE_CHECKING:
    from shoal.comm.control.plane import Control

LONG_S = 1.0
"""A wait that takes longer is shown to the others."""
CERTAIN_S = 1.0
"""A deadlock is told if nothing about it has changed for so long."""
EXAMINE_EVERY_S = 0.1
_SERVANTS = ("shoal-control-", "shoal-watchdog-", "shoal-tensors-")


class Examined(NamedTuple):
    """What a waiting thread knows of its wait; ``what`` is a text for those without a stack."""

    awaited: Awaited
    group: str
    what: Callable[[], str]


class DeadlockWatch:
    """The long waits of the threads of one rank.

    Attributes:
        waits: By thread.
    """

    def __init__(self, control: Control, progress: Callable[[], RankProgress]) -> None:
        self.waits: dict[int, LongWait] = {}
        self._control, self._progress = control, progress
        self._texts: dict[int, Callable[[], str]] = {}
        self._serials = itertools.count(1)
        self._lock = threading.Lock()
        self._shown = b""
        self._suspects: dict[int, bytes] = {}
        self._since = 0.0
        self._is_told = False

    def examine(self, examined: Examined, missing: Sequence[int]) -> None:
        """For a thread that has waited long; raises if it waits in vain."""
        with self._lock:
            self._note(examined, tuple(missing))
            record = self._own_record()
            self._show(b"" if record is None else record.encode())
            verdict = self._verdict()
        if verdict is not None:
            self._is_told = True
            error = _as_error(verdict)
            self._control.publish(Failure(self._control.rank, error.reason, time.monotonic_ns()))
            raise error

    def end(self) -> None:
        """The calling thread's wait is over."""
        with self._lock:
            self._texts.pop(threading.get_ident(), None)
            if self.waits.pop(threading.get_ident(), None) is not None:
                self._show(b"")
                self._suspects = {}

    def check_verdict(self, failure: Failure) -> None:
        """Raises if a failure tells of a deadlock that this rank is part of."""
        verdict = decode_reason(failure.reason)
        if verdict is not None:
            self._is_told |= self._control.rank in verdict.ranks
            if self._is_told:  # also by another thread: operations are queued behind each other
                raise _as_error(verdict)

    def call_of(self, rank: int) -> str | None:
        """The public call that a blocked rank is in."""
        record = WaitRecord.decode(self._control.shown_waits().get(rank, b""))
        return None if record is None else record.call

    def _note(self, examined: Examined, missing: tuple[int, ...]) -> None:
        thread = threading.get_ident()
        known = self.waits.get(thread)
        is_same = known is not None and known.awaited == examined.awaited
        serial = known.serial if known is not None and is_same else next(self._serials)
        self.waits[thread] = LongWait(serial, examined.awaited, missing, examined.group)
        self._texts[thread] = examined.what

    def _show(self, record: bytes) -> None:
        if record != self._shown:
            self._shown = record
            self._control.show_wait(record)

    def _verdict(self) -> Deadlock | None:
        """Who is stuck with this rank, once that is certain."""
        shown = {**self._control.shown_waits(), self._control.rank: self._shown}
        found = {rank: WaitRecord.decode(data) for rank, data in shown.items()}
        records = {rank: record for rank, record in found.items() if record is not None}
        stuck = stuck_with(self._control.rank, records)
        suspects = {rank: shown[rank] for rank in stuck}
        now = time.monotonic()
        if suspects != self._suspects:
            self._suspects, self._since = suspects, now
        if not suspects or now - self._since < CERTAIN_S:
            return None
        return Deadlock(tuple(stuck), report({rank: records[rank] for rank in stuck}))

    # This rank's own threads ------------------------------------------------------------

    def _own_record(self) -> WaitRecord | None:
        """None if some thread of this rank, or a handler of a timer, may go on by itself."""
        if signal.getitimer(signal.ITIMER_REAL)[0] > 0:
            return None
        busy = busy_threads(self._is_at_rest)
        spent_ns = 0
        if busy:
            frames = sys._current_frames()
            if busy != [threading.main_thread().ident] or not self._awaits_autograd(frames):
                return None
            spent_ns = time.clock_gettime_ns(time.pthread_getcpuclockid(busy[0]))
        waits = sorted(self.waits.values(), key=lambda wait: wait.serial)
        return WaitRecord(waits, self._progress(), self._call(), spent_ns)

    def _is_at_rest(self, thread: int, name: str, frame: FrameType) -> bool:
        if thread in self.waits or name.startswith(_SERVANTS):
            return True
        return frame.f_code is WorkQueue._run.__code__  # it has nothing to do

    def _awaits_autograd(self, frames: dict[int, FrameType]) -> bool:
        """Whether the main thread is in a backward that a thread of torch's carries out.

        That thread is in a hook, and waits there, since nobody but the main thread is busy. The
        main thread may have work of its own in the backward, so the processor time that it has
        spent is part of the record.
        """
        main = frames.get(threading.main_thread().ident or 0)
        if main is None or main.f_code.co_name != "_engine_run_backward":
            return False
        threads = threading.enumerate()
        of_python = {each.ident for each in threads if not each.name.startswith("Dummy-")}
        return is_torch(main.f_code.co_filename) and not of_python.issuperset(frames)

    def _call(self) -> str:
        frames = sys._current_frames()
        for thread in (threading.main_thread().ident or 0, *self.waits):
            wait = self.waits.get(thread)
            group = "world" if wait is None or wait.awaited.group_id == 0 else "group"
            call = public_call(frames.get(thread), group)
            if call is not None:
                return call
        return next(iter(self._texts.values()))()


def _as_error(verdict: Deadlock) -> DeadlockError:
    error = DeadlockError(verdict.text)
    error.reason = encode_reason(verdict)
    return error
