"""Waiting that ends: a warning when it takes long, an error when it takes too long.

All texts of waits for other ranks are in this file. Each of the functions `*_text` describes one
kind of wait; its first argument is how many seconds it has taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from shoal.errors import DeadlineError
from shoal.system.rank_names import name_ranks

logger = logging.getLogger("shoal")

_FIRST_WARNING_S = 10.0


class Deadline:
    """The time one wait may take.

    Example:
        >>> deadline = Deadline(60.0)
        >>> while not is_ready():
        ...     deadline.enforce(start_text, "the server")
        ...     time.sleep(0.1)
    """

    __slots__ = ("_warn_after", "begin", "timeout")

    def __init__(self, timeout: float, begin: float | None = None) -> None:
        """Seconds from now, or from a moment before."""
        self.begin = time.monotonic() if begin is None else begin
        self.timeout = timeout
        self._warn_after = min(_FIRST_WARNING_S, timeout / 2)

    def enforce(self, text: Callable[..., str], *args: object, since: float = 0.0) -> None:
        """Raises if the wait is too long; warns if it is long, after 10 s, 30 s, 90 s ...

        Args:
            text: Describes the wait, from its seconds and ``args``; called if there is need.
            args: What else ``text`` is given.
            since: The wait began then, if that is later than the beginning of the deadline.
        """
        waited = time.monotonic() - max(self.begin, since)
        if waited >= self.timeout:
            raise DeadlineError(f"{text(waited, *args)}\nThe deadline has passed.")
        if waited >= self._warn_after:
            self._warn_after = 3 * waited
            logger.warning("still waiting: %s", text(waited, *args))


def wait_until(is_done: Callable[[], bool], seconds: float, poll_s: float) -> bool:
    """Asks again and again until the time is over; whether it is done."""
    end = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > end:
            return False
        time.sleep(poll_s)
    return True


def pauses(first: float, longest: float) -> Iterator[float]:
    """How long to sleep between looks at something that may take long: longer and longer."""
    pause = first
    while True:
        yield pause
        pause = min(pause * 1.5, longest)


def operation_text(
    waited: float,
    what: str,
    ranks: Sequence[int],
    late: Sequence[int],
    whereabouts: Callable[[int], str],
) -> str:
    """An operation that some ranks have not come to."""
    arrived = [rank for rank in ranks if rank not in set(late)]
    lines = [
        f"{what}, for {waited:.1f} s",
        f"  arrived: {name_ranks(arrived)}; missing: {name_ranks(late)}",
    ]
    lines += [f"  rank {rank} was last in {whereabouts(rank)}" for rank in late]
    return "\n".join(lines)


def fetch_text(
    waited: float, rank: int, what: str, holder: int, whereabouts: Callable[[int], str]
) -> str:
    """A tensor that one rank fetches from another."""
    return (
        f"rank {rank} fetches {what} from rank {holder}, for {waited:.1f} s; it does not answer "
        f"and was last in {whereabouts(holder)}"
    )


def staleness_text(waited: float, rank: int, slowest: int, whereabouts: str) -> str:
    """An update that would make another rank's too stale."""
    return (
        f"rank {rank} waits for rank {slowest}, for {waited:.1f} s: rank {slowest} has the oldest "
        f"parameters, and its update would become too stale; {whereabouts}"
    )


def joining_text(
    waited: float, rank: int, size: int, missing: Callable[[], Sequence[int]], question: str
) -> str:
    """A world that some ranks have not joined."""
    late = name_ranks(missing())
    return f"rank {rank} waits for {late} of {size} to join, for {waited:.1f} s. {question}"


def regrouping_text(waited: float, awaited: Callable[[], Sequence[int]]) -> str:
    """The next world of an elastic run."""
    late = awaited()
    who = name_ranks(late) if late else "one that takes the place of a rank that is gone"
    return f"this rank waits for {who} to come to the next world, for {waited:.1f} s"


def start_text(waited: float, what: str) -> str:
    """A library that waits for the other ranks while it starts."""
    return (
        f"{what} has not started for {waited:.1f} s: it waits until every rank of the job has come "
        "to shoal.init(), and some rank died or is not there yet"
    )


def save_text(waited: float, folder: object) -> str:
    """A folder of checkpoints that another save has locked."""
    return (
        f"another save to {folder} has been going on for {waited:.0f} s, of another process or "
        "another model: save to another folder"
    )


def turn_text(waited: float, rank: int, waits: str, runner: int, runs: Callable[[], str]) -> str:
    """A rank that is a thread, while another one keeps running."""
    return (
        f"rank {rank} waits {waits}; missing: rank {runner}, "
        f"which has been running for {waited:.1f} s and is at {runs()}"
    )


def abandoned_error(timeout: float, rank: int, runs: str) -> DeadlineError:
    """For a rank that is a thread and does not end, though all others have."""
    return DeadlineError(
        f"rank {rank} did not end within {timeout:g} s and is at {runs}; "
        "its thread cannot be stopped and goes on"
    )


def under_way_error(what: str, timeout: float | None) -> DeadlineError:
    """For a caller that would wait for an operation only so long; the operation goes on."""
    return DeadlineError(f"{what} is still under way after {timeout} s")
