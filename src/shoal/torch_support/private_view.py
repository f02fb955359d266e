"""Shared memory as one process sees it, with changes of its own.

[Note: private views]
A segment can be mapped a second time, privately. Pages that this process has not written there are
the segment's own: whatever others write to it shows at once, and nothing is copied. Writing makes a
copy of that page for this process, which stays until it is dropped. The kernel knows which pages
are such copies (``/proc/self/pagemap``), so every write is found, however it was made.
Where that file cannot be read, the bytes are compared.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.system import libc
from shoal.torch_support.raw import as_bytes

_ENTRY_BYTES = 8
# Bits of an entry: the page is in memory or in swap; it is a file's and no copy.
_IS_THERE, _IS_FILE = np.uint64(3 << 62), np.uint64(1 << 61)
_Pages = np.ndarray[Any, np.dtype[np.bool_]]


class PrivateView:
    """One range of a segment, mapped privately; see [Note: private views].

    Example:
        >>> view = PrivateView("/proc/self/fd/7", offset=0, shared=shared)
        >>> view.memory[:4] = 1  # other processes do not see it
        >>> view.written()
        [(0, 4096)]
        >>> view.drop()
    """

    def __init__(self, path: str, offset: int, shared: Tensor) -> None:
        """``shared`` are the same bytes as all ranks see them; ``offset`` begins a page."""
        self._path, self._offset, self._shared = path, offset, shared
        self._mapping = _map_privately(path, offset, shared.numel())
        self.memory = as_bytes(self._mapping)  # to the end of the last page

    def another(self) -> PrivateView:
        """A view of the same range without what was written to this one."""
        return PrivateView(self._path, self._offset, self._shared)

    def written(self) -> list[tuple[int, int]]:
        """The ranges of bytes of which this process has copies, in whole pages."""
        try:
            is_copy = self._find_copies()
        except OSError:
            is_copy = self._compare()
        edges = np.flatnonzero(np.diff(is_copy, prepend=False, append=False)) * mmap.PAGESIZE
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    def _find_copies(self) -> _Pages:
        num_bytes = len(self._mapping) // mmap.PAGESIZE * _ENTRY_BYTES
        fd = os.open("/proc/self/pagemap", os.O_RDONLY)
        try:
            begin = self.memory.data_ptr() // mmap.PAGESIZE * _ENTRY_BYTES
            entries = np.frombuffer(os.pread(fd, num_bytes, begin), np.uint64)
        finally:
            os.close(fd)
        if entries.nbytes != num_bytes:
            raise OSError(f"pagemap has {entries.nbytes} bytes where {num_bytes} were expected")
        is_copy: _Pages = ((entries & _IS_THERE) != 0) & ((entries & _IS_FILE) == 0)
        return is_copy

    def _compare(self) -> _Pages:
        theirs = self._shared.split(mmap.PAGESIZE)
        mine = self.memory[: self._shared.numel()].split(mmap.PAGESIZE)
        differs = [not torch.equal(*pages) for pages in zip(mine, theirs, strict=True)]
        return np.array(differs, dtype=np.bool_)

    def drop(self) -> None:
        """Frees the copies: the view shows the shared bytes again."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


def _map_privately(path: str, offset: int, num_bytes: int) -> mmap.mmap:
    """Maps over memory that Python frees in the end; its own mapping would keep the file open."""
    memory = mmap.mmap(-1, num_bytes + -num_bytes % mmap.PAGESIZE, flags=mmap.MAP_PRIVATE)
    fd = os.open(path, os.O_RDWR)
    try:
        libc.map_over(as_bytes(memory).data_ptr(), len(memory), fd, offset)
    finally:
        os.close(fd)
    return memory
