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


class _Generators:
    """torch's, numpy's and Python's own generators on the CPU, and some of the user's."""

    def __init__(self, own: Sequence[torch.Generator]) -> None:
        self.own = list(own)

    def capture(self) -> Any:
        return RandomState.capture(with_cuda=False), self.own_states()

    def restore(self, state: Any) -> None:
        self.restore_common(state)
        self.restore_own(state[1])

    def restore_common(self, state: Any) -> None:
        """Puts those back that everything draws from."""
        state[0].restore()

    def to_plain(self) -> dict[str, Any]:
        common = RandomState.capture(with_cuda=False).to_plain()
        return {**common, "own": self.own_states()}

    def own_states(self) -> list[torch.Tensor]:
        return [each.get_state() for each in self.own]

    def restore_plain(self, state: dict[str, Any]) -> None:
        RandomState.from_plain(state).restore()
        self.restore_own(state["own"])

    def restore_own(self, states: Sequence[torch.Tensor]) -> None:
        for each, saved in zip(self.own, states, strict=True):
            each.set_state(saved)


class Draws:
    """What is drawn for the order of one loader; see [Note: rank 0's draws]."""

    def __init__(self, generators: Sequence[torch.Generator], ranks: Backend) -> None:
        """``ranks`` are all that iterate; all of them call it."""
        self._generators, self._ranks = _Generators(generators), ranks.lane(self)
        self._is_resumed = False
        self.start: dict[str, Any] | None = None
        """The states at the beginning of the last epoch, or of the one that is to be resumed."""
        self._stream: Any = None

    def move_to(self, ranks: Backend) -> None:
        """Other ranks iterate from now on; all of them call it."""
        self._ranks = ranks.lane(self)

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

    def forget_resumed(self) -> None:
        """The epoch that was to be resumed was left: the next one is drawn anew."""
        self.start, self._is_resumed = None, False

    def drawn(self, make: Callable[[], Iterator[T]]) -> Iterator[T]:
        """What an iterator gives if every rank draws alike; ``make`` begins it."""
        is_resumed, self._is_resumed = self._is_resumed, False
        with self._drawing(is_own=not is_resumed):
            own = self.start if is_resumed else self._generators.to_plain()
            self.start = self._ranks.broadcast_object(own)
            self._generators.restore_plain(self.start)
            iterator = make()
            item = next(iterator, _END)
        while item is not _END:
            yield item
            with self._drawing():
                self._generators.restore(self._stream)
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
    def _drawing(self, *, is_own: bool = False) -> Iterator[None]:
        """Around draws; afterwards the rest of the script goes on where it was.

        Unless the draws were rank 0's own: there it goes on from what was drawn.
        """
        before = self._generators.capture()
        yield
        self._stream = self._generators.capture()
        if self._ranks.rank:
            self._generators.restore(before)
        elif not is_own:
            self._generators.restore_common(before)
