"""Where the output of ranks goes: on one screen, whole lines with the name of their rank, or files.

On the screen, a rank's bytes go `pipe -> PipeReader -> Screen`. A reader cuts them into lines. A
screen knows whose line is unfinished on it, so that another rank's line never lands inside. Bytes
stay bytes: they come out as they went in, whatever their encoding.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

from shoal.launch.script.held import HeldTraceback
from shoal.launch.script.streams import is_lost

_PALETTE = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)

# An unbuffered print() writes its text and its newline apart: wait for the second a moment.
_PARTIAL_DELAY = 0.1
_CHUNK_BYTES = 64 * 1024
_TAIL_BYTES = 64 * 1024

_CARRIAGE_RETURN = re.compile(rb"(?=\r(?!\n))")


class Speaker(NamedTuple):
    """Whose line it is: the label shown before it, and which of the rank's two streams."""

    label: str
    channel: str


class Screen:
    r"""One stream of the launcher, shared by all ranks.

    Example:
        >>> screen = Screen(io.BytesIO(), colour=False)
        >>> screen.write(Speaker("rank 0", "stdout"), b"half a li")
        >>> screen.write(Speaker("rank 1", "stdout"), b"whole\n")
        >>> screen.stream.getvalue()
        b'[rank 0] half a li\n[rank 1] whole\n'
    """

    def __init__(self, stream: BinaryIO, *, colour: bool) -> None:
        self.stream = stream
        self._colour = colour
        self._owner: Speaker | None = None  # whose unfinished line is on the screen
        self._broken = False
        self.complain: Callable[[str], None] | None = None
        """Where to say that output is lost, if there is another screen."""

    def write(self, owner: Speaker, piece: bytes) -> None:
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

    def finish(self, owner: Speaker) -> None:
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
        except OSError as error:
            self._broken = True
            if is_lost(error) and self.complain is not None:
                self.complain(
                    f"shoal: output is lost from here on ({error.strerror}); the ranks go on."
                )
        except ValueError:  # it was closed
            self._broken = True

    def _prefix(self, owner: Speaker) -> bytes:
        if not self._colour:
            return f"[{owner.label}] ".encode()
        number = re.sub(r"\D", "", owner.label) or "0"
        colour = _PALETTE[int(number) % len(_PALETTE)]
        return f"\x1b[{colour}m[{owner.label}]\x1b[0m ".encode()


class PipeReader:
    """One output stream of one rank, read from the pipe `fd` (which it owns) into a screen."""

    def __init__(
        self,
        owner: Speaker,
        fd: int,
        screen: Screen,
        patience: Callable[[], float] | None = None,
    ) -> None:
        """With `patience`, a traceback at the end is held back: see `HeldTraceback`."""
        self._owner, self._fd, self._screen = owner, fd, screen
        self._held = patience and HeldTraceback(self._write, patience)
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
        self._drain()
        if self._fd >= 0:
            self._stop()
        if self._held is not None:
            self._held.release()

    def held(self) -> HeldTraceback | None:
        """What is kept from the screen, after a look into the pipe."""
        self._drain()
        return self._held

    def _drain(self) -> None:
        while self._fd >= 0 and self._on_readable():
            pass

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
            self._show(line)
        if len(rest) > _CHUNK_BYTES:
            self._flush_rest()
        elif rest:
            self._timer = self._loop.call_later(_PARTIAL_DELAY, self._flush_rest)

    def _flush_rest(self) -> None:
        """Shows an unfinished line; a CR at its end may yet become CR LF and is held back."""
        shown = self._rest.removesuffix(b"\r")
        self._rest = self._rest[len(shown) :]
        if shown:
            self._show(shown)

    def _show(self, piece: bytes) -> None:
        if self._held is None or not self._held.take(piece):
            self._write(piece)

    def _write(self, piece: bytes) -> None:
        self._screen.write(self._owner, piece)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._flush_rest()
        self._screen.finish(self._owner)
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


class ScreenOutput:
    """Lines on the launcher's own stdout and stderr, with a label before each.

    ``fds`` are the rank's stdout and stderr. For ``patience`` see `PipeReader`.
    """

    def __init__(
        self,
        label: str,
        out: Screen,
        err: Screen,
        patience: Callable[[], float] | None = None,
    ) -> None:
        read_out, write_out = os.pipe()
        read_err, write_err = os.pipe()
        self.fds = (write_out, write_err)
        self._out = PipeReader(Speaker(label, "stdout"), read_out, out)
        self._err = PipeReader(Speaker(label, "stderr"), read_err, err, patience)

    def started(self) -> None:
        """Closes our copies of the rank's ends, so that its end is the end of the stream."""
        for fd in self.fds:
            os.close(fd)

    def tail(self) -> bytes:
        """The last of what came through stderr."""
        return self._err.tail()

    def held(self) -> HeldTraceback | None:
        """The traceback that the rank ended with, if it is not on the screen yet."""
        return self._err.held()

    def close(self) -> None:
        """Prints what is left in the pipes and closes them."""
        self._out.close()
        self._err.close()


class FileOutput:
    """A file that gets both streams in the order they were written; no launcher in between."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        with contextlib.suppress(OSError):  # the file of another user
            os.fchmod(self._file.fileno(), os.fstat(self._file.fileno()).st_mode | 0o600)
        self.fds = (self._file.fileno(), self._file.fileno())

    def started(self) -> None:
        """Closes the file here."""
        self._file.close()

    def tail(self) -> bytes:
        """The end of the file."""
        with self._path.open("rb") as file:
            file.seek(max(0, self._path.stat().st_size - _TAIL_BYTES))
            return file.read()

    def held(self) -> None:
        """Nothing is held back from a file."""

    def close(self) -> None:
        """Nothing is left to pass on."""


RankOutput = ScreenOutput | FileOutput
"""Where one rank's output goes."""


def console(out: IO[str], err: IO[str]) -> tuple[Screen, Screen]:
    """Screens for stdout and stderr: a single one when both lead to the same place."""
    first = Screen(out.buffer, colour=_wants_colour(out))  # type: ignore[attr-defined]
    if _is_same_file(out, err):
        return first, first
    second = Screen(err.buffer, colour=_wants_colour(err))  # type: ignore[attr-defined]
    first.complain = second.say
    return first, second


def _wants_colour(stream: IO[str]) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _is_same_file(out: IO[str], err: IO[str]) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.path.sameopenfile(out.fileno(), err.fileno())
    return False
