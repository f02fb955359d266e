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
from pathlib import Path

_threads: set[threading.Thread] = set()


@contextlib.contextmanager
def held(paths: Sequence[Path]) -> Iterator[None]:
    """Inside, these files can be removed quickly; afterwards they are let go of."""
    descriptors = [held for path in paths if (held := _hold(path)) is not None]
    try:
        yield
    finally:
        _let_go_aside(descriptors)


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


def wait() -> None:
    """Returns once everything is let go of."""
    for thread in list(_threads):
        thread.join()
        _threads.discard(thread)


def _hold(path: Path) -> int | None:
    """Whatever it is: it is not opened, and a link is not followed."""
    with contextlib.suppress(OSError, AttributeError):  # other systems than Linux
        return os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    return None


def _let_go(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


# A child that inherits what is held would keep the disk's room taken for as long as it lives.
os.register_at_fork(before=wait)
