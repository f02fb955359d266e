"""The processes of a run whose ranks come and go: who is started, replaced, fenced, and until when.

For whoever holds the roster: `shoal.run` and `shoal launch`. It knows processes by their numbers
only. To start one, to see its end and to kill it is for the caller, who does that in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.meeting.elastic_options import Elastic
from shoal.meeting.roster import PERSON_VARIABLE, SPARE, WORKER, Person, Roster
from shoal.meeting.server import MeetingServer
from shoal.system.stopped import StoppedProcesses

BEAT_S = 2.0
"""One that is stopped for longer is fenced: killed, so that it cannot wake up among the others."""


def worker_variables(number: int, rank: int = 0, size: int = 1) -> dict[str, str]:
    """What tells a process its number, and what it is until it is a member."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        PERSON_VARIABLE: str(number),
    }


class Fence:
    """Finds workers that are stopped past their beat, from one look to the next."""

    def __init__(self) -> None:
        self._stopped = StoppedProcesses(BEAT_S)

    def beyond(self, pids: Mapping[int, int]) -> list[int]:
        """The numbers of those that must be killed; ``pids`` has who runs, by number."""
        stopped = self._stopped.among(pids.values())
        return [number for number, pid in pids.items() if pid in stopped]


class Crew:
    """The processes of one run, by the numbers that the roster gives them.

    Attributes:
        roster: Who is a member.
        desk: Where processes register, and where ends are told.
        is_over: Whether nobody is started any more.
    """

    def __init__(
        self,
        server: MeetingServer,
        ranks: int,
        bounds: Elastic,
        start: Callable[[int, int, int], None],
    ) -> None:
        """``start(number, rank, size)`` starts a process with its `worker_variables`."""
        self.roster = Roster(ranks, bounds)
        self.desk = server.hold(self.roster)
        self.is_over = False
        self._ranks, self._bounds = ranks, bounds
        self._restarts = bounds.restarts
        self._start = start

    def begin(self) -> None:
        """Starts workers and spares. All are expected before the first one is there."""
        roles = [WORKER] * self._ranks + [SPARE] * self._bounds.spares
        for number in [self.desk.expect(role) for role in roles]:
            first = (number, self._ranks) if number < self._ranks else (0, 1)
            self._start(number, *first)

    def note_end(self, number: int, code: int, why: str) -> None:
        """A process has ended; another is started in its place, as long as that may be."""
        person = self.roster.persons[number]
        is_lost = code != 0 and not (person.has_finished or person.is_leaving)
        another = self._expect_another() if is_lost else None
        self.desk.end(number, why, is_good=code == 0)
        if another is not None:
            self._start(another, 0, 1)

    def _expect_another(self) -> int | None:
        if self._restarts == 0 or self.is_over or self.has_result:
            return None
        self._restarts -= 1
        return self.desk.expect(WORKER)

    @property
    def has_result(self) -> bool:
        """Whether a member has come to the end of what there was to do."""
        return any(person.has_finished for person in self._persons())

    @property
    def is_going_on(self) -> bool:
        """Whether somebody trains, or will."""
        if self.roster.refusal:
            return False
        living = [person for person in self._persons() if person.is_alive]
        is_member = any(person.rank is not None for person in living)
        return is_member or (bool(living) and not (self.roster.worlds and self.has_result))

    def end(self) -> list[int]:
        """Nobody is started any more. Returns who waits in vain: they are not needed."""
        self.is_over = True
        return [person.number for person in self._persons() if person.rank is None]

    def _persons(self) -> list[Person]:
        return list(self.roster.persons.values())  # the server's thread may add one
