"""Gradients that users put in by hand: ``parameter.grad = ...``.

[Note: by hand]
A plain tensor that was put in the place of a gradient is this rank's own, as one from backward is,
and is averaged with the others' when it is used: at the next backward, or at the optimizer's step.
Nothing happens at the moment it is put in. So a rank that finds some asks the others, and a rank
that has seen no averaged gradients since its last step asks, too: the others may have some where it
has none. In a plain loop no rank asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from shoal.comm import Backend
from shoal.comm.operation import Barrier
from shoal.comm.operation.base import Header
from shoal.errors import MismatchError
from shoal.strategies.gradients.group_gradients import GroupGradients
from shoal.strategies.gradients.reductions import Flagged, Flags


class HandMade:
    """The gradients of one model that were put in by hand."""

    def __init__(
        self, gradients: Sequence[GroupGradients], group: Backend, replicas: Backend | None
    ) -> None:
        """``group``: the ranks that share the gradients; ``replicas``: those with the same part."""
        self._gradients, self._replicas = gradients, replicas
        groups = [group] if replicas is None else [group, replicas]
        self._groups = [each for each in groups if each.size > 1]
        self._are_final = False

    @contextlib.contextmanager
    def final(self) -> Iterator[None]:
        """What is put in inside of it, or there at a step inside, is the same on every rank."""
        self.adopt()
        before = {id(g) for each in self._gradients for g in each.shown.by_hand.values()}
        was_final, self._are_final = self._are_final, True
        try:
            yield
        finally:
            self._are_final = was_final
        for gradients in self._gradients:
            shown = gradients.shown
            shown.adopt()
            shown.take_as_final([i for i, g in shown.by_hand.items() if id(g) not in before])

    def adopt(self) -> None:
        """Finds what users did to gradients; what needs no averaging is taken over."""
        for gradients in self._gradients:
            shown = gradients.shown
            shown.adopt()
            if shown.by_hand and (self._are_final or not self._groups):
                shown.take_as_final([*shown.by_hand])

    def add_to(self) -> None:
        """Backward adds to what was put in, and averages it."""
        self.adopt()
        for gradients in self._gradients:
            if gradients.shown.by_hand:
                gradients.shown.take_as_local()

    def average(self, *, is_due: bool) -> None:
        """Averages them over the ranks, if any has some; see [Note: by hand].

        ``is_due``: whether other ranks may have some though this one has none.
        """
        self.adopt()
        own = {number for number, each in enumerate(self._gradients) if each.shown.by_hand}
        if not self._groups or not (own or is_due):
            return
        for group in self._groups:
            question = _Question(own, len(self._gradients))
            group.run(question)
            own = question.flags.union
        for number in sorted(own):
            self._average_group(self._gradients[number])

    def _average_group(self, gradients: GroupGradients) -> None:
        by_hand = set(gradients.shown.by_hand)
        averaged = gradients.used - by_hand
        for group in self._groups:
            comparison = _HandMadeComparison(by_hand, averaged, gradients.group.names)
            group.run(comparison)
            by_hand, averaged = comparison.by_hand, comparison.averaged
        gradients.shown.take_as_local()
        gradients.start_reduction()
        gradients.finish_reduction()
        if self._replicas is not None:
            gradients.average_over(self._replicas)
        gradients.shown.show()


class _Question(Flagged, Barrier):
    """Which groups have gradients that any rank put in by hand."""

    signature = "step, or another use of gradients that may have been put in by hand"

    def __init__(self, own: set[int], count: int) -> None:
        self.carry(Flags(own, count))


class _HandMadeComparison(Flagged, Barrier):
    """What each rank has of a group: put in by hand, or averaged already."""

    def __init__(
        self, by_hand: Collection[int], averaged: Collection[int], names: Sequence[str]
    ) -> None:
        self._names, self._count = names, len(names)
        self.signature = f"average of gradients put in by hand, {names[0]} and others"
        both = {*by_hand, *(self._count + index for index in averaged)}
        self.carry(Flags(both, 2 * self._count))

    def check(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        """Raises if one rank's own would be averaged with what is an average already."""
        found = []
        for header in headers:
            flags = Flags(set(), 2 * self._count)
            flags.unite([header])
            found.append(flags.union)
        for index, name in enumerate(self._names):
            own = [rank for rank, each in zip(ranks, found, strict=True) if index in each]
            others = [
                rank for rank, each in zip(ranks, found, strict=True) if index + self._count in each
            ]
            if own and others:
                raise MismatchError(
                    f"the gradient of {name} was put in by hand on ranks {own}, but is the average "
                    f"of a backward on ranks {others}: put it in on every rank, or change the "
                    "averaged one in index"
                )

    @property
    def by_hand(self) -> set[int]:
        """Indices of parameters whose gradient some rank has put in."""
        return {index for index in self.flags.union if index < self._count}

    @property
    def averaged(self) -> set[int]:
        """Indices of parameters whose gradient some rank shows as averaged."""
        return {index - self._count for index in self.flags.union if index >= self._count}
