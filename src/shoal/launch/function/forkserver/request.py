"""What a caller says to its forkserver: small packets, with descriptors for all that is large.

A packet is atomic, so threads of the caller need no lock to send one. The answer to a spawn comes
over the child's own status pipe: first its pid (or a negative errno), at the end its exit code.
"""

from __future__ import annotations

import array
import os
import pickle
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

SPAWN, SIGNAL, LOAD_COMPILER = 1, 2, 3
STATUS = struct.Struct("=i")
_PACKET = struct.Struct("=BQi")


class Descriptors(NamedTuple):
    """The descriptors that go with a spawn, in the order they travel in."""

    status: int
    channel: int
    request: int
    payload: int
    cwd: int
    stdin: int
    stdout: int
    stderr: int


class Packet(NamedTuple):
    """One message to the server; `serial` names a child for as long as the server lives."""

    kind: int
    serial: int
    signal: int = 0
    descriptors: Descriptors | None = None


def import_path() -> list[str]:
    """This process's `sys.path`, without what is no string: imports skip that too."""
    entries: list[object] = [*sys.path]
    return [entry for entry in entries if isinstance(entry, str)]


@dataclass(frozen=True)
class Request:
    """How a child starts, taken from the caller at the time of the call."""

    entry: str
    env: dict[str, str]
    path: list[str]
    argv: list[str]

    @classmethod
    def of_caller(cls, entry: str, env: Mapping[str, str]) -> Request:
        """The request for `entry`, with this process's import path and arguments as they are."""
        return cls(entry, dict(env), import_path(), list(getattr(sys, "argv", [""])))

    def encode(self) -> bytes:
        """As bytes; both ends are the same user's own processes."""
        return pickle.dumps((self.entry, self.env, self.path, self.argv))

    @classmethod
    def decode(cls, data: bytes) -> Request:
        """The inverse of `encode`."""
        return cls(*pickle.loads(data))


def send_packet(control: socket.socket, packet: Packet) -> None:
    """Sends one packet, whole."""
    body = _PACKET.pack(packet.kind, packet.serial, packet.signal)
    socket.send_fds(control, [body], list(packet.descriptors or ()))


def receive_packet(control: socket.socket) -> Packet | None:
    """The next packet, or None when the caller has closed its end."""
    limit = socket.CMSG_SPACE(len(Descriptors._fields) * array.array("i").itemsize)
    body, ancillary, _, _ = control.recvmsg(_PACKET.size, limit, socket.MSG_CMSG_CLOEXEC)
    if not body:
        return None
    kind, serial, signal = _PACKET.unpack(body)
    fds = [fd for _, _, data in ancillary for fd in array.array("i", data)]
    return Packet(kind, serial, signal, _descriptors(fds))


def _descriptors(fds: list[int]) -> Descriptors | None:
    """Names them; a set cut short (no descriptors left in this process) counts as none."""
    if len(fds) == len(Descriptors._fields):
        return Descriptors(*fds)
    for fd in fds:
        os.close(fd)
    return None
