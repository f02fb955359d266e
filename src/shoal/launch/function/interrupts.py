"""Ctrl-C in `shoal.run`: the user sees the line that was interrupted, once, and nothing of ours."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import cache
from types import TracebackType

from shoal.system.site import is_ours
from shoal.system.tracebacks import VARIABLE

_MARK = "_shoal_run"


@contextlib.contextmanager
def ending_quietly() -> Iterator[None]:
    """Has a KeyboardInterrupt that leaves this block shown without shoal's frames.

    If it is not caught, the process ends. Another Ctrl-C ends it then and there.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # the user pressed it twice
            error.__suppress_context__ = True
        setattr(error, _MARK, True)
        if threading.current_thread() is threading.main_thread():
            _watch_end()
        raise


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback up to the user's call of `shoal.run`; all of it if it begins in shoal."""
    last = trace
    if os.environ.get(VARIABLE) == "full" or trace is None or _is_own(trace):
        return trace
    while last is not None:
        if last.tb_next is not None and _is_own(last.tb_next):
            last.tb_next = None
        last = last.tb_next
    return trace


def _is_own(trace: TracebackType) -> bool:
    return is_ours(trace.tb_frame.f_code.co_filename)


@cache
def _watch_end() -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not hasattr(error, _MARK):
            previous(kind, error, trace)
            return
        trace = without_own_frames(trace)
        previous(kind, error.with_traceback(trace), trace)
        # What Python still calls has nothing to say to a second Ctrl-C but a traceback.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)

    sys.excepthook = hook
