"""Standard input, output and error of the `shoal` command, where the caller gave it none."""

from __future__ import annotations

import errno
import os
import sys

# The reader went away: a pager that was left, a terminal that was closed. That is its own wish.
_GONE = (errno.EPIPE, errno.EIO)


def open_closed_streams() -> None:
    """Opens /dev/null for those that are closed (`>&-`).

    Otherwise the first file or socket to be opened would become the ranks' standard input.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:  # it is the lowest that is free
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115


def is_lost(error: OSError) -> bool:
    """Whether output was lost that somebody wants to read: the disk is full, for one."""
    return error.errno not in _GONE


def is_of_output(error: OSError) -> bool:
    """Whether it can only come from writing: it names no file, and there is no room or reader."""
    writing = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, *_GONE)
    return error.filename is None and error.errno in writing


def give_up_output() -> OSError | None:
    """What keeps standard output from being written, if anything does.

    It leads nowhere after that, so that Python does not stumble over it again at its end.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return error
    return None
