"""The C library's allocator: what one training step frees is kept for the next.

A training step takes and frees the same memory again and again. glibc gives free memory at the
end of its heap back to the system, which must then clear every page anew. That took two
microseconds a page on the virtual machine where it was measured, of thousands in a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
_LONGEST_BYTES = 32 << 20  # more than that glibc never takes from the heap
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


@cache
def keep_freed_memory() -> None:
    """Keeps up to a gigabyte, unless the user has chosen otherwise or there is no glibc."""
    has_tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if has_tuned or any(choice in os.environ for choice in _CHOICES):
        return
    with contextlib.suppress(AttributeError, TypeError, OSError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        set_option(_M_MMAP_THRESHOLD, _LONGEST_BYTES)
