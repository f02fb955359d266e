"""A thread that looks after transfers, which block or run where Python cannot look around."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from shoal.comm.control.patience import Patience
from shoal.comm.control.plane import Control, Failure
from shoal.errors import PeerError, ShoalError
from shoal.system.deadline import wait_until

_LOOK_EVERY_S = 0.05
# A rank may fail right after its part of a transfer. What the others still need of it is on
# its way then, and they should get their result before they hear of the failure.
_GRACE_S = 0.25
# The transport may notice a death, or a peer's abort, before the news of it is here.
_NEWS_S = 0.5
_ABORT_AGAIN_S = 0.5


class Flight:
    """A transfer under way.

    Attributes:
        verdict: Why it was cut short, once it was.
    """

    def __init__(
        self,
        patience: Patience,
        others: Sequence[int],
        abort: Callable[[ShoalError], None],
        is_over: Callable[[], bool] = lambda: False,
        *,
        is_stubborn: bool = False,
    ) -> None:
        """``others`` are the world ranks it needs; ``is_over`` is for those nothing waits for.

        One that ``is_stubborn`` may survive an abort that comes at a bad moment, so it is aborted
        again and again until it is released.
        """
        self._patience, self._others, self._abort = patience, others, abort
        self.is_over, self.is_stubborn = is_over, is_stubborn
        self._abort_again_at = 0.0
        self.verdict: ShoalError | None = None
        self._begin = time.monotonic()

    def examine(self) -> ShoalError | None:
        """The error that makes further waiting pointless, or None."""
        if time.monotonic() - self._begin < _GRACE_S:
            return None
        try:
            self._patience.look(lambda: self._others, is_under_way=True)
        except ShoalError as error:
            return error
        return None

    def await_verdict(self) -> ShoalError | None:
        """Why the transport failed, if the news of it comes soon."""

        def is_known() -> bool:
            self.verdict = self.verdict or self.examine()
            return self.verdict is not None

        wait_until(is_known, _NEWS_S, poll_s=0.01)
        return self.verdict

    def cut_short(self, verdict: ShoalError) -> None:
        """Makes threads that wait for the transfer return, with an error of the transport's own."""
        self.verdict = verdict
        if time.monotonic() >= self._abort_again_at:
            self._abort(verdict)
            self._abort_again_at = time.monotonic() + _ABORT_AGAIN_S


class Watchdog:
    """Aborts transfers that have become pointless; one for each world.

    It sleeps while nothing is under way.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._flights: set[Flight] = set()
        self._lock = threading.Lock()
        self._is_needed = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, flight: Flight) -> None:
        """Looks after a transfer until it is released, or over."""
        with self._lock:
            self._flights.add(flight)
            if not self._is_needed.is_set():
                self._is_needed.set()
                if self._thread is None:
                    name = f"shoal-watchdog-{self._control.rank}"
                    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                    self._thread.start()

    def release(self, flight: Flight) -> None:
        """The transfer needs no looking after any more."""
        with self._lock:
            self._flights.discard(flight)

    def close(self) -> None:
        """Ends the thread. Twice is fine."""
        with self._lock:
            self._is_closed.set()
            self._is_needed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._is_closed.wait(_LOOK_EVERY_S):
            self._look()  # what it saw it forgets: a transfer has memory
            self._is_needed.wait()

    def _look(self) -> None:
        for flight in self._still_under_way():
            verdict = flight.verdict or flight.examine()
            if verdict is None:
                continue
            self._tell(verdict)
            flight.cut_short(verdict)
            if not flight.is_stubborn:
                self.release(flight)

    def _still_under_way(self) -> list[Flight]:
        with self._lock:
            self._flights = {flight for flight in self._flights if not flight.is_over()}
            if not self._flights and not self._is_closed.is_set():
                self._is_needed.clear()
            return list(self._flights)

    def _tell(self, verdict: ShoalError) -> None:
        """An abort looks to the peers like a broken connection: they must learn why first."""
        if isinstance(verdict, PeerError) and self._control.failure() is None:
            failure = Failure(verdict.rank, verdict.reason, time.monotonic_ns())
            self._control.publish(failure)
