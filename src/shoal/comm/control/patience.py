"""How to wait: spin, then yield, then sleep, and never for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from shoal.comm.control.deadlock import watch
from shoal.comm.control.deadlock.record import Awaited
from shoal.comm.control.deadlock.watch import Examined
from shoal.comm.control.plane import HIDDEN, Control, Failure
from shoal.system.deadline import Deadline, operation_text
from shoal.system.libc import num_cores

# With a core for each rank an answer is microseconds away, so spinning pays; with fewer
# cores than ranks it only keeps the rank we wait for from running.
_CORES = num_cores()
_SPINS = 1000
_YIELDS = 400
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3
_LOOK_EVERY_S = 0.02


class Patience:
    """The wait of one rank in one operation.

    `pause` is called after each fruitless poll. It decides how to pass the time, looks
    around for ranks that failed or left, warns of late ones, and raises at the deadline.
    """

    __slots__ = (
        "_begin", "_control", "_deadline", "_examine_at", "_first_poll", "_group", "_next_look",
        "_polls", "_ranks", "_seconds", "_sleep", "_spins", "_what", "awaited",
    )  # fmt: skip

    def __init__(
        self,
        control: Control,
        what: Callable[[], str],
        ranks: Sequence[int],
        timeout: float,
        *,
        eager: bool = True,
        awaited: tuple[str, int, int, int] | None = None,
        group: str = "",
    ) -> None:
        """``what`` describes the operation; it is only called when there is something to say.

        A wait that is not ``eager`` sleeps at once: a background thread that spins would keep
        the interpreter from the thread that computes. ``awaited`` is what it waits for, in a
        ``group``: the fields of an `Awaited`, which takes longer to make. None for waits that end
        by themselves, which no deadlock is made of.
        """
        self._begin = time.monotonic()
        self._control, self._what, self._ranks = control, what, ranks
        self._seconds = timeout
        self.awaited, self._group = awaited, group
        self._examine_at = 0.0
        self._deadline: Deadline | None = None
        self._next_look = self._begin + _LOOK_EVERY_S
        self._sleep = _FIRST_SLEEP_S
        self._spins = _SPINS if len(ranks) <= _CORES else 0
        self._first_poll = 0 if eager else self._spins + _YIELDS
        self._polls = self._first_poll

    def check(self) -> None:
        """Raises if the world has failed already: nothing can be begun in it any more."""
        failure = self._control.failure()
        if failure is not None:
            self._check_verdict(failure)
            raise self._control.lost(failure.rank, failure.reason, self._what())

    def pause(self, missing: Callable[[], Sequence[int]]) -> None:
        """Passes a moment. ``missing`` tells which world ranks have not arrived yet."""
        self._polls += 1
        if self._polls <= self._spins:
            return
        if self._polls <= self._spins + _YIELDS:
            os.sched_yield()
            if self._polls % 64:
                return
        if time.monotonic() >= self._next_look:
            self.look(missing)
        if self._polls > self._spins + _YIELDS:
            time.sleep(self._sleep)
            self._sleep = min(self._sleep * 1.2, _LONGEST_SLEEP_S)
        else:
            time.sleep(0)  # gives up the GIL too: a thread of this rank may be what we wait for

    def made_progress(self) -> None:
        """Spins again: a peer has just moved, so the next step is near."""
        self._polls = self._first_poll
        self._sleep = _FIRST_SLEEP_S

    def look(self, missing: Callable[[], Sequence[int]], *, is_under_way: bool = False) -> None:
        """Raises if the wait is pointless or too long; warns if it is getting long.

        What ``is_under_way`` waits for data, not for a rank to come: that is no deadlock.
        """
        now = time.monotonic()
        self._next_look = now + _LOOK_EVERY_S
        failure = self._control.failure() or self._absence(missing)
        # A rank that failed or left may have arrived before that: what counts is who is missing.
        late = missing()
        if not late:
            return
        if failure is not None:
            self._check_verdict(failure)
            text = self._text(now - self._begin, late)
            raise self._control.lost(failure.rank, failure.reason, text)
        is_long = now - self._begin >= watch.LONG_S
        if is_long and self.awaited is not None and not is_under_way:
            self._examine(Awaited(*self.awaited), late, now)
        if self._deadline is None:
            self._deadline = Deadline(self._seconds, self._begin)
        self._deadline.enforce(self._text, late)

    def _examine(self, awaited: Awaited, late: Sequence[int], now: float) -> None:
        """Raises if it is known that this wait will not end."""
        deadlocks = self._control.deadlocks
        if deadlocks is not None and now >= self._examine_at:
            self._examine_at = now + watch.EXAMINE_EVERY_S
            deadlocks.examine(Examined(awaited, self._group, self._what), late)

    def _check_verdict(self, failure: Failure) -> None:
        if self._control.deadlocks is not None:
            self._control.deadlocks.check_verdict(failure)

    def _absence(self, missing: Callable[[], Sequence[int]]) -> Failure | None:
        for rank in missing():
            reason = self._control.absence(rank)
            if reason is not None:
                return Failure(rank, reason, 0)
        return None

    def _text(self, waited: float, late: Sequence[int]) -> str:
        return operation_text(waited, self._what(), self._ranks, late, self._whereabouts)

    def _whereabouts(self, rank: int) -> str:
        where = self._control.whereabouts(rank).partition(HIDDEN)[0]
        deadlocks = self._control.deadlocks
        call = None if deadlocks is None else deadlocks.call_of(rank)
        return where if call is None else f"{where}, in {call}"
