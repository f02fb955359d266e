"""Errors at the limits of a process, in words: which limit, how high it is, how to raise it."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator

# The limit, what it counts, and the option of `ulimit`.
_LIMITS = {
    errno.EMFILE: (resource.RLIMIT_NOFILE, "{} files may be open in a process", "-n 4096"),
    errno.EFBIG: (
        resource.RLIMIT_FSIZE,
        "a file may have {} bytes, and memory that ranks share counts as one",
        "-f unlimited",
    ),
}


def advice(error: BaseException) -> str | None:
    """What to do about an error at a limit; None of any other.

    Example:
        >>> advice(OSError(errno.EMFILE, "Too many open files"))
        'The limit is reached: 1024 files may be open in a process. Raise it with: ulimit -n 4096'
    """
    found = _LIMITS.get(error.errno or 0) if isinstance(error, OSError) else None
    if found is None:
        return None
    limit, meaning, option = found
    height = resource.getrlimit(limit)[0]
    return (
        f"The limit is reached: {meaning.format(height)}. "
        f"Raise it with: ulimit {option} (see also: ulimit -H {option.split()[0]})"
    )


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Adds the advice to errors at a limit that pass through."""
    try:
        yield
    except OSError as error:
        text = advice(error)
        if text is not None and text not in getattr(error, "__notes__", ()):
            error.add_note(text)
        raise
