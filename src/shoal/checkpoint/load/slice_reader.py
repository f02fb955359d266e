"""Reads just the bytes that are wanted, and checks every one of them.

Checksums cover chunks, so a chunk of which anything is wanted is read whole and compared; what is
wanted is read straight into its memory if it is all of the chunk, else through a small buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.checkpoint.disk.filesystem import FileSystem, Reading
from shoal.checkpoint.format.tensor_file import CHUNK_BYTES, checksum, num_chunks
from shoal.checkpoint.load.tensor_source import (
    MemorySource,
    SliceLocation,
    TensorSource,
    Wanted,
    unreadable,
)
from shoal.errors import CorruptCheckpointError
from shoal.sharding.extent import Extent, Indices, overlap
from shoal.system.libc import num_cores
from shoal.torch_support.concurrency import run_concurrently

_MOST_THREADS = 4
_FEW_RUNS = 8
# As much as a thread reads before it asks for more; less than that is read by one.
_BATCH_CHUNKS = 16

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Part:
    """Runs of a slice's bytes that are wanted, from ``sources`` to ``offsets`` of the target."""

    target: Bytes
    sources: Indices
    offsets: Indices
    lengths: Indices

    @cached_property
    def single(self) -> tuple[int, int, int] | None:
        """The run, if it is only one, as is usual; plain numbers are faster."""
        if len(self.lengths) != 1:
            return None
        return int(self.sources[0]), int(self.offsets[0]), int(self.lengths[0])

    def chunks(self) -> Sequence[int]:
        if self.single is not None:
            source, _, length = self.single
            return range(source // CHUNK_BYTES, num_chunks(source + length))
        first = self.sources // CHUNK_BYTES
        behind = (self.sources + self.lengths - 1) // CHUNK_BYTES + 1
        return [int(number) for number in np.unique(_spelled_out(first, behind - first))]

    def memory_of(self, low: int, high: int) -> memoryview | None:
        """Where these bytes of the slice go, if all of them go to one run of memory."""
        if self.single is None:
            return None
        source, offset, length = self.single
        if low < source or high > source + length:
            return None
        return self.target[offset + low - source : offset + high - source].data

    def take(self, data: Bytes, low: int) -> None:
        """Copies what is wanted of the slice's bytes from ``low`` on."""
        high = low + len(data)
        ends = self.sources + self.lengths
        which = slice(np.searchsorted(ends, low, "right"), np.searchsorted(self.sources, high))
        sources = np.maximum(self.sources[which], low)
        offsets = self.offsets[which] + sources - self.sources[which]
        lengths = np.minimum(ends[which], high) - sources
        if len(lengths) > _FEW_RUNS:
            self.target[_spelled_out(offsets, lengths)] = data[_spelled_out(sources - low, lengths)]
            return
        for source, offset, length in zip(sources - low, offsets, lengths, strict=True):
            self.target[offset : offset + length] = data[source : source + length]


def _spelled_out(starts: Indices, lengths: Indices) -> Indices:
    """Every index of some runs."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


@dataclass(frozen=True)
class _Slice:
    tensor: str
    location: SliceLocation
    parts: list[_Part]

    def chunks(self) -> Sequence[int]:
        if len(self.parts) == 1:
            return self.parts[0].chunks()
        return sorted({number for part in self.parts for number in part.chunks()})

    def read(self, number: int, file: Reading, scratch: memoryview) -> int:
        """Reads a chunk, compares its checksum and hands it out; returns its size."""
        low = number * CHUNK_BYTES
        high = min(low + CHUNK_BYTES, self.location.end - self.location.begin)
        own = self.parts[0].memory_of(low, high) if len(self.parts) == 1 else None
        target = scratch[: high - low] if own is None else own
        self._read_into(target, number, file)
        if own is None:
            for part in self.parts:
                part.take(np.frombuffer(target, np.uint8), low)
        return high - low

    def _read_into(self, target: memoryview, number: int, file: Reading) -> None:
        begin = self.location.begin + number * CHUNK_BYTES
        try:
            count = file.read_into(begin, target)
        except OSError as error:
            raise self._error(f"cannot be read: {error}") from error
        if count != len(target):
            raise self._error("it ends early")
        checksums = self.location.checksums
        if checksums is not None and checksum(target) != checksums[number]:
            end = begin + len(target)
            raise self._error(f"the checksum of bytes {begin} to {end} is wrong")

    def _error(self, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(str(self.location.path), reason, self.tensor)


def read(
    source: TensorSource, wanted: Sequence[Wanted], is_unwanted: threading.Event | None = None
) -> int:
    """Fills the memory of all that is wanted, while it is; returns how many bytes were read.

    Raises:
        CorruptCheckpointError: Naming file and tensor, if anything is wrong; then the memory's
            content has no meaning.
    """
    if isinstance(source, MemorySource):
        return source.read(wanted)
    slices = sorted(
        _plan(source, wanted), key=lambda each: (str(each.location.path), each.location.begin)
    )
    with ExitStack() as stack:
        paths = dict.fromkeys(each.location.path for each in slices)
        files = {path: _open(source.disk, path, stack) for path in paths}
        return _read_all(slices, files, is_unwanted or threading.Event())


def _open(disk: FileSystem, path: Path, stack: ExitStack) -> Reading:
    try:
        file = disk.open(path)
    except OSError as error:
        raise unreadable(path, error) from error
    stack.callback(file.close)
    return file


def _read_all(
    slices: Sequence[_Slice], files: Mapping[Path, Reading], is_unwanted: threading.Event
) -> int:
    batches = [
        (each, chunks[first : first + _BATCH_CHUNKS])
        for each in slices
        for chunks in [each.chunks()]
        for first in range(0, len(chunks), _BATCH_CHUNKS)
    ]
    rest = iter(batches)  # threads take from it in turns

    def work(has_failed: threading.Event) -> int:
        num_bytes = 0
        scratch = memoryview(bytearray(CHUNK_BYTES))
        for each, numbers in rest:
            file = files[each.location.path]
            for number in numbers:
                if has_failed.is_set() or is_unwanted.is_set():
                    return num_bytes
                num_bytes += each.read(number, file, scratch)
        return num_bytes

    num_threads = max(1, min(_MOST_THREADS, num_cores(), len(batches)))
    return sum(run_concurrently([work] * num_threads))


# Which slices -------------------------------------------------------------------------------


def _plan(source: TensorSource, wanted: Sequence[Wanted]) -> Iterator[_Slice]:
    by_tensor: dict[str, list[Wanted]] = {}
    for each in wanted:
        by_tensor.setdefault(each.tensor, []).append(each)
    for tensor, of_tensor in by_tensor.items():
        yield from _slices_of(source, tensor, of_tensor)


def _slices_of(source: TensorSource, tensor: str, wanted: Sequence[Wanted]) -> Iterator[_Slice]:
    record = source.tensors[tensor]
    itemsize = record.dtype.itemsize
    found: list[list[Indices]] = [[] for _ in wanted]
    for stored in record.slices:
        parts = []
        for each, ranges in zip(wanted, found, strict=True):
            runs = overlap(stored.extent, each.extent)
            if not runs.num_elements:
                continue
            ranges.append(np.stack([runs.right, runs.right + runs.lengths]))
            target: Bytes = each.memory.view(torch.uint8).numpy()
            order = np.argsort(runs.left, kind="stable")
            left, right, lengths = (column[order] * itemsize for column in runs)
            parts.append(_Part(target, left, right, lengths))
        if parts:
            yield _Slice(tensor, source.locate(tensor, stored), parts)
    for each, ranges in zip(wanted, found, strict=True):
        _check_covered(source, tensor, each.extent, ranges)


def _check_covered(
    source: TensorSource, tensor: str, extent: Extent, ranges: Sequence[Indices]
) -> None:
    """Every element that is wanted is in some slice."""
    begins, ends = np.concatenate(ranges, axis=1) if ranges else np.zeros((2, 0), np.int64)
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order]) if len(ends) else ends
    reached = np.concatenate(([0], ends))
    if (begins > reached[:-1]).any() or reached[-1] < extent.num_elements:
        raise CorruptCheckpointError(
            str(source.folder), "no file has some elements of a tensor", tensor
        )


def read_tensors(source: TensorSource, keys: Iterable[str]) -> dict[str, Tensor]:
    """Whole tensors, in new memory."""
    result: dict[str, Tensor] = {}
    wanted = []
    for key in dict.fromkeys(keys):
        record = source.tensors[key]
        memory = torch.empty(record.shape.numel(), dtype=record.dtype)
        result[key] = memory.view(record.shape)
        wanted.append(Wanted(key, Extent.whole(record.shape), memory))
    read(source, wanted)
    return result
