"""Versions of parameters that are updated without barriers, and how old an update may be.

[Note: staleness]
Every update makes a new *version* of the parameters. A rank *pulls* a version, computes a gradient
with it, and *pushes* that as an update. Its *staleness* is the number of versions that were made in
between, which is nought if no other rank was faster. What is more stale than allowed is dropped; or
damped: the step is made with `(1 + max_staleness) / (1 + staleness)` of its learning rate.

With "wait" no update becomes so stale. Of those under way the one with the oldest version may
always be pushed next, then the second oldest, and so on. A pull or push has to wait if after it one
of them, pushed in this order, would be too stale. So nobody waits for ever, and everybody slows
down to the slowest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

WHEN_STALE = ("drop", "damp", "wait")


class Admission(NamedTuple):
    """What becomes of an update.

    Attributes:
        staleness: How stale it is.
        factor: How much it counts; 0 if it was dropped.
    """

    staleness: int
    factor: float


@dataclass
class VersionCount:
    """The versions of one set of parameters; see [Note: staleness].

    Example:
        >>> ledger = VersionCount(max_staleness=0, when_stale="drop")
        >>> ledger.begin(rank=0), ledger.begin(rank=1)
        (0, 0)
        >>> ledger.admit(0, 0), ledger.admit(1, 0)
        (Admission(staleness=0, factor=1.0), Admission(staleness=1, factor=0.0))
    """

    max_staleness: int
    when_stale: str
    version: int = 0

    def __post_init__(self) -> None:
        self._under_way: dict[int, int] = {}
        self.events: list[tuple[str, int, float]] | None = None
        """Pulls and pushes in their order, with the rank and the factor, if that is wanted."""

    def begin(self, rank: int) -> int:
        """A rank pulls; returns the version that it gets."""
        self._under_way.pop(rank, None)
        self._under_way[rank] = self.version
        self._note("pull", rank, 1.0)
        return self.version

    def admit(self, rank: int, version: int) -> Admission:
        """A rank pushes what it has computed with a version."""
        self._under_way.pop(rank, None)
        staleness = self.version - version
        factor = self._factor(staleness)
        if factor:
            self.version += 1
        self._note("push", rank, factor)
        return Admission(staleness, factor)

    def _factor(self, staleness: int) -> float:
        if staleness <= self.max_staleness or self.when_stale == "wait":
            return 1.0
        return (1 + self.max_staleness) / (1 + staleness) if self.when_stale == "damp" else 0.0

    def blocking(self, rank: int, event: str) -> int | None:
        """Whom a rank has to wait for before it may "pull" or "push"; None if it need not."""
        if self.when_stale != "wait":
            return None
        others = [own for own in self._under_way.items() if own[0] != rank]
        others.sort(key=lambda own: own[1])  # of one version in the order of their pulls
        versions, now = [version for _, version in others], self.version
        if event == "pull":
            versions.append(now)
        else:
            now += 1
        is_free = all(
            now + place - version <= self.max_staleness for place, version in enumerate(versions)
        )
        return None if is_free else others[0][0]

    def change(self, rank: int, event: str) -> None:
        """A version was made by something else than an update of a rank."""
        self.version += 1
        self._note(event, rank, 1.0)

    def reset(self) -> None:
        """Nobody computes anything now."""
        self._under_way.clear()

    def _note(self, event: str, rank: int, factor: float) -> None:
        if self.events is not None:
            self.events.append((event, rank, factor))
