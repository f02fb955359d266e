"""One control socket to one peer. Neither side of it ever blocks."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
import threading
import time

from shoal.comm.control.sockets.frames import Splitter

_CHUNK_BYTES = 1 << 16
# A host that vanished without a word keeps no socket of ours open for hours.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class ConnectionEndedError(Exception):
    """The other side is gone; the message says how."""


class Connection:
    """Sends what the socket takes and keeps the rest: a peer that is stopped stalls nobody.

    Any thread may send; only the reader's thread pushes, receives and closes.
    """

    def __init__(self, rank: int, sock: socket.socket | None = None) -> None:
        """``rank`` is the peer's, proven by the handshake; the socket becomes ours.

        Without a socket, what is sent is kept until there is one.
        """
        self.rank = rank
        self.heard_at = time.monotonic()
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._rest = bytearray()
        self._told: bytes | None = None
        self._splitter = Splitter()
        self._is_shut = False
        if sock is not None:
            self.attach(sock)

    def attach(self, sock: socket.socket, first: bytes = b"") -> None:
        """There is a socket now: ``first`` goes out before what was kept."""
        _tune(sock)
        with self._lock:
            self.heard_at = time.monotonic()
            self._rest[:0] = first
            self._socket = sock
            self._send_rest()

    @property
    def is_attached(self) -> bool:
        """Whether there is, or was, a socket."""
        return self._socket is not None

    def fileno(self) -> int:
        """For selectors."""
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def has_rest(self) -> bool:
        """Whether something waits until the socket takes more."""
        return bool(self._rest)

    def send(self, frame: bytes, note: bytes | None = None) -> bool:
        """Sends a frame, after ``note`` unless that was the last note sent.

        Returns:
            Whether all of it went out; if not, the reader must `push` when it can.
        """
        with self._lock:
            if note is not None and note is not self._told:
                frame, self._told = note + frame, note
            self._rest += frame
            return self._send_rest()

    def push(self) -> bool:
        """Sends more of the rest; returns whether none is left."""
        with self._lock:
            return self._send_rest()

    def _send_rest(self) -> bool:
        if self._is_shut:
            self._rest.clear()
        if self._socket is None:
            return True
        try:
            while self._rest:
                del self._rest[: self._socket.send(self._rest)]
        except BlockingIOError:
            return False
        except OSError:
            # The reader will find the end of the stream, after the peer's last words.
            self._is_shut = True
            self._rest.clear()
        return True

    def receive(self) -> list[tuple[int, bytes]]:
        """The frames that have arrived, kind and body; raises at the end of the stream."""
        assert self._socket is not None
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionEndedError(f"its connection ended ({error.strerror})") from error
        if not data:
            raise ConnectionEndedError("its connection ended")
        self.heard_at = time.monotonic()
        return self._splitter.feed(data)

    def is_flushed(self) -> bool:
        """Whether the peer's kernel has everything, so that our end no longer matters."""
        with self._lock:
            if self._is_shut or self._socket is None:
                return True
            return not (self._rest or _unacknowledged_bytes(self._socket))

    def shut(self) -> None:
        """Ends our side of the stream; the peer's may still speak."""
        with self._lock:
            if not self._is_shut:
                self._is_shut = True
                with contextlib.suppress(OSError):
                    assert self._socket is not None
                    self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the socket. Under the lock, since the descriptor may soon be another's."""
        with self._lock:
            self._is_shut = True
            if self._socket is not None:
                self._socket.close()

    def forget(self) -> None:
        """Closes a forked child's copy, whose lock may be held by a thread it does not have."""
        self._lock = threading.Lock()
        self.close()


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # macOS lacks some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _unacknowledged_bytes(sock: socket.socket) -> int:
    """Zero where the system does not tell."""
    try:
        (count,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0\0\0\0"))
    except OSError:
        return 0
    return int(count)
