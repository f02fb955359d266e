"""Writes one safetensors file, with its checksums computed on the way.

[Note: what the disk's time is good for]
sha256 is slower than writing to the system's memory, and the disk is slower still. So a stretch of
the file is written first and hashed afterwards, while the disk is busy with it. Hashing and writing
at once would have the disk wait for a processor.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint.disk.filesystem import FileSystem, Writing
from shoal.checkpoint.format.manifest import Content, FileRecord, SliceRecord, content_of
from shoal.checkpoint.format.tensor_file import CHUNK_BYTES, checksum, chunks, encode_header
from shoal.sharding.extent import Extent
from shoal.torch_support.concurrency import Abandoned, run_concurrently
from shoal.torch_support.memory import as_memory

# The system gives a file memory in pieces as large as what is written at once.
BLOCK_BYTES = 16 * CHUNK_BYTES
_STRETCH_BYTES = 1 << 26

Parts = Callable[[], Iterator[Tensor]]
"""The elements of a slice, in order, as tensors on any device."""


@dataclass(frozen=True)
class Outgoing:
    """A slice that is about to be written; ``tensor`` is the key of the full one."""

    tensor: str
    dtype: torch.dtype
    extent: Extent
    parts: Parts

    @property
    def key(self) -> str:
        """What it is called in the file: its tensor's key, and which elements unless all."""
        if self.extent.is_whole:
            return self.tensor
        part, split = "", self.extent.split
        if split is not None:
            runs = ",".join(f"{start}-{stop}" for start, stop in split.runs)
            part = f"[{split.dim}:{runs}]"
        return f"{self.tensor}{part}[{self.extent.start}:{self.extent.stop}]"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the file has it in."""
        return tuple(self.extent.shape) if self.extent.is_whole else (self.extent.num_elements,)

    @property
    def num_bytes(self) -> int:
        """The size in the file."""
        return self.extent.num_elements * self.dtype.itemsize


def write_file(
    disk: FileSystem,
    folder: Path,
    name: str,
    outgoing: Sequence[Outgoing],
    is_unwanted: threading.Event | None = None,
) -> Content:
    """Writes and syncs a file, and returns what is in it; the folder's entry is not synced.

    Raises:
        Abandoned: Once the event is set; the rest is not written.
    """
    shapes = [(each.key, each.dtype, each.shape) for each in outgoing]
    head = encode_header(shapes, {"format": "pt"})
    num_bytes = len(head) + sum(each.num_bytes for each in outgoing)
    sums = _Sums(head)
    file = disk.create(folder / name)
    try:
        file.reserve(num_bytes)
        file.write(head)
        for each in outgoing:
            _write_slice(file, each, sums, is_unwanted)
        run_concurrently([lambda _: sums.catch_up(), lambda _: file.sync()])
    finally:
        file.close()
    record = FileRecord(name, num_bytes, sums.sha256, zlib.crc32(head))
    slices = [
        (each.tensor, each.dtype, SliceRecord(each.extent, 0, each.key, tuple(own)))
        for each, own in zip(outgoing, sums.checksums, strict=True)
    ]
    return content_of(record, slices)


def shares(outgoing: Sequence[Outgoing], count: int) -> list[list[Outgoing]]:
    """What goes to up to so many files of about one size; neighbours stay together."""
    total = sum(each.num_bytes for each in outgoing)
    divided: list[list[Outgoing]] = [[] for _ in range(count)]
    before = 0
    for each in outgoing:
        middle = before + each.num_bytes // 2
        divided[min(middle * count // max(total, 1), count - 1)].append(each)
        before += each.num_bytes
    return [share for share in divided if share] or [[]]


def _write_slice(
    file: Writing, outgoing: Outgoing, sums: _Sums, is_unwanted: threading.Event | None
) -> None:
    num_bytes = 0
    sums.begin_slice()
    for block in _blocks(outgoing.parts()):
        if is_unwanted is not None and is_unwanted.is_set():
            raise Abandoned
        file.write(block)
        sums.wrote(block)
        num_bytes += len(block)
    if num_bytes != outgoing.num_bytes:
        raise AssertionError(f"{outgoing.key}: {num_bytes} bytes of {outgoing.num_bytes}")


def _blocks(parts: Iterator[Tensor]) -> Iterator[memoryview]:
    """The parts' bytes in whole chunks, but for the last; what is between chunks is copied."""
    pending = bytearray()
    for part in parts:
        data = as_memory(part)
        while data:
            if not pending and len(data) >= CHUNK_BYTES:
                size = min(len(data) // CHUNK_BYTES * CHUNK_BYTES, BLOCK_BYTES)
                yield data[:size]
                data = data[size:]
                continue
            room = CHUNK_BYTES - len(pending)
            pending += data[:room]
            data = data[room:]
            if len(pending) == CHUNK_BYTES:
                yield memoryview(pending)
                pending = bytearray()
    if pending:
        yield memoryview(pending)


class _Sums:
    """The sha256 of a file and the checksums of its slices, of what was written a while ago."""

    def __init__(self, head: bytes) -> None:
        self.checksums: list[list[int]] = []
        self._digest = hashlib.sha256(head)
        self._waiting: list[tuple[memoryview, list[int]]] = []
        self._num_bytes = 0

    @property
    def sha256(self) -> str:
        """Of the blocks that `catch_up` has hashed."""
        return self._digest.hexdigest()

    def begin_slice(self) -> None:
        """What comes now belongs to the next one."""
        self.checksums.append([])

    def wrote(self, block: memoryview) -> None:
        """Takes note of what was written; it must not change until the end.

        The last stretch is left for the time in which the disk finishes.
        """
        if self._num_bytes >= _STRETCH_BYTES:
            self.catch_up()
        self._waiting.append((block, self.checksums[-1]))
        self._num_bytes += len(block)

    def catch_up(self) -> None:
        """See [Note: what the disk's time is good for]."""
        for block, checksums in self._waiting:
            for chunk in chunks(block):
                self._digest.update(chunk)
                checksums.append(checksum(chunk))  # of what is in the cache by now
        self._waiting.clear()
        self._num_bytes = 0
