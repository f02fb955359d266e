"""Members that hold the others up: told once, and never ended for it."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from shoal.meeting.roster import Roster
from shoal.meeting.roster_desk import WaitingShare

_LEAST_DIFFERENCE = 0.25
_LEAST_REPORTS = 4


class Stragglers:
    """Finds those who wait much less than the others do: it is for them that others wait."""

    def __init__(self) -> None:
        self._since: dict[int, int] = {}
        self._told: set[int] = set()

    def news(self, roster: Roster, progress: Mapping[int, WaitingShare]) -> list[str]:
        """A line for each that has become one, in all of its last reports."""
        numbers = [person.number for person in roster.members()]
        reports = [progress.get(number) for number in numbers]
        found = {
            number: report
            for number, report in zip(numbers, reports, strict=True)
            if report is not None and report.generation == roster.generation
        }
        if len(found) < len(numbers):
            return []
        slow = {number: self._compare(number, found) for number in numbers}
        self._since = {
            number: self._since.get(number, found[number].num_reports)
            for number, text in slow.items()
            if text
        }
        self._told &= self._since.keys()
        due = [
            number
            for number, since in self._since.items()
            if found[number].num_reports >= since + _LEAST_REPORTS - 1 and number not in self._told
        ]
        self._told.update(due)
        return [f"worker {n} (rank {roster.persons[n].rank}) {slow[n]}" for n in due]

    @staticmethod
    def _compare(number: int, reports: Mapping[int, WaitingShare]) -> str:
        """What there is to say of one, if it is one."""
        own = reports[number].waiting
        others = [report.waiting for each, report in reports.items() if each != number]
        theirs = median(others) if others else 0.0
        if theirs - own < _LEAST_DIFFERENCE:
            return ""
        times = (1 - own) / max(1 - theirs, 0.01)
        return (
            f"holds the others up: it waits {own:.0%} of the time and they {theirs:.0%}, so it "
            f"takes {times:.1f} times as long for its part of a step."
        )
