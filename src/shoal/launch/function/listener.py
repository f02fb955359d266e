"""Where ranks connect that another program started: a socket in a directory of its own."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import struct
import tempfile

from shoal.errors import LaunchError
from shoal.launch.function.collector import Collector
from shoal.launch.function.forkserver.request import Request
from shoal.system.memory_file import MemoryFile

HELLO = struct.Struct("=ii")
_CREDENTIALS = struct.Struct("=3i")
_HELLO_SECONDS = 10.0
_LONGEST_PATH = 100  # of the 107 bytes that the kernel allows for a socket's


class RankListener:
    """Accepts each rank once, hands it the call, and adds it to a collector.

    Only the same user can connect: the directory is closed to all others. It is removed as soon as
    all ranks are connected, before the last one is told to begin, so that a kill of a run whose
    ranks all work leaves nothing behind.
    """

    def __init__(self, collector: Collector, ranks: int, request: Request, payload: bytes) -> None:
        """Begins to listen; `collector`'s loop accepts the connections."""
        self._collector = collector
        self._ranks = ranks
        self._connected: set[int] = set()
        with contextlib.ExitStack() as stack:
            self._request = stack.enter_context(MemoryFile(request.encode()))
            self._payload = stack.enter_context(MemoryFile(payload))
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self.path = _socket_path(stack)
            self._listener.bind(self.path)
            os.chmod(self.path, 0o600)  # whatever the umask
            self._listener.listen(ranks)
            collector.watch(self._listener, self._accept)
            stack.callback(collector.unwatch, self._listener)
            self._resources = stack.pop_all()

    def close(self) -> None:
        """Stops listening and removes every trace of that."""
        self._resources.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            connection.settimeout(_HELLO_SECONDS)
            hello = connection.recv(HELLO.size, socket.MSG_WAITALL)
            if len(hello) < HELLO.size:  # it died meanwhile: the command will say so
                return
            rank = self._check(*HELLO.unpack(hello))
            if len(self._connected) == self._ranks:  # nobody needs the path any more
                shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)
            process = ConnectedProcess(connection)
            stack.callback(process.close)
            files = [self._request.fileno(), self._payload.fileno()]
            socket.send_fds(connection, [b"\0"], files)
            self._collector.add(rank, connection, process)
            stack.pop_all()
        if self._collector.complete:
            self.close()

    def _check(self, rank: int, size: int) -> int:
        if size != self._ranks:
            raise LaunchError(
                f"{self._ranks} ranks were asked for, and rank {rank} finds itself in a world of "
                f"{size}; does the command start {self._ranks} ranks, with the MPI they use?"
            )
        if not 0 <= rank < size or rank in self._connected:
            raise LaunchError(
                f"each rank from 0 to {size - 1} should connect once, and rank {rank} came again "
                "or is none of them"
            )
        self._connected.add(rank)
        return rank


class ConnectedProcess:
    """Watches and kills the process that made a connection; its exit code cannot be known.

    Holds a pidfd, so that a later process with the same pid is never taken for it.
    """

    def __init__(self, connection: socket.socket) -> None:
        option = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid: int = _CREDENTIALS.unpack(option)[0]
        self._fd = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has ended."""
        return self._fd

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for the end of the process; always None, for the code is its parent's to know."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.poll(None if timeout is None else timeout * 1000)
        return None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signals the process, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def lost(self) -> None:
        """Nothing starts these processes that could be lost."""

    def close(self) -> None:
        """Gives the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _socket_path(stack: contextlib.ExitStack) -> str:
    """A path in a new directory, removed with `stack`; short even if TMPDIR is not."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > _LONGEST_PATH - len("/shoal-12345678/ranks"):
        base = "/tmp"
    folder = tempfile.mkdtemp(prefix="shoal-", dir=base)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    os.chmod(folder, 0o700)
    return os.path.join(folder, "ranks")
