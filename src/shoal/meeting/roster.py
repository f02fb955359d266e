"""Who is a member of an elastic run: what its holder knows, and when it announces the next world.

No sockets and no clock: whoever calls says what happened and when. See [Note: generations].

[Note: the next generation]
It is announced once every living member of the present one has asked for it, so nobody is left
behind in a world that the others have given up. Those that died or left are not waited for. It has
all who asked and do not leave, and of those that wait outside as many as are wanted:

- A worker or a spare takes the place of one that died. One that left by itself is not replaced.
- A joiner came from outside, uncalled. It is one more, as long as there is room.
- One that leaves is let go with the next generation; if that comes of a loss, with the one after,
  since nobody else may have what it has.

Those that come take the ranks of those that went. If fewer come than went, ranks are closed up in
order. Where several ranks hold a replica of the model between them, members are whole replicas: as
many come as complete one, and if a replica has lost a rank and nobody comes, its others wait
outside from then on. With less than the least number of ranks nothing is announced as long as
somebody is on the way; if nobody is, all are told that the run cannot go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from shoal.meeting.elastic_options import Elastic

PERSON_VARIABLE = "SHOAL_PERSON"
"""Tells a process its number in the roster."""
WORKER, SPARE, JOINER = ROLES = ("worker", "spare", "joiner")
ASIDE = "it waits until there are enough ranks for another replica of the model"
"""Why a rank is none any more that is alive."""
# Where whoever started a process cannot tell of its end any more.
LOST_S = 1.0
# Where it can, and will: a process may take long to end after its last word.
ENDING_S = 10.0

Notice = tuple[int, dict[str, Any]]
"""To whom, and what it is told."""


class PersonStage(Enum):
    """How far somebody has come."""

    EXPECTED = "started, but not heard of yet"
    THERE = "there"
    ASKING = "asks for the next generation"
    GONE = "gone"


@dataclass(eq=False)
class Person:
    """A process that is a member, was one, or may become one; its number is never used again.

    Attributes:
        number: Given by the holder.
        role: Why it was started.
        stage: How far it has come.
        rank: In the present generation; None for one that waits outside.
        is_leaving: Whether it has asked to be let go.
        stays: Whether it takes part in the next generation all the same.
        has_finished: Whether it was a member until it came to its end by itself.
        lost_at: When it counts as lost, since a connection has ended.
        reason: Why it is gone.
    """

    number: int
    role: str
    stage: PersonStage = PersonStage.EXPECTED
    rank: int | None = None
    is_leaving: bool = False
    stays: bool = False
    has_finished: bool = False
    lost_at: float | None = None
    reason: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether it may still do something."""
        return self.stage is not PersonStage.GONE

    @property
    def is_ready(self) -> bool:
        """Whether it waits outside to be taken in."""
        return self.rank is None and self.stage is PersonStage.ASKING and not self.is_leaving


@dataclass(frozen=True)
class Announcement:
    """A new world, as all of its members are told of it.

    Attributes:
        generation: Its number, higher than any before.
        members: The numbers of its members, by rank.
        old_size: How many ranks the world before had.
        old_ranks: For each rank its old one; None for one that has come.
        reasons: Why old ranks are gone.
    """

    generation: int
    members: tuple[int, ...]
    old_size: int = 0
    old_ranks: tuple[int | None, ...] = ()
    reasons: dict[int, str] = field(default_factory=dict)

    def message(self, rank: int) -> dict[str, Any]:
        """As plain data for the member that is ``rank``."""
        return {
            "generation": self.generation,
            "rank": rank,
            "size": len(self.members),
            "old_size": self.old_size,
            "old_ranks": list(self.old_ranks),
            "reasons": [[old, text] for old, text in self.reasons.items()],
        }


class Roster:
    """The members of one run, from the first generation to the last.

    Attributes:
        persons: All that there ever were, by number.
        generation: Of the present world; 0 before the first.
        present: The members of the present world, by rank, the dead among them.
        refusal: Why there will be no next generation, once that is so.
        is_complete: Whether that is because the last members have come to their end.
        worlds: All announcements.
    """

    def __init__(self, ranks: int, options: Elastic, join_s: float = 0.0) -> None:
        """``join_s``: how long one from outside is waited for where there are too few."""
        self.persons: dict[int, Person] = {}
        self.generation = 0
        self.present: list[Person] = []
        self.refusal = ""
        self.is_complete = False
        self.worlds: list[Announcement] = []
        self._min, self._max = options.min_ranks, options.max_ranks
        self._known_replica: int | None = None
        self._wanted, self._join_s = ranks, join_s
        self._short_since: float | None = None
        self._has_ended_well = False
        self._is_change_wanted = False
        self._notices: list[Notice] = []

    # What the holder says -----------------------------------------------------------------

    def expect(self, role: str) -> int:
        """A process was started, or will be; returns its number."""
        if role not in ROLES:
            raise ValueError(f"no role {role!r}")
        number = len(self.persons)
        self.persons[number] = Person(number, role)
        return number

    def end(self, number: int, reason: str, now: float, *, is_good: bool = False) -> None:
        """A process has ended; one whose end ``is_good`` went by itself and is not replaced."""
        person = self.persons[number]
        if not person.is_alive:
            return
        if is_good or person.is_leaving:
            self._note_good_end(person)
        person.has_finished = is_good and person.rank is not None and not person.is_leaving
        person.stage, person.reason = PersonStage.GONE, reason
        self._settle(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        for person in list(self.persons.values()):
            if person.is_alive and person.lost_at is not None and now >= person.lost_at:
                self.end(person.number, "its connection to the run's holder ended", now)
        self._settle(now)

    def next_time(self) -> float | None:
        """When `tick` should be called at the latest."""
        lost = [each.lost_at for each in self._living() if each.lost_at is not None]
        if self._short_since is not None:
            lost.append(self._short_since + self._join_s)
        return min(lost, default=None)

    def take_notices(self) -> list[Notice]:
        """What is to be told to whom since the last call."""
        notices, self._notices = self._notices, []
        return notices

    # What processes say -------------------------------------------------------------------

    def register(self, number: int) -> bool:
        """A process is there; whether it belongs to the first generation."""
        person = self.persons[number]
        if person.stage is not PersonStage.EXPECTED:
            raise ValueError(f"process {number} was here before")
        person.stage = PersonStage.THERE
        return person.role == WORKER and self.generation == 0

    def ask(self, number: int, generation: int, now: float, *, stays: bool = False) -> None:
        """A process asks for the next generation, or to be taken into one.

        ``stays``: a member is not let go with this one, though it has asked to be.
        """
        person = self.persons[number]
        if person.stage not in (PersonStage.THERE, PersonStage.ASKING):
            raise ValueError(f"process {number} is {person.stage.value}")
        if person.stage is PersonStage.ASKING:
            raise ValueError(f"process {number} asks twice")
        if generation != (0 if person.rank is None else self.generation):
            self._refuse(person, f"the run is in generation {self.generation}, not {generation}")
            return
        person.stage, person.stays = PersonStage.ASKING, stays and person.rank is not None
        self._settle(now)

    def leave(self, number: int, now: float) -> None:
        """A process asks to be let go."""
        person = self.persons[number]
        if person.is_alive and not person.is_leaving:
            person.is_leaving = True
            self._settle(now)

    def lose(self, number: int, now: float, wait_s: float = LOST_S) -> None:
        """The connection of a process has ended, or of its launcher: it will hardly live on.

        News of why is waited for so long.
        """
        before = self.persons[number].lost_at
        self.persons[number].lost_at = now + wait_s if before is None else min(before, now + wait_s)

    def require(
        self, number: int, least: int, most: int | None, now: float, *, replica: int = 1
    ) -> str:
        """Narrows the bounds; what speaks against that, if anything does.

        ``replica``: how many ranks hold one model between them.
        """
        person = self.persons[number]
        size = len(self.present) if person.rank is not None else None
        new_min = max(self._min, least)
        new_max = min((each for each in (self._max, most) if each is not None), default=None)
        if least < 1 or (new_max is not None and new_max < new_min):
            return f"at least {new_min} and at most {new_max} ranks cannot be"
        if replica < 1 or self._known_replica not in (None, replica):
            return f"{replica} ranks for a replica, where others have {self._known_replica}"
        if size is not None and size < least:
            return f"min_ranks={least}, but there are {size} ranks"
        if size is not None and most is not None and size > most:
            return f"max_ranks={most}, but there are {size} ranks"
        self._min, self._max, self._known_replica = new_min, new_max, replica
        self._settle(now)
        return ""

    # What follows -------------------------------------------------------------------------

    @property
    def _replica(self) -> int:
        return self._known_replica or 1

    def awaited(self) -> list[int]:
        """Ranks of the present generation that have not asked for the next one yet."""
        return [rank for rank, each in enumerate(self.present) if _holds_up(each)]

    def broken(self) -> tuple[int, dict[str, Any]] | None:
        """The present generation and the first of its ranks that is not in it any more.

        Others may wait there for it, while they connect.
        """
        for rank, person in enumerate(self.present):
            if not person.is_alive:
                return self.generation, {"rank": rank, "reason": person.reason}
            if person.stage is PersonStage.ASKING:
                return self.generation, {"rank": rank, "reason": "it asks for another world"}
        return None

    def outside(self) -> list[Person]:
        """Living processes that are no members."""
        return [each for each in self._living() if each.rank is None]

    def members(self) -> list[Person]:
        """The living members of the present generation, by rank."""
        return [each for each in self.present if each.is_alive]

    def _living(self) -> Iterable[Person]:
        return (each for each in self.persons.values() if each.is_alive)

    def _settle(self, now: float) -> None:
        """Announces or refuses what is due after a change."""
        self._let_go(self.outside())
        if self.worlds and not self.members() and self._has_ended_well and not self.refusal:
            self.refusal, self.is_complete = "the run has come to its end", True
        if self.refusal:
            for person in self._living():
                self._refuse_if_asking(person)
            return
        if not self._is_held_up():
            self._let_go(self.members())
            self._form(now)
        self._tell_wishes()

    def _is_held_up(self) -> bool:
        """Whether somebody must be waited for, or nobody asks at all."""
        workers = [each for each in self._living() if each.role == WORKER]
        if any(map(_holds_up, self.present if self.generation else workers)):
            return True
        return not any(each.stage is PersonStage.ASKING for each in self._living())

    def _let_go(self, persons: Iterable[Person]) -> None:
        """Those of them that have asked to leave, and have nothing left to do."""
        for person in persons:
            is_due = person.is_leaving and not person.stays
            if is_due and person.stage is PersonStage.ASKING:
                self._note_good_end(person)
                person.stage, person.reason = PersonStage.GONE, "it left, as it had asked to"
                self._notices.append((person.number, {"left": True}))

    def _note_good_end(self, person: Person) -> None:
        if person.rank is not None:
            self._wanted -= 1
            self._has_ended_well = True

    def _form(self, now: float) -> None:
        stay = [each if each.is_alive else None for each in self.present]
        come = self._admitted(len(self.members()))
        ranks = set_aside([each is not None for each in stay], len(come), self._replica)
        members = _place([None if rank in ranks else each for rank, each in enumerate(stay)], come)
        if not self.members() and not come:
            return
        if len(members) >= self._min:
            self._announce(members, [self.present[rank] for rank in ranks])
        elif self._is_somebody_coming(members):
            self._short_since = None
        else:
            self._short_since = now if self._short_since is None else self._short_since
            if now >= self._short_since + self._join_s:
                self._end_run(len(self.members()) + len(come))

    def _admitted(self, num_stay: int) -> list[Person]:
        """Those that wait and are wanted, in the order in which they were started."""
        ready = [each for each in self._living() if each.is_ready]
        limit = len(self.persons) if self._max is None else self._max
        called = sorted((each for each in ready if each.role != JOINER), key=_is_spare)
        joiners = [each for each in ready if each.role == JOINER]
        # Those who left are not replaced, unless there were too few without them.
        come = called[: max(0, min(max(self._wanted, self._min), limit) - num_stay)]
        come += joiners[: max(0, limit - num_stay - len(come))]
        return come[: num_admitted(num_stay, len(come), self._replica)]

    def _is_somebody_coming(self, members: list[Person]) -> bool:
        """Whether more can be there in a moment than are."""
        limit = len(self.persons) if self._max is None else self._max
        others = [each for each in self._living() if each not in members and not each.is_leaving]
        # Who asks and is no member all the same would be too few for another replica.
        is_on_the_way = any(each.stage is not PersonStage.ASKING for each in others)
        return len(members) < limit and is_on_the_way

    def _announce(self, members: list[Person], aside: list[Person]) -> None:
        self.generation += 1
        self._short_since = None
        reasons = {rank: each.reason for rank, each in enumerate(self.present) if not each.is_alive}
        reasons |= {self.present.index(each): ASIDE for each in aside}
        announcement = Announcement(
            self.generation,
            tuple(each.number for each in members),
            len(self.present),
            tuple(each.rank for each in members),
            reasons,
        )
        self._wanted += sum(each.rank is None and each.role == JOINER for each in members)
        self.present = members
        for person in aside:  # it goes on asking
            person.rank, person.stays = None, False
            self._wanted -= person.role == JOINER
            self._notices.append((person.number, {"aside": True}))
        for rank, person in enumerate(members):
            person.rank, person.stage, person.stays = rank, PersonStage.THERE, False
            self._notices.append((person.number, {"world": announcement.message(rank)}))
        self.worlds.append(announcement)
        self._is_change_wanted = False

    def _end_run(self, left: int) -> None:
        gone = {rank: each.reason for rank, each in enumerate(self.present) if not each.is_alive}
        why = "".join(f"; rank {rank} is gone: {reason}" for rank, reason in gone.items())
        self.refusal = (
            f"the run needs at least {self._min} rank(s){in_words(self._replica)} and has {left} "
            f"left, and nobody can take the place of those that are gone{why}"
        )
        for person in self._living():
            self._refuse_if_asking(person)

    def _refuse_if_asking(self, person: Person) -> None:
        if person.stage is PersonStage.ASKING:
            person.stage = PersonStage.THERE
            self._refuse(person, self.refusal)

    def _refuse(self, person: Person, why: str) -> None:
        notice: dict[str, Any] = {"refused": why}
        if self.is_complete:
            notice["is_complete"] = True
        self._notices.append((person.number, notice))

    def _tell_wishes(self) -> None:
        """Members are told whether a change is due, so that they can ask for it together."""
        stay = [each for each in self.members() if not each.is_leaving]
        is_wanted = len(stay) < len(self.present) or bool(self._admitted(len(stay)))
        if is_wanted != self._is_change_wanted and self.generation:
            self._is_change_wanted = is_wanted
            wish = {"change": is_wanted, "generation": self.generation}
            self._notices += [(each.number, wish) for each in self.members()]


def _holds_up(person: Person) -> bool:
    return person.is_alive and person.stage is not PersonStage.ASKING


def _is_spare(person: Person) -> bool:
    return person.role == SPARE


def in_words(replica: int) -> str:
    """Why there is a least number of ranks."""
    return f" ({replica} hold one model between them)" if replica > 1 else ""


def num_admitted(num_stay: int, num_ready: int, replica: int) -> int:
    """How many of those that wait can come, if all ranks are to be in whole replicas."""
    return max(0, num_ready - (num_stay + num_ready) % replica)


def set_aside(is_there: Sequence[bool], num_come: int, replica: int) -> list[int]:
    """Old ranks that have to wait, so that those that stay and come are whole replicas.

    What a rank has is kept by the one at the same place of the next replica as well, so nobody goes
    whose neighbour is gone, as far as that can be; and rather one of a replica that is not whole.
    """
    size, gone = len(is_there), {rank for rank, there in enumerate(is_there) if not there}
    broken = {rank // replica for rank in gone}

    def preference(rank: int) -> tuple[bool, bool, int]:
        neighbours = {(rank - replica) % size, (rank + replica) % size}
        return bool(neighbours & gone), rank // replica not in broken, -rank

    staying = [rank for rank, there in enumerate(is_there) if there]
    aside: list[int] = []
    for _ in range((len(staying) + num_come) % replica):
        aside.append(min(staying, key=preference))
        staying.remove(aside[-1])
        gone.add(aside[-1])
    return aside


def _place(stay: list[Person | None], come: list[Person]) -> list[Person]:
    """Those that come take the free ranks, in order; ranks that stay free are closed up."""
    waiting = iter(come)
    filled = [each if each is not None else next(waiting, None) for each in stay]
    return [each for each in filled if each is not None] + list(waiting)
