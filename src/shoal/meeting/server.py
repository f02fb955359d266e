"""The server where the ranks of a run meet: it gathers what each rank has to say, round by round.

[Note: who may come in]
On one host the kernel tells the user at the other end: another user's connection is closed before a
byte of it is read. Between hosts a guest proves that it knows ``SHOAL_TOKEN``, and so does the
server. Until it has, a connection may send a hundred bytes and last five seconds, and only so many
may be open. Whoever is in is one of the run's own processes, and is trusted.

On one host each guest is given the run's secret. Between hosts the secret is made of the token and
a random number of the server's, so it never travels. Without a token there is no secret.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.meeting import address as places
from shoal.meeting.handshake import (
    Handshake,
    HandshakeError,
    answer,
    make_key,
    session_key,
)
from shoal.meeting.rounds import GatherRound, Guest
from shoal.meeting.wire import LONGEST_REQUEST_BYTES, Wire, WireError

logger = logging.getLogger("shoal")

ANSWER_S = 5.0
MOST_UNPROVEN = 256
# The guest's number in the handshake is above the server's, which is 0.
GUEST, SERVER, _NUM_SIDES = 1, 0, 2
_READ_BYTES = 1 << 16
_FULL_PAUSE_S = 0.05


def token_key(token: str) -> bytes:
    """What both sides prove to know; without a token only that they speak shoal's language."""
    return make_key("meeting", token)


def secret_of(token: str, nonce: str) -> bytes | None:
    """The secret of a run between hosts."""
    if not token:
        return None
    return hmac.digest(token_key(token), b"secret of run " + nonce.encode(), "sha256")


class MeetingServer:
    """A thread that serves the ranks of one run, and ends with `close`.

    Example:
        >>> with MeetingServer.on_one_host() as server:
        ...     start_ranks({"SHOAL_MEETING": server.address})
    """

    def __init__(
        self, listener: socket.socket, address: str, token: str | None, generation: int = 0
    ) -> None:
        """``token`` is None on one host. ``generation`` is the only one served, or 0 for all."""
        self.address = address
        self._listener, self._token, self._generation = listener, token, generation
        self._nonce = secrets.token_hex(32)
        self._rounds: dict[tuple[int, int], GatherRound] = {}
        self._complete: dict[tuple[int, int], GatherRound] = {}
        self._failure: dict[str, Any] | None = None
        self._joined: dict[int, set[int]] = {}
        self._ended: set[int] = set()
        self._guests: set[Guest] = set()
        self._unproven: dict[Guest, float] = {}
        self._has_warned = False
        self._changed = threading.Condition()
        self._tasks: list[Callable[[], None]] = []
        self._selector = selectors.DefaultSelector()
        self._alarm, self._bell = socket.socketpair()
        self._is_closing = False
        for sock in (listener, self._alarm, self._bell):
            sock.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._alarm, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="shoal-meeting", daemon=True)
        self._thread.start()

    @classmethod
    def on_one_host(cls, address: str | None = None, generation: int = 0) -> MeetingServer:
        """At a unix address, by default one that nobody can guess."""
        address = address or places.unix_address(secrets.token_hex(16))
        return cls(places.listen_unix(address), address, None, generation)

    @classmethod
    def between_hosts(
        cls, listener: socket.socket, host: str, token: str, generation: int = 0
    ) -> MeetingServer:
        """At a port that is bound already; ``host`` is how others call this one."""
        address = places.tcp_address(host, listener.getsockname()[1])
        return cls(places.above_stdio(listener), address, token, generation)

    def __enter__(self) -> MeetingServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends the server."""
        self.close()

    # For the process that holds it ------------------------------------------------------------

    def report_failure(self, rank: int, reason: str) -> None:
        """Tells ranks that wait for others of one that will not come; the first report counts."""
        self._do(lambda: self._fail(rank, reason))

    def await_joined(self, generation: int, size: int, seconds: float) -> bool:
        """Waits until all ranks have said that they need the server no more."""
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self._joined.get(generation, ())) >= size, seconds
            )

    def end_node(self, node: int) -> None:
        """A node's ranks have ended."""
        with self._changed:
            self._ended.add(node)
            self._changed.notify_all()

    def num_ended(self) -> int:
        """The number of nodes whose ranks have ended."""
        with self._changed:
            return len(self._ended)

    def close(self) -> None:
        """Hangs up on all. Twice is fine."""
        self._is_closing = True
        self._ring()
        self._thread.join()

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it rings already
            self._bell.send(b"\0")

    # The thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
            while self._tasks:  # the last words of a rank that gives up
                self._tasks.pop(0)()
        finally:
            for guest in list(self._guests):
                guest.socket.close()
            self._listener.close()
            self._alarm.close()
            self._bell.close()
            self._selector.close()
            places.remove(self.address)

    def _turn(self) -> None:
        timeout = None
        if self._unproven:
            timeout = max(0.0, min(self._unproven.values()) - time.monotonic())
        for key, events in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._alarm:
                self._alarm.recv(4096)
            elif key.data in self._guests:
                self._look_at(key.data, events)
        while self._tasks:
            self._tasks.pop(0)()
        now = time.monotonic()
        for guest in [each for each, end in self._unproven.items() if end <= now]:
            self._drop(guest, "it took too long to say who it is")

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError:  # it has gone again, or descriptors are short: those of others will end
            time.sleep(_FULL_PAUSE_S)
            return
        sock.setblocking(False)
        guest = Guest(sock, f"{peer[0]} port {peer[1]}" if self._token is not None else "this host")
        if self._token is None:
            uid = places.peer_uid(sock)
            if uid != os.geteuid():
                sock.close()
                self._warn(f"a process of uid {uid}", "it is another user's")
                return
            self._guests.add(guest)
            self._selector.register(guest, selectors.EVENT_READ, guest)
            self._welcome(guest, None)
            return
        if len(self._unproven) >= MOST_UNPROVEN:  # the oldest has had the most time
            self._drop(next(iter(self._unproven)), "too many strangers call at once")
        steps = answer(token_key(self._token), SERVER, _NUM_SIDES, guest.transcript)
        deadline = time.monotonic() + ANSWER_S
        guest.handshake = Handshake(sock, steps, guest.name, deadline, is_call=False)
        self._guests.add(guest)
        self._unproven[guest] = deadline
        self._selector.register(guest, selectors.EVENT_READ, guest)
        self._look_at(guest, selectors.EVENT_READ)

    def _look_at(self, guest: Guest, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send_rest(guest)
            if events & selectors.EVENT_READ:
                if guest.wire is None:
                    self._shake_hands(guest)
                else:
                    self._hear(guest, guest.wire)
        except (OSError, HandshakeError, WireError) as error:
            self._drop(guest, str(error))

    def _shake_hands(self, guest: Guest) -> None:
        assert guest.handshake is not None
        assert self._token is not None
        if guest.handshake.go_on() is not None:
            del self._unproven[guest]
            key = session_key(token_key(self._token), bytes(guest.transcript))
            self._welcome(guest, key)

    def _welcome(self, guest: Guest, key: bytes | None) -> None:
        guest.wire = Wire("server", LONGEST_REQUEST_BYTES, key)
        # On one host the random number is the secret itself; between hosts the token is missing.
        self._tell(guest, {"nonce": self._nonce, "generation": self._generation})

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

    def _serve_request(self, guest: Guest, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "gather":
            self._gather(guest, message)
        elif kind == "missing":
            found = self._rounds.get((message["generation"], message["round"]))
            self._tell(guest, {"missing": [] if found is None else found.missing()})
        elif kind == "joined":
            self._note_joined(message["generation"], message["rank"], message["size"])
        elif kind == "failed":
            self._fail(int(message["rank"]), str(message["reason"]))
        elif kind == "ended":
            self.end_node(int(message["node"]))
        else:
            raise KeyError(kind)
        if kind in ("failed", "ended"):
            self._tell(guest, {"noted": True})

    def _note_joined(self, generation: int, rank: int, size: int) -> None:
        with self._changed:
            joined = self._joined.setdefault(generation, set())
            joined.add(rank)
            self._changed.notify_all()
        # A server for one world is of no use once all are in it, and a fork would inherit it.
        self._is_closing |= generation == self._generation and len(joined) >= size

    def _gather(self, guest: Guest, message: dict[str, Any]) -> None:
        key = (int(message["generation"]), int(message["round"]))
        rank, size, process = int(message["rank"]), int(message["size"]), str(message["process"])
        found = self._complete.get(key) or self._rounds.setdefault(key, GatherRound(rank, size))
        found.refusal = found.refusal or found.conflict(rank, size, process)
        if found.refusal:
            for each in (guest, *found.waiting.values()):
                self._tell(each, {"error": found.refusal})
            found.waiting.clear()
            if key in self._complete:  # that world is whole: only the one that came late is wrong
                found.refusal = ""
            return
        found.brought[rank], found.waiting[rank] = str(message["data"]), guest
        found.came[rank] = process
        if not found.missing():
            self._close_round(key, found)
        elif self._failure is not None:
            self._tell_failure(found)

    def _close_round(self, key: tuple[int, int], found: GatherRound) -> None:
        gathered = [found.brought[each] for each in range(found.size)]
        for each in found.waiting.values():
            self._tell(each, {"gathered": gathered})
        del self._rounds[key]
        found.waiting.clear()
        found.brought.clear()
        # Who came is kept, for one that comes too much; of the last world, they may be many.
        self._complete = {one: old for one, old in self._complete.items() if one[0] >= key[0]}
        self._complete[key] = found

    def _fail(self, rank: int, reason: str) -> None:
        if self._failure is None:
            self._failure = {"rank": rank, "reason": reason}
        for found in self._rounds.values():
            self._tell_failure(found)

    def _tell_failure(self, found: GatherRound) -> None:
        """To those who wait. The rank may have been here before it ended: somebody is missing."""
        for guest in found.waiting.values():
            self._tell(guest, {"failure": self._failure})
        found.waiting.clear()

    # Sending, and strangers -------------------------------------------------------------------

    def _tell(self, guest: Guest, message: Any) -> None:
        if guest in self._guests and guest.wire is not None:
            guest.unsent += guest.wire.encode(message)
            with contextlib.suppress(OSError):  # what is wrong shows when it is read from
                self._send_rest(guest)

    def _send_rest(self, guest: Guest) -> None:
        with contextlib.suppress(BlockingIOError):
            while guest.unsent:
                del guest.unsent[: guest.socket.send(guest.unsent)]
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
                "dropped a connection from %s at the place where ranks meet: %s. More of them are "
                "dropped without a word.", who, why
            )  # fmt: skip

    def _forget(self, guest: Guest) -> None:
        for found in self._rounds.values():
            found.leave(guest)
        self._selector.unregister(guest)
        self._guests.discard(guest)
        self._unproven.pop(guest, None)
        guest.socket.close()
