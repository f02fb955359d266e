"""A message that is shown to its receiver now and comes to its end without a thread.

Where ranks read each other's memory a sender has nothing to do but to wait until the receiver has
read. A thread for that would fight the rank's own work for the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.comm.control.page_message import ANSWERED, FINISHED, PageMessage
from shoal.comm.control.patience import Patience
from shoal.comm.work import Work


class PostedSend(Work[None]):
    """A send whose receiver has been shown where the data lies."""

    def __init__(
        self,
        message: PageMessage,
        peer: int,
        patience: Callable[[], Patience],
        finish: Callable[[bytes], None],
    ) -> None:
        """``finish`` gets the receiver's header, checks it and counts the message."""
        self._message, self._peer = message, peer
        self._patience, self._finish = patience, finish
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
            self._end(self._patience())
        if self._error is not None:
            raise self._error

    def _end(self, patience: Patience) -> None:
        self._message.await_state(ANSWERED, patience, self._peer)
        self._is_over = True
        try:
            self._finish(self._message.theirs)
        except BaseException as error:
            self._error = error
            self._message.abandon()
            return
        self._message.finish(patience)
