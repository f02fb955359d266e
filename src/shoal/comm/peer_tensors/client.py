"""A rank's connection to the tensors that another one lends."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from shoal.comm.peer_tensors.server import server_key
from shoal.comm.peer_tensors.values import READY, check_digest, description, room_for
from shoal.errors import PeerError, ShoalError
from shoal.meeting import address as places
from shoal.meeting.handshake import HandshakeError, call, frame_key
from shoal.meeting.wire import LONGEST_REPLY_BYTES, Wire, WireError
from shoal.torch_support.memory import as_memory

# How often one who waits looks whether the holder is still there.
_LOOK_EVERY_S = 0.02
_CONNECT_S = 1.0
# How long the news of a rank's end may take after its connections have ended.
_NEWS_S = 3.0
_LENGTH = struct.Struct("<I")
_PROOF_BYTES = 32

Watch = Callable[[], None]
"""Raises when waiting is pointless or takes too long."""


class Whereabouts(NamedTuple):
    """Where a rank lends its tensors, and the token with which to ask."""

    address: str
    token: str


class _HungUp(Exception):
    """The holder has closed the connection."""


class TensorClient:
    """Asks one rank, one thing at a time; any thread may."""

    def __init__(
        self, rank: int, holder: int, whereabouts: Whereabouts, secret: bytes | None
    ) -> None:
        """``rank`` and ``holder`` are world ranks."""
        self._rank, self._holder, self._address = rank, holder, whereabouts.address
        self._is_one_host = places.host_and_port(self._address) is None
        self._key = server_key(whereabouts.token, secret)
        self._socket: socket.socket | None = None
        self._wire: Wire | None = None
        self._lock = threading.Lock()

    def ask(
        self, request: dict[str, Any], watch: Watch, values: Tensor | None = None
    ) -> tuple[dict[str, Any], Tensor | None]:
        """The answer, and the values that came with it, on the CPU; ``values`` go with a call."""
        while not self._lock.acquire(timeout=_LOOK_EVERY_S):
            watch()
        try:
            return self._ask(request, watch, values)
        except (OSError, WireError, HandshakeError, _HungUp) as error:
            self._hang_up()
            raise self._explained(error, watch) from error
        except BaseException:  # an answer may still come, which nobody would read
            self._hang_up()
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        """Hangs up, also on an answer that somebody waits for. Twice is fine."""
        if (sock := self._socket) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = self._wire = None

    def _explained(self, error: Exception, watch: Watch) -> ShoalError:
        """The holder's end, if there is news of it soon."""
        end = time.monotonic() + _NEWS_S
        while time.monotonic() < end:
            watch()
            time.sleep(0.01)
        reason = f"its connection for tensors ended ({error})"
        return PeerError(self._holder, reason)

    def _ask(
        self, request: dict[str, Any], watch: Watch, given: Tensor | None
    ) -> tuple[dict[str, Any], Tensor | None]:
        wire = self._wire or self._connect(watch)
        memory = None if given is None else as_memory(given)
        if given is not None and memory is not None:
            request = request | description(given, memory, is_one_host=self._is_one_host)
        self._send(wire.encode(request), watch)
        header = self._receive_message(wire, watch)
        if memory is not None and header == READY:
            self._send(memory, watch)
            header = self._receive_message(wire, watch)
        if "bytes" not in header:
            return header, None
        values = room_for(header)
        memory = as_memory(values)  # contiguous and the CPU's, so these are its own bytes
        self._receive_into(memory, watch)
        check_digest(header, memory, is_one_host=self._is_one_host)
        header.update(self._receive_message(wire, watch))
        return header, values.view(header["shape"])

    # Sockets ----------------------------------------------------------------------------------

    def _connect(self, watch: Watch) -> Wire:
        self._socket = self._open(watch)
        self._socket.settimeout(_LOOK_EVERY_S)
        transcript = bytearray()
        steps = call(self._key, self._rank, self._holder, transcript)
        message, wanted = next(steps)
        with contextlib.suppress(StopIteration):
            while True:
                self._send(message, watch)
                message, wanted = steps.send(self._receive(wanted, watch))
        key = frame_key(self._key, transcript, is_one_host=self._is_one_host)
        self._wire = Wire("guest", LONGEST_REPLY_BYTES, key)
        return self._wire

    def _open(self, watch: Watch) -> socket.socket:
        while True:
            watch()
            try:
                return places.connect_to(self._address, _CONNECT_S)
            except (TimeoutError, BlockingIOError):  # it is busy, or stopped: `watch` knows
                time.sleep(_LOOK_EVERY_S)

    def _send(self, data: bytes | memoryview, watch: Watch) -> None:
        assert self._socket is not None
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except TimeoutError:
                watch()

    def _receive_message(self, wire: Wire, watch: Watch) -> dict[str, Any]:
        """Exactly one frame: values may follow it."""
        length = self._receive(_LENGTH.size, watch)
        messages = wire.feed(length)  # refuses what is too long
        proof_bytes = 0 if self._is_one_host else _PROOF_BYTES
        rest = _LENGTH.unpack(length)[0] + proof_bytes
        messages += wire.feed(self._receive(rest, watch))
        (message,) = messages
        if not isinstance(message, dict):
            raise WireError("it speaks another language")
        return message

    def _receive(self, count: int, watch: Watch) -> bytes:
        data = bytearray(count)
        self._receive_into(memoryview(data), watch)
        return bytes(data)

    def _receive_into(self, memory: memoryview, watch: Watch) -> None:
        assert self._socket is not None
        while memory:
            try:
                count = self._socket.recv_into(memory)
            except TimeoutError:
                watch()
                continue
            if not count:
                raise _HungUp("it hung up")
            memory = memory[count:]
