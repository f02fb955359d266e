"""Reading another process's memory where it lies, if the system lets us.

Linux copies from one process to another in one go (``process_vm_readv``). That takes the right to
trace the other process, which processes of one user have. Where the Yama module reserves it for
ancestors, a rank grants it to what its own parent started: the other ranks of a launch. Sandboxes
may forbid the call altogether. So ranks try it on each other when they join, and unless all of
them can, none does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

_WORD = b"shoal!\n\0"
_probed = ctypes.create_string_buffer(_WORD, len(_WORD))
_PR_SET_PTRACER = 0x59616D61
# By process, for a fork is another one: to whom it has granted the right to read it.
_granted: dict[int, int] = {}


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def probe_address() -> int:
    """The address of a word that others try to read.

    Side effect: where Yama restricts tracing, processes of the same parent may trace this one now.
    """
    if _is_for_ancestors_only():
        parent = _granted[os.getpid()] = os.getppid()
        _libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(parent), 0, 0, 0)
    return ctypes.addressof(_probed)


def is_readable() -> bool:
    """Whether other ranks can still read this process: a grant ends with its parent."""
    parent = _granted.get(os.getpid()) if _granted else None
    return parent is None or parent == os.getppid()


def _is_for_ancestors_only() -> bool:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/yama/ptrace_scope") as scope:
        return scope.read().strip() == "1"
    return False


def can_read(pid: int, address: int) -> bool:
    """Whether this process finds another one's word."""
    found = ctypes.create_string_buffer(len(_WORD))
    try:
        _read(pid, address, ctypes.addressof(found), len(_WORD))
    except (OSError, AttributeError):  # forbidden, or a system without the call
        return False
    return found.raw == _WORD


def read_into(target: Tensor, pid: int, address: int) -> None:
    """Fills flat CPU memory with what another process has at an address."""
    _read(pid, address, target.data_ptr(), target.nbytes)
    if not target.is_inference():
        increment_version(target)  # autograd does not know of it otherwise


def _read(pid: int, address: int, target: int, num_bytes: int) -> None:
    done = 0
    while done < num_bytes:
        here = _Range(target + done, num_bytes - done)
        there = _Range(address + done, num_bytes - done)
        count = _libc().process_vm_readv(
            pid, ctypes.byref(here), 1, ctypes.byref(there), 1, ctypes.c_ulong(0)
        )
        if count <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"cannot read memory of process {pid}: {os.strerror(error)}")
        done += count


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc
