"""How ranks decide together whether to go on, at no cost but a header."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shoal.comm import Backend
from shoal.comm.operation import Barrier, Payload
from shoal.comm.operation.header import Header
from shoal.strategies.consistency.progress import NUM_WORDS, Progress


class Vote(Barrier):
    """A barrier that says whether any rank wants something, and unites some numbers.

    It also finds out ranks that do not train alike.

    Example:
        >>> vote = Vote.cast(group, progress, "backward()", numbers={3})
        >>> if vote.is_wanted:
        ...     join_in()
    """

    def __init__(
        self, progress: Progress, doing: str, wish: bool, numbers: Collection[int]
    ) -> None:
        """What this rank wants and contributes; every rank learns what all did."""
        self.signature = doing
        self.meta = (int(wish), *progress.words(), *numbers)
        self.is_wanted = wish
        self.is_alike = True
        self.united = set(numbers)

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The headers are all there is to it."""
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
        """Votes in a group; all of its ranks do.

        Args:
            group: The ranks.
            progress: What this rank's optimizers have done so far.
            doing: What the ranks are at, as an error message would call it.
            wish: Whether this rank wants something.
            numbers: What this rank contributes to the union.

        Raises:
            MismatchError: If the ranks do not train alike.
        """
        vote = cls(progress, doing, wish, numbers)
        group.run(vote)
        if not vote.is_alike:  # which every rank of the group has seen
            raise progress.difference(group)
        return vote
