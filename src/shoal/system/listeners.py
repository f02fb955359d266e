"""Sockets of this process that a library of C++ made, by their descriptors; Linux only.

Nothing here makes a Python socket of a descriptor: that may change whether it blocks, and closes it
at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

# Of <asm-generic/socket.h> and <linux/filter.h>; Python has no names for them.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_KEEP_NOTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: of each packet 0 bytes
_PROGRAM = struct.Struct("@HP")
_DESCRIPTORS = "/proc/self/fd"
_ADDRESS_BYTES = 128
_TCP_FAMILIES = (int(socket.AF_INET), int(socket.AF_INET6))


def tcp_listeners() -> set[tuple[int, int]]:
    """Descriptor and inode of each TCP socket of this process that listens."""
    return {
        (fd, inode)
        for fd, inode in _sockets()
        if _option(fd, socket.SO_ACCEPTCONN) and _option(fd, socket.SO_DOMAIN) in _TCP_FAMILIES
    }


def is_still(fd: int, inode: int) -> bool:
    """Whether a descriptor is the one that it was."""
    with contextlib.suppress(OSError):
        return os.fstat(fd).st_ino == inode
    return False


def hear_nobody(fd: int) -> bool:
    """Has the kernel drop what arrives for a listener; returns whether it will.

    Who is connected stays connected: a connection has a socket of its own.
    """
    code = ctypes.create_string_buffer(_KEEP_NOTHING, len(_KEEP_NOTHING))
    return _set_option(fd, _SO_ATTACH_FILTER, _PROGRAM.pack(1, ctypes.addressof(code)))


def hear_all(fd: int) -> bool:
    """Takes that back."""
    return _set_option(fd, _SO_DETACH_FILTER, bytes(4))


def num_callers(fd: int) -> int:
    """How many sockets of this process are of connections to one of its listeners."""
    place = _place(fd)
    return sum(_place(other) == place for other, _ in _sockets() if other != fd)


def _sockets() -> Iterator[tuple[int, int]]:
    if sys.platform != "linux":
        return
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # closed meanwhile
            kind, _, rest = os.readlink(f"{_DESCRIPTORS}/{name}").partition(":[")
            if kind == "socket":
                yield int(name), int(rest.rstrip("]"))


def _option(fd: int, option: int) -> int:
    value, length = ctypes.c_int(), ctypes.c_uint32(ctypes.sizeof(ctypes.c_int))
    arguments = (fd, socket.SOL_SOCKET, option, ctypes.byref(value), ctypes.byref(length))
    return value.value if _libc().getsockopt(*arguments) == 0 else 0


def _set_option(fd: int, option: int, value: bytes) -> bool:
    return bool(_libc().setsockopt(fd, socket.SOL_SOCKET, option, value, len(value)) == 0)


def _place(fd: int) -> bytes:
    """Address and port of a socket's own end, as the kernel writes them."""
    place, length = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_uint32(_ADDRESS_BYTES)
    _libc().getsockname(fd, place, ctypes.byref(length))
    return place.raw


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
