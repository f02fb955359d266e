"""`LaunchOrder`: what a rank launches in its GPU's queues comes in the order of its calls.

[Note: the order of launches]
Each group of ranks has a thread of its own, which launches an operation once it knows the headers
of all ranks. A GPU may have no room for the operations of two groups at once. Then one rank must
not launch A before B where another launches B before A: A would wait for the second rank, B for the
first, for ever. So an operation that is queued takes a turn when it is called, and is launched when
all earlier ones of its rank have been, whichever thread gets its headers first. Ranks that call the
same operations in the same order launch them in that order. One whose caller waits for its headers
takes its turn when it has them.

Ranks whose models take different branches do not call in the same order: an earlier operation may
be one that the other ranks have yet to call, perhaps only after this one. That cannot be known, so
an operation without headers is waited for a moment only, which is far longer than it takes if all
ranks have called. If that was not enough, later moments are shorter, until one was enough again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")

_LONGEST_MOMENT_S = 1.0
_SHORTEST_MOMENT_S = 0.25
# What a launch may take, where a GPU's queue is full or a kernel is loaded.
_LAUNCH_S = 10.0


class LaunchOrder:
    """The turns of all operations of a rank that have been called and not been launched."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turns: dict[Turn, None] = {}
        self._moment_s = _LONGEST_MOMENT_S

    @property
    def is_free(self) -> bool:
        """Whether nothing waits that was called before."""
        return not self._turns

    def take(self) -> Turn:
        """The turn behind all others, for an operation that is called now."""
        turn = Turn(self)
        with self._changed:
            self._turns[turn] = None
        return turn

    def in_turn(self, task: Callable[[], T]) -> Callable[[], T]:
        """The task with a turn that is taken now, in whatever thread it will be carried out."""
        turn = self.take()

        def carry_out() -> T:
            with turn:
                return task()

        return carry_out

    def wait(self, turn: Turn) -> None:
        """Until all earlier ones have been launched, or for a moment."""
        with self._changed:
            turn.has_headers = True
            self._changed.notify_all()
            while (first := next(iter(self._turns), turn)) is not turn:
                if not self._await_change(first):
                    return

    def _await_change(self, first: Turn) -> bool:
        if first.has_headers:  # it is launched as soon as it has its own turn
            return self._changed.wait_for(lambda: first not in self._turns, _LAUNCH_S)
        is_enough = self._changed.wait_for(
            lambda: first.has_headers or first not in self._turns, self._moment_s
        )
        shorter = max(self._moment_s / 4, _SHORTEST_MOMENT_S)
        self._moment_s = _LONGEST_MOMENT_S if is_enough else shorter
        return is_enough

    def end(self, turn: Turn) -> None:
        """It was launched, or it failed."""
        with self._changed:
            self._turns.pop(turn, None)
            self._changed.notify_all()


class Turn:
    """The place of one operation in the order; inside of ``with`` it is this thread's."""

    def __init__(self, order: LaunchOrder) -> None:
        self._order = order
        self.has_headers = False

    def wait(self) -> None:
        """See [Note: the order of launches]."""
        self._order.wait(self)

    def __enter__(self) -> Turn:
        self._token = _current.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _current.reset(self._token)
        self._order.end(self)


_current: ContextVar[Turn | None] = ContextVar("turn", default=None)


def own_turn(order: LaunchOrder) -> Turn | nullcontext[Turn]:
    """The turn of what this thread carries out, or one that is taken now."""
    turn = _current.get()
    return order.take() if turn is None else nullcontext(turn)
