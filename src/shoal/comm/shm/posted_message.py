"""A message that is shown to its receiver now and comes to its end without a thread.

Where ranks read each other's memory a sender has nothing to do but to wait until the receiver has
read. A thread for that would fight the rank's own work for the interpreter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.comm.control.page.message import ANSWERED, FINISHED, PageMessage
from shoal.comm.control.patience import Patience
from shoal.comm.work import Work
from shoal.system.deadline import under_way_error


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
                raise under_way_error(self._what, timeout)
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
