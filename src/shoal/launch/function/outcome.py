"""What became of a rank, and how it tells: one frame with a value or with an exception.

A frame is a header that says kind and length, then bytes, over a stream socket.
"""

from __future__ import annotations

import pickle
import socket
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle

from shoal.errors import LaunchError, RemoteError
from shoal.torch_internals.compiler_module import COMPILER

VALUE, ERROR = 1, 2
_MAGIC = b"shoal"
_HEADER = struct.Struct("=5sB?Q")
_PIECE_BYTES = 1 << 20


@dataclass
class Outcome:
    """How one rank ended.

    A rank that ended without a word (it was killed, or left by `os._exit`) has neither value nor
    error, only an exit code. `failed_at` is set exactly if no value came; it is a time of the
    host's monotonic clock, so the smallest one belongs to the rank that failed first.
    `used_compiler` says that the rank had torch's compiler loaded at its end, `fate` why shoal
    itself killed it, if it did, and `is_echo` whether that was for another's failure.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None
    failed_at: float | None = None
    used_compiler: bool = False
    fate: str = ""
    is_echo: bool = False

    @property
    def failed(self) -> bool:
        """Whether the rank gave no value."""
        return self.failed_at is not None


def send_value(channel: socket.socket, value: object) -> None:
    """Reports a rank's result. A value that cannot be pickled raises before anything is sent."""
    try:
        body = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"what the function returned (a {type(value).__name__}) cannot be sent back by the "
            f"rank, which is a process: {error}. Return numbers, tensors or text made from it, or "
            "use backend='memory', whose ranks are threads."
        ) from error
    send_frame(channel, VALUE, body)


def send_error(channel: socket.socket, error: BaseException, text: str | None = None) -> None:
    """Reports a rank's exception with its traceback (`text`, or the exception's own)."""
    failed_at = time.monotonic()
    if text is None:
        text = "".join(traceback.format_exception(error))
    send_frame(channel, ERROR, pickle.dumps((encode_exception(error), text, failed_at)))


def encode_exception(error: BaseException) -> bytes:
    """The exception as bytes, with its name and message in case it cannot be rebuilt."""
    try:
        body = cloudpickle.dumps(error)
    except Exception:  # locks, sockets, generators among its attributes
        body = b""
    return pickle.dumps((body, _name_of(error), _message_of(error)))


def decode_exception(data: bytes) -> BaseException:
    """The exception itself where that is possible, else a `RemoteError` in its place."""
    body, name, message = pickle.loads(data)
    try:
        error = pickle.loads(body)
    except Exception:  # an empty body, a class that is not known here, a constructor that refuses
        error = None
    return error if isinstance(error, BaseException) else RemoteError(name, message)


def decode_frame(rank: int, frame: Frame) -> Outcome:
    """The outcome that a rank reported."""
    if frame.kind == ERROR:
        encoded, text, failed_at = pickle.loads(frame.body)
        return Outcome(rank, error=decode_exception(encoded), traceback=text, failed_at=failed_at)
    try:
        return Outcome(rank, value=pickle.loads(frame.body))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        error.add_note(f"The result of rank {rank} arrived, but cannot be unpickled here.")
        return Outcome(rank, error=error, traceback=text, failed_at=time.monotonic())


def _name_of(error: BaseException) -> str:
    kind = type(error)
    known = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if known else f"{kind.__module__}.{kind.__qualname__}"


def _message_of(error: BaseException) -> str:
    """The exception's text, even if its own `__str__` fails."""
    try:
        return str(error)
    except Exception as problem:
        return f"<no message: {type(problem).__name__} in __str__>"


class Frame(NamedTuple):
    """A whole message."""

    kind: int
    body: bytearray
    used_compiler: bool = False


def send_frame(channel: socket.socket, kind: int, body: bytes) -> None:
    """Sends one frame, waiting as long as the reader needs."""
    channel.sendall(_HEADER.pack(_MAGIC, kind, COMPILER in sys.modules, len(body)))
    channel.sendall(body)


class FrameReader:
    """Reads one frame from a non-blocking socket, in as many pieces as it comes in."""

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self._kind = 0
        self._used_compiler = False
        self._in_header = True
        self._expect(_HEADER.size)

    def advance(self, channel: socket.socket) -> bool:
        """Reads once; False when there is nothing more to come.

        Raises:
            BlockingIOError: Nothing is there now.
            LaunchError: Something other than a frame is there.
        """
        piece = self._view[self._filled : self._filled + _PIECE_BYTES]
        try:
            count = channel.recv_into(piece)
        except ConnectionError:  # the writer ended without reading all that was sent to it
            return False
        self._filled += count
        if count and self._filled == len(self._buffer):
            self._complete()
        return count > 0

    def _expect(self, size: int) -> None:
        self._buffer = bytearray(size)
        self._view = memoryview(self._buffer)
        self._filled = 0

    def _complete(self) -> None:
        """Goes from the header to the body, or from the body to the frame."""
        if not self._in_header:
            self.frame = Frame(self._kind, self._buffer, self._used_compiler)
            return
        magic, self._kind, self._used_compiler, size = _HEADER.unpack(self._buffer)
        if magic != _MAGIC:
            raise LaunchError(
                f"a rank's channel should start with {_MAGIC!r}, and starts with {magic!r}; "
                "does something else write to that descriptor?"
            )
        self._in_header = False
        self._expect(size)
        if size == 0:
            self._complete()
