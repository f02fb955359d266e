"""Whose a file of code is, and an error as text, with the place in the user's code."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from types import TracebackType

from shoal.errors import DeadlockError, PeerError

# Where torch is, without loading it.
_SPEC = importlib.util.find_spec("torch")
assert _SPEC is not None
assert _SPEC.origin is not None
TORCH = os.path.dirname(os.path.abspath(_SPEC.origin)) + os.sep
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_ours(filename: str) -> bool:
    """Whether a file belongs to shoal itself."""
    return filename.startswith(PACKAGE)


def is_torch(filename: str) -> bool:
    """Whether a file belongs to torch."""
    return filename.startswith(TORCH)


@lru_cache(maxsize=4096)
def is_stdlib(filename: str) -> bool:
    """Whether a file belongs to Python itself."""
    if filename.startswith("<frozen "):
        return True
    return filename.startswith(_STDLIB) and not is_installed(filename)


@lru_cache(maxsize=4096)
def is_installed(filename: str) -> bool:
    """Whether a file belongs to a package that was installed: a library, not a script."""
    return any(folder in filename for folder in _INSTALLED)


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
    """Type, text and place of an exception, or the reason that it passes on."""
    if isinstance(error, PeerError | DeadlockError) and error.reason:
        return error.reason
    return f"{type(error).__name__}: {error} ({error_site(error.__traceback__)})"
