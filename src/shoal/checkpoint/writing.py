"""Writes one safetensors file, with its checksums computed on the way.

Hashing is slower than writing, so two threads hash what a third has just taken up; a few blocks
are on their way at any time, never the file.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint import header
from shoal.checkpoint.filesystem import FileSystem, Writing
from shoal.checkpoint.manifest import CHUNK_BYTES, FileRecord, SliceRecord
from shoal.sharding.extent import Extent

BLOCK_BYTES = 16 * CHUNK_BYTES
_BLOCKS_AHEAD = 4

Parts = Callable[[], Iterator[Tensor]]
"""The elements of a slice, in order, as tensors on any device."""


@dataclass(frozen=True)
class Outgoing:
    """A slice that is about to be written.

    Attributes:
        tensor: The key of the full tensor.
        dtype: Of its elements.
        extent: Which elements.
        parts: Gives the elements.
    """

    tensor: str
    dtype: torch.dtype
    extent: Extent
    parts: Parts

    @property
    def key(self) -> str:
        """What it is called in the file: its tensor's key, and which elements unless all."""
        if self.extent.is_whole:
            return self.tensor
        split = self.extent.split
        part = "" if split is None else f"[{split.dim}:{_runs_text(split.runs)}]"
        return f"{self.tensor}{part}[{self.extent.start}:{self.extent.stop}]"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is in the file."""
        return tuple(self.extent.shape) if self.extent.is_whole else (self.extent.num_elements,)

    @property
    def num_bytes(self) -> int:
        """Of what is in the file."""
        return prod(self.shape) * self.dtype.itemsize


def _runs_text(runs: Sequence[tuple[int, int]]) -> str:
    return ",".join(f"{start}-{stop}" for start, stop in runs)


@dataclass(frozen=True)
class Written:
    """A file and what is in it: the slices by the key of their tensor."""

    file: FileRecord
    slices: tuple[tuple[str, SliceRecord], ...]


def write_file(
    disk: FileSystem,
    folder: Path,
    name: str,
    outgoing: Sequence[Outgoing],
    rename: Callable[[str], str] = lambda key: key,
    metadata: dict[str, str] | None = None,
) -> Written:
    """Writes and syncs a file; the folder's entry is not synced.

    Args:
        disk: The disk.
        folder: Where.
        name: The file's.
        outgoing: What is written, in this order.
        rename: What a slice is called in the file.
        metadata: For the header.
    """
    keys = [rename(each.key) for each in outgoing]
    shapes = [(key, each.dtype, each.shape) for key, each in zip(keys, outgoing, strict=True)]
    head = header.encode(shapes, metadata or {})
    file = disk.create(folder / name)
    try:
        with Digests() as digests:
            num_bytes = _write(file, head, digests)
            for each in outgoing:
                num_bytes += _write_slice(file, each, digests)
            file.sync()
        # The first checksums are the header's, which may be longer than one chunk.
        crcs = iter(digests.crcs[1:])
    finally:
        file.close()
    slices = [
        (each.tensor, SliceRecord(each.extent, 0, key, tuple(next(crcs))))
        for key, each in zip(keys, outgoing, strict=True)
    ]
    record = FileRecord(name, num_bytes, digests.sha256, zlib.crc32(head))
    return Written(record, tuple(slices))


def numbered(written: Written, number: int) -> list[tuple[str, SliceRecord]]:
    """The slices, with the file's number in the manifest."""
    return [(tensor, replace(each, file=number)) for tensor, each in written.slices]


def _write(file: Writing, data: bytes, digests: Digests) -> int:
    digests.begin()
    digests.take(memoryview(data))
    file.write(data)
    return len(data)


def _write_slice(file: Writing, outgoing: Outgoing, digests: Digests) -> int:
    digests.begin()
    num_bytes = 0
    for block in _blocks(outgoing.parts()):
        digests.take(block)
        file.write(block)
        num_bytes += len(block)
    if num_bytes != outgoing.num_bytes:
        raise AssertionError(f"{outgoing.key}: {num_bytes} bytes of {outgoing.num_bytes}")
    return num_bytes


def _blocks(parts: Iterator[Tensor]) -> Iterator[memoryview]:
    """The parts' bytes; large ones without a copy, many small ones together in one block."""
    pending = bytearray()
    for part in parts:
        data = as_memory(part)
        while data:
            if not pending and len(data) >= BLOCK_BYTES:
                yield data[:BLOCK_BYTES]
                data = data[BLOCK_BYTES:]
                continue
            room = BLOCK_BYTES - len(pending)
            pending += data[:room]
            data = data[room:]
            if len(pending) == BLOCK_BYTES:
                yield memoryview(pending)
                pending = bytearray()
    if pending:
        yield memoryview(pending)


def as_memory(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; its own memory where that is contiguous and the CPU's."""
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class Digests:
    """Two threads that hash blocks as they come: sha256 over all, crc32 chunk by chunk.

    Blocks of one slice come in whole chunks, but for the last.
    """

    def __init__(self) -> None:
        """Starts nothing yet."""
        self.sha256 = ""
        self.crcs: list[list[int]] = []
        self._queues = [queue.Queue[memoryview | None](_BLOCKS_AHEAD) for _ in range(2)]
        works = (self._hash, self._check)
        self._threads = [
            threading.Thread(target=work, args=(blocks,), name="shoal-checksums", daemon=True)
            for work, blocks in zip(works, self._queues, strict=True)
        ]

    def begin(self) -> None:
        """What comes now is another slice: a chunk of none."""
        self._queues[1].put(memoryview(b""))

    def take(self, block: memoryview) -> None:
        """Hands a block to both; it must not change until the end."""
        if block:
            for blocks in self._queues:
                blocks.put(block)

    def __enter__(self) -> Digests:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Waits until everything is hashed."""
        for blocks in self._queues:
            blocks.put(None)
        for thread in self._threads:
            thread.join()

    def _hash(self, blocks: queue.Queue[memoryview | None]) -> None:
        digest = hashlib.sha256()
        while (block := blocks.get()) is not None:
            digest.update(block)
        self.sha256 = digest.hexdigest()

    def _check(self, blocks: queue.Queue[memoryview | None]) -> None:
        while (block := blocks.get()) is not None:
            if not block:
                self.crcs.append([])
                continue
            self.crcs[-1] += [zlib.crc32(chunk) for chunk in chunks(block)]


def chunks(block: memoryview) -> Iterator[memoryview]:
    """What one checksum each covers."""
    for place in range(0, len(block), CHUNK_BYTES):
        yield block[place : place + CHUNK_BYTES]
