"""How to wait: spin, then yield, then sleep, and never for ever."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence

from shoal.comm.control.plane import HIDDEN, Control, Failure
from shoal.errors import DeadlineError, PeerError
from shoal.system.cores import num_cores
from shoal.system.rank_names import name_ranks

logger = logging.getLogger("shoal")

# With a core for each rank an answer is microseconds away, so spinning pays; with fewer
# cores than ranks it only keeps the rank we wait for from running.
_CORES = num_cores()
_SPINS = 1000
_YIELDS = 400
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3
_LOOK_EVERY_S = 0.02
FIRST_WARNING_S = 10.0


class Patience:
    """The wait of one rank in one operation.

    `pause` is called after each fruitless poll. It decides how to pass the time, looks
    around for ranks that failed or left, warns of late ones, and raises at the deadline.
    """

    __slots__ = (
        "_begin", "_control", "_deadline", "_first_poll", "_next_look", "_polls", "_ranks",
        "_sleep", "_spins", "_warn_at", "_what",
    )  # fmt: skip

    def __init__(
        self,
        control: Control,
        what: Callable[[], str],
        ranks: Sequence[int],
        timeout: float,
        *,
        eager: bool = True,
    ) -> None:
        """``what`` describes the operation; it is only called when there is something to say.

        A wait that is not ``eager`` sleeps at once: a background thread that spins would keep
        the interpreter from the thread that computes.
        """
        self._control = control
        self._what = what
        self._ranks = ranks
        self._begin = begin = time.monotonic()
        self._deadline = begin + timeout
        self._warn_at = begin + (FIRST_WARNING_S if timeout > 2 * FIRST_WARNING_S else timeout / 2)
        self._next_look = begin + _LOOK_EVERY_S
        self._sleep = _FIRST_SLEEP_S
        self._spins = _SPINS if len(ranks) <= _CORES else 0
        self._first_poll = 0 if eager else self._spins + _YIELDS
        self._polls = self._first_poll

    def check(self) -> None:
        """Raises if the world has failed already: nothing can be begun in it any more."""
        failure = self._control.failure()
        if failure is not None:
            raise PeerError(failure.rank, failure.reason, self._what())

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

    def look(self, missing: Callable[[], Sequence[int]]) -> None:
        """Raises if the wait is pointless or too long; warns if it is getting long."""
        now = time.monotonic()
        self._next_look = now + _LOOK_EVERY_S
        failure = self._control.failure() or self._absence(missing)
        # Whoever failed or left may have arrived first: what counts is whether it is missing.
        late = missing()
        if not late:
            return
        if failure is not None:
            raise PeerError(failure.rank, failure.reason, self._described(late, now))
        if now >= self._deadline:
            raise DeadlineError(self._described(late, now) + "\nThe deadline has passed.")
        if now >= self._warn_at:
            self._warn_at = now + 2 * (now - self._begin)
            logger.warning("still waiting: %s", self._described(late, now))

    def _absence(self, missing: Callable[[], Sequence[int]]) -> Failure | None:
        for rank in missing():
            reason = self._control.absence(rank)
            if reason is not None:
                return Failure(rank, reason, 0)
        return None

    def _described(self, late: Sequence[int], now: float) -> str:
        arrived = [rank for rank in self._ranks if rank not in set(late)]
        lines = [
            f"{self._what()}, for {now - self._begin:.1f} s",
            f"  arrived: {name_ranks(arrived)}; missing: {name_ranks(late)}",
        ]
        lines += [f"  rank {rank} was last in {self._whereabouts(rank)}" for rank in late]
        return "\n".join(lines)

    def _whereabouts(self, rank: int) -> str:
        return self._control.whereabouts(rank).partition(HIDDEN)[0]
