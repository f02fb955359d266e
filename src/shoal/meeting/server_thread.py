"""A thread that serves whoever connects and proves to belong to the run, and waits for nobody.

What it serves, a subclass says: see `MeetingServer`, and `TensorServer` in `comm/peer_tensors/`.
Who may come in is decided alike: see [Note: who may come in].
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from shoal.meeting import address as places
from shoal.meeting.handshake import Handshake, HandshakeError, answer, frame_key
from shoal.meeting.wire import LONGEST_REQUEST_BYTES, Wire, WireError

logger = logging.getLogger("shoal")

_READ_BYTES = 1 << 16
_FULL_PAUSE_S = 0.01


class Guest:
    """One connection: a stranger until ``wire`` is there."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.socket, self.name = sock, name
        self.wire: Wire | None = None
        self.handshake: Handshake | None = None
        self.transcript = bytearray()
        self.unsent: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        """What is to be sent, and what to do when it was."""

    def fileno(self) -> int:
        """For the selector."""
        return self.socket.fileno()


class ServerThread:
    """Begins with `_start`, and ends with `close`.

    Attributes:
        answer_s: How long a stranger may take to prove who it is.
        most_unproven: How many strangers may be connected at once.
    """

    answer_s = 5.0
    most_unproven = 256

    def __init__(self, listener: socket.socket, address: str, place: str) -> None:
        """``place`` says in a warning where a stranger was."""
        self.address = address
        self._listener, self._place = listener, place
        self._is_one_host = places.host_and_port(address) is None
        self._guests: set[Guest] = set()
        self._unproven: dict[Guest, float] = {}
        self._tasks: list[Callable[[], None]] = []
        self._selector = selectors.DefaultSelector()
        self._alarm, self._bell = socket.socketpair()
        self._is_closing = self._has_warned = False
        for sock in (listener, self._alarm, self._bell):
            sock.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._alarm, selectors.EVENT_READ)

    def _start(self, name: str, key: bytes | None, rank: int, size: int) -> None:
        """The last thing a subclass does when it is made.

        ``rank`` of ``size`` is this side's number in handshakes. Without a key nobody has to prove
        anything, and the kernel's word for the user at the other end is enough.
        """
        self._key, self._rank, self._size = key, rank, size
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hangs up on all and ends the thread. Twice is fine."""
        self._is_closing = True
        self._ring()
        self._thread.join()

    def _do(self, task: Callable[[], None]) -> None:
        """Has the thread do something."""
        self._tasks.append(task)
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it rings already
            self._bell.send(b"\0")

    # What subclasses say ----------------------------------------------------------------------

    def _welcome(self, guest: Guest) -> None:
        """A stranger has become a guest."""

    def _serve_request(self, guest: Guest, message: dict[str, Any]) -> None:
        """A guest asks for something; an error of a wrong request ends its connection."""
        raise NotImplementedError

    def _due(self) -> Iterable[float]:
        """Times of the monotonic clock at which `_tick` is to be called."""
        return ()

    def _tick(self, now: float) -> None:
        """Called in every turn."""

    # The thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
            self._do_tasks()  # the last words of a rank that gives up
        finally:
            self._let_go()

    def _let_go(self, *, is_owner: bool = True) -> None:
        for guest in list(self._guests):
            guest.socket.close()
        for each in (self._listener, self._alarm, self._bell):
            each.close()
        self._selector.close()
        if is_owner:
            places.remove(self.address)

    def _turn(self) -> None:
        times = [*self._unproven.values(), *self._due()]
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        for key, events in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._alarm:
                self._alarm.recv(4096)
            elif key.data in self._guests:
                self._look_at(key.data, events)
        self._do_tasks()
        now = time.monotonic()
        for guest in [each for each, end in self._unproven.items() if end <= now]:
            self._drop(guest, "it took too long to say who it is")
        self._tick(now)

    def _do_tasks(self) -> None:
        while self._tasks:
            self._tasks.pop(0)()

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError:  # it has gone again, or descriptors are short: those of others will end
            time.sleep(_FULL_PAUSE_S)
            return
        sock = places.above_stdio(sock)
        sock.setblocking(False)
        if self._is_one_host and (uid := places.peer_uid(sock)) != os.geteuid():
            sock.close()
            self._warn(f"a process of uid {uid}", "it is another user's")
            return
        guest = Guest(sock, "this host" if self._is_one_host else f"{peer[0]} port {peer[1]}")
        if self._key is not None and len(self._unproven) >= self.most_unproven:
            # The oldest has had the most time.
            self._drop(next(iter(self._unproven)), "too many strangers call at once")
        self._guests.add(guest)
        self._selector.register(guest, selectors.EVENT_READ, guest)
        if self._key is None:
            self._let_in(guest)
            return
        steps = answer(self._key, self._rank, self._size, guest.transcript)
        deadline = self._unproven[guest] = time.monotonic() + self.answer_s
        guest.handshake = Handshake(sock, steps, guest.name, deadline, is_call=False)
        self._look_at(guest, selectors.EVENT_READ)

    def _look_at(self, guest: Guest, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send_rest(guest)
            if events & selectors.EVENT_READ:
                if guest.wire is not None:
                    self._hear(guest, guest.wire)
                elif guest.handshake is not None and guest.handshake.go_on() is not None:
                    del self._unproven[guest]
                    self._let_in(guest)
        except (OSError, HandshakeError, WireError) as error:
            self._drop(guest, str(error))

    def _let_in(self, guest: Guest) -> None:
        key = None
        if self._key is not None:
            key = frame_key(self._key, guest.transcript, is_one_host=self._is_one_host)
        guest.wire = Wire("server", LONGEST_REQUEST_BYTES, key)
        self._welcome(guest)

    def _hear(self, guest: Guest, wire: Wire) -> None:
        try:
            data = guest.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._forget(guest)
            return
        for message in wire.feed(data):
            try:
                self._serve_request(guest, message)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise WireError(f"it asks for what there is not: {error!r}") from error

    # Sending, and strangers -------------------------------------------------------------------

    def _say(self, guest: Guest, message: Any) -> None:
        """Sent with the next `_send_rest`."""
        assert guest.wire is not None
        guest.unsent.append((memoryview(guest.wire.encode(message)), None))

    def _send_rest(self, guest: Guest) -> None:
        with contextlib.suppress(BlockingIOError):
            while guest.unsent:
                memory, sent = guest.unsent[0]
                count = guest.socket.send(memory) if memory else 0
                guest.unsent[0] = (memory[count:], sent)
                if count == len(memory):
                    guest.unsent.popleft()
                    if sent is not None:
                        sent()
        writing = selectors.EVENT_WRITE if guest.unsent else 0
        self._selector.modify(guest, selectors.EVENT_READ | writing, guest)

    def _drop(self, guest: Guest, why: str) -> None:
        if guest.wire is None:
            self._warn(guest.name, why)
        self._forget(guest)

    def _warn(self, who: str, why: str) -> None:
        """Once: strangers may come by the thousand."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "dropped a connection from %s %s: %s. More of them are dropped without a word.",
                who, self._place, why,
            )  # fmt: skip

    def _forget(self, guest: Guest) -> None:
        self._selector.unregister(guest)
        self._guests.discard(guest)
        self._unproven.pop(guest, None)
        guest.socket.close()
