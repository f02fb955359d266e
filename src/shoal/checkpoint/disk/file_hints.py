"""What Linux lets one say about a file that is being written, and Python's `os` does not.

Both are hints: where the system or the file system does not know them, nothing happens.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

_FALLOC_FL_KEEP_SIZE = 1
_SYNC_FILE_RANGE_WRITE = 2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reserve(descriptor: int, num_bytes: int) -> None:
    """Has the disk keep room for a file, which is written faster then; its size stays.

    `os.posix_fallocate` would write to every block where a file system cannot do that.

    Raises:
        OSError: If there is not as much room.
    """
    call = _libc("fallocate64") or _libc("fallocate")
    if (
        call is not None
        and num_bytes
        and call(descriptor, _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(num_bytes))
    ):
        code = ctypes.get_errno()
        if code in _NO_ROOM:
            raise OSError(code, os.strerror(code))


def start_writing(descriptor: int, place: int, num_bytes: int) -> None:
    """Has the disk begin with what was written; a later sync tells what goes wrong with it."""
    call = _libc("sync_file_range")
    if call is not None:
        call(descriptor, ctypes.c_int64(place), ctypes.c_int64(num_bytes), _SYNC_FILE_RANGE_WRITE)


@cache
def _libc(name: str) -> Any:
    """None where there is no such call."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)
