"""The thread that listens to all peers, shows them that we live, and notices when they do not.

In worlds where not all pairs are connected it also calls ranks to which there is something to say,
and answers those that call.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shoal.comm.control.sockets.connection import Connection, ConnectionEndedError
from shoal.comm.control.sockets.frames import FrameError
from shoal.comm.control.sockets.switchboard import Line, Switchboard
from shoal.system.deadline import wait_until

if TYPE_CHECKING:
    from shoal.comm.control.sockets.sockets import SocketControl

_BEAT_EVERY_S = 1.0
# How long `close` gives the peers to take our last words and hang up too.
_LINGER_S = 1.0
_FLUSH_POLL_S = 0.001
# A rank listens until it leaves, and the news of that may be slower than a call that is refused.
_CALL_AGAIN_S = 0.2
_CALL_S = 30.0


class Reader:
    """Reads, in a thread of its own, and sends what the peers' sockets did not take at once."""

    def __init__(
        self,
        connections: Iterable[Connection],
        control: SocketControl,
        line: Line | None,
        silence_s: float,
    ) -> None:
        """A peer that has said nothing for ``silence_s`` is lost; ``line`` is to be answered."""
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
        self._to_call: deque[int] = deque()
        self._calls: dict[int, tuple[float, float]] = {}  # when to call again, and until when
        self._switchboard: Switchboard | None = None
        if line is not None:
            self._switchboard = Switchboard(line, self._selector, self._connected, self._failed)
        name = f"shoal-control-{control.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # For other threads ------------------------------------------------------------------

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def wake(self) -> None:
        """Makes the reader look which connections have something left to send."""
        with contextlib.suppress(OSError):  # full: it is awake; closed: there is nobody to wake
            self._waker.send(b"\0")

    def call(self, rank: int) -> None:
        """Connects to a rank; what was sent to it meanwhile goes out then."""
        self._to_call.append(rank)
        self.wake()

    @property
    def connections(self) -> tuple[Connection, ...]:
        """All that are open now, two to a rank where both have called."""
        return tuple(self._open.copy())

    def flush(self, timeout: float) -> None:
        """Returns when the peers' hosts have all we said, or when the time is up."""
        connections = self.connections
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
        if self._switchboard is not None:
            self._switchboard.forget()
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
            if self._switchboard is not None:
                self._switchboard.close()
                self._switchboard.stop_answering()
            for connection in self._open:
                connection.close()

    def _is_through(self) -> bool:
        if self._close_by is None:
            return False
        return not (self._open or self._calls) or time.monotonic() >= self._close_by

    def _turn(self) -> None:
        for event, mask in self._selector.select(self._pause_s()):
            if isinstance(event.data, Connection):
                self._serve(event.data, mask)
            elif event.data is None:
                self._follow_wake()
            elif self._switchboard is not None:
                self._switchboard.serve(event.data)
        now = time.monotonic()
        if self._switchboard is not None:
            self._follow_calls(now, self._switchboard)
        if self._close_by is None:
            self._beat(now)
            self._judge_silence(now)
        else:
            self._hang_up()

    def _pause_s(self) -> float:
        until = self._beat_at if self._close_by is None else self._close_by
        until = min([until, *(again for again, _ in self._calls.values())])
        return max(0.0, until - time.monotonic())

    def _follow_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        for connection in self._open:
            self._watch(connection)

    # Calls ------------------------------------------------------------------------------

    def _follow_calls(self, now: float, switchboard: Switchboard) -> None:
        while self._to_call:
            self._calls[self._to_call.popleft()] = (now, now + _CALL_S)
        for rank, (again_at, until) in list(self._calls.items()):
            if self._control.is_gone(rank):
                del self._calls[rank]
                switchboard.cancel(rank)
            elif again_at <= now:
                self._calls[rank] = (until, until)
                switchboard.call(rank, until)
        switchboard.drop_overdue(now)

    def _failed(self, rank: int, error: str) -> None:
        """Calls again for a while: news of why it does not answer may be under way."""
        _, until = self._calls.pop(rank, (0.0, 0.0))
        now = time.monotonic()
        if self._close_by is not None:
            return
        if now < until:
            self._calls[rank] = (now + _CALL_AGAIN_S, until)
        else:
            self._control.lose(rank, f"it could not be reached: {error}")

    def _connected(self, rank: int, sock: socket.socket) -> None:
        self._calls.pop(rank, None)
        assert self._switchboard is not None
        self._switchboard.cancel(rank)
        connection = self._control.connection_for(rank)
        self._open.add(connection)  # first: no news may be missed between the greeting and this
        connection.attach(sock, self._control.greeting())
        self._selector.register(connection, selectors.EVENT_READ, connection)
        self._watch(connection)

    # Connections ------------------------------------------------------------------------

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
        for rank in self._control.to_call():
            self._control.connect_to(rank)
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
