"""Where tensors can be read from: a checkpoint, or safetensors files as others write them.

Opening one reads the manifest and checks it; the headers of files are read when something in them
is wanted. Sizes, names and offsets are all checked before any memory is made for them.
"""

from __future__ import annotations

import errno
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.disk.checkpoint_folder import MANIFEST
from shoal.checkpoint.disk.filesystem import DISK, FileSystem, Reading, opened, read_all
from shoal.checkpoint.format.manifest import (
    FileRecord,
    Manifest,
    SliceRecord,
    TensorRecord,
    most_bytes,
)
from shoal.checkpoint.format.plain_json import parse
from shoal.checkpoint.format.tensor_file import (
    PREFIX_BYTES,
    HeaderEntry,
    decode_header,
    header_bytes,
)
from shoal.checkpoint.load.matching import PREFIX
from shoal.errors import CheckpointError, CorruptCheckpointError
from shoal.sharding.extent import Extent, overlap
from shoal.torch_internals.modules import EXTRA_STATE
from shoal.torch_support.dtypes import code_of, dtype_of_code

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST_INDEX_BYTES = 1 << 28


@dataclass(frozen=True)
class Wanted:
    """Elements that are wanted, and contiguous CPU memory of the stored dtype for them."""

    tensor: str
    extent: Extent
    memory: Tensor


@dataclass(frozen=True)
class SliceLocation:
    """Where a slice lies: its file, its bytes, and their checksums if there are any."""

    path: Path
    begin: int
    end: int
    checksums: tuple[int, ...] | None


@dataclass
class TensorSource:
    """Tensors that can be read, by key; see `Manifest`. Files of others have no values."""

    disk: FileSystem
    folder: Path
    tensors: Mapping[str, TensorRecord]
    files: tuple[FileRecord, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    written_by: Mapping[str, Any] = field(default_factory=dict)
    is_checked: bool = True
    """Whether there are checksums to compare with."""
    _headers: dict[int, dict[str, HeaderEntry]] = field(default_factory=dict)

    def path(self, number: int) -> Path:
        """The path of a file, by its number."""
        path = self.folder / self.files[number].name
        return path if self.is_checked else self.disk.followed(path)

    def locate(self, tensor: str, part: SliceRecord) -> SliceLocation:
        """Where a slice of a tensor lies.

        Raises:
            CorruptCheckpointError: If the file has not what the manifest says.
        """
        if part.file not in self._headers:
            self._headers[part.file] = self._read_header(part.file)
        entry, path = self._headers[part.file].get(part.key), self.path(part.file)
        dtype = self.tensors[tensor].dtype
        num_bytes = part.extent.num_elements * dtype.itemsize
        if entry is None:
            raise CorruptCheckpointError(str(path), f"there is no {part.key!r} in it", tensor)
        if entry.end - entry.begin != num_bytes or entry.dtype is not dtype_of_code(code_of(dtype)):
            raise CorruptCheckpointError(
                str(path),
                f"it has {entry.end - entry.begin} bytes of {entry.dtype} where {num_bytes} of "
                f"{dtype} are expected",
                tensor,
            )
        checksums = part.checksums if self.is_checked else None
        return SliceLocation(path, entry.begin, entry.end, checksums)

    def _read_header(self, number: int) -> dict[str, HeaderEntry]:
        record, path = self.files[number], self.path(number)
        with naming(path), opened(self.disk, path) as file:
            head = read_header(file, record.num_bytes)
            if self.is_checked and zlib.crc32(head) != record.header_crc32:
                raise ValueError("the checksum of its header is wrong")
            return decode_header(head, record.num_bytes)


@dataclass
class MemorySource(TensorSource):
    """Tensors that are in memory already."""

    def read(self, wanted: Sequence[Wanted]) -> int:
        """Fills the memory of all that is wanted; returns how many bytes that were."""
        raise NotImplementedError


@dataclass
class StateDictSource(MemorySource):
    """Tensors that are in memory already, whole, on every rank."""

    state_dict: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, state_dict: Mapping[str, Any]) -> StateDictSource:
        """A model's ``state_dict()``, of the plain module or a wrapped one."""
        for name, value in state_dict.items():
            if not isinstance(value, Tensor) and not name.endswith(EXTRA_STATE):
                raise TypeError(
                    f"a model's state_dict has tensors; {name!r} is a {type(value).__name__}. If "
                    "this dict has the model's among others, pass that one."
                )
        tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
        records = {
            PREFIX + name: TensorRecord(value.dtype, value.shape, ())
            for name, value in tensors.items()
        }
        source = cls(DISK, Path("the state_dict"), records, (), is_checked=False)
        source.state_dict = tensors
        return source

    def read(self, wanted: Sequence[Wanted]) -> int:
        """Copies what is wanted."""
        for each in wanted:
            full = self.state_dict[each.tensor.removeprefix(PREFIX)].detach()
            flat = full.cpu().contiguous().view(-1)
            runs = overlap(Extent.whole(full.shape), each.extent)
            for left, right, length in zip(*runs, strict=True):
                each.memory[right : right + length].copy_(flat[left : left + length])
        return sum(each.memory.nbytes for each in wanted)


def check_size(file: Reading, num_bytes: int) -> None:
    """A file of another size is truncated, or another file."""
    if file.num_bytes != num_bytes:
        raise ValueError(f"it has {file.num_bytes} bytes, and {num_bytes} are expected")


def read_header(file: Reading, num_bytes: int) -> bytes:
    """The first bytes of a safetensors file, up to its first tensor."""
    check_size(file, num_bytes)
    prefix = bytearray(min(PREFIX_BYTES, num_bytes))
    file.read_into(0, memoryview(prefix))
    head = bytearray(header_bytes(bytes(prefix), num_bytes))
    if file.read_into(0, memoryview(head)) != len(head):
        raise ValueError("it ends early")
    return bytes(head)


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Why a file cannot be read; that this process has too many open is no damage."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return CheckpointError(f"cannot open {path}: {error}; raise the limit, as by ulimit -n")
    missing = isinstance(error, FileNotFoundError)
    return CorruptCheckpointError(
        str(path), "it is missing" if missing else f"cannot be read: {error}"
    )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, errors count as damage of a file, and name it."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise CorruptCheckpointError(str(path), str(error)) from error


# Opening ------------------------------------------------------------------------------------


def open_checkpoint(disk: FileSystem, folder: Path) -> TensorSource:
    """A checkpoint of shoal."""
    path = folder / MANIFEST
    with naming(path):
        if not disk.is_folder(folder):
            raise ValueError("its folder is missing, or a link")
        manifest = Manifest.parse(read_all(disk, path, _most_manifest_bytes(disk, folder)))
    for record in manifest.files:
        with naming(folder / record.name), opened(disk, folder / record.name) as file:
            check_size(file, record.num_bytes)
    return TensorSource(
        disk, folder, manifest.tensors, manifest.files, manifest.values, manifest.written_by
    )


def _most_manifest_bytes(disk: FileSystem, folder: Path) -> int:
    """By the size of the files beside it, which are looked at only if that matters."""
    with opened(disk, folder / MANIFEST) as file:
        if file.num_bytes <= most_bytes(0):
            return most_bytes(0)
    num_bytes = 0
    for name in disk.names(folder):
        if name.endswith(".safetensors"):
            with opened(disk, folder / name) as file:
                num_bytes += file.num_bytes
    return most_bytes(num_bytes)


def _open_index(disk: FileSystem, path: Path) -> TensorSource:
    """Several safetensors files with an index, as Hugging Face writes large models."""
    with naming(path):
        content = parse(read_all(disk, disk.followed(path), _MOST_INDEX_BYTES), b'.safetensors"')
        weights = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weights, dict):
            raise ValueError("it has no weight_map")
        names = list(dict.fromkeys(weights.values()))
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or name.startswith("."):
                raise ValueError(f"{str(name)[:100]!r} is no name of a file beside it")
    source = _foreign(disk, path.parent, names, lambda name, key: weights.get(key, name) == name)
    missing = [key for key in weights if f"model/{key}" not in source.tensors]
    if missing:
        raise CorruptCheckpointError(str(path), "no file has this tensor", missing[0])
    return source


def _foreign(
    disk: FileSystem,
    folder: Path,
    names: list[str],
    is_wanted: Callable[[str, str], bool] = lambda name, key: True,
) -> TensorSource:
    files: list[FileRecord] = []
    headers: dict[int, dict[str, HeaderEntry]] = {}
    tensors: dict[str, TensorRecord] = {}
    for number, name in enumerate(names):
        with naming(folder / name), opened(disk, disk.followed(folder / name)) as file:
            head = read_header(file, file.num_bytes)
            headers[number] = decode_header(head, file.num_bytes)
            files.append(FileRecord(name, file.num_bytes, "", zlib.crc32(head)))
            for key, entry in headers[number].items():
                if is_wanted(name, key):
                    if f"model/{key}" in tensors:
                        raise ValueError(f"tensor {key!r} is in another file as well")
                    shape = torch.Size(entry.shape)
                    part = SliceRecord(Extent.whole(shape), number, key, ())
                    tensors[f"model/{key}"] = TensorRecord(entry.dtype, shape, (part,))
    return TensorSource(disk, folder, tensors, tuple(files), is_checked=False, _headers=headers)


def _open_foreign(disk: FileSystem, path: Path) -> TensorSource | None:
    """Links are followed: the cache of Hugging Face consists of them."""
    if path.name.endswith(".index.json"):
        return _open_index(disk, path)
    if path.suffix == ".safetensors" and not disk.is_folder(disk.followed(path)):
        return _foreign(disk, path.parent, [path.name])
    if disk.is_file(disk.followed(path / INDEX)):
        return _open_index(disk, path / INDEX)
    if disk.is_file(disk.followed(path / SINGLE)):
        return _foreign(disk, path, [SINGLE])
    if disk.is_file(disk.followed(path)):
        _refuse_pickle(disk, path)
    return None


def open_path(disk: FileSystem, path: Path) -> TensorSource:
    """A checkpoint, or what others have written.

    Raises:
        CheckpointError: If there is neither.
    """
    if disk.is_file(path / MANIFEST):
        return open_checkpoint(disk, path)
    source = _open_foreign(disk, path)
    if source is None:
        raise CheckpointError(
            f"there is no checkpoint at {path}: neither one of shoal nor a model.safetensors"
        )
    return source


def _refuse_pickle(disk: FileSystem, path: Path) -> None:
    begin = bytearray(2)
    with naming(path), opened(disk, disk.followed(path)) as file:
        file.read_into(0, memoryview(begin))
    if bytes(begin) == b"PK" or begin[:1] == b"\x80":  # torch.save, now and formerly
        raise CheckpointError(
            f"{path} is a pickle, and reading one can run any code. If you trust it, read it "
            "yourself and pass the state_dict: "
            f'shoal.load(torch.load("{path}", weights_only=True), model)'
        )
