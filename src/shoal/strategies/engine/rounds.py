"""In which order the groups of a model take their turns.

[Note: the round]
A transport carries out collectives in one order, the same on every rank. But ranks may take
different branches of a model, or use different experts, and so need different groups. So in
a *round* every group takes its turn, in an agreed order: to get at a group a rank lets those
before it go first. Before each round the ranks vote whether anybody wants one. A rank that
has finished its pass completes the round it is in and joins those that others still want. So
no rank ever waits for a collective that another skips.
"""

from __future__ import annotations

from collections.abc import Sequence


class Round:
    """One turn for each group.

    Example:
        >>> turns = Round([2, 0, 1])
        >>> turns.until(0)
        [2, 0]
        >>> turns.has_had(2), turns.following()
        (True, 1)
        >>> turns.rest()
        [1]
    """

    def __init__(self, order: Sequence[int]) -> None:
        """``order`` names each group once."""
        self._order = list(order)
        self._place = {group: place for place, group in enumerate(self._order)}
        self._position = 0

    def has_had(self, group: int) -> bool:
        """Whether the group's turn is over."""
        return self._place[group] < self._position

    def until(self, group: int) -> list[int]:
        """The groups whose turn comes now, up to and including ``group``."""
        return self._advance(self._place[group] + 1)

    def following(self) -> int | None:
        """The group whose turn is next, if there is one."""
        return self._order[self._position] if self._position < len(self._order) else None

    def rest(self) -> list[int]:
        """The turns that are missing to the end."""
        return self._advance(len(self._order))

    def _advance(self, position: int) -> list[int]:
        turns = self._order[self._position : position]
        self._position = max(self._position, position)
        return turns
