"""The caller's handle of a process that the forkserver started."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Self

from shoal.errors import LaunchError
from shoal.launch.function.forkserver.request import STATUS


class Child:
    """A running child: its pid, its channel and its end.

    `fileno()` becomes readable when the child has ended, so a child can be given to a selector.
    Closing the handle of a child that still runs kills it.

    Example:
        >>> with fork_server().spawn("package.module:function", b"payload", os.environ) as child:
        ...     child.channel.recv(100)
        ...     child.wait(10.0)
    """

    def __init__(
        self,
        channel: socket.socket,
        status: int,
        send_signal: Callable[[int], None],
        on_lost: Callable[[], None],
    ) -> None:
        """Wraps the caller's ends; `await_pid` completes it.

        Args:
            channel: The caller's end of the child's channel.
            status: The read end of the child's status pipe.
            send_signal: Signals the child by way of the server.
            on_lost: Called when it shows that the server itself is gone.
        """
        self.channel = channel
        self.pid = 0
        self.exit_code: int | None = None
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115 (closed by close)
        self._send_signal = send_signal
        self._on_lost = on_lost

    def await_pid(self, timeout: float) -> None:
        """Waits until the server has forked the child."""
        if not self._readable(timeout):
            raise LaunchError(f"the forkserver did not start a process within {timeout:g} s")
        pid = self._read_status()
        if pid is None:
            raise LaunchError(
                "the forkserver ended, or has no descriptors left, before it could start a "
                "process; what it wrote to standard error says why"
            )
        if pid < 0:
            raise OSError(-pid, f"the forkserver cannot fork: {os.strerror(-pid)}")
        self.pid = pid

    def fileno(self) -> int:
        """A descriptor that becomes readable when the child has ended."""
        return self._status.fileno()

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code, minus the signal's number if one ended it; None while it runs."""
        if self.exit_code is None and self._readable(timeout):
            code = self._read_status()
            # Without a server there is no code, but its children were killed with it.
            self.exit_code = -signal.SIGKILL if code is None else code
        return self.exit_code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal; nothing happens to a child that has ended."""
        if self.exit_code is None:
            self._send_signal(number)

    def close(self) -> None:
        """Gives the descriptors back, which kills a child that still runs."""
        self.channel.close()
        self._status.close()

    def _readable(self, timeout: float | None) -> bool:
        """Whether the status pipe has something to say before the time is over."""
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        return bool(poll.poll(None if timeout is None else max(0.0, timeout) * 1000))

    def _read_status(self) -> int | None:
        """The next number the server wrote, or None if there is no server any more."""
        data = self._status.read(STATUS.size)
        if not data:
            self._on_lost()
            return None
        number: int = STATUS.unpack(data)[0]
        return number

    def __enter__(self) -> Self:
        """Itself, closed at the end of the block."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Closes the handle."""
        self.close()
