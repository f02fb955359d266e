"""Files that are removed: the system has much to let go of, and nobody needs to wait for it.

Removing a large file takes the system a while: pages of memory and blocks on the disk are freed one
after the other, and it waits for the disk in between. But a file that somebody holds is only freed
when that one lets go. So we hold what is removed, and let go of it in a thread: names are gone at
once, and training goes on.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

# A process may open only so many files.
_MOST_HELD = 32

_held: set[int] = set()
_threads: set[threading.Thread] = set()


@contextlib.contextmanager
def held(paths: Sequence[Path]) -> Iterator[None]:
    """Inside, these files can be removed quickly; afterwards they are let go of."""
    descriptors = [held for path in islice(paths, _MOST_HELD) if (held := _hold(path)) is not None]
    try:
        yield
    finally:
        _let_go_aside(descriptors)


def wait() -> None:
    """Returns once everything is let go of."""
    for thread in list(_threads):
        thread.join()
        _threads.discard(thread)


def _hold(path: Path) -> int | None:
    """Whatever it is: it is not opened, and a link is not followed."""
    with contextlib.suppress(OSError, AttributeError):  # other systems than Linux
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        _held.add(descriptor)
        return descriptor
    return None


def _let_go_aside(descriptors: Sequence[int]) -> None:
    if not descriptors:
        return
    thread = threading.Thread(target=_let_go, args=(descriptors,), name="shoal-free", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # there are no more threads to be had
        _let_go(descriptors)
    else:
        _threads.add(thread)  # only now: one that has not started cannot be waited for


def _let_go(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        _held.discard(descriptor)  # before: its number may be another file's afterwards
        os.close(descriptor)


def _forget() -> None:
    """In a child: what it has inherited would keep the room taken for as long as it lives."""
    _threads.clear()
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget)
