"""One order of the data for all ranks: what is drawn for it, every rank draws as rank 0 does.

[Note: rank 0's draws]
A sampler draws from torch's, numpy's or Python's generators, or from one of its own, and ranks
have these in different states: their seeds differ, or they have computed different things. So at
the beginning of an epoch rank 0 sends the states it has, and every rank draws from these. Rank 0
itself draws as one process would, so an order is the one that a script had before it was
distributed. Others have their own states back afterwards: what they draw for dropout or
augmentation is as their own seeds say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from shoal.comm import Backend
from shoal.errors import MismatchError
from shoal.torch_support.random_state import RandomState

T = TypeVar("T")
_END: Any = object()


class Generators:
    """torch's, numpy's and Python's own generators on the CPU, and some of the user's."""

    def __init__(self, own: Sequence[torch.Generator]) -> None:
        """``own`` are the user's."""
        self.own = list(own)

    def capture(self) -> Any:
        """Their states, for `restore`."""
        return RandomState.capture(with_cuda=False), self.own_states()

    def restore(self, state: Any) -> None:
        """Puts all of them back."""
        self.restore_common(state)
        self.restore_own(state[1])

    def restore_common(self, state: Any) -> None:
        """Puts those back that everything draws from."""
        state[0].restore()

    def to_plain(self) -> dict[str, Any]:
        """Their states as plain values, to be sent and saved."""
        common = RandomState.capture(with_cuda=False).to_plain()
        return {**common, "own": self.own_states()}

    def own_states(self) -> list[torch.Tensor]:
        """The states of the user's generators."""
        return [each.get_state() for each in self.own]

    def restore_plain(self, state: dict[str, Any]) -> None:
        """Takes over what `to_plain` gave."""
        RandomState.from_plain(state).restore()
        self.restore_own(state["own"])

    def restore_own(self, states: Sequence[torch.Tensor]) -> None:
        """Gives the user's generators saved states."""
        for each, saved in zip(self.own, states, strict=True):
            each.set_state(saved)


class Draws:
    """What is drawn for the order of one loader; see [Note: rank 0's draws]."""

    def __init__(self, generators: Sequence[torch.Generator], ranks: Backend) -> None:
        """``ranks`` are all that iterate; all of them call it."""
        self._generators, self._ranks = Generators(generators), ranks.lane(self)
        self._is_resumed = False
        self.start: dict[str, Any] | None = None
        """The states at the beginning of the last epoch, or of the one that is to be resumed."""
        self._stream: Any = None

    @property
    def own_states(self) -> list[torch.Tensor]:
        """Those of the user's generators, after what was drawn last."""
        if self._stream is None:
            return self._generators.own_states()
        states: list[torch.Tensor] = self._stream[1]
        return states

    def resume(self, start: dict[str, Any] | None, own: Sequence[torch.Tensor]) -> None:
        """The next epoch begins with saved states: with all of them, or the user's generators'."""
        self.start, self._is_resumed, self._stream = start, start is not None, None
        self._generators.restore_own(own)

    def drawn(self, make: Callable[[], Iterator[T]]) -> Iterator[T]:
        """What an iterator gives if every rank draws alike; ``make`` begins it."""
        with self._beginning():
            iterator = make()
            item = next(iterator, _END)
        while item is not _END:
            yield item
            with self._going_on():
                item = next(iterator, _END)

    def compare(self, what: str, found: str) -> None:
        """Raises if ranks differ in what they are about to divide; every rank calls it."""
        by_rank = self._ranks.all_gather_object(found)
        odd = [rank for rank, other in enumerate(by_rank) if other != by_rank[0]]
        if odd:
            raise MismatchError(
                f"the ranks would divide different data: {what} is another one on rank {odd[0]} "
                f"than on rank 0 ({by_rank[odd[0]]} and {by_rank[0]}). A loader that shoal "
                "divides gives every rank the same batches, of which each takes its part: leave "
                "the division to shoal, or divide the data yourself and do not pass the loader"
            )

    @contextlib.contextmanager
    def _beginning(self) -> Iterator[None]:
        before, is_resumed = self._generators.capture(), self._is_resumed
        self._is_resumed = False
        own = self.start if is_resumed else self._generators.to_plain()
        start: dict[str, Any] = self._ranks.broadcast_object(own)
        self.start = start
        self._generators.restore_plain(start)
        yield
        self._stream = self._generators.capture()
        if self._ranks.rank:
            self._generators.restore(before)
        elif is_resumed:  # the rest of the script goes on where it is
            self._generators.restore_common(before)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        before = self._generators.capture()
        self._generators.restore(self._stream)
        yield
        self._stream = self._generators.capture()
        if self._ranks.rank:
            self._generators.restore(before)
        else:
            self._generators.restore_common(before)
