"""How ranks take the same turns: the order of one round, and the vote whether there is another.

[Note: the round]
A transport carries out collectives in one order, the same on every rank. But ranks may take
different branches of a model, or use different experts, and so need different groups. So in
a *round* every group takes its turn, in one order: to get at a group a rank first takes the turns
of the groups before it. Before each round the ranks vote whether any of them wants one. A rank
that has finished its pass completes the round it is in and joins the rounds that others still
want. So no rank ever waits for a collective that another skips.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from shoal.comm import Backend
from shoal.comm.operation import Barrier, Payload
from shoal.comm.operation.base import Header
from shoal.strategies.consistency.progress import NUM_WORDS, Progress


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
        self._turn = {group: turn for turn, group in enumerate(self._order)}
        self._num_taken = 0

    def has_had(self, group: int) -> bool:
        """Whether the group's turn is over."""
        return self._turn[group] < self._num_taken

    def until(self, group: int) -> list[int]:
        """The groups whose turn comes now, up to and including ``group``."""
        return self._advance(self._turn[group] + 1)

    def behind(self, group: int) -> Iterator[int]:
        """Groups in the order of their turns, beginning behind ``group``'s.

        A group that was gathered in an earlier round may have no turn in this one.
        """
        turn = self._turn.get(group, len(self._order))
        return islice(self._order, turn + 1, None)

    def following(self) -> int | None:
        """The group whose turn is next, if there is one."""
        return self._order[self._num_taken] if self._num_taken < len(self._order) else None

    def rest(self) -> list[int]:
        """The turns that are missing to the end."""
        return self._advance(len(self._order))

    def _advance(self, num_taken: int) -> list[int]:
        turns = self._order[self._num_taken : num_taken]
        self._num_taken = max(self._num_taken, num_taken)
        return turns


class Vote(Barrier):
    """A barrier that says whether any rank wants something, and unites some numbers.

    It costs no more than a header, and finds ranks that do not train alike.
    """

    def __init__(
        self, progress: Progress, doing: str, wish: bool, numbers: Collection[int]
    ) -> None:
        """What this rank wants and contributes; every rank learns what all want."""
        self.signature = doing
        self.meta = (int(wish), *progress.words(), *numbers)
        self.is_wanted = wish
        self.is_alike = True
        self.united = set(numbers)

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """Reads the votes, which are in the headers."""
        self.is_wanted = any(header.meta[0] for header in headers)
        words = {header.meta[1 : 1 + NUM_WORDS] for header in headers}
        self.is_alike = len(words) == 1
        self.united = {number for header in headers for number in header.meta[1 + NUM_WORDS :]}
        return super().prepare(headers, rank)

    @classmethod
    def cast(
        cls,
        group: Backend,
        progress: Progress,
        doing: str,
        *,
        wish: bool = False,
        numbers: Collection[int] = (),
    ) -> Vote:
        """Votes in a group; all of its ranks do, and raise if they do not train alike.

        ``doing`` is what they are doing, in words for an error message; ``wish`` is what this rank
        wants, and ``numbers`` what it contributes to the union.
        """
        vote = cls(progress, doing, wish, numbers)
        group.run(vote)
        if not vote.is_alike:  # which every rank of the group has seen
            raise progress.difference(group)
        return vote
