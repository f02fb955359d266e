"""In which order the groups of a model take their turns.

[Note: the round]
A transport carries out collectives in one order, the same on every rank. But ranks may take
different branches of a model, or use different experts, and so need different groups. So
every rank lets all groups take their turn, round after round in an agreed order: to get at a
group it lets those before it go first. At the end of a pass the ranks agree on the number of
rounds, and finish the last one. No rank ever waits for a collective that another skips.
"""

from __future__ import annotations

from collections.abc import Sequence


class Rounds:
    """Turns of groups in an agreed order, over and over within a pass.

    Example:
        >>> rounds = Rounds([2, 0, 1])
        >>> rounds.until(0)
        [2, 0]
        >>> rounds.until(2)
        [1, 2]
        >>> rounds.rest(rounds.count)
        [0, 1]
    """

    def __init__(self, order: Sequence[int]) -> None:
        """``order`` names each group once."""
        self._order = list(order)
        self._place = {group: place for place, group in enumerate(self._order)}
        self._position = 0

    @property
    def count(self) -> int:
        """How many rounds have begun."""
        return -(-self._position // len(self._order)) if self._order else 0

    def until(self, group: int) -> list[int]:
        """The groups whose turn comes now, up to and including ``group``."""
        ahead = (self._place[group] - self._position) % len(self._order)
        return self._advance(ahead + 1)

    def following(self) -> int | None:
        """The group whose turn is next in this round, if there is one."""
        place = self._position % len(self._order) if self._order else 0
        return self._order[place] if place else None

    def rest(self, num_rounds: int) -> list[int]:
        """The turns that are missing to the end of that many rounds; the next pass begins anew."""
        turns = self._advance(num_rounds * len(self._order) - self._position)
        self._position = 0
        return turns

    def _advance(self, num_turns: int) -> list[int]:
        length = len(self._order)
        turns = [self._order[(self._position + step) % length] for step in range(num_turns)]
        self._position += num_turns
        return turns
