"""The thread that listens to all peers, shows them that we live, and notices when they do not."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shoal.comm.control.sockets.connection import Connection, ConnectionEndedError
from shoal.comm.control.sockets.frames import FrameError
from shoal.system.deadline import wait_until

if TYPE_CHECKING:
    from shoal.comm.control.sockets.sockets import SocketControl

_BEAT_EVERY_S = 1.0
# How long `close` gives the peers to take our last words and hang up too.
_LINGER_S = 1.0
_FLUSH_POLL_S = 0.001


class Reader:
    """Reads, in a thread of its own, and sends what the peers' sockets did not take at once."""

    def __init__(
        self, connections: Iterable[Connection], control: SocketControl, name: str, silence_s: float
    ) -> None:
        """A peer that has said nothing for ``silence_s`` is lost."""
        self._open = set(connections)
        self._control = control
        self._silence_s = silence_s
        self._beat_every_s = min(_BEAT_EVERY_S, silence_s / 4)
        self._beat_at = self._turned_at = time.monotonic()
        self._close_by: float | None = None
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for connection in self._open:
            self._selector.register(connection, selectors.EVENT_READ, connection)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # For other threads ------------------------------------------------------------------

    def wake(self) -> None:
        """Makes the reader look which connections have something left to send."""
        with contextlib.suppress(OSError):  # full: it is awake; closed: there is nobody to wake
            self._waker.send(b"\0")

    def flush(self, connections: Iterable[Connection], timeout: float) -> None:
        """Returns when the peers' hosts have all we said, or when the time is up."""
        wait_until(lambda: all(each.is_flushed() for each in connections), timeout, _FLUSH_POLL_S)

    def close(self) -> None:
        """Sends what is left, hangs up, waits a moment for the peers to do so, ends the thread."""
        self._close_by = time.monotonic() + _LINGER_S
        self.wake()
        self._thread.join()
        self._release()

    def forget(self) -> None:
        """Closes a forked child's copies; the thread is the parent's."""
        for connection in self._open:
            connection.forget()
        self._release()

    def _release(self) -> None:
        self._selector.close()
        self._woken.close()
        self._waker.close()

    # The thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_through():
                self._turn()
        except Exception as error:
            self._control.give_up(f"its control thread failed: {error!r}")
        finally:
            for connection in self._open:
                connection.close()

    def _is_through(self) -> bool:
        if self._close_by is None:
            return False
        return not self._open or time.monotonic() >= self._close_by

    def _turn(self) -> None:
        for event, mask in self._selector.select(self._pause_s()):
            if event.data is None:
                self._follow_wake()
            else:
                self._serve(event.data, mask)
        if self._close_by is None:
            now = time.monotonic()
            self._beat(now)
            self._judge_silence(now)
        else:
            self._hang_up()

    def _pause_s(self) -> float:
        until = self._beat_at if self._close_by is None else self._close_by
        return max(0.0, until - time.monotonic())

    def _follow_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        for connection in self._open:
            self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        events = selectors.EVENT_READ
        if connection.has_rest:
            events |= selectors.EVENT_WRITE
        self._selector.modify(connection, events, connection)

    def _serve(self, connection: Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and connection.push():
            self._watch(connection)
        if mask & selectors.EVENT_READ:
            self._listen(connection)

    def _listen(self, connection: Connection) -> None:
        try:
            for kind, body in connection.receive():
                self._control.hear(connection.rank, kind, body)
        except ConnectionEndedError as end:
            self._end(connection, str(end))
        except FrameError as error:
            reason = f"it sent {error}, which is not our protocol; its connection was dropped"
            self._end(connection, reason)

    def _end(self, connection: Connection, reason: str) -> None:
        """Hanging up at once lets a peer that leaves in good order go without a wait."""
        self._selector.unregister(connection)
        self._open.discard(connection)
        connection.close()
        self._control.lose(connection.rank, reason)

    def _beat(self, now: float) -> None:
        if now < self._beat_at:
            return
        self._beat_at = now + self._beat_every_s
        frame = self._control.heartbeat()
        for connection in self._open:
            # What could not be sent yet will show that we live as soon as the peer reads it.
            if not connection.has_rest and not connection.send(frame):
                self._watch(connection)

    def _judge_silence(self, now: float) -> None:
        """A silent peer is lost, yet its connection stays: should it wake, it hears our news."""
        was_away = now - self._turned_at > self._beat_every_s + self._silence_s / 2
        self._turned_at = now
        for connection in self._open:
            if was_away:  # this process did not run: what looks like their silence was ours
                connection.heard_at = now
            elif now - connection.heard_at > self._silence_s:
                self._control.lose(connection.rank, f"silent for {self._silence_s:g} s")

    def _hang_up(self) -> None:
        for connection in self._open:
            if not connection.has_rest:
                connection.shut()
