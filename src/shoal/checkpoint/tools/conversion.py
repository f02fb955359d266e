"""A checkpoint in other files: fewer, more, or as Hugging Face has them; in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint.disk.checkpoint_folder import CheckpointFolder
from shoal.checkpoint.disk.filesystem import DISK, FileSystem, write_all
from shoal.checkpoint.format.manifest import TensorRecord, encode, joined
from shoal.checkpoint.load.matching import PREFIX
from shoal.checkpoint.load.slice_reader import Wanted, read
from shoal.checkpoint.load.tensor_source import INDEX, SINGLE, TensorSource
from shoal.checkpoint.save.assignment import Claim, assign
from shoal.checkpoint.save.writing import BLOCK_BYTES, Outgoing, write_file
from shoal.checkpoint.tools.inspection import Progress
from shoal.errors import CheckpointError
from shoal.sharding.extent import Extent
from shoal.torch_support.dtypes import traits


def _silent(count: int) -> None:
    """Nobody wants to know how far it is."""


def reshard(
    source: TensorSource, target: CheckpointFolder, num_files: int, progress: Progress = _silent
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
    source: TensorSource, target: CheckpointFolder, num_files: int, progress: Progress
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
        part = write_file(target.disk, draft, file_name, outgoing, metadata={"format": "pt"})
        parts.append(part)
    content = joined(parts, source.tensors)
    return target.commit(name, encode(content, source.values, source.written_by))


def export(
    source: TensorSource,
    folder: Path,
    dtype: torch.dtype | None = None,
    most_bytes: int | None = None,
    progress: Progress = _silent,
    disk: FileSystem = DISK,
) -> list[Path]:
    """Writes the model alone, as Hugging Face has it: one file, or several and an index.

    Tied parameters are written once, under their first name.

    Args:
        source: The checkpoint.
        folder: Where to.
        dtype: What numbers with a fraction are converted to; they stay as they are by default.
        most_bytes: The most bytes of tensors in one file; one file by default.
        progress: Told of the bytes that were read.
        disk: Where the folder is.

    Returns:
        The files.
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
        metadata = {"format": "pt"}
        write_file(disk, folder, unfinished, own, lambda key: key.removeprefix(PREFIX), metadata)
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
    weights = {
        each.tensor.removeprefix(PREFIX): name
        for name, own in zip(names, files, strict=False)
        for each in own
    }
    total = sum(each.num_bytes for own in files for each in own)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2).encode()


def _whole(
    source: TensorSource, key: str, dtype: torch.dtype | None, progress: Progress
) -> Outgoing:
    record = source.tensors[key]
    extent = Extent.whole(record.shape)
    parts = _reading(source, key, extent, progress)
    if dtype is None or not record.dtype.is_floating_point:
        return Outgoing(key, record.dtype, extent, parts)
    return Outgoing(key, dtype, extent, lambda: (part.to(dtype) for part in parts()))


def _reading(
    source: TensorSource, key: str, extent: Extent, progress: Progress
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
