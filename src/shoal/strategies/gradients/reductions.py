"""Reductions of gradients: what one is, and in which order those of a model run.

[Note: who used what]
In plain PyTorch a parameter that took no part in the loss has no gradient and is not stepped.
With ranks it counts if any rank used it. Which ones a rank used rides in the header of the
reduction, as bits, so that knowing it costs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from shoal.comm import Backend
from shoal.comm.operation import AllReduce, Operation, Payload, ReduceScatter
from shoal.comm.operation.base import Header
from shoal.strategies.consistency.progress import FrozenParameters, Progress
from shoal.strategies.consistency.rounds import Round, Vote

if TYPE_CHECKING:
    from shoal.strategies.gradients.group_gradients import GroupGradients

# Gradients whose reduction is under way take memory: one on the wire, one about to follow. Where
# ranks do the work themselves instead of a thread, more of them even out who is ahead of whom.
_MOST_IN_FLIGHT = 2
_MOST_IN_FLIGHT_DIRECTLY = 5

_BITS = 62


class Flags:
    """Numbers that this rank names, and once the headers are known those that any rank names."""

    def __init__(self, named: set[int], count: int) -> None:
        """``named``: numbers below ``count``."""
        is_all = len(named) == count
        self.words = _words_of_all(count) if is_all else _words_of(named, count)
        self.union: set[int] = set()
        self._all = set(named) if is_all else None

    def unite(self, headers: Sequence[Header]) -> None:
        """Learns from all headers what any rank names."""
        if self._all is not None:
            self.union = self._all
            return
        self.union = set()
        for word in range(len(self.words)):
            union = 0
            for header in headers:
                union |= header.meta[word]
            self.union |= {word * _BITS + bit for bit in range(_BITS) if union >> bit & 1}


def _words_of(named: Iterable[int], count: int) -> tuple[int, ...]:
    words = [0] * (-(-count // _BITS))
    for number in named:
        words[number // _BITS] |= 1 << (number % _BITS)
    return tuple(words)


@cache
def _words_of_all(count: int) -> tuple[int, ...]:
    """The usual case, once for each size of a group."""
    return _words_of(range(count), count)


class Flagged(Operation):
    """An operation in whose headers flags are united."""

    flags: Flags
    is_foreseeable = True

    def carry(self, flags: Flags) -> None:
        """The operation's headers are flags."""
        self.meta, self.flags = flags.words, flags

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """Reads the flags."""
        self.flags.unite(headers)
        return super().prepare(headers, rank)  # type: ignore[safe-super]

    def reconsider(
        self, headers: Sequence[Header], foreseen: Sequence[Header], ranks: Sequence[int]
    ) -> None:
        """The flags of others do not change what is moved."""
        self.flags.unite(headers)


class AverageToAll(Flagged, AllReduce):
    """Every rank has the whole average."""


class AverageToParts(Flagged, ReduceScatter):
    """Every rank has its part of the average."""


class Reductions:
    """The reductions of one model's gradients; see [Note: the round] for the order."""

    def __init__(
        self,
        gradients: Sequence[GroupGradients],
        backend: Backend,
        progress: Progress,
        *,
        may_wait: bool,
    ) -> None:
        """``may_wait``: whether a rank may wait for a reduction in the middle of a pass.

        It may not where ranks meet for other things meanwhile: another rank may get to its part of
        the reduction only after a meeting that this rank has yet to join.
        """
        self._gradients, self._backend, self._may_wait = gradients, backend, may_wait
        self._progress = progress
        self._frozen = FrozenParameters(
            {
                name: parameter
                for each in gradients
                for name, parameter in zip(each.group.names, each.group.parameters, strict=True)
            }
        )
        # Backward comes by the last groups first. Integers have no gradients.
        masters = [(each.group.index, each.group.master) for each in reversed(gradients)]
        self._order = [n for n, m in masters if m.is_floating_point() or m.is_complex()]
        self._most = _MOST_IN_FLIGHT_DIRECTLY if backend.shares_memory else _MOST_IN_FLIGHT
        self._round = Round([])
        self._complete: set[int] = set()
        self._in_flight: deque[GroupGradients] = deque()

    def begin(self, *, is_averaged: bool) -> None:
        """A backward pass begins; ``is_averaged``: a round of reductions belongs to it."""
        self._round = Round(self._order)
        self._complete.clear()
        if not is_averaged:
            self._frozen.see()

    def completed(self, index: int) -> None:
        """A group's gradients are all there: starts what is complete and has its turn."""
        self._complete.add(index)
        while (following := self._round.following()) in self._complete:
            assert following is not None
            self._take_turns(self._round.until(following))

    def complete_round(self) -> None:
        """Every backward has one round of reductions; gradients that came late want another."""
        self._take_turns(self._round.rest())
        while self._is_another_wanted():
            self.reduce_all()

    def _is_another_wanted(self) -> bool:
        wish, frozen = bool(self._complete), self._frozen.fingerprint()
        vote = Vote.cast(
            self._backend, self._progress, "the end of a backward", wish=wish, numbers=[frozen]
        )
        if len(vote.united) > 1:  # which every rank of the group has seen
            raise self._frozen.difference(self._backend)
        return vote.is_wanted

    def reduce_all(self) -> None:
        """Another turn for every group."""
        self._take_turns(self._order)

    def _take_turns(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._complete.discard(index)
            self._gradients[index].start_reduction()
            self._in_flight.append(self._gradients[index])
            while len(self._in_flight) > self._most:
                if not self._may_wait and not self._in_flight[0].is_reduced():
                    break
                self._in_flight.popleft().take_average()

    def finish(self) -> None:
        """Waits for everything."""
        self._in_flight.clear()
        for index in self._order:
            self._gradients[index].finish_reduction()

    def average_over(self, replicas: Backend) -> None:
        """The other copies of the shards take part too."""
        for index in self._order:
            self._gradients[index].average_over(replicas)
