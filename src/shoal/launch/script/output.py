"""The output of many ranks on one screen: whole lines, each with the name of its rank.

A rank's bytes go `pipe -> Source -> Sink`. A source cuts them into lines. A sink knows whose line
is unfinished on the screen, so that another rank's line never lands inside it. Bytes stay bytes:
whatever a rank writes, in whatever encoding, comes out as it went in.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from typing import IO, BinaryIO, NamedTuple

_PALETTE = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)

# An unbuffered print() writes its text and its newline apart: wait for the second a moment.
_PARTIAL_DELAY = 0.1
_CHUNK_BYTES = 64 * 1024
_TAIL_BYTES = 64 * 1024

_CARRIAGE_RETURN = re.compile(rb"(?=\r(?!\n))")


class Voice(NamedTuple):
    """Whose line it is: the label shown before it, and which of the rank's two streams."""

    label: str
    channel: str


class Sink:
    r"""One stream of the launcher, shared by all ranks.

    Example:
        >>> sink = Sink(io.BytesIO(), colour=False)
        >>> sink.write(Voice("rank 0", "stdout"), b"half a li")
        >>> sink.write(Voice("rank 1", "stdout"), b"whole\n")
        >>> sink.stream.getvalue()
        b'[rank 0] half a li\n[rank 1] whole\n'
    """

    def __init__(self, stream: BinaryIO, *, colour: bool) -> None:
        """Writes to `stream`, with ANSI colours if asked."""
        self.stream = stream
        self._colour = colour
        self._owner: Voice | None = None  # whose unfinished line is on the screen
        self._broken = False

    def write(self, owner: Voice, piece: bytes) -> None:
        """Writes a line, or a part of one, of `owner`; a leading CR begins its line anew."""
        start = b""
        if self._owner not in (None, owner):
            start = b"\n"
        if self._owner != owner:
            piece = piece.removeprefix(b"\r")
            start += self._prefix(owner)
        elif piece.startswith(b"\r"):
            piece, start = piece[1:], b"\r" + self._prefix(owner)
        self._owner = None if piece.endswith(b"\n") else owner
        self._put(start + piece)

    def finish(self, owner: Voice) -> None:
        """Ends the line that `owner` left unfinished, if it did."""
        if self._owner == owner:
            self._owner = None
            self._put(b"\n")

    def say(self, text: str) -> None:
        """Writes a message of the launcher itself on lines of its own."""
        start = b"" if self._owner is None else b"\n"
        self._owner = None
        self._put(start + text.encode(errors="backslashreplace") + b"\n")

    def _put(self, data: bytes) -> None:
        """A reader that went away (a pager, a closed terminal) must not end the training."""
        if self._broken:
            return
        try:
            self.stream.write(data)
            self.stream.flush()
        except BlockingIOError as full:
            # Someone who shares the terminal made it non-blocking; a slow one is no broken one.
            os.set_blocking(self.stream.fileno(), True)
            self._put(data[full.characters_written :])
        except (OSError, ValueError):
            self._broken = True

    def _prefix(self, owner: Voice) -> bytes:
        if not self._colour:
            return f"[{owner.label}] ".encode()
        number = re.sub(r"\D", "", owner.label) or "0"
        colour = _PALETTE[int(number) % len(_PALETTE)]
        return f"\x1b[{colour}m[{owner.label}]\x1b[0m ".encode()


class Source:
    """One output stream of one rank, read from the pipe `fd` (which it owns) into a sink."""

    def __init__(self, owner: Voice, fd: int, sink: Sink) -> None:
        """Starts reading in the running event loop."""
        self._owner, self._fd, self._sink = owner, fd, sink
        self._rest = b""
        self._tail = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._on_readable)

    def tail(self) -> bytes:
        """The last of what came through."""
        return bytes(self._tail)

    def close(self) -> None:
        """Takes what still is in the pipe and stops.

        It does not wait for the end of the pipe: a process that outlives its rank may hold it.
        """
        if self._fd >= 0:
            while self._on_readable():
                pass
        if self._fd >= 0:
            self._stop()

    def _on_readable(self) -> bool:
        try:
            chunk = os.read(self._fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if chunk:
            self._feed(chunk)
        else:
            self._stop()
        return bool(chunk)

    def _feed(self, chunk: bytes) -> None:
        self._tail += chunk
        del self._tail[:-_TAIL_BYTES]
        *lines, rest = split_lines(self._rest + chunk)
        self._rest = rest
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for line in lines:
            self._sink.write(self._owner, line)
        if len(rest) > _CHUNK_BYTES:
            self._flush_rest()
        elif rest:
            self._timer = self._loop.call_later(_PARTIAL_DELAY, self._flush_rest)

    def _flush_rest(self) -> None:
        """Shows an unfinished line; a CR at its end may yet become CR LF and is held back."""
        shown = self._rest.removesuffix(b"\r")
        self._rest = self._rest[len(shown) :]
        if shown:
            self._sink.write(self._owner, shown)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._flush_rest()
        self._sink.finish(self._owner)
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1


def split_lines(data: bytes) -> list[bytes]:
    r"""Cuts after each newline and before each lone CR; the last piece is the unfinished one.

    Example:
        >>> split_lines(b"one\r\ntwo\nbar 1%\rbar 2%")
        [b'one\r\n', b'two\n', b'bar 1%', b'\rbar 2%']
    """
    *lines, rest = data.split(b"\n")
    pieces: list[bytes] = []
    for line in lines:
        pieces += [piece for piece in _CARRIAGE_RETURN.split(line + b"\n") if piece]
    *overwritten, rest = _CARRIAGE_RETURN.split(rest)
    return [*pieces, *(piece for piece in overwritten if piece), rest]


def console(out: IO[str], err: IO[str]) -> tuple[Sink, Sink]:
    """Sinks for stdout and stderr: a single one when both lead to the same place."""
    first = Sink(out.buffer, colour=_wants_colour(out))  # type: ignore[attr-defined]
    if _is_same_file(out, err):
        return first, first
    return first, Sink(err.buffer, colour=_wants_colour(err))  # type: ignore[attr-defined]


def _wants_colour(stream: IO[str]) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _is_same_file(out: IO[str], err: IO[str]) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.path.sameopenfile(out.fileno(), err.fileno())
    return False
