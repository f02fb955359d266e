"""Reads just the bytes that are wanted, and checks every one of them.

Checksums cover chunks, so a chunk of which anything is wanted is read whole and compared; what is
wanted goes straight to its place if it is all of the chunk, and by way of a small buffer if not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.checkpoint.checksums import CHUNK_BYTES, checksum
from shoal.checkpoint.filesystem import FileSystem, Reading
from shoal.checkpoint.source import Place, Source
from shoal.errors import CorruptCheckpointError
from shoal.sharding.extent import Extent, Indices, overlap

_MOST_THREADS = 4
_FEW_RUNS = 8
# Less than this is read before a second thread has started.
_BATCH_BYTES = 4 << 20

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Wanted:
    """Elements that somebody wants, and contiguous CPU memory of the stored dtype for them."""

    tensor: str
    extent: Extent
    memory: Tensor


@dataclass
class _Part:
    """Runs of a chunk's bytes, and where they go."""

    target: Bytes
    sources: Indices | list[int]
    places: Indices | list[int]
    lengths: Indices | list[int]


@dataclass
class _Chunk:
    """What one checksum covers, and who wants what of it."""

    tensor: str
    path: Path
    begin: int
    length: int
    checksum: int | None
    parts: list[_Part] = field(default_factory=list)

    def read(self, file: Reading, scratch: memoryview) -> None:
        target = self._own_place() or scratch[: self.length]
        try:
            count = file.read_into(self.begin, target)
        except OSError as error:
            raise self._error(f"cannot be read: {error}") from error
        if count != self.length:
            raise self._error("it ends early")
        if self.checksum is not None and checksum(target) != self.checksum:
            raise self._error(
                f"the checksum of bytes {self.begin} to {self.begin + self.length} is wrong"
            )
        if target is scratch or target.obj is scratch.obj:
            data: Bytes = np.frombuffer(target, np.uint8)
            for part in self.parts:
                _scatter(data, part)

    def _own_place(self) -> memoryview | None:
        """Where all of it goes, if it goes to one place."""
        if len(self.parts) != 1 or len(self.parts[0].lengths) != 1:
            return None
        part = self.parts[0]
        if int(part.lengths[0]) != self.length:
            return None
        place = int(part.places[0])
        return part.target[place : place + self.length].data

    def _error(self, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(str(self.path), reason, self.tensor)


def _scatter(data: Bytes, part: _Part) -> None:
    if len(part.lengths) <= _FEW_RUNS:
        for source, place, length in zip(part.sources, part.places, part.lengths, strict=True):
            part.target[place : place + length] = data[source : source + length]
        return
    sources, places, lengths = map(np.asarray, (part.sources, part.places, part.lengths))
    part.target[_spelled_out(places, lengths)] = data[_spelled_out(sources, lengths)]


def _spelled_out(starts: Indices, lengths: Indices) -> Indices:
    """Every index of some runs."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def read(source: Source, wanted: Sequence[Wanted]) -> int:
    """Fills the memory of all that is wanted; returns how many bytes were read.

    Raises:
        CorruptCheckpointError: Naming file and tensor, if anything is wrong; then the memory's
            content has no meaning.
    """
    chunks = sorted(_plan(source, wanted), key=lambda chunk: (str(chunk.path), chunk.begin))
    num_bytes = sum(chunk.length for chunk in chunks)
    with ExitStack() as stack:
        files = {path: _open(source.disk, path, stack) for path in {c.path for c in chunks}}
        _read_all(chunks, files, num_bytes)
    return num_bytes


def _open(disk: FileSystem, path: Path, stack: ExitStack) -> Reading:
    try:
        file = disk.open(path)
    except OSError as error:
        raise CorruptCheckpointError(str(path), f"cannot be read: {error}") from error
    stack.callback(file.close)
    return file


def _read_all(chunks: Sequence[_Chunk], files: dict[Path, Reading], num_bytes: int) -> None:
    num_threads = max(1, min(_MOST_THREADS, os.cpu_count() or 1, num_bytes // _BATCH_BYTES))
    has_failed = threading.Event()

    def work(own: Iterable[_Chunk]) -> None:
        scratch = memoryview(bytearray(CHUNK_BYTES))
        try:
            for chunk in own:
                if has_failed.is_set():
                    return
                chunk.read(files[chunk.path], scratch)
        except BaseException:
            has_failed.set()
            raise

    if num_threads == 1:
        work(chunks)
        return
    bounds = [len(chunks) * number // num_threads for number in range(num_threads + 1)]
    with ThreadPoolExecutor(num_threads, "shoal-read") as pool:
        runs = [chunks[low:high] for low, high in pairwise(bounds)]
        for future in [pool.submit(work, run) for run in runs]:
            future.result()


# Which chunks -------------------------------------------------------------------------------


def _plan(source: Source, wanted: Sequence[Wanted]) -> Iterator[_Chunk]:
    by_tensor: dict[str, list[Wanted]] = {}
    for each in wanted:
        by_tensor.setdefault(each.tensor, []).append(each)
    for tensor, of_tensor in by_tensor.items():
        yield from _chunks_of(source, tensor, of_tensor)


def _chunks_of(source: Source, tensor: str, wanted: Sequence[Wanted]) -> Iterator[_Chunk]:
    record = source.tensors[tensor]
    itemsize = record.dtype.itemsize
    found: list[list[Indices]] = [[] for _ in wanted]
    for part in record.slices:
        chunks: dict[int, _Chunk] = {}
        for number, each in enumerate(wanted):
            runs = overlap(part.extent, each.extent)
            if not runs.num_elements:
                continue
            found[number].append(np.stack([runs.right, runs.right + runs.lengths]))
            place = source.place(tensor, part)
            target: Bytes = each.memory.view(torch.uint8).numpy()
            order = np.argsort(runs.left, kind="stable")
            left, right, lengths = (column[order] * itemsize for column in runs)
            _cut(chunks, tensor, place, _Part(target, left, right, lengths))
        yield from chunks.values()
    for each, ranges in zip(wanted, found, strict=True):
        _check_covered(source, tensor, each.extent, ranges)


def _cut(chunks: dict[int, _Chunk], tensor: str, place: Place, part: _Part) -> None:
    """Hands runs of a slice, sorted by their place in it, to the chunks that they lie in."""
    if len(part.lengths) == 1:
        _cut_run(chunks, tensor, place, part)
        return
    starts, targets, sizes = map(np.asarray, (part.sources, part.places, part.lengths))
    ends = starts + sizes
    for number in _touched(starts, ends):
        low = number * CHUNK_BYTES
        high = min(low + CHUNK_BYTES, place.end - place.begin)
        first, last = np.searchsorted(ends, low, "right"), np.searchsorted(starts, high)
        sources = np.maximum(starts[first:last], low)
        places = targets[first:last] + sources - starts[first:last]
        lengths = np.minimum(ends[first:last], high) - sources
        chunk = _chunk(chunks, number, tensor, place)
        chunk.parts.append(_Part(part.target, sources - low, places, lengths))


def _cut_run(chunks: dict[int, _Chunk], tensor: str, place: Place, part: _Part) -> None:
    """The same for a single run, which is the usual case, without arrays."""
    source, target = int(part.sources[0]), int(part.places[0])
    end = source + int(part.lengths[0])
    for number in range(source // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
        chunk = _chunk(chunks, number, tensor, place)
        low = number * CHUNK_BYTES
        begin, stop = max(source, low), min(end, low + chunk.length)
        own = _Part(part.target, [begin - low], [target + begin - source], [stop - begin])
        chunk.parts.append(own)


def _chunk(chunks: dict[int, _Chunk], number: int, tensor: str, place: Place) -> _Chunk:
    found = chunks.get(number)
    if found is None:
        begin = place.begin + number * CHUNK_BYTES
        length = min(CHUNK_BYTES, place.end - begin)
        expected = None if place.checksums is None else place.checksums[number]
        found = chunks[number] = _Chunk(tensor, place.path, begin, length, expected)
    return found


def _touched(starts: Indices, ends: Indices) -> list[int]:
    """The numbers of the chunks that some runs touch."""
    first, last = starts // CHUNK_BYTES, (ends - 1) // CHUNK_BYTES + 1
    return [int(n) for n in np.unique(_spelled_out(first, last - first))]


def _check_covered(source: Source, tensor: str, extent: Extent, ranges: Sequence[Indices]) -> None:
    """Every element that is wanted is in some slice."""
    begins, ends = np.concatenate(ranges, axis=1) if ranges else np.zeros((2, 0), np.int64)
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order]) if len(ends) else ends
    reached = np.concatenate(([0], ends))
    if (begins > reached[:-1]).any() or reached[-1] < extent.num_elements:
        raise CorruptCheckpointError(
            str(source.folder), "no file has some elements of a tensor", tensor
        )


def read_tensors(source: Source, keys: Iterable[str]) -> dict[str, Tensor]:
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
