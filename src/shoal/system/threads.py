"""What the threads of this process are doing, read from their stacks."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType

from shoal.system.public_call import stack
from shoal.system.site import is_installed, is_ours, is_stdlib

_POOL_FILE = os.path.join("concurrent", "futures", "thread.py")
# Waits of the standard library: by function, what its ``timeout`` is if there is no limit.
_UNLIMITED: dict[str, object] = {"wait": None, "join": None, "_wait_for_tstate_lock": -1}


def waits_for_a_thread(frame: FrameType) -> bool:
    """Whether a thread waits, without a limit, for another thread of this process.

    ``frame`` is its innermost. Nothing but another thread can wake it.
    """
    if frame.f_code.co_filename != threading.__file__:
        return False
    name = frame.f_code.co_name
    return name in _UNLIMITED and frame.f_locals.get("timeout") == _UNLIMITED[name]


def busy_threads(is_excused: Callable[[int, str, FrameType], bool]) -> list[int]:
    """The threads of Python code that can go on by themselves, as far as their stacks show.

    Not among them: threads that wait for other threads, those of a pool that have nothing to do,
    and those of installed libraries while they wait in the standard library (a progress bar's, a
    logger's). A thread of the standard library alone, such as a timer's or an event loop's, may
    call the user's code at any moment. ``is_excused`` gets a thread's id, its name and its
    innermost frame, and names others.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    return [
        ident
        for ident, frame in sys._current_frames().items()
        if not is_excused(ident, names.get(ident, ""), frame)
        and not waits_for_a_thread(frame)
        and (ident == main or not _is_library_at_rest(frame))
    ]


def _is_library_at_rest(frame: FrameType) -> bool:
    if not is_stdlib(frame.f_code.co_filename):
        return False
    if _is_idle_in_pool(frame):
        return True
    files = {each.f_code.co_filename for each in stack(frame)}
    libraries = {file for file in files if not is_stdlib(file)}
    return bool(libraries) and all(is_installed(file) and not is_ours(file) for file in libraries)


def _is_idle_in_pool(frame: FrameType) -> bool:
    """Whether a thread of a pool waits for work, which only another thread can give it.

    A thread that has work is in a function that this one calls.
    """
    code = frame.f_code
    return code.co_name == "_worker" and code.co_filename.endswith(_POOL_FILE)
