"""What shoal asks of the system and the C library; mostly Linux only.

Cores, signals at a parent's death, adopted orphans and rights to trace (prctl), memory of other
processes, mappings at a given address, hints about files that are being written, and the allocator.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_FALLOC_FL_KEEP_SIZE = 1
_SYNC_FILE_RANGE_WRITE = 2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IS_LINUX = sys.platform.startswith("linux")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
_LONGEST_BYTES = 32 << 20  # more than that glibc never takes from the heap
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def own_cores() -> frozenset[int]:
    """Numbers of the cores this process may use; a launcher may have given it just some."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        return frozenset(range(os.cpu_count() or 1))


def num_cores() -> int:
    """How many these are."""
    return len(own_cores())


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when `parent`, its parent process, ends."""
    killed_with(parent)()


def killed_with(parent: int) -> Callable[[], None]:
    """What does the same between fork and exec, where only plain calls are safe."""
    prctl = _function("prctl") if _IS_LINUX else None

    def ask() -> None:
        if prctl is None:
            return
        if prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            _fail("prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:  # it ended before the kernel knew of the request
            os._exit(1)

    return ask


def adopt_orphans(is_wanted: bool) -> None:
    """Whether this process becomes the parent of orphaned descendants, instead of process 1."""
    if _IS_LINUX:
        _function("prctl")(_PR_SET_CHILD_SUBREAPER, int(is_wanted))


def allow_tracing_by(ancestor: int) -> None:
    """Under Yama, lets `ancestor` and all its descendants trace (and read) this process."""
    _function("prctl")(_PR_SET_PTRACER, ctypes.c_ulong(ancestor), 0, 0, 0)


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def read_process_memory(pid: int, source: int, target: int, num_bytes: int) -> None:
    """Copies from an address of another process to one of this process.

    Raises:
        AttributeError: If the system has no such call.
        OSError: If it is forbidden, or the process is gone.
    """
    done = 0
    while done < num_bytes:
        here = _Range(target + done, num_bytes - done)
        there = _Range(source + done, num_bytes - done)
        count = _readv()(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, ctypes.c_ulong(0))
        if count <= 0:
            _fail(f"cannot read memory of process {pid}")
        done += count


def map_over(address: int, num_bytes: int, file: int, offset: int) -> None:
    """Maps a private, writable view of a file in place of what is mapped at `address`."""
    flags, access = mmap.MAP_PRIVATE | _MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
    if _mmap()(address, num_bytes, access, flags, file, offset) == _MAP_FAILED:
        _fail(f"mapping {num_bytes} bytes failed")


def reserve_blocks(file: int, num_bytes: int) -> None:
    """Has the disk keep room for a file, which is written faster then; its size stays.

    A hint: nothing happens where the system or the file system does not know it.
    `os.posix_fallocate` would write to every block there.

    Raises:
        OSError: If there is not as much room.
    """
    call = _optional("fallocate64") or _optional("fallocate")
    if call is None or not num_bytes:
        return
    if call(file, _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
        code = ctypes.get_errno()
        if code in _NO_ROOM:
            raise OSError(code, os.strerror(code))


def start_writing(file: int, offset: int, num_bytes: int) -> None:
    """Has the disk begin with what was written; a later sync reports what goes wrong with it."""
    call = _optional("sync_file_range")
    if call is not None:
        call(file, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), _SYNC_FILE_RANGE_WRITE)


@cache
def keep_freed_memory() -> None:
    """Keeps up to a gigabyte, unless the user has chosen otherwise or there is no glibc.

    A training step takes and frees the same memory again and again. glibc gives free memory at the
    end of its heap back to the system, which must then clear every page anew. That took two
    microseconds a page on the virtual machine where it was measured, of thousands in a step.
    """
    has_tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if has_tuned or any(choice in os.environ for choice in _CHOICES):
        return
    with contextlib.suppress(AttributeError, TypeError, OSError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        set_option(_M_MMAP_THRESHOLD, _LONGEST_BYTES)


def _fail(what: str) -> NoReturn:
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")


@cache
def _function(name: str) -> Any:
    return getattr(ctypes.CDLL(None, use_errno=True), name)


def _optional(name: str) -> Any:
    """None where there is no such function."""
    try:
        return _function(name)
    except AttributeError:
        return None


@cache
def _readv() -> Any:
    function = _function("process_vm_readv")
    function.restype = ctypes.c_ssize_t
    return function


@cache
def _mmap() -> Any:
    function, number = _function("mmap"), ctypes.c_int
    function.restype = ctypes.c_void_p
    function.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long,
    )  # fmt: skip
    return function
