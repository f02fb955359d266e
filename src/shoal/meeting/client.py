"""A guest of the server where ranks meet."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from shoal.errors import LaunchError, ShoalError
from shoal.meeting import address as places
from shoal.meeting.handshake import TOKEN_VARIABLE, HandshakeError, call, session_key
from shoal.meeting.server import GUEST, SERVER, secret_of, token_key
from shoal.meeting.wire import LONGEST_REPLY_BYTES, LONGEST_REQUEST_BYTES, Wire, WireError

_ANSWER_S = 10.0
_READ_BYTES = 1 << 16


class NotThereYet(Exception):
    """The server does not listen, or serves another world: it may be there in a moment.

    Attributes:
        is_unknown_host: Nobody knows the name of its host.
    """

    is_unknown_host = False


class MeetingGone(ShoalError):
    """The server has ended."""


class MeetingClient:
    """A connection to the server, proven from both sides.

    Attributes:
        secret: What only the run's own processes know; None between hosts without a token.
    """

    def __init__(self, address: str, generation: int = 0) -> None:
        """Connects once; raises `NotThereYet` where it is worth trying again."""
        self.address = address
        self.host = (places.host_and_port(address) or (None, 0))[0]
        self._replies: deque[Any] = deque()
        try:
            self._socket = places.connect_to(address, _ANSWER_S)
        except OSError as error:
            trouble = NotThereYet(f"{address}: {error}")
            trouble.is_unknown_host = isinstance(error, socket.gaierror)
            raise trouble from error
        try:
            self._wire = Wire("guest", LONGEST_REPLY_BYTES, self._prove())
            greeting = self._await_greeting()
        except BaseException:
            self._socket.close()
            raise
        if generation and greeting["generation"] not in (0, generation):
            self._socket.close()
            raise NotThereYet(f"{address} still serves the world before this one")
        self.secret = self._secret(greeting["nonce"])

    def tell(self, message: Any) -> None:
        """Sends a request."""
        frame = self._wire.encode(message)
        if len(frame) > LONGEST_REQUEST_BYTES:
            raise ShoalError(
                f"a rank has {len(frame)} bytes to say where ranks meet, above the limit of "
                f"{LONGEST_REQUEST_BYTES}"
            )
        self._socket.settimeout(_ANSWER_S)
        try:
            self._socket.sendall(frame)
        except OSError as error:
            raise self._gone(error) from error

    def reply(self, seconds: float, key: str | None = None) -> Any | None:
        """The next message, or the next that has ``key``; None if none comes in time."""
        return self.reply_of(seconds, () if key is None else (key,))

    def poll(self, key: str) -> Any | None:
        """The next message that has ``key``, if one is there."""
        while select.select([self._socket], [], [], 0)[0]:
            self._receive(_ANSWER_S)
        return self._take((key,))

    def reply_of(self, seconds: float, keys: Sequence[str]) -> Any | None:
        """The next message that has one of ``keys``, or any if there are none."""
        deadline = time.monotonic() + seconds
        while True:
            message = self._take(keys)
            if message is not None:
                return message
            left = deadline - time.monotonic()
            if left <= 0 or not self._receive(left):
                return None

    def _take(self, keys: Sequence[str]) -> Any | None:
        for message in self._replies:
            if not keys or any(key in message for key in keys):
                self._replies.remove(message)
                return message
        return None

    def close(self) -> None:
        """Hangs up."""
        self._socket.close()

    def _receive(self, seconds: float) -> bool:
        self._socket.settimeout(seconds)
        try:
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            return False
        except OSError as error:
            raise self._gone(error) from error
        if not data:
            raise self._gone("it hung up")
        try:
            self._replies.extend(self._wire.feed(data))
        except WireError as error:
            raise self._gone(error) from error
        return True

    def _gone(self, why: object) -> MeetingGone:
        return MeetingGone(
            f"the place where the ranks meet ({self.address}) is gone: {why}. The process that "
            "held it (the launcher, or rank 0) has ended, or the connection to it."
        )

    def _await_greeting(self) -> Any:
        try:
            greeting = self.reply(_ANSWER_S)
        except MeetingGone as error:
            raise NotThereYet(str(error)) from error
        if greeting is None:
            raise NotThereYet(f"{self.address} does not answer")
        return greeting

    def _prove(self) -> bytes | None:
        """Between hosts: the handshake, and the key of what is said next."""
        if self.host is None:
            return None
        key, transcript = token_key(os.environ.get(TOKEN_VARIABLE, "")), bytearray()
        steps = call(key, GUEST, SERVER, transcript)
        message, wanted = next(steps)
        try:
            with contextlib.suppress(StopIteration):
                while True:
                    self._socket.sendall(message)
                    message, wanted = steps.send(self._read(wanted))
        except HandshakeError as error:
            raise LaunchError(
                f"the process at {self.address} does not prove that it knows this run's "
                f"{TOKEN_VARIABLE}: {TOKEN_VARIABLE} must have the same value, or none, on every "
                "rank; or a stranger listens there."
            ) from error
        except OSError as error:
            raise NotThereYet(f"{self.address}: {error}") from error
        return session_key(key, bytes(transcript))

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise ConnectionResetError(
                    f"it hung up (is {TOKEN_VARIABLE} the same on every rank?)"
                )
            data += piece
        return data

    def _secret(self, nonce: str) -> bytes | None:
        if self.host is None:
            return bytes.fromhex(nonce)
        return secret_of(os.environ.get(TOKEN_VARIABLE, ""), nonce)


def report_failure(client: MeetingClient, rank: int, reason: str) -> None:
    """Tells ranks that are joining, or will, of one that does not."""
    client.tell({"kind": "failed", "rank": rank, "reason": reason})
    client.reply(_ANSWER_S)


def report_node_ended(address: str, node: int) -> None:
    """Tells the launcher of node 0 that the ranks of another node have ended."""
    with contextlib.closing(MeetingClient(address)) as client:
        client.tell({"kind": "ended", "node": node})
        client.reply(_ANSWER_S)
