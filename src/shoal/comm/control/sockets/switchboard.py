"""Calls other ranks and answers theirs, over sockets that never block."""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.meeting.handshake import (
    Handshake,
    HandshakeError,
    HungUpError,
    answer,
    call,
)

logger = logging.getLogger("shoal")

ANSWER_S = 5.0
# Strangers that connect and say nothing must not use up this process's descriptors.
MOST_UNPROVEN = 256


class Address(NamedTuple):
    """Where a rank listens, and whether it has the key that all should have."""

    host: str
    port: int
    fingerprint: str


class Line(NamedTuple):
    """What a rank needs to call, and to be called."""

    rank: int
    key: bytes
    listener: socket.socket
    addresses: Sequence[Address]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.addresses)


class Switchboard:
    """The handshakes that are under way, among the other events of a selector.

    A stranger's connection is dropped when it proves to be one, or when its time is up; it delays
    nobody. Of two ranks that call each other at once, both get two sockets: `Reader` reads both.
    """

    def __init__(
        self,
        line: Line,
        selector: selectors.BaseSelector,
        connected: Callable[[int, socket.socket], None],
        failed: Callable[[int, str], None],
    ) -> None:
        """``connected`` is called with a proven rank; ``failed`` where our own call did not work.

        The events of the selector that are ours have the switchboard itself or a `Handshake` for
        data and are to be given to `serve`.
        """
        self.under_way: dict[Handshake, int | None] = {}  # with the rank that we called
        self._line, self._selector = line, selector
        self._connected, self._failed = connected, failed
        self._has_warned = False
        selector.register(line.listener, selectors.EVENT_READ, self)

    def call(self, peer: int, deadline: float) -> None:
        """Begins to connect to another rank."""
        address = self._line.addresses[peer]
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        steps = call(self._line.key, self._line.rank, peer)
        name = f"rank {peer} at {address.host} port {address.port}"
        code = sock.connect_ex((address.host, address.port))
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._failed(peer, f"{name}: {os.strerror(code)}")
            return
        attempt = Handshake(sock, steps, name, deadline, is_call=True)
        self.under_way[attempt] = peer
        self._selector.register(sock, selectors.EVENT_WRITE, attempt)

    def serve(self, event: Handshake | Switchboard) -> None:
        """Goes on with what the selector found ready."""
        if isinstance(event, Handshake):
            if event in self.under_way:  # else it was dropped in this very turn
                self._go_on(event)
        else:
            self._answer()

    def drop_overdue(self, now: float) -> None:
        """Gives up on those that have not proven who they are in time."""
        for attempt in [each for each in self.under_way if each.deadline <= now]:
            self._drop(attempt, HandshakeError("it took too long"))

    def cancel(self, peer: int) -> None:
        """Drops our call to a rank that has called us meanwhile, or that is gone."""
        for attempt in [each for each, called in self.under_way.items() if called == peer]:
            self._forget(attempt)
            attempt.socket.close()

    def stop_answering(self) -> None:
        """Nobody can call any more; our own calls go on."""
        if self._line.listener.fileno() >= 0:
            self._selector.unregister(self._line.listener)
            self._line.listener.close()

    def close(self) -> None:
        """Drops what is under way. The selector stays the caller's."""
        for attempt in list(self.under_way):
            self._forget(attempt)
            attempt.socket.close()

    def forget(self) -> None:
        """Closes a forked child's copies, and leaves the selector, which is its parent's, alone."""
        for attempt in self.under_way:
            attempt.socket.close()
        self._line.listener.close()

    def _answer(self) -> None:
        try:
            sock, address = self._line.listener.accept()
        except OSError:  # it has gone again, or descriptors are short: others may fare better
            return
        sock.setblocking(False)
        steps = answer(self._line.key, self._line.rank, self._line.size)
        name = f"{address[0]} port {address[1]}"
        attempt = Handshake(sock, steps, name, time.monotonic() + ANSWER_S, is_call=False)
        self._make_room()
        self.under_way[attempt] = None
        self._selector.register(sock, selectors.EVENT_READ, attempt)
        self._go_on(attempt)

    def _make_room(self) -> None:
        unproven = [each for each, called in self.under_way.items() if called is None]
        if len(unproven) >= MOST_UNPROVEN:
            self._drop(unproven[0], HandshakeError("too many others came after it"))

    def _go_on(self, attempt: Handshake) -> None:
        try:
            peer = attempt.go_on()
        except (OSError, HandshakeError) as error:
            self._drop(attempt, error)
            return
        if peer is not None:
            self._forget(attempt)
            self._connected(peer, attempt.socket)
        elif attempt.is_call:
            self._selector.modify(attempt.socket, selectors.EVENT_READ, attempt)

    def _drop(self, attempt: Handshake, error: Exception) -> None:
        """Our call that fails is an error; a caller that fails to prove itself is a stranger."""
        peer = self.under_way[attempt]
        self._forget(attempt)
        attempt.socket.close()
        if peer is not None:
            self._failed(peer, f"{attempt.name}: {error}")
        else:
            # A rank that thought better of it hangs up, which is no reason to worry anybody. And
            # strangers may come by the thousand: one warning is enough.
            is_minor = self._has_warned or isinstance(error, HungUpError | OSError)
            self._has_warned |= not is_minor
            logger.log(
                logging.DEBUG if is_minor else logging.WARNING,
                "dropped a connection from %s: %s",
                attempt.name,
                error,
            )

    def _forget(self, attempt: Handshake) -> None:
        self._selector.unregister(attempt.socket)
        del self.under_way[attempt]
