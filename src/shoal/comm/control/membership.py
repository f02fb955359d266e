"""Who takes part in a run whose ranks come and go: what one of them sees of that.

[Note: generations]
The ranks of an elastic run form one world after the other. Each is a *generation*: its members are
fixed, and nothing that is said in one counts in another. Who is a member of the next one is decided
by the holder of the run (the launcher, or whoever called `shoal.run`), never by a rank. A member
keeps its identity from one generation to the next, and its rank where that is possible: those that
come take the ranks of those that went, so that a replaced worker changes nothing for the others.

One that comes later begins as a world of its own, of one rank, in which it builds its model as all
others did. It is a member once it has said that it is ready, and the others have come to the end of
a step.

Where several ranks hold a replica of the model between them, members are whole replicas. If one of
a replica is lost and nobody takes its place, the others of it wait outside, like those who have
come later, until there are enough of them for another replica.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.comm.world import World
from shoal.errors import LaunchError


@dataclass(frozen=True)
class Change:
    """What has become of a world, for those who go on.

    Attributes:
        generation: The number of the new world; the first is 1.
        old_size: How many ranks there were.
        new_size: How many there are.
        left: Ranks of the old world that are gone.
        joined: Ranks of the new world that were not in the old one.
        step: How many steps are committed; training goes on with the next.
        reasons: Why ranks of the old world are gone, by rank.
    """

    generation: int
    old_size: int
    new_size: int
    left: tuple[int, ...]
    joined: tuple[int, ...]
    step: int
    reasons: Mapping[int, str] = field(default_factory=dict)


class RunComplete(LaunchError):
    """The run has come to its end while this rank waited to be a member: it was not needed."""


class Regrouped(NamedTuple):
    """A new world, and how it came out of the old one.

    Attributes:
        world: The new one, connected; it is the current world already.
        old_size: How many ranks there were.
        old_ranks: For each new rank its old one; None for one that has come.
        reasons: Why ranks of the old world are gone, by old rank.
    """

    world: World
    old_size: int
    old_ranks: tuple[int | None, ...]
    reasons: Mapping[int, str]

    @property
    def left(self) -> tuple[int, ...]:
        """Ranks of the old world that are gone."""
        return tuple(rank for rank in range(self.old_size) if rank not in self.old_ranks)

    @property
    def joined(self) -> tuple[int, ...]:
        """Ranks of the new world that were not in the old one."""
        return tuple(new for new, old in enumerate(self.old_ranks) if old is None)


class Membership(ABC):
    """One rank's place in a run whose ranks come and go; see [Note: generations].

    Attributes:
        generation: Of the world that this rank is in; 0 for one that waits to be a member.
        is_leaving: Whether this rank has asked to be let go.
    """

    generation: int
    is_leaving: bool = False

    @abstractmethod
    def require(self, min_ranks: int, max_ranks: int | None, replica: int = 1) -> None:
        """Bounds for the number of members; the holder's own bounds hold besides.

        ``replica``: how many neighbouring ranks hold one model between them; members are whole
        replicas.
        """

    @abstractmethod
    def regroup(self, *, stays: bool = False) -> Regrouped:
        """Leaves the world there is, and returns in the next one.

        ``stays``: a member that asks to be let go takes part in the next world all the same, since
        the others may not have what it has.

        Waits for nobody who is gone: the old world is given up, not shut down together. If another
        member is lost meanwhile, it goes on to the generation after that. One that waits to be a
        member says by this call that it is ready.

        Raises:
            LaunchError: If there will be no next world: too few are left and nobody replaces them,
                this rank is not a member any more, or the holder has ended.
            DeadlineError: If those who must come do not.
        """

    @abstractmethod
    def wants_change(self) -> bool:
        """Whether the holder waits to change who is a member, as far as this rank knows.

        Asks nobody, so ranks may be told apart for a moment; they agree before they regroup.
        """

    @abstractmethod
    def leave(self) -> None:
        """Asks to be let go: the others regroup without this rank at the end of a step."""
