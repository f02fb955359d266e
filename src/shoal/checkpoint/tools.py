"""Checkpoints by themselves, without a model: opened, verified, written again in other files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint.disk.checkpoint_folder import MANIFEST, CheckpointFolder
from shoal.checkpoint.disk.filesystem import DISK, FileSystem, Reading, opened, write_all
from shoal.checkpoint.format.manifest import TensorRecord, encode, joined
from shoal.checkpoint.format.tensor_file import CHUNK_BYTES, checksum
from shoal.checkpoint.load.matching import PREFIX
from shoal.checkpoint.load.slice_reader import read
from shoal.checkpoint.load.tensor_source import (
    INDEX,
    SINGLE,
    SliceLocation,
    TensorSource,
    Wanted,
    naming,
    open_checkpoint,
    open_path,
)
from shoal.checkpoint.save.division import Claim, assign
from shoal.checkpoint.save.writing import BLOCK_BYTES, Outgoing, write_file
from shoal.errors import CheckpointError, CorruptCheckpointError
from shoal.sharding.extent import Extent
from shoal.torch_support.dtypes import traits

ReportBytes = Callable[[int], None]
"""Told how many bytes more have been looked at."""


def _silent(count: int) -> None:
    """Nobody wants to know how far it is."""


def open_any(path: Path, disk: FileSystem = DISK) -> TensorSource:
    """A checkpoint, the latest of a folder of them, or safetensors files of others."""
    if disk.is_folder(disk.followed(path)):  # a link that was named is to be followed
        path = disk.followed(path)
    names = [] if disk.is_file(path / MANIFEST) else CheckpointFolder(path, disk).candidates()
    return open_checkpoint(disk, path / names[0]) if names else open_path(disk, path)


def verify(source: TensorSource, progress: ReportBytes = _silent) -> None:
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
    progress: ReportBytes,
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


def reshard(
    source: TensorSource, target: CheckpointFolder, num_files: int, progress: ReportBytes = _silent
) -> Path:
    """Writes a checkpoint again, into a number of files of about one size.

    Loading never needs it, since every number of ranks reads any files; fewer or more of them may
    suit a disk better.
    """
    if num_files < 1:
        raise ValueError(f"the number of files must be at least 1; got {num_files}")
    unlock = target.lock()
    try:
        return _reshard(source, target, num_files, progress)
    finally:
        unlock()


def _reshard(
    source: TensorSource, target: CheckpointFolder, num_files: int, progress: ReportBytes
) -> Path:
    step = source.values.get("step")
    name = target.begin(step if isinstance(step, int) else None)
    claims = {
        key: Claim(record.dtype, record.shape, (Extent.whole(record.shape),))
        for key, record in source.tensors.items()
    }
    parts = []
    for number, assigned in enumerate(assign([claims] * num_files)):
        outgoing = [
            Outgoing(key, claims[key].dtype, extent, _reading(source, key, extent, progress))
            for key, extents in assigned.items()
            for extent in extents
        ]
        file_name = f"data-{number:05d}.safetensors"
        draft = target.draft(name)
        parts.append(write_file(target.disk, draft, file_name, outgoing))
    content = joined(parts, source.tensors)
    return target.commit(name, encode(content, source.values, source.written_by))


def export(
    source: TensorSource,
    folder: Path,
    dtype: torch.dtype | None = None,
    most_bytes: int | None = None,
    progress: ReportBytes = _silent,
    disk: FileSystem = DISK,
) -> list[Path]:
    """Writes the model alone, as Hugging Face has it: one file, or several and an index.

    Tied parameters are written once, under their first name.

    Numbers with a fraction are converted to ``dtype``. A file has at most ``most_bytes`` of
    tensors; by default there is one. Returns the files.
    """
    keys = [key for key in source.tensors if key.startswith(PREFIX)]
    _check_dtypes(source, keys)
    disk.make_folder(folder)
    taken = [name for name in (SINGLE, INDEX) if name in disk.names(folder)]
    if taken:
        raise CheckpointError(f"there is a {taken[0]} in {folder} already: name another folder")
    outgoing = [_whole(source, key, dtype, progress) for key in keys]
    files = _filled(outgoing, most_bytes)
    names = [_file_name(number, len(files)) for number in range(len(files))]
    for name, own in zip(names, files, strict=True):
        unfinished = f".{name}.new"
        write_file(disk, folder, unfinished, own)
        disk.rename(folder / unfinished, folder / name)
    if len(files) > 1:
        names.append(INDEX)
        write_all(disk, folder / INDEX, _index(names, files))
    disk.sync_folder(folder)
    return [folder / name for name in names]


def _check_dtypes(source: TensorSource, keys: Sequence[str]) -> None:
    """Other readers would see bytes where there are numbers."""
    for key in keys:
        dtype = source.tensors[key].dtype
        if traits(dtype).code is None:
            raise CheckpointError(
                f"{key.removeprefix(PREFIX)} is of {dtype}, which safetensors does not know, so "
                "the model cannot be exported: convert it in the model, and save that"
            )


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _filled(outgoing: Sequence[Outgoing], most_bytes: int | None) -> list[list[Outgoing]]:
    """Tensors in their order, as many in a file as it may have."""
    files: list[list[Outgoing]] = [[]]
    size = 0
    for each in outgoing:
        if files[-1] and most_bytes is not None and size + each.num_bytes > most_bytes:
            files.append([])
            size = 0
        files[-1].append(each)
        size += each.num_bytes
    return files


def _index(names: Sequence[str], files: Sequence[Sequence[Outgoing]]) -> bytes:
    weights = {each.tensor: name for name, own in zip(names, files, strict=False) for each in own}
    total = sum(each.num_bytes for own in files for each in own)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2).encode()


def _whole(
    source: TensorSource, key: str, dtype: torch.dtype | None, progress: ReportBytes
) -> Outgoing:
    record = source.tensors[key]
    extent = Extent.whole(record.shape)
    parts, name = _reading(source, key, extent, progress), key.removeprefix(PREFIX)
    if dtype is None or not record.dtype.is_floating_point:
        return Outgoing(name, record.dtype, extent, parts)
    return Outgoing(name, dtype, extent, lambda: (part.to(dtype) for part in parts()))


def _reading(
    source: TensorSource, key: str, extent: Extent, progress: ReportBytes
) -> Callable[[], Iterator[Tensor]]:
    """The elements of an extent, a block at a time."""
    record = source.tensors[key]
    step = BLOCK_BYTES // record.dtype.itemsize

    def parts() -> Iterator[Tensor]:
        for start in range(extent.start, extent.stop, step):
            stop = min(start + step, extent.stop)
            memory = torch.empty(stop - start, dtype=record.dtype)
            read(source, [Wanted(key, extent.narrowed(start, stop), memory)])
            progress(memory.nbytes)
            yield memory

    return parts


def total_bytes(tensors: Mapping[str, TensorRecord]) -> int:
    """The size of all tensors."""
    return sum(record.num_bytes for record in tensors.values())
