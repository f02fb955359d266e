"""Where ranks come in that some other program started: a socket in a directory of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import tempfile

from shoal.errors import LaunchError
from shoal.launch.function.collector import Collector
from shoal.launch.function.command.peer import Peer
from shoal.launch.function.forkserver.request import Request
from shoal.system.memory_file import MemoryFile

HELLO = struct.Struct("=ii")
_HELLO_SECONDS = 10.0
_LONGEST_PATH = 100  # of the 107 bytes that the kernel allows for a socket's


class Door:
    """Admits each rank once, hands it the call, and adds it to a collector.

    Only the same user can enter: the directory is closed to all others. It is removed as soon as
    all ranks are in, so that there is little time in which a kill could leave it behind.

    Example:
        >>> door = Door(collector, ranks=4, request=request, payload=payload)
        >>> subprocess.Popen([..., door.path])
    """

    def __init__(self, collector: Collector, ranks: int, request: Request, payload: bytes) -> None:
        """Opens the door; it is served by `collector`'s loop."""
        self._collector = collector
        self._ranks = ranks
        self._entered: set[int] = set()
        with contextlib.ExitStack() as stack:
            self._request = stack.enter_context(MemoryFile(request.encode()))
            self._payload = stack.enter_context(MemoryFile(payload))
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self.path = _socket_path(stack)
            self._listener.bind(self.path)
            self._listener.listen(ranks)
            collector.watch(self._listener, self._admit)
            stack.callback(collector.unwatch, self._listener)
            self._resources = stack.pop_all()

    def close(self) -> None:
        """Shuts the door and removes every trace of it."""
        self._resources.close()

    def _admit(self) -> None:
        """Lets the next rank in."""
        connection, _ = self._listener.accept()
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            connection.settimeout(_HELLO_SECONDS)
            hello = connection.recv(HELLO.size, socket.MSG_WAITALL)
            if len(hello) < HELLO.size:  # it died on the threshold: the launcher will say so
                return
            rank = self._check(*HELLO.unpack(hello))
            peer = Peer(connection)
            stack.callback(peer.close)
            files = [self._request.fileno(), self._payload.fileno()]
            socket.send_fds(connection, [b"\0"], files)
            self._collector.add(rank, connection, peer)
            stack.pop_all()
        if self._collector.complete:
            self.close()

    def _check(self, rank: int, size: int) -> int:
        """Makes sure that the command started what was asked for."""
        if size != self._ranks:
            raise LaunchError(
                f"{self._ranks} ranks were asked for, and rank {rank} finds itself in a world of "
                f"{size}; does the command start {self._ranks} ranks, with the MPI they use?"
            )
        if not 0 <= rank < size or rank in self._entered:
            raise LaunchError(
                f"each rank from 0 to {size - 1} should connect once, and rank {rank} came again "
                "or is none of them"
            )
        self._entered.add(rank)
        return rank


def _socket_path(stack: contextlib.ExitStack) -> str:
    """A path in a new directory, removed with `stack`; short even if TMPDIR is not."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > _LONGEST_PATH - len("/shoal-12345678/ranks"):
        base = "/tmp"
    folder = tempfile.mkdtemp(prefix="shoal-", dir=base)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return os.path.join(folder, "ranks")
