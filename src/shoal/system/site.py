"""Where in the user's code a call or an error came from, and an error as text with that place."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from functools import lru_cache
from types import FrameType, TracebackType

from shoal.errors import PeerError

# Where torch is, without loading it.
_SPEC = importlib.util.find_spec("torch")
assert _SPEC is not None
assert _SPEC.origin is not None
TORCH = os.path.dirname(os.path.abspath(_SPEC.origin)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def is_ours(filename: str) -> bool:
    """Whether a file belongs to shoal itself."""
    return filename.startswith(_PACKAGE)


def is_torch(filename: str) -> bool:
    """Whether a file belongs to torch."""
    return filename.startswith(TORCH)


# Every operation asks where it came from, so the answer for a file must be quick.
@lru_cache(maxsize=4096)
def _is_in_between(filename: str) -> bool:
    """Whether a file is shoal's, or of those that call shoal for the user: hooks, backward."""
    return is_ours(filename) or is_torch(filename) or filename == contextlib.__file__


def call_frame() -> FrameType | None:
    """The innermost frame that is the user's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_in_between(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def call_site() -> str:
    """File and line of the innermost frame that is the user's own."""
    frame = call_frame()
    return "<shoal>" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def error_site(traceback: TracebackType | None) -> str:
    """File and line of the innermost frame of a traceback that is the user's own.

    Where torch calls shoal, and no frame is the user's, the innermost of torch has to do.
    """
    site = theirs = "<unknown>"
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if is_torch(filename):
            theirs = f"{filename}:{traceback.tb_lineno}"
        elif not is_ours(filename):
            site = f"{filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return theirs if site == "<unknown>" else site


def describe(error: BaseException) -> str:
    """Type, text and place of an exception; of a `PeerError` the reason that it passes on."""
    if isinstance(error, PeerError):
        return error.reason
    return f"{type(error).__name__}: {error} ({error_site(error.__traceback__)})"
