"""A handshake over a socket that never blocks."""

from __future__ import annotations

import contextlib
import os
import socket

from shoal.comm.control.sockets.handshake import HandshakeError, Talk


class Dialogue:
    """One handshake under way over one socket."""

    def __init__(
        self,
        sock: socket.socket,
        talk: Talk,
        name: str,
        deadline: float,
        *,
        is_call: bool,
    ) -> None:
        """``name`` says who is at the other end; ``is_call`` whether it was us who connected."""
        self.socket, self.name, self.deadline, self.is_call = sock, name, deadline, is_call
        self._talk = talk
        self._is_begun = False
        self._wanted = 0
        self._received = b""

    def go_on(self) -> int | None:
        """Does what can be done now; returns the peer's rank once it is proven."""
        try:
            if not self._is_begun:
                self._begin()
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._receive()
        except StopIteration as end:
            return int(end.value)
        return None

    def _begin(self) -> None:
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._is_begun = True
        self._say(next(self._talk))

    def _receive(self) -> None:
        """Never more than was asked for: what follows the handshake is not ours to read."""
        missing = self._wanted - len(self._received)
        data = self.socket.recv(missing) if missing else b""
        if missing and not data:
            raise HandshakeError("it hung up")
        self._received += data
        if len(self._received) == self._wanted:
            received, self._received = self._received, b""
            self._say(self._talk.send(received))

    def _say(self, step: tuple[bytes, int]) -> None:
        data, self._wanted = step
        # A hundred bytes always fit into the buffer of a new socket.
        if self.socket.send(data) != len(data):
            raise HandshakeError("it does not listen")
