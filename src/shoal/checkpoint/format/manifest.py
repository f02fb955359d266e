"""The manifest: what a checkpoint holds, in full names, shapes and slices. Pure, no files.

The first line is the sha256 of all that follows; together they are one JSON object.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, TypeGuard

import torch

from shoal.checkpoint.format.plain_json import is_count, parse, to_text
from shoal.checkpoint.format.tensor_file import CHUNK_BYTES, DIGITS, num_chunks
from shoal.sharding.extent import Extent
from shoal.sharding.split import Split
from shoal.torch_support.dtypes import dtype_called, dtype_name

FORMAT = "shoal checkpoint"
VERSION = 1
RECORD = b'"checksums"'
"""Each slice of a tensor has it once; see [Note: a budget of values]."""
_MOST_BYTES = 128 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors")
_HEX = re.compile(r"[0-9a-f]*")
_HEX_SHA = re.compile(r"[0-9a-f]{64}")
_FIRST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')


@dataclass(frozen=True)
class FileRecord:
    """One safetensors file of a checkpoint; its header's length counts for the header's crc32."""

    name: str
    num_bytes: int
    sha256: str
    header_crc32: int


@dataclass(frozen=True, slots=True)
class SliceRecord:
    """Some elements of a tensor under a key of a file, with a checksum for each `CHUNK_BYTES`."""

    extent: Extent
    file: int
    key: str
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A full tensor, and the slices that make it up."""

    dtype: torch.dtype
    shape: torch.Size
    slices: tuple[SliceRecord, ...]

    @property
    def num_bytes(self) -> int:
        """The size of the full tensor."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        tensors: All tensors by their key, as in "model/layer.weight".
        values: What is no tensor: the step, hyperparameters, extras, ...; see `plain_json`.
        written_by: Who wrote it with what; for information only, a loader never looks at it.
    """

    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    values: Mapping[str, Any] = field(default_factory=dict)
    written_by: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """From the bytes of a file.

        Raises:
            ValueError: If anything about them is wrong.
        """
        check_signature(data)
        content = parse(data, RECORD)
        del data
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError("it is no manifest of shoal")
        if content.get("version") != VERSION:
            raise ValueError(
                f"its format has version {str(content.get('version'))[:20]}, and this shoal reads "
                f"version {VERSION}: use the shoal that wrote it, or a newer one"
            )
        if content.get("chunk_bytes") != CHUNK_BYTES:
            raise ValueError(f"chunk_bytes must be {CHUNK_BYTES}")
        files = tuple(_parse_file(about) for about in _typed(content, "files", list))
        if len({record.name for record in files}) != len(files):
            raise ValueError("a file is there twice")
        given = _typed(content, "tensors", dict)
        # Taken out one by one, so that there are never two of all.
        tensors = {key: _parse_tensor(key, given.pop(key), len(files)) for key in list(given)}
        _check_room(files, tensors)
        values = _typed(content, "values", dict)
        return cls(files, tensors, values, _typed(content, "written_by", dict))


def most_bytes(data_bytes: int) -> int:
    """How long a manifest may be beside so many bytes of tensors: twice what checksums need."""
    return _MOST_BYTES + data_bytes // (CHUNK_BYTES // DIGITS // 2)


def signed(text: bytes) -> bytes:
    """A JSON object with the checksum of the rest as its first member."""
    rest = memoryview(text)[1:]
    head = b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n'
    return b"".join((head, rest))


def check_signature(data: bytes) -> None:
    """Compares what `signed` returned with its checksum.

    Raises:
        ValueError: If it is wrong.
    """
    first = _FIRST_LINE.match(data)
    if first is None:
        raise ValueError("it does not begin with its checksum: truncated, damaged or foreign")
    rest = memoryview(data)[first.end() :]
    if hashlib.sha256(rest).hexdigest().encode() != first[1]:
        raise ValueError("its checksum is wrong: truncated or damaged")


# To JSON ------------------------------------------------------------------------------------


Content = dict[str, Any]
"""The files and tensors of a manifest as plain data, of a whole checkpoint or a part of it."""


def content_of(file: FileRecord, slices: Sequence[tuple[str, torch.dtype, SliceRecord]]) -> Content:
    """What one file holds: slices, with the key and dtype of the tensor that each is a part of."""
    tensors: dict[str, Any] = {}
    for key, dtype, each in slices:
        about = {"dtype": dtype_name(dtype), "shape": list(each.extent.shape), "slices": []}
        tensors.setdefault(key, about)["slices"].append(_slice_json(each))
    about_file = {
        "name": file.name,
        "bytes": file.num_bytes,
        "sha256": file.sha256,
        "header_crc32": f"{file.header_crc32:08x}",
    }
    return {"files": [about_file], "tensors": tensors}


def joined(parts: Sequence[Content], keys: Iterable[str]) -> Content:
    """What all files hold between them, with the tensors in the order of ``keys``."""
    files: list[Any] = []
    tensors: dict[str, Any] = {}
    for part in parts:
        for key, record in part["tensors"].items():
            slices = tensors.setdefault(key, {**record, "slices": []})["slices"]
            slices += [{**each, "file": each["file"] + len(files)} for each in record["slices"]]
        files += part["files"]
    return {"files": files, "tensors": {key: tensors[key] for key in keys}}


def encode(content: Content, values: Mapping[str, Any], written_by: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest's file, as `Manifest.parse` takes them.

    Raises:
        ValueError: If readers would refuse it.
    """
    about = {"format": FORMAT, "version": VERSION, "chunk_bytes": CHUNK_BYTES}
    rest = {"written_by": written_by, **content, "values": values}
    data = signed(to_text(about | rest, RECORD))
    most = most_bytes(sum(file["bytes"] for file in content["files"]))
    if len(data) > most:
        raise ValueError(
            f"the manifest has {len(data)} bytes, and at most {most} can be read again: put long "
            "lists and texts of extra= into tensors or files of your own"
        )
    return data


def _slice_json(record: SliceRecord) -> dict[str, Any]:
    return {
        "file": record.file,
        "key": record.key,
        **extent_json(record.extent),
        "checksums": "".join(f"{each:0{DIGITS}x}" for each in record.checksums),
    }


def extent_json(extent: Extent) -> dict[str, Any]:
    """Which elements of a tensor; its shape is not repeated."""
    about: dict[str, Any] = {"elements": [extent.start, extent.stop]}
    if extent.split is not None:
        runs = [list(run) for run in extent.split.runs]
        about["split"] = {"dim": extent.split.dim, "runs": runs}
    return about


# From JSON ----------------------------------------------------------------------------------


def _typed(content: Mapping[str, Any], key: str, kind: type) -> Any:
    value = content.get(key)
    if not isinstance(value, kind):
        raise ValueError(f"{key!r} must be a {kind.__name__}")
    return value


def _parse_file(about: Any) -> FileRecord:
    if not isinstance(about, dict):
        raise ValueError("a file must be an object")
    name: Any = about.get("name")
    num_bytes: Any = about.get("bytes")
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{str(name)[:100]!r} is no name for a file of a checkpoint")
    if not is_count(num_bytes):
        raise ValueError(f"file {name} has no proper size")
    sha256 = about.get("sha256")
    if not isinstance(sha256, str) or not _HEX_SHA.fullmatch(sha256):
        raise ValueError(f"file {name} has no proper sha256")
    crc = about.get("header_crc32")
    if not isinstance(crc, str) or len(crc) != 8 or not _HEX.fullmatch(crc):
        raise ValueError(f"file {name} has no proper header_crc32")
    return FileRecord(name, num_bytes, sha256, int(crc, 16))


def _parse_checksums(text: Any) -> tuple[int, ...]:
    if not isinstance(text, str) or not _HEX.fullmatch(text) or len(text) % DIGITS:
        raise ValueError("checksums must be hexadecimal")
    return tuple(int(text[i : i + DIGITS], 16) for i in range(0, len(text), DIGITS))


def _parse_tensor(key: str, about: Any, num_files: int) -> TensorRecord:
    try:
        if not isinstance(about, dict):
            raise ValueError("it must be an object")
        dtype, shape = dtype_called(about.get("dtype")), parse_shape(about.get("shape"))
        if not is_count(prod(shape) * dtype.itemsize):
            raise ValueError("it is larger than any disk")
        slices = tuple(
            _parse_slice(each, key, shape, dtype, num_files)
            for each in _typed(about, "slices", list)
        )
    except ValueError as error:
        raise ValueError(f"tensor {key[:200]!r}: {error}") from None
    return TensorRecord(dtype, shape, slices)


def _check_room(files: tuple[FileRecord, ...], tensors: Mapping[str, TensorRecord]) -> None:
    """No bytes are used twice, and the files can hold all that is said to be in them."""
    used: set[tuple[int, str]] = set()
    room = [record.num_bytes for record in files]
    for key, record in tensors.items():
        found = 0
        for each in record.slices:
            num_bytes = each.extent.num_elements * record.dtype.itemsize
            found += num_bytes
            room[each.file] -= num_bytes
            if room[each.file] < 0 or (each.file, each.key) in used:
                raise ValueError(f"tensor {key[:200]!r}: a slice is there twice, or too large")
            used.add((each.file, each.key))
        if found < record.num_bytes:
            raise ValueError(f"tensor {key[:200]!r}: some of its elements are in no file")


def parse_shape(sizes: Any) -> torch.Size:
    """The shape of a full tensor."""
    if not isinstance(sizes, list) or len(sizes) > 64 or not all(map(is_count, sizes)):
        raise ValueError("it has no proper shape")
    if not is_count(prod(size for size in sizes if size)):
        raise ValueError("its shape is larger than any disk")
    return torch.Size(sizes)


def _parse_slice(
    about: Any, tensor: str, shape: torch.Size, dtype: torch.dtype, num_files: int
) -> SliceRecord:
    if not isinstance(about, dict):
        raise ValueError("a slice must be an object")
    file, key = about.get("file"), about.get("key")
    if not is_count(file) or file >= num_files or not isinstance(key, str):
        raise ValueError("a slice has no proper file and key")
    extent = parse_extent(about, shape)
    found = _parse_checksums(about.get("checksums"))
    if len(found) != num_chunks(extent.num_elements * dtype.itemsize):
        raise ValueError(f"a slice of {extent.num_elements} elements has {len(found)} checksums")
    # Most have the name of their tensor, which need not be in memory twice.
    return SliceRecord(extent, file, tensor if key == tensor else key, found)


def parse_extent(about: Mapping[str, Any], shape: torch.Size) -> Extent:
    """The inverse of `extent_json`."""
    elements = about.get("elements")
    split = None if "split" not in about else _parse_split(about["split"], shape)
    whole = Extent.whole(shape, split)
    if not _is_run(elements, whole.stop):
        raise ValueError(f"elements {str(elements)[:50]} are not in a part of {whole.stop}")
    return whole.narrowed(*elements)


def _parse_split(about: Any, shape: torch.Size) -> Split:
    """A tensor-parallel part: its indices are in the tensor, and none is there twice."""
    dim = about.get("dim") if isinstance(about, dict) else None
    if not is_count(dim) or dim >= len(shape):
        raise ValueError("a split has no proper dim")
    runs = about.get("runs")
    if not isinstance(runs, list) or not all(_is_run(run, shape[dim]) for run in runs):
        raise ValueError("a split has no proper runs")
    ordered = sorted(tuple(run) for run in runs)
    if any(left[1] > right[0] for left, right in pairwise(ordered)):
        raise ValueError("the runs of a split overlap")
    return Split(shape, dim, tuple((start, stop) for start, stop in runs))


def _is_run(run: Any, size: int) -> TypeGuard[list[int]]:
    is_pair = isinstance(run, list) and len(run) == 2 and all(map(is_count, run))
    return is_pair and run[0] <= run[1] <= size
