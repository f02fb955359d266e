"""Operations that are launched before headers are compared.

[Note: foreseen operations]
The gathers and reductions of a training step are the same in every step. So the headers of the
other ranks are taken to be those of last time: the caller's thread launches the operation at once,
and the queue's thread compares the headers of all ranks later, exactly, for each operation. Who
wants to know what is in them, as a reduction does in the end, waits for that with `Work.confirm`.
So does everything that is put into the queue behind them, as the vote at the end of a pass.

If the headers differ, a library may have written anywhere by then: the transfers are aborted, and
every call after that raises the `MismatchError`, on every rank. None is launched ahead of one that
still waits in a queue: of the same group, because its numbers say the order, or of another one, see
[Note: the order of launches].
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shoal.comm.operation import Barrier, Operation
from shoal.comm.operation.base import NOTHING_MOVED, Header, encode
from shoal.comm.torch_groups.base import ProcessGroupBackend
from shoal.comm.torch_groups.launch_order import own_turn
from shoal.comm.work import ThreadedWork, Work, WorkQueue
from shoal.errors import MismatchError

_MESSAGES = ("send", "recv")
_TOO_LATE = (
    "That was found after data had begun to move, so nothing that the ranks hold can be trusted: "
    "start again from the last checkpoint."
)


class Confirmation(ThreadedWork[None]):
    """Compares headers when there is time for it, or when somebody waits for that."""

    def __init__(self, task: Callable[[], None], what: str, queue: WorkQueue) -> None:
        """``queue`` will carry it out."""
        super().__init__(task, what)
        self._queue = queue

    def wait(self, timeout: float | None = None) -> None:
        """Raises `MismatchError` if the ranks called different operations."""
        if not self.is_done():
            self._queue.call()
        super().wait(timeout)


class ForeseeingBackend(ProcessGroupBackend):
    """A backend that need not wait for headers; see [Note: foreseen operations]."""

    _last_queued: Work[Any] | None = None

    @abstractmethod
    def _launch(
        self, operation: Operation, move: Callable[[], Any], confirmation: Work[None]
    ) -> Work[Any]:
        """Calls ``move``, which moves the payload and returns the result, or has it called."""

    def _begin(self, operation: Operation, number: int, site: str) -> Work[Any]:
        self._check_stuck()
        mine = encode(Header(operation.signature, operation.meta, b"", site))
        shown = self._coordination.foreseen(mine) if operation.is_foreseeable else None
        if self._last_queued is not None and not self._last_queued.would_block():
            self._last_queued = None  # it would keep its result
        is_next = self._last_queued is None and self._links.launches.is_free
        if shown is None or not is_next:
            self._last_queued = super()._begin(operation, number, site)
            return self._last_queued
        return self._begin_foreseen(operation, number, site, mine, shown)

    def _queued(self, operation: Operation, number: int, site: str) -> Callable[[], Any]:
        task = super()._queued(operation, number, site)
        if isinstance(operation, Barrier):  # launches nothing
            return task
        self._compare_everywhere()
        return self._links.launches.in_turn(task)

    def _compare_everywhere(self) -> None:
        """Other ranks may not have foreseen what this one has, and wait for its headers."""
        for group in self._state.groups:
            assert isinstance(group, ForeseeingBackend)
            queue = group._coordination.queue
            if queue is not None and not queue.is_idle():
                queue.call()

    def _mover(self, kind: str) -> Callable[..., None]:
        move = super()._mover(kind)
        if kind in _MESSAGES:  # which have an order of their own
            return move

        def move_in_turn(*args: Any) -> None:
            with own_turn(self._links.launches) as turn:
                turn.wait()
                move(*args)

        return move_in_turn

    def _begin_foreseen(
        self, operation: Operation, number: int, site: str, mine: bytes, shown: Sequence[bytes]
    ) -> Work[Any]:
        coordination, times = self._coordination, (time.perf_counter(), 0.0)
        payload = coordination.prepare(operation, number, mine, shown)
        # Comparing comes late, perhaps at the end of the pass: what has moved may be freed before.
        compared = operation.without_memory()
        confirm = partial(self._confirm, compared, number, site, mine, shown)
        queue = coordination.start_queue()
        confirmation = queue.put_later(Confirmation(confirm, operation.signature, queue))
        patience = coordination.patience(operation.signature, number, site, eager=False)
        move = partial(coordination.carry_out, operation, payload, self._mover, patience, times)
        return self._launch(operation, move, confirmation)

    def _confirm(
        self,
        operation: Operation,
        number: int,
        site: str,
        mine: bytes,
        foreseen: Sequence[bytes],
    ) -> None:
        self._check_stuck()
        coordination = self._coordination
        is_awaited = coordination.start_queue().is_called
        patience = coordination.begin(operation.signature, number, site, eager=is_awaited)
        shown = coordination.or_fail(self._channel.exchange, number, mine, patience)
        try:
            coordination.confirm(operation, number, mine, foreseen, shown)
        except MismatchError as error:
            text = str(error).replace(NOTHING_MOVED, "", 1)
            late = MismatchError(f"{text}\n{_TOO_LATE}")
            self._state.mismatch = late
            for group in self._state.groups:  # a GPU may wait in any of them, and for ever
                if isinstance(group, ProcessGroupBackend):
                    group._abort(late)
            raise late from None
