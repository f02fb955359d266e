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

from torch import Tensor
from torch.autograd.graph import increment_version

from shoal.system import libc

_WORD = b"shoal!\n\0"
_probed = ctypes.create_string_buffer(_WORD, len(_WORD))
# By process, for a fork is another one: to whom it has granted the right to read it.
_granted: dict[int, int] = {}


def probe_address() -> int:
    """Address of the probe word. Side effect: under Yama, lets sibling processes trace this one."""
    if _is_for_ancestors_only():
        parent = _granted[os.getpid()] = os.getppid()
        libc.allow_tracing_by(parent)
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
        libc.read_process_memory(pid, address, ctypes.addressof(found), len(_WORD))
    except (OSError, AttributeError):  # forbidden, or a system without the call
        return False
    return found.raw == _WORD


def read_into(target: Tensor, pid: int, address: int) -> None:
    """Fills flat CPU memory with what another process has at an address."""
    libc.read_process_memory(pid, address, target.data_ptr(), target.nbytes)
    if not target.is_inference():
        increment_version(target)  # nobody else tells autograd
