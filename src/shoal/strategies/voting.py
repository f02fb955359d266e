"""How ranks decide together whether to go on, at no cost but a header."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shoal.comm import Backend
from shoal.comm.header import Header
from shoal.comm.operation import Barrier, Payload


class Vote(Barrier):
    """A barrier that says whether any rank wants something, and unites some numbers.

    Example:
        >>> vote = Vote.cast(group, wish=False, numbers={3})
        >>> if vote.is_wanted:
        ...     join_in()
    """

    def __init__(self, wish: bool, numbers: Collection[int], signature: str) -> None:
        """What this rank wants and contributes; every rank learns what all did."""
        self.signature = signature
        self.meta = (int(wish), *numbers)
        self.is_wanted = wish
        self.united = set(numbers)

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The headers are all there is to it."""
        self.is_wanted = any(header.meta[0] for header in headers)
        self.united = {number for header in headers for number in header.meta[1:]}
        return super().prepare(headers, rank)

    @classmethod
    def cast(
        cls,
        group: Backend,
        *,
        wish: bool,
        numbers: Collection[int] = (),
        signature: str = Barrier.signature,
    ) -> Vote:
        """Votes in a group; all of its ranks do. ``signature`` is what they vote on."""
        vote = cls(wish, numbers, signature)
        group.run(vote)
        return vote
