"""A process at the other end of a unix socket, which is not a child of this one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct

_CREDENTIALS = struct.Struct("=3i")


class Peer:
    """Watches and kills the process that made a connection; its exit code cannot be known.

    Holds a pidfd, so that a later process with the same pid is never taken for it.

    Example:
        >>> peer = Peer(connection)
        >>> peer.kill()
        >>> peer.wait(1.0)
    """

    def __init__(self, connection: socket.socket) -> None:
        """Asks the kernel who connected."""
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

    def close(self) -> None:
        """Gives the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
