"""Memory as tensors of bytes, long copies past the cache, and private views of what is shared.

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
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shoal.system import libc
from shoal.torch_support.dtypes import traits


def as_bytes(memory: mmap.mmap | bytearray) -> Tensor:
    """The same memory as a tensor on the CPU, also under ``with torch.device(...)``.

    It is no tensor of inference mode: memory is kept, and its next user may train in it.
    """
    with torch.inference_mode(mode=False):
        return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))


def of_dtype(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory as numbers; like `as_bytes` not of inference mode, whose views are."""
    with torch.inference_mode(mode=False):
        return memory.view(dtype)


def storage_address(tensor: Tensor) -> int:
    """The same for tensors that lie in one piece of memory, wherever in it."""
    return tensor.untyped_storage().data_ptr()


def make_worthless(tensor: Tensor) -> None:
    """Fills contiguous memory with what cannot be taken for values: floats are not a number."""
    if tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.view(-1).view(torch.uint8).fill_(0xFF)


def as_memory(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; its own memory where that is contiguous and the CPU's."""
    if not tensor.numel():
        return memoryview(b"")
    plain = tensor.detach().resolve_conj().resolve_neg()
    # One element may have any stride, and counts as contiguous.
    flat = plain.to("cpu").contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


# Numbers as wide as an element; wider ones are seen in part.
_NUMBER_FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {
    1: "B", 2: "H", 4: "I", 8: "Q", 16: "Q",
}  # fmt: skip
_WIDEST_BYTES = 8


class Glimpse:
    """A look at some elements of flat memory of the CPU, which costs less than one operator.

    Example:
        >>> look = Glimpse([0, 2], torch.float32)
        >>> look.at(look.numbers(torch.ones(4)))
        (1065353216, 1065353216)
    """

    def __init__(self, offsets: Sequence[int], dtype: torch.dtype) -> None:
        """``offsets`` of the elements to look at."""
        factor = max(1, dtype.itemsize // _WIDEST_BYTES)
        chosen = [offset * factor for offset in offsets]
        self.at: Callable[[memoryview], object] = itemgetter(*chosen) if chosen else len
        """What is there now: equal if the same bits are."""

    @staticmethod
    def numbers(tensor: Tensor) -> memoryview:
        """The memory of a tensor, to look at."""
        return as_memory(tensor).cast(_NUMBER_FORMATS[tensor.itemsize])


def are_equal(left: Tensor, right: Tensor) -> bool:
    """`torch.equal`, which does not know every dtype; of those it may not, the bytes count."""
    if not traits(left.dtype).is_computed:
        left, right = (each.reshape(-1).contiguous().view(torch.uint8) for each in (left, right))
    return torch.equal(left, right)


# From here on the C library's copy, which writes past the cache (where shoal started the rank, see
# `shoal.launch.rank_settings`), is clearly ahead of torch's: two ranks that copied 8 MiB at once
# took 0.9 instead of 1.7 ms on the machine where it was measured.
_LARGE_BYTES = 1 << 20


def copy(target: Tensor, source: Tensor) -> None:
    """Copies between flat tensors: as fast as can be if they are CPU memory of one dtype."""
    if source.nbytes < _LARGE_BYTES or not _is_memory_like(target, source):
        target.copy_(source)
        return
    np.copyto(_bytes_of(target), _bytes_of(source))
    if not target.is_inference():
        increment_version(target)  # numpy does not tell autograd


def _is_memory_like(target: Tensor, source: Tensor) -> bool:
    return (
        target.is_cpu
        and source.is_cpu
        and target.dtype is source.dtype
        and target.is_contiguous()
        and source.is_contiguous()
        and not (source.is_conj() or source.is_neg())
        and not (target.is_conj() or target.is_neg())
    )


def _bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return tensor.detach().view(torch.uint8).numpy()


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
