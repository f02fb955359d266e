"""A rank's connection to the tensors that another one lends."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.comm.peer_tensors.server import frame_key, server_key
from shoal.errors import PeerError, ShoalError
from shoal.meeting import address as places
from shoal.meeting.handshake import HandshakeError, call
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
        self._key = server_key(whereabouts.token, secret)
        self._socket: socket.socket | None = None
        self._wire: Wire | None = None
        self._lock = threading.Lock()

    def ask(
        self, request: dict[str, Any], watch: Watch, given: Tensor | None = None
    ) -> tuple[dict[str, Any], Tensor | None]:
        """The answer, and the values that came with it, on the CPU; ``given`` goes the other way.

        Bytes are given once the holder says that there is room.
        """
        while not self._lock.acquire(timeout=_LOOK_EVERY_S):
            watch()
        try:
            if given is not None:
                return self._give(request, given, watch), None
            return self._ask(request, watch)
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

    def _ask(self, request: dict[str, Any], watch: Watch) -> tuple[dict[str, Any], Tensor | None]:
        wire = self._wire or self._connect(watch)
        self._send(wire.encode(request), watch)
        header = self._receive_message(wire, watch)
        if "bytes" not in header:
            return header, None
        values = _room(header)
        memory = as_memory(values)  # contiguous and the CPU's, so these are its own bytes
        self._receive_into(memory, watch)
        if "digest" in header:
            digest = hashlib.sha256(memory).hexdigest()
            if not hmac.compare_digest(digest, header["digest"]):
                raise WireError("values do not come from who began the conversation")
        header.update(self._receive_message(wire, watch))
        return header, values.view(header["shape"])

    def _give(self, request: dict[str, Any], given: Tensor, watch: Watch) -> dict[str, Any]:
        wire = self._wire or self._connect(watch)
        memory = as_memory(given)
        request = {**request, "bytes": len(memory)}
        if places.host_and_port(self._address):  # the request is proven, and this the values
            request["digest"] = hashlib.sha256(memory).hexdigest()
        self._send(wire.encode(request), watch)
        header = self._receive_message(wire, watch)
        if "room" not in header:
            return header
        self._send(memory, watch)
        return self._receive_message(wire, watch)

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
        is_one_host = places.host_and_port(self._address) is None
        key = frame_key(self._key, transcript, is_one_host=is_one_host)
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
        proof_bytes = _PROOF_BYTES if places.host_and_port(self._address) else 0
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


def _room(header: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, str(header["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise WireError(f"it lends a tensor of a dtype that there is not: {header['dtype']!r}")
    with torch.inference_mode(mode=False):
        room = torch.empty(torch.Size(header["shape"]).numel(), dtype=dtype, device="cpu")
    if room.nbytes != header["bytes"]:
        raise WireError("it announces a tensor of another size than it has")
    return room
