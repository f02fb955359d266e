"""What is in a checkpoint, and whether every byte of it is what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.checkpoint.disk.checkpoint_folder import MANIFEST, CheckpointFolder
from shoal.checkpoint.disk.filesystem import DISK, FileSystem, Reading, opened
from shoal.checkpoint.format.checksums import CHUNK_BYTES, checksum
from shoal.checkpoint.load.tensor_source import (
    SliceLocation,
    TensorSource,
    naming,
    open_checkpoint,
    open_path,
)
from shoal.errors import CorruptCheckpointError

Progress = Callable[[int], None]
"""Told how many bytes more have been looked at."""


def open_any(path: Path, disk: FileSystem = DISK) -> TensorSource:
    """A checkpoint, the latest of a folder of them, or safetensors files of others."""
    if disk.is_folder(disk.followed(path)):  # a link that was named is to be followed
        path = disk.followed(path)
    names = [] if disk.is_file(path / MANIFEST) else CheckpointFolder(path, disk).candidates()
    return open_checkpoint(disk, path / names[0]) if names else open_path(disk, path)


def verify(source: TensorSource, progress: Progress = lambda count: None) -> None:
    """Reads every byte of every file and compares all checksums.

    Raises:
        CorruptCheckpointError: Naming the first file and tensor that are not what was written.
    """
    locations: dict[int, list[tuple[str, SliceLocation]]] = {}
    for key, record in source.tensors.items():
        for part in record.slices:
            locations.setdefault(part.file, []).append((key, source.locate(key, part)))
    for number in range(len(source.files)):
        _verify_file(source, number, locations.get(number, []), progress)


def _verify_file(
    source: TensorSource,
    number: int,
    locations: list[tuple[str, SliceLocation]],
    progress: Progress,
) -> None:
    path, record = source.path(number), source.files[number]
    digest = hashlib.sha256()
    with naming(path), opened(source.disk, path) as file:
        begin = min((location.begin for _, location in locations), default=file.num_bytes)
        for data in _pieces(file, 0, begin, begin or 1):
            digest.update(data)
        for key, location in sorted(locations, key=lambda each: each[1].begin):
            for chunk, data in enumerate(_pieces(file, location.begin, location.end, CHUNK_BYTES)):
                digest.update(data)
                progress(len(data))
                if location.checksums is not None and checksum(data) != location.checksums[chunk]:
                    raise CorruptCheckpointError(str(path), "a checksum is wrong", key)
    if source.is_checked and digest.hexdigest() != record.sha256:
        raise CorruptCheckpointError(str(path), "its sha256 is wrong")


def _pieces(file: Reading, begin: int, end: int, size: int) -> Iterator[memoryview]:
    for offset in range(begin, end, size):
        data = memoryview(bytearray(min(size, end - offset)))
        if file.read_into(offset, data) != len(data):
            raise ValueError("it ends early")
        yield data
