"""Writes one safetensors file, with its checksums computed on the way.

sha256 is slower than writing, so a thread of its own takes it of what another has just taken up; a
few blocks are on their way at any time, never the file.
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
from shoal.checkpoint.checksums import CHUNK_BYTES, checksum, chunks
from shoal.checkpoint.filesystem import FileSystem, Writing
from shoal.checkpoint.manifest import FileRecord, SliceRecord
from shoal.sharding.extent import Extent

BLOCK_BYTES = 4 * CHUNK_BYTES
_BLOCKS_AHEAD = 16

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
        with Hashing() as hashing:
            hashing.take(memoryview(head))
            file.write(head)
            slices = [
                (each.tensor, SliceRecord(each.extent, 0, key, _write_slice(file, each, hashing)))
                for key, each in zip(keys, outgoing, strict=True)
            ]
            file.sync()
    finally:
        file.close()
    num_bytes = len(head) + sum(each.num_bytes for each in outgoing)
    record = FileRecord(name, num_bytes, hashing.sha256, zlib.crc32(head))
    return Written(record, tuple(slices))


def numbered(written: Written, number: int) -> list[tuple[str, SliceRecord]]:
    """The slices, with the file's number in the manifest."""
    return [(tensor, replace(each, file=number)) for tensor, each in written.slices]


def _write_slice(file: Writing, outgoing: Outgoing, hashing: Hashing) -> tuple[int, ...]:
    """Returns the checksums."""
    num_bytes = 0
    checksums: list[int] = []
    for block in _blocks(outgoing.parts()):
        hashing.take(block)
        for chunk in chunks(block):  # still in the cache when it is written
            checksums.append(checksum(chunk))
            file.write(chunk)
        num_bytes += len(block)
    if num_bytes != outgoing.num_bytes:
        raise AssertionError(f"{outgoing.key}: {num_bytes} bytes of {outgoing.num_bytes}")
    return tuple(checksums)


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


def as_memory(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; its own memory where that is contiguous and the CPU's."""
    if not tensor.numel():
        return memoryview(b"")
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = plain.to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class Hashing:
    """A thread that takes the sha256 of blocks as they come."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self.sha256 = ""
        self._blocks = queue.Queue[memoryview | None](_BLOCKS_AHEAD)
        self._thread = threading.Thread(target=self._work, name="shoal-sha256", daemon=True)

    def take(self, block: memoryview) -> None:
        """Hands a block over; it must not change until the end."""
        self._blocks.put(block)

    def __enter__(self) -> Hashing:
        """Starts the thread."""
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Waits until everything is hashed."""
        self._blocks.put(None)
        self._thread.join()

    def _work(self) -> None:
        digest = hashlib.sha256()
        while (block := self._blocks.get()) is not None:
            digest.update(block)
        self.sha256 = digest.hexdigest()
