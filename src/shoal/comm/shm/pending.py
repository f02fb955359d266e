"""Operations and messages that are shown to the others now and come to their end without a thread.

Where ranks read each other's memory, an operation has two moments: when all ranks have shown
where their data lies, a rank can do its part; when all ranks have done their parts, the data may
change again. A rank that computes meanwhile asks now and then how far the others are. A sender of
a message only waits until the receiver has read it. A thread would do the same with more effort,
and compete with the rank's own work for the interpreter.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal.comm.control.deadlock.record import SETTLED
from shoal.comm.control.page.page import ANSWERED, FINISHED, RING, PageChannel, PageMessage
from shoal.comm.control.patience import Patience
from shoal.comm.coordination import Coordination
from shoal.comm.operation import Operation, writing
from shoal.comm.operation.base import Header, encode
from shoal.comm.shm.transfers import Transfers
from shoal.comm.work import Work
from shoal.system.deadline import under_way_error
from shoal.system.public_call import origin, told

# One header is for the operation that comes next, one for a rank that is still at the one before.
_MOST_PENDING = RING - 2


class PendingOperation(Work[Any]):
    """One of the `PendingOperations`."""

    def __init__(
        self, pending: PendingOperations, operation: Operation, number: int, header: bytes
    ) -> None:
        """``header`` is this rank's, as the others see it."""
        self.operation, self.number, self.header = operation, number, header
        self.begin = time.perf_counter()
        self.num_settled = 0
        """How many transfers of the group are over once this rank has done its part; 0 before."""
        self.is_over = False
        self.result: Tensor | None = None
        self.error: BaseException | None = None
        self._pending = pending

    def is_done(self) -> bool:
        """Whether all ranks have done their parts. Does this rank's part if it can be done now."""
        self._pending.advance()
        return self.is_over

    def wait(self, timeout: float | None = None) -> Any:
        """Returns once all ranks have done their parts."""
        self._pending.finish(self, timeout)
        if self.error is not None:
            raise self.error
        return self.result


class PendingOperations:
    """The operations of one group that this rank has shown and that are not over everywhere.

    Attributes:
        is_idle: Whether there are none, and none has failed.
    """

    def __init__(
        self, coordination: Coordination, channel: PageChannel, transfers: Transfers
    ) -> None:
        self._coordination, self._channel, self._transfers = coordination, channel, transfers
        self._pending: deque[PendingOperation] = deque()
        self._error: BaseException | None = None
        self.is_idle = True

    def put(self, operation: Operation, wire: bytes) -> PendingOperation:
        """Shows an operation to the others; the caller has the group's lock."""
        self._coordination.number = number = self._coordination.number + 1
        site = origin(operation.signature, self._coordination.called)
        header = encode(Header(operation.signature, operation.meta, wire, site))
        self._coordination.note(told(operation.signature, site))
        self._check()
        while len(self._pending) >= _MOST_PENDING:
            self.finish(self._pending[0], None)
        self.is_idle = False
        self._channel.show(number, header)
        pending = PendingOperation(self, operation, number, header)
        self._pending.append(pending)
        self.advance()
        return pending

    def advance(self) -> None:
        """Does all that can be done without waiting."""
        for pending in self._pending:
            if not pending.num_settled:
                if self._channel.unshown(pending.number):
                    break
                self._try_own_part(pending)
        while self._pending and self._is_over(self._pending[0]):
            self._pending.popleft().is_over = True

    def _try_own_part(self, pending: PendingOperation) -> None:
        try:
            self._do_own_part(pending)
        except BaseException as error:
            self._error = error
            for each in self._pending:  # nothing goes on after a failure
                each.error = each.error or error

    def _do_own_part(self, pending: PendingOperation) -> None:
        self._coordination.check_process()
        operation, number = pending.operation, pending.number
        coordination, shown = self._coordination, self._channel.shown(number)
        waited = time.perf_counter() - pending.begin
        payload = coordination.prepare(operation, number, pending.header, shown)
        with writing(payload.target):
            coordination.transport(self._transfers.reduce_pending, operation.kind, payload)
        coordination.settle()
        pending.result = operation.result()
        coordination.count(operation.kind, payload.num_bytes, pending.begin, waited)
        pending.num_settled = coordination.num_settled

    def _check(self) -> None:
        """Raises if one has failed: all operations after it are out of step for good."""
        if self._error is not None:
            raise self._error

    def _is_over(self, pending: PendingOperation) -> bool:
        if pending.error is not None:
            return True
        return bool(pending.num_settled) and not self._channel.unsettled(pending.num_settled)

    def finish(self, pending: PendingOperation, timeout: float | None) -> None:
        """Waits for one operation, and for those before it."""
        self.advance()
        if pending.is_over:
            return
        until = math.inf if timeout is None else time.monotonic() + timeout
        self._coordination.or_fail(self._wait, pending, until)
        if not pending.is_over:
            raise under_way_error(pending.operation.signature, timeout)

    def _wait(self, pending: PendingOperation, until: float) -> None:
        signature = pending.operation.signature
        site = origin(signature, self._coordination.called)
        self._coordination.note(told(signature, site))
        patience = self._coordination.patience(signature, pending.number, site, eager=True)
        if until < math.inf:
            patience.awaited = None
        while not pending.is_over and time.monotonic() < until:
            patience.pause(lambda: self._missing(pending))
            self.advance()
            if pending.num_settled and patience.awaited is not None:  # the others' parts are left
                group_id = self._coordination.group_id
                patience.awaited = (SETTLED, group_id, pending.num_settled, 0)

    def _missing(self, pending: PendingOperation) -> list[int]:
        self.advance()
        if pending.is_over:
            return []
        if not pending.num_settled:
            return self._channel.unshown(pending.number)
        return self._channel.unsettled(pending.num_settled)

    def finish_all(self) -> None:
        """Waits for everything."""
        while self._pending:
            self.finish(self._pending[0], None)
        self._check()
        self.is_idle = True


class PendingSend(Work[None]):
    """A send whose receiver has been shown where the data lies."""

    def __init__(
        self,
        message: PageMessage,
        peer: int,
        coordination: Coordination,
        call: tuple[str, int, str],
        awaited: tuple[str, int, int, int],
        check: Callable[[bytes], None],
        give_back: Callable[[], None],
    ) -> None:
        """``peer`` is the receiver's world rank, ``call`` has signature, number and site.

        ``awaited`` is what it needs of the peer. ``check`` gets the receiver's header and counts
        the message; ``give_back`` is called when the receiver has read everything.
        """
        self._message, self._peer, self._coordination = message, peer, coordination
        self._call, self._check, self._give_back = call, check, give_back
        self._awaited = awaited
        self._is_over = False
        self._error: BaseException | None = None

    def is_done(self) -> bool:
        """Whether the receiver has read it."""
        if not self._is_over and self._message.has_reached(FINISHED):
            self._end(self._patience())
        return self._is_over

    def wait(self, timeout: float | None = None) -> None:
        """Returns once the receiver has read it."""
        if not self._is_over:
            patience = self._patience()
            patience.awaited = None if timeout is not None else self._awaited
            self._coordination.or_fail(self._await_answer, patience, timeout)
            if not self._message.has_reached(ANSWERED):
                raise under_way_error(self._call[0], timeout)
            self._coordination.or_fail(self._end, patience)
        if self._error is not None:
            raise self._error

    def _patience(self) -> Patience:
        return self._coordination.patience(*self._call, eager=True)

    def _await_answer(self, patience: Patience, timeout: float | None) -> None:
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self._message.has_reached(ANSWERED) and time.monotonic() < until:
            patience.pause(lambda: [] if self._message.has_reached(ANSWERED) else [self._peer])

    def _end(self, patience: Patience) -> None:
        self._coordination.check_process()
        self._message.await_state(ANSWERED, patience, self._peer)
        self._is_over = True
        try:
            self._check(self._message.theirs)
        except BaseException as error:
            self._error = error
            self._message.abandon()
            return
        self._message.finish(patience)
        self._give_back()
