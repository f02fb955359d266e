"""What became of the workers of an elastic run, in words: at each change, and at the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shoal.launch.script.summary import Ending, story_of
from shoal.meeting.roster import ASIDE, JOINER, Announcement, Person, Roster


def change_text(roster: Roster, world: Announcement) -> str:
    """One line for a world that was announced after another."""
    before = roster.worlds[world.generation - 2].members
    replaced = replacements(roster)
    words = []
    for rank, number in enumerate(before):
        if world.reasons.get(rank) == ASIDE:
            words.append(f"worker {number} (rank {rank}): {ASIDE}")
        elif number not in world.members:
            words.append(f"worker {number} (rank {rank}) is gone: {roster.persons[number].reason}")
    known = {number for each in roster.worlds[: world.generation - 1] for number in each.members}
    for rank, number in enumerate(world.members):
        if number not in before:
            place = [gone for gone, other in replaced.items() if other == number]
            how = f"takes the place of worker {place[0]}" if place else "joins"
            words.append(f"worker {number} {'is back' if number in known else how} as rank {rank}")
    what = "; ".join(words) or "the same as before"
    return f"generation {world.generation}, {len(world.members)} rank(s): {what}."


def replacements(roster: Roster) -> dict[int, int]:
    """Who took the place of whom. One that has to be started first may do so worlds later."""
    found: dict[int, int] = {}
    waiting: list[int] = []
    known: set[int] = set()
    for before, after in pairwise(list(roster.worlds)):
        known.update(before.members)
        for rank, number in enumerate(before.members):
            is_aside = after.reasons.get(rank) == ASIDE
            is_gone = number not in after.members and not is_aside
            if is_gone and not roster.persons[number].is_leaving:
                waiting.append(number)
        for number in after.members:
            is_called = roster.persons[number].role != JOINER
            if number not in known and is_called and waiting:
                found[waiting.pop(0)] = number
    return found


class RunAccount:
    """The end of a run.

    Attributes:
        is_finished: Whether enough members have come to their end by themselves.
        exit_code: 0 if it is finished, whoever was lost; else that of the last that was.
    """

    def __init__(self, roster: Roster, failed: Sequence[Ending], least: int) -> None:
        """``failed`` are the ends of workers that failed by themselves, ``least`` is ``--min``."""
        self._roster = roster
        self._failed = sorted(failed, key=lambda each: each.since)
        members = roster.worlds[-1].members if roster.worlds else ()
        self._num_finished = sum(roster.persons[each].has_finished for each in members)
        # A script may have joined no world at all.
        self.is_finished = self._num_finished >= least if members else not failed
        last = self._failed[-1].exit_code if self._failed else 1
        self.exit_code = 0 if self.is_finished else last

    def text(self, *, is_shown: bool) -> str:
        """Who was lost, of what, and who took its place; nothing if there is nothing to say.

        ``is_shown``: What workers have written is on the screen already.
        """
        lost = [person for person in self._roster.persons.values() if self._is_lost(person)]
        if not self.is_finished:
            head, is_story = f"the run could not go on: {self._why()}.", not is_shown
        elif lost:
            head = f"the run has finished with {self._num_finished} rank(s); lost on the way:"
            is_story = False
        else:
            return ""
        replaced = replacements(self._roster)
        lines = [f"shoal: {head}", *(f"  {self._fate_of(each, replaced)}" for each in lost)]
        if is_story and self._failed:
            lines += ["", *story_of(self._failed[-1])]
        return "\n".join(lines).rstrip()

    def _why(self) -> str:
        if self._roster.refusal and not self._roster.is_complete:
            return self._roster.refusal.partition(";")[0]
        return "too few came to their end" if self._num_finished else "no worker was left"

    def _is_lost(self, person: Person) -> bool:
        """Not those that were ended because the run was."""
        if person.is_alive or person.has_finished or person.is_leaving:
            return False
        is_own = any(each.rank == person.number for each in self._failed)
        return is_own or (person.role == JOINER and person.rank is not None)

    def _fate_of(self, person: Person, replaced: dict[int, int]) -> str:
        where = "before it was a member" if person.rank is None else f"rank {person.rank}"
        text = f"worker {person.number} ({where}): {person.reason}"
        if person.rank is None:
            return text
        other = replaced.get(person.number)
        return f"{text}; {'nobody' if other is None else f'worker {other}'} took its place"
