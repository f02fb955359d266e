"""Gradients that users put in by hand: ``parameter.grad = ...``.

[Note: by hand]
A plain tensor that was put in the place of a gradient is this rank's own, as one from backward is,
and is averaged with the others' when it is used: at the next backward, or at the optimizer's step.
Nobody is told when it is put in. So a rank that finds some asks the others, and one that has seen
no averaged gradients since its last step asks, too: they may have some where it has none. In a
plain loop nobody asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from shoal.comm import Backend
from shoal.comm.operation import Barrier, Payload
from shoal.comm.operation.header import Header
from shoal.errors import MismatchError
from shoal.strategies.gradients.flagged_reduction import Flags
from shoal.strategies.gradients.group_gradients import GroupGradients


class HandMade:
    """The gradients of one model that were put in by hand."""

    def __init__(
        self, gradients: Sequence[GroupGradients], group: Backend, replicas: Backend | None
    ) -> None:
        """``group``: the ranks that share the gradients; ``replicas``: those with the same part."""
        self._gradients, self._replicas = gradients, replicas
        everybody = [group] if replicas is None else [group, replicas]
        self._groups = [each for each in everybody if each.size > 1]
        self._are_final = False

    @contextlib.contextmanager
    def final(self) -> Iterator[None]:
        """What is put in inside of it, or there at a step inside, is the same on every rank."""
        self.adopt()
        before = {id(g) for each in self._gradients for g in each.by_hand.values()}
        was_final, self._are_final = self._are_final, True
        try:
            yield
        finally:
            self._are_final = was_final
        for gradients in self._gradients:
            gradients.adopt()
            new = [place for place, g in gradients.by_hand.items() if id(g) not in before]
            gradients.take_as_final(new)

    def adopt(self) -> None:
        """Finds what users did to gradients; what needs no averaging is taken over."""
        for gradients in self._gradients:
            gradients.adopt()
            if gradients.by_hand and (self._are_final or not self._groups):
                gradients.take_as_final([*gradients.by_hand])

    def add_to(self) -> None:
        """Backward adds to what was put in, and averages it."""
        self.adopt()
        for gradients in self._gradients:
            if gradients.by_hand:
                gradients.take_as_local()

    def average(self, *, is_due: bool) -> None:
        """Averages them over the ranks, if any has some; see [Note: by hand].

        ``is_due``: whether other ranks may have some though this one has none.
        """
        self.adopt()
        own = {place for place, each in enumerate(self._gradients) if each.by_hand}
        if not self._groups or not (own or is_due):
            return
        for group in self._groups:
            question = _Question(own, len(self._gradients))
            group.run(question)
            own = question.flags.union
        for place in sorted(own):
            self._average_group(self._gradients[place])

    def _average_group(self, gradients: GroupGradients) -> None:
        by_hand = set(gradients.by_hand)
        averaged = gradients.used - by_hand
        for group in self._groups:
            comparison = _Comparison(by_hand, averaged, gradients.group.names)
            group.run(comparison)
            by_hand, averaged = comparison.by_hand, comparison.averaged
        gradients.take_as_local()
        gradients.start_reduction()
        gradients.finish_reduction()
        if self._replicas is not None:
            gradients.average_over(self._replicas)
        gradients.show()


class _Question(Barrier):
    """Which groups have gradients that any rank put in by hand."""

    signature = "step, or another use of gradients that may have been put in by hand"

    def __init__(self, own: set[int], count: int) -> None:
        self.flags = Flags(own, count)
        self.meta = self.flags.words

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The headers are all there is to it."""
        self.flags.unite(headers)
        return super().prepare(headers, rank)


class _Comparison(Barrier):
    """What each rank has of a group: put in by hand, or averaged already."""

    def __init__(
        self, by_hand: Collection[int], averaged: Collection[int], names: Sequence[str]
    ) -> None:
        self._names, self._count = names, len(names)
        self.signature = f"average of gradients put in by hand, {names[0]} and others"
        both = {*by_hand, *(self._count + place for place in averaged)}
        self._flags = Flags(both, 2 * self._count)
        self.meta = self._flags.words

    def check(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        """Raises if one rank's own would be averaged with what is an average already."""
        found = []
        for header in headers:
            flags = Flags(set(), 2 * self._count)
            flags.unite([header])
            found.append(flags.union)
        for place, name in enumerate(self._names):
            own = [rank for rank, each in zip(ranks, found, strict=True) if place in each]
            others = [
                rank for rank, each in zip(ranks, found, strict=True) if place + self._count in each
            ]
            if own and others:
                raise MismatchError(
                    f"the gradient of {name} was put in by hand on ranks {own}, but is the average "
                    f"of a backward on ranks {others}: put it in on every rank, or change the "
                    "averaged one in place"
                )

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The headers are all there is to it."""
        self._flags.unite(headers)
        return super().prepare(headers, rank)

    @property
    def by_hand(self) -> set[int]:
        """Parameters, by place, whose gradient some rank has put in."""
        return {place for place in self._flags.union if place < self._count}

    @property
    def averaged(self) -> set[int]:
        """Parameters, by place, whose gradient some rank shows as averaged."""
        return {place - self._count for place in self._flags.union if place >= self._count}
