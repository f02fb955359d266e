"""The thread of a rank that serves what it lends; see [Note: lent tensors].

One thread serves all who ask, and never waits for one of them. Who calls proves first that it
belongs to this world (see [Note: the handshake]); on one host the kernel also says whose process it
is. Requests and answers are JSON, values are the tensor's bytes: nothing is pickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from shoal.comm.peer_tensors.lending import CalledSource, LendingSource, Lent
from shoal.comm.peer_tensors.values import READY, check_digest, description, room_for
from shoal.errors import ShoalError
from shoal.meeting import address as places
from shoal.meeting.handshake import Handshake, HandshakeError, answer, make_key, session_key
from shoal.meeting.wire import LONGEST_REQUEST_BYTES, Wire, WireError
from shoal.torch_internals.tensors import version_of
from shoal.torch_support.memory import as_memory

logger = logging.getLogger("shoal")

HANDSHAKE_S = 10.0
_MOST_UNPROVEN = 64
_MOST_RANKS = 1 << 31
_READ_BYTES = 1 << 16
_FULL_PAUSE_S = 0.01


class Borrower:
    """One connection of a rank that asks, or of a stranger that has proven nothing yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.transcript = bytearray()
        self.handshake: Handshake | None = None
        self.wire: Wire | None = None
        # What is to be sent, and what to do when it was.
        self.unsent: deque[tuple[memoryview, Any]] = deque()
        # A call whose values are on their way: the call, the values, and what is missing of them.
        self.coming: tuple[dict[str, Any], Tensor, memoryview] | None = None


class TensorServer:
    """Serves the tensors that this rank lends, by the number of the lending."""

    def __init__(self, rank: int, secret: bytes | None, host: str | None) -> None:
        """``host`` is this host's address towards others; None if all ranks are on this one."""
        self.token = secrets.token_hex(32)
        """Those who know it may ask, if they know the world's secret as well."""
        self.sources: dict[int, LendingSource] = {}
        self._rank, self._key = rank, server_key(self.token, secret)
        self._is_one_host = host is None
        self._listener, self.address = _listen(host)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._alarm, self._bell = socket.socketpair()
        self._guests: set[Borrower] = set()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._is_closing = self._has_warned = False
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._alarm, selectors.EVENT_READ)
        name = f"shoal-tensors-{rank}"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        _servers.add(self)

    def close(self) -> None:
        """Hangs up on all and ends the thread. Twice is fine."""
        if not self._is_closing:
            self._is_closing = True
            self.sources.clear()
            self._bell.send(b"\0")
            self._thread.join()
            self._let_go()

    def abandon(self) -> None:
        """In a forked child, which has the sockets and not the thread: the rank's are its own."""
        self._is_closing = True
        self.sources.clear()
        self._let_go(is_owner=False)

    def _let_go(self, *, is_owner: bool = True) -> None:
        for guest in list(self._guests):
            guest.socket.close()
        for each in (self._listener, self._alarm, self._bell):
            each.close()
        self._selector.close()
        if is_owner:
            places.remove(self.address)

    # The thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._is_closing:
            for event, events in self._selector.select(self._next_deadline()):
                if event.fileobj is self._listener:
                    self._accept()
                elif event.data in self._guests:
                    self._look_at(event.data, events)
            self._drop_overdue()

    def _next_deadline(self) -> float | None:
        ends = [guest.handshake.deadline for guest in self._unproven() if guest.handshake]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _unproven(self) -> list[Borrower]:
        return [guest for guest in self._guests if guest.wire is None]

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        for guest in self._unproven():
            if guest.handshake is not None and guest.handshake.deadline <= now:
                self._drop(guest, "it took too long to say who it is")

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has gone again, or descriptors are short: those of others will end
            time.sleep(_FULL_PAUSE_S)
            return
        sock = places.above_stdio(sock)
        sock.setblocking(False)
        guest = Borrower(sock)
        if self._is_one_host and places.peer_uid(sock) != os.geteuid():
            sock.close()
            self._warn("it is another user's")
            return
        if len(unproven := self._unproven()) >= _MOST_UNPROVEN:
            self._drop(unproven[0], "too many strangers call at once")
        steps = answer(self._key, self._rank, _MOST_RANKS, guest.transcript)
        deadline = time.monotonic() + HANDSHAKE_S
        guest.handshake = Handshake(sock, steps, "a rank", deadline, is_call=False)
        self._guests.add(guest)
        self._selector.register(sock, selectors.EVENT_READ, guest)
        self._look_at(guest, selectors.EVENT_READ)

    def _look_at(self, guest: Borrower, events: int) -> None:
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

    def _shake_hands(self, guest: Borrower) -> None:
        assert guest.handshake is not None
        if guest.handshake.go_on() is not None:
            key = frame_key(self._key, guest.transcript, is_one_host=self._is_one_host)
            guest.wire = Wire("server", LONGEST_REQUEST_BYTES, key)

    def _hear(self, guest: Borrower, wire: Wire) -> None:
        if guest.coming is not None:
            self._take_values(guest, wire)
            return
        try:
            data = guest.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._forget(guest)
            return
        for message in wire.feed(data):
            try:
                self._answer(guest, wire, message)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise WireError(f"it asks for what there is not: {error!r}") from error
        self._send_rest(guest)

    def _take_values(self, guest: Borrower, wire: Wire) -> None:
        assert guest.coming is not None
        message, values, missing = guest.coming
        with contextlib.suppress(BlockingIOError):
            count = guest.socket.recv_into(missing)
            if not count:
                self._forget(guest)
                return
            guest.coming = (message, values, missing[count:])
        if not guest.coming[2]:
            guest.coming = None
            check_digest(message, as_memory(values), is_one_host=self._is_one_host)
            self._call(guest, wire, message, values.view(message["shape"]))
            self._send_rest(guest)

    # Answers ----------------------------------------------------------------------------------

    def _answer(self, guest: Borrower, wire: Wire, message: dict[str, Any]) -> None:
        source = self.sources.get(int(message["lending"]))
        if source is None:
            self._say(guest, wire, {"closed": True})
        elif message["kind"] == "list":
            self._say(guest, wire, {"listing": source.listing()})
        elif message["kind"] == "call" and message.get("bytes"):
            values = room_for(message)
            guest.coming = (message, values, as_memory(values))
            self._say(guest, wire, READY)
        elif message["kind"] == "call":
            empty = room_for(message).view(message["shape"]) if "bytes" in message else None
            self._call(guest, wire, message, empty)
        else:
            self._lend(guest, wire, source, str(message["key"]))

    def _lend(self, guest: Borrower, wire: Wire, source: LendingSource, key: str) -> None:
        try:
            lent = source.find(key)
            memory = None if lent is None else self._host_memory(lent)
        except (ShoalError, RuntimeError) as error:  # torch's, of memory that ran out
            self._say(guest, wire, {"error": f"{type(error).__name__}: {error}"})
            return
        if lent is None or memory is None:
            self._say(guest, wire, {"listing": source.listing()})
            return
        self._send(guest, wire, lent, memory, {})

    def _call(
        self, guest: Borrower, wire: Wire, message: dict[str, Any], values: Tensor | None
    ) -> None:
        source = self.sources.get(int(message["lending"]))
        if not isinstance(source, CalledSource):
            self._say(guest, wire, {"closed": True})
            return
        try:
            answer = source.handle(dict(message["request"]), values)
        except Exception as error:  # whatever it is, the one who called is told
            self._say(guest, wire, {"error": f"{type(error).__name__}: {error}"})
            return
        if answer.values is None:
            self._say(guest, wire, {"answer": answer.data})
        else:
            lent = Lent(answer.values)
            self._send(guest, wire, lent, as_memory(lent.tensor), {"answer": answer.data})

    def _send(
        self, guest: Borrower, wire: Wire, lent: Lent, memory: memoryview, said: dict[str, Any]
    ) -> None:
        told = description(lent.tensor, memory, is_one_host=self._is_one_host)
        self._say(guest, wire, {**said, **told})
        before = known_version(lent)

        def sent() -> None:
            self._say(guest, wire, {"unchanged": known_version(lent) == before})

        guest.unsent.append((memory, sent))

    def _host_memory(self, lent: Lent) -> memoryview:
        """The bytes; those of a GPU are copied beside what the rank computes."""
        if lent.ready is None:
            return as_memory(lent.tensor)
        device = lent.tensor.device
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.stream(stream):
            stream.wait_event(lent.ready)
            return as_memory(lent.tensor)

    def _say(self, guest: Borrower, wire: Wire, message: Any) -> None:
        guest.unsent.append((memoryview(wire.encode(message)), None))

    def _send_rest(self, guest: Borrower) -> None:
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
        self._selector.modify(guest.socket, selectors.EVENT_READ | writing, guest)

    # Strangers --------------------------------------------------------------------------------

    def _drop(self, guest: Borrower, why: str) -> None:
        if guest.wire is None:
            self._warn(why)
        self._forget(guest)

    def _warn(self, why: str) -> None:
        """Once: strangers may come by the thousand."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "dropped a connection to the tensors that rank %d lends: %s. More of them are "
                "dropped without a word.", self._rank, why
            )  # fmt: skip

    def _forget(self, guest: Borrower) -> None:
        self._selector.unregister(guest.socket)
        self._guests.discard(guest)
        guest.socket.close()


def server_key(token: str, secret: bytes | None) -> bytes:
    """What both sides know: the server's token, and the world's secret where there is one."""
    return make_key(token, secret.hex() if secret else "")


def frame_key(key: bytes, transcript: bytearray, *, is_one_host: bool) -> bytes | None:
    """Proves frames between hosts; on one host nobody else can write to the socket."""
    return None if is_one_host else session_key(key, bytes(transcript))


def known_version(lent: Lent) -> int:
    """Grows when the tensor is written to; tensors of inference mode do not count that."""
    return 0 if lent.tensor.is_inference() else version_of(lent.tensor)


def _listen(host: str | None) -> tuple[socket.socket, str]:
    if host is None:
        address = places.unix_address("tensors", secrets.token_hex(16))
        return places.listen_unix(address), address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = places.above_stdio(socket.create_server((host, 0), family=family, backlog=1024))
    return listener, places.tcp_address(host, listener.getsockname()[1])


_servers: weakref.WeakSet[TensorServer] = weakref.WeakSet()


def _abandon_in_child() -> None:
    for server in list(_servers):
        server.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
