"""Removes files without waiting for the system to free what they occupy.

Freeing a large file takes the system a while: memory pages and disk blocks are freed one after the
other. But a file that is open is freed only when it is closed. So files are opened before their
names are removed, and a thread closes them: the names are gone at once, and training goes on.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

# A process may open only so many files.
_MOST_OPEN = 32

_open: set[int] = set()
_threads: set[threading.Thread] = set()


@contextlib.contextmanager
def kept_open(paths: Sequence[Path]) -> Iterator[None]:
    """Inside, removing these files is quick; a thread closes them afterwards."""
    opened = [_open_any(path) for path in islice(paths, _MOST_OPEN)]
    try:
        yield
    finally:
        _close_in_thread([descriptor for descriptor in opened if descriptor is not None])


def wait() -> None:
    """Returns once all files are closed."""
    for thread in list(_threads):
        thread.join()
        _threads.discard(thread)


def _open_any(path: Path) -> int | None:
    """Opens a file, link or pipe only as a name: nothing is followed or waited for."""
    with contextlib.suppress(OSError, AttributeError):  # systems other than Linux
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        _open.add(descriptor)
        return descriptor
    return None


def _close_in_thread(descriptors: Sequence[int]) -> None:
    if not descriptors:
        return
    thread = threading.Thread(target=_close, args=(descriptors,), name="shoal-free", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the process may not start more threads
        _close(descriptors)
    else:
        _threads.add(thread)  # only now: a thread that has not started cannot be joined


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        _open.discard(descriptor)  # first: once closed, the number may be another file's
        os.close(descriptor)


def _close_in_child() -> None:
    """Descriptors that a forked child inherits would keep the files' room for its lifetime."""
    _threads.clear()
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_close_in_child)
