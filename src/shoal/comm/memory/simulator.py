"""A world inside one process: ranks are threads that take turns.

[Note: the baton]
One rank runs at a time. It keeps the baton until it has to wait for others, then hands it
to the next rank that can run. So a run repeats exactly, a debugger shows one thing at a
time, and the moment no rank can run is the moment a deadlock is known. The generators of
random numbers are shared by all threads of a process, so they are swapped with the baton.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Sequence

from shoal.comm.control.plane import Failure
from shoal.comm.memory.meeting import Meeting
from shoal.errors import DeadlineError, DeadlockError, PeerError
from shoal.system.deadline import Deadline, abandoned_error, turn_text
from shoal.system.rank_names import name_ranks
from shoal.system.site import is_ours
from shoal.torch_support.random_state import RandomState

# How long a late rank may still take to end once the others have given up on it.
_GRACE_S = 2.0
_LOOK_EVERY_S = 1.0
_LEFT = "it has left: it returned without taking part"


class Simulator:
    """The ranks of one world in memory: whose turn it is, what each waits for, who failed."""

    def __init__(self, size: int, timeout: float) -> None:
        """Rank 0 has the baton first; each rank starts with the caller's random state."""
        self.size = size
        self.failure: Failure | None = None
        self.notes = ["its own code, before any operation"] * size
        self._timeout = timeout
        self._holder = 0
        self._turn_began = time.monotonic()
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._threads: dict[int, int] = {}
        self._waiting: dict[int, Meeting] = {}
        self._gone: set[int] = set()
        self._deadlocked: set[int] = set()
        self._random = [RandomState.capture()] * size
        self._meetings: dict[tuple[object, ...], Meeting] = {}

    # Turns ------------------------------------------------------------------------------

    def enter(self, rank: int) -> None:
        """The rank's thread begins; it runs when its turn comes."""
        self._threads[rank] = threading.get_ident()
        if rank != 0:
            self._await_turn(rank, None)
        self._random[rank].restore()

    def leave(self, rank: int) -> None:
        """The rank takes part in nothing more: ranks that wait for it will be told."""
        self._gone.add(rank)

    def exit(self, rank: int) -> None:
        """The rank's thread ends."""
        self.leave(rank)
        self._threads.pop(rank, None)
        if self._holder == rank:
            self._pass_on(rank)

    def wait(self, rank: int, meeting: Meeting) -> None:
        """Returns once the meeting has taken place; other ranks run meanwhile."""
        if meeting.is_over:
            return
        self._waiting[rank] = meeting
        self._random[rank] = RandomState.capture()
        try:
            self._pass_on(rank)
            self._await_turn(rank, meeting)
            self._check_over(rank, meeting)
        except BaseException:
            meeting.withdraw(rank)
            raise
        finally:
            del self._waiting[rank]
        self._random[rank].restore()

    def _pass_on(self, rank: int) -> None:
        successor = self._next_ready(rank)
        if successor is None and self._waiting:
            self._deadlocked |= set(self._waiting)
            successor = self._next_ready(rank)
        if successor is not None:
            self._holder = successor
            self._turn_began = time.monotonic()
            self._turns[successor].release()

    def _next_ready(self, rank: int) -> int | None:
        for step in range(1, self.size + 1):
            candidate = (rank + step) % self.size
            if candidate not in self._gone and self._is_ready(candidate):
                return candidate
        return None

    def _is_ready(self, rank: int) -> bool:
        meeting = self._waiting.get(rank)
        return (
            meeting is None
            or meeting.is_over
            or self.failure is not None
            or rank in self._deadlocked
            or not self._gone.isdisjoint(meeting.missing())
        )

    def check(self, rank: int) -> None:
        """Raises if the world has failed already: nothing can be begun in it any more."""
        if self.failure is not None:
            raise PeerError(self.failure.rank, self.failure.reason, self.notes[rank])

    def _check_over(self, rank: int, meeting: Meeting) -> None:
        """The rank runs again: because the meeting is over, or because it will never be."""
        is_deadlocked = rank in self._deadlocked
        self._deadlocked.discard(rank)
        if meeting.is_over:
            return
        self.check(rank)
        gone = self._gone.intersection(meeting.missing())
        if gone:
            raise PeerError(min(gone), _LEFT, self.notes[rank])
        assert is_deadlocked
        raise DeadlockError(self._deadlock_report())

    def _deadlock_report(self) -> str:
        lines = ["no rank can go on, each waits for another:"]
        for rank, meeting in sorted(self._waiting.items()):
            missing = name_ranks(meeting.missing())
            lines.append(f"  rank {rank} waits for {missing} in {self.notes[rank]}")
        return "\n".join(lines)

    # Deadlines: a rank that keeps the baton is late for all the others ------------------

    def _await_turn(self, rank: int, meeting: Meeting | None) -> None:
        deadline = Deadline(self._timeout)
        while not self._turns[rank].acquire(timeout=min(_LOOK_EVERY_S, self._timeout / 2)):
            if self._holder != rank:
                deadline.enforce(self._late_text, rank, meeting, since=self._turn_began)

    def _late_text(self, waited: float, rank: int, meeting: Meeting | None) -> str:
        if meeting is None:
            waits = "to start"
        elif meeting.is_over:
            waits = f"for its turn, after {self.notes[rank]}"
        else:
            waits = f"in {self.notes[rank]}; arrived: {meeting.arrived()}"
        return turn_text(waited, rank, waits, self._holder, self._doing)

    def _doing(self) -> str:
        rank = self._holder
        return f"{self._position(rank)} (its last operation: {self.notes[rank]})"

    def _position(self, rank: int) -> str:
        frame = sys._current_frames().get(self._threads.get(rank, -1))
        while frame is not None and is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"

    # Meetings ---------------------------------------------------------------------------

    def meeting(self, key: tuple[object, ...], ranks: Sequence[int], number: int) -> Meeting:
        """The meeting of that key: the first to ask makes it, the last to arrive ends it."""
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting(ranks, number)
        if len(meeting.missing()) == 1:
            del self._meetings[key]
        return meeting

    def publish(self, failure: Failure) -> None:
        """The first failure counts, unless it only passed on another's."""
        if self.failure is None:
            self.failure = failure

    def interrupt(self, error: BaseException) -> None:
        """The caller was interrupted: every rank ends at its next operation."""
        rank = self._holder
        reason = f"the caller was interrupted by {error!r} while it was at {self._position(rank)}"
        self.publish(Failure(rank, reason, time.monotonic_ns()))

    def is_abandoned(self, threads_alive: Iterable[bool]) -> bool:
        """Whether only the rank that keeps the baton is left, and the others gave up on it."""
        if self.failure is None or sum(threads_alive) != 1:
            return False
        held = time.monotonic() - self._turn_began
        known_for = time.monotonic() - self.failure.time_ns / 1e9
        return held > self._timeout and known_for > _GRACE_S

    def abandoned(self) -> DeadlineError:
        """Names the rank that was given up, and what it is doing."""
        return abandoned_error(self._timeout, self._holder, self._doing())
