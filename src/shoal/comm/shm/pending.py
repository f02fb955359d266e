"""Operations that are shown to the others now and carried out bit by bit, without a thread.

Where ranks read each other's memory, an operation has two moments: when everybody has shown
where its data lies, a rank can do its part; when everybody has done its part, the data may be
changed again. Whoever computes meanwhile comes by now and then and asks. A thread would do the
same with more effort, and fight for the interpreter.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from shoal.comm.control.page.memory import SLOTS
from shoal.comm.control.page.message import ANSWERED, FINISHED, PageMessage
from shoal.comm.control.page.page import PageChannel
from shoal.comm.control.patience import Patience
from shoal.comm.operation import Operation
from shoal.comm.work import Work
from shoal.errors import DeadlineError

# One slot is for the operation that comes next, one for whoever is still at the one before.
_MOST_POSTED = SLOTS - 2


class Posted(Work[Any]):
    """One operation of a `Postbox`."""

    def __init__(self, postbox: Postbox, operation: Operation, number: int, header: bytes) -> None:
        """``header`` is this rank's, as the others see it."""
        self.operation, self.number, self.header = operation, number, header
        self.begin = time.perf_counter()
        self.num_settled = 0
        """How many transfers of the group are over when this rank has done its part; then not 0."""
        self.is_over = False
        self.result: Tensor | None = None
        self.error: BaseException | None = None
        self._postbox = postbox

    def is_done(self) -> bool:
        """Does what can be done; whether everybody has done its part."""
        self._postbox.advance()
        return self.is_over

    def wait(self, timeout: float | None = None) -> Any:
        """Returns once everybody has done its part."""
        self._postbox.finish(self, timeout)
        if self.error is not None:
            raise self.error
        return self.result


class Carrier(NamedTuple):
    """What a postbox needs from its backend."""

    channel: PageChannel
    patience: Callable[[Operation, int], Patience]
    or_fail: Callable[..., Any]
    """Calls a function; if it gives up waiting, the others are told."""
    do_part: Callable[[Posted], int]
    """Agrees and moves; returns how many transfers of the group are over then."""


class Postbox:
    """The operations of one group that this rank has shown and not everybody has carried out."""

    def __init__(self, carrier: Carrier) -> None:
        """Empty."""
        self._carrier = carrier
        self._posted: deque[Posted] = deque()
        self._error: BaseException | None = None

    def put(self, operation: Operation, number: int, header: bytes) -> Posted:
        """Shows an operation to the others."""
        self.check()
        while len(self._posted) >= _MOST_POSTED:
            self.finish(self._posted[0], None)
        posted = Posted(self, operation, number, header)
        self._carrier.channel.show(number, header)
        self._posted.append(posted)
        self.advance()
        return posted

    def advance(self) -> None:
        """Does all that can be done without waiting."""
        channel = self._carrier.channel
        for posted in self._posted:
            if not posted.num_settled:
                if channel.unshown(posted.number):
                    break
                self._do_part(posted)
        while self._posted and self._is_over(self._posted[0]):
            self._posted.popleft().is_over = True

    def _do_part(self, posted: Posted) -> None:
        try:
            posted.num_settled = self._carrier.do_part(posted)
        except BaseException as error:
            self._error = posted.error = error
            self.abandon()

    def check(self) -> None:
        """Raises if a posted operation has failed: what came after it is out of step for good."""
        if self._error is not None:
            raise self._error

    def _is_over(self, posted: Posted) -> bool:
        if posted.error is not None:
            return True
        return bool(posted.num_settled) and not self._carrier.channel.unsettled(posted.num_settled)

    def abandon(self) -> None:
        """Nothing goes on after a failure: whoever waits is told."""
        error = next((posted.error for posted in self._posted if posted.error is not None), None)
        for posted in self._posted:
            posted.error = posted.error or error

    def finish(self, posted: Posted, timeout: float | None) -> None:
        """Waits for one operation, and for those before it."""
        self.advance()
        if posted.is_over:
            return
        until = math.inf if timeout is None else time.monotonic() + timeout
        self._carrier.or_fail(self._wait, posted, until)
        if not posted.is_over:
            what = posted.operation.signature
            raise DeadlineError(f"{what} is still under way after {timeout} s")

    def _wait(self, posted: Posted, until: float) -> None:
        patience = self._carrier.patience(posted.operation, posted.number)
        while not posted.is_over and time.monotonic() < until:
            patience.pause(lambda: self._missing(posted))
            self.advance()

    def _missing(self, posted: Posted) -> list[int]:
        self.advance()
        channel = self._carrier.channel
        if posted.is_over:
            return []
        if not posted.num_settled:
            return channel.unshown(posted.number)
        return channel.unsettled(posted.num_settled)

    def finish_all(self) -> None:
        """Waits for everything."""
        while self._posted:
            self.finish(self._posted[0], None)
        self.check()


class Courier(NamedTuple):
    """What a posted message needs from its backend."""

    patience: Callable[[], Patience]
    or_fail: Callable[..., Any]
    """Calls a function; if it gives up waiting, the others are told."""
    finish: Callable[[bytes], None]
    """Gets the receiver's header, checks it and counts the message."""
    let_go: Callable[[], None]
    """Called when the receiver has read everything."""


class PostedSend(Work[None]):
    """A send whose receiver has been shown where the data lies."""

    def __init__(
        self,
        message: PageMessage,
        peer: int,
        what: str,
        courier: Courier,
    ) -> None:
        """``peer`` is the receiver's world rank, ``what`` names the message in errors."""
        self._message, self._peer, self._what = message, peer, what
        self._courier = courier
        self._is_over = False
        self._error: BaseException | None = None

    def is_done(self) -> bool:
        """Whether the receiver has read it."""
        if not self._is_over and self._message.has_reached(FINISHED):
            self._end(self._courier.patience())
        return self._is_over

    def wait(self, timeout: float | None = None) -> None:
        """Returns once the receiver has read it."""
        if not self._is_over:
            patience = self._courier.patience()
            self._courier.or_fail(self._await_answer, patience, timeout)
            if not self._message.has_reached(ANSWERED):
                raise DeadlineError(f"{self._what} is still under way after {timeout} s")
            self._courier.or_fail(self._end, patience)
        if self._error is not None:
            raise self._error

    def _await_answer(self, patience: Patience, timeout: float | None) -> None:
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self._message.has_reached(ANSWERED) and time.monotonic() < until:
            patience.pause(lambda: [] if self._message.has_reached(ANSWERED) else [self._peer])

    def _end(self, patience: Patience) -> None:
        self._message.await_state(ANSWERED, patience, self._peer)
        self._is_over = True
        try:
            self._courier.finish(self._message.theirs)
        except BaseException as error:
            self._error = error
            self._message.abandon()
            return
        self._message.finish(patience)
        self._courier.let_go()
