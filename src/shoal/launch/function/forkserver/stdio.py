"""Standard streams on their way from a caller to its child.

The descriptors travel, not Python's stream objects: so a child writes to wherever the caller's 0,
1 and 2 lead at the time of the call, be it a terminal, a file or a test's capture.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys


def flush() -> None:
    """Writes out what this process printed so far, before another one writes or this one ends."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # streams may be None, closed or replaced
            stream.flush()


def usable(fd: int, stack: contextlib.ExitStack) -> int:
    """The descriptor, or the null device in place of one that is closed (as in daemons)."""
    try:
        os.fstat(fd)
    except OSError:
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, fd)
    return fd


def adopt(stdin: int, stdout: int, stderr: int) -> None:
    """Makes the descriptors this process's 0, 1 and 2, with streams that fit what they are."""
    for target, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, target)
        os.close(fd)
    encoding, errors = sys.stdout.encoding, sys.stdout.errors or "strict"
    reader = open(0, encoding=encoding, closefd=False)  # noqa: SIM115 (stays open)
    sys.stdin = sys.__stdin__ = reader  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _writer(1, encoding, errors)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _writer(2, encoding, "backslashreplace")  # type: ignore[misc]


def follow_environment() -> None:
    """Honours PYTHONUNBUFFERED, once the environment is the caller's."""
    if os.environ.get("PYTHONUNBUFFERED") and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(write_through=True)


def _writer(fd: int, encoding: str, errors: str) -> io.TextIOWrapper:
    """A text stream that is buffered as a fresh interpreter would buffer it."""
    by_line = fd == 2 or os.isatty(fd)
    return open(
        fd, "w", buffering=1 if by_line else -1, encoding=encoding, errors=errors, closefd=False
    )
