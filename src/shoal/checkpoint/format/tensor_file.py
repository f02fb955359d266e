"""A safetensors file: its header, which says what lies where, and checksums of what it holds. Pure.

Eight bytes give the header's length, then comes JSON, then the tensors without gaps. Checksums
cover chunks of a slice, and are as fast as memory: every byte that is loaded goes through one.

[Note: sums of rows and columns]
A chunk is a matrix of 32-bit numbers, 512 to a row. Its checksum is made of the sums of its columns
and of its rows, all modulo 2**32. What changes one number changes one of both; only if four or more
change so that every row and every column comes to the same as before, no sum shows it. The sums
are a hundredth of the data, and 64 bits of their sha256 are kept.
It guards against accidents. Files that are changed on purpose can get new checksums as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from shoal.checkpoint.format.plain_json import is_count, parse
from shoal.torch_support.dtypes import BYTES_CODE, code_of, dtype_of_code

MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
PREFIX_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a file, and where in the file its bytes begin and end."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def encode_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """The header of a file that holds these tensors in this order, with its length in front."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        num_bytes = prod(shape) * dtype.itemsize
        code = code_of(dtype)
        stored = [num_bytes] if code == BYTES_CODE and dtype is not torch.uint8 else list(shape)
        content[name] = {
            "dtype": code,
            "shape": stored,
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def header_bytes(prefix: bytes, file_bytes: int) -> int:
    """How long the header is, the prefix included.

    Raises:
        ValueError: If no header of that length can be in the file.
    """
    if len(prefix) < PREFIX_BYTES:
        raise ValueError(f"the file ends after {len(prefix)} bytes")
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if length > min(MOST_HEADER_BYTES, file_bytes - PREFIX_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {file_bytes}")
    return PREFIX_BYTES + length


def decode_header(header: bytes, file_bytes: int) -> dict[str, HeaderEntry]:
    """The tensors of a file of that size, from the file's first bytes.

    Raises:
        ValueError: If the header is not one, or does not fit the file.
    """
    content = parse(header[PREFIX_BYTES:], b'"data_offsets"')
    if not isinstance(content, dict):
        raise ValueError("the header is no JSON object")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError("the metadata is no JSON object")
    entries = {name: _entry(name, about, len(header)) for name, about in content.items()}
    _check_gapless(entries, len(header), file_bytes)
    return entries


def _entry(name: str, about: Any, base: int) -> HeaderEntry:
    if not isinstance(about, dict) or about.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name[:200]!r} needs a dtype, a shape and data_offsets")
    shape, offsets = about["shape"], about["data_offsets"]
    if not isinstance(shape, list) or not all(map(is_count, shape)):
        raise ValueError(f"tensor {name[:200]!r} has no proper shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise ValueError(f"tensor {name[:200]!r} has no proper data_offsets")
    dtype = dtype_of_code(about["dtype"])
    begin, end = offsets
    if end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(
            f"tensor {name[:200]!r} of shape {str(shape)[:100]} cannot have {end - begin} bytes"
        )
    return HeaderEntry(dtype, tuple(shape), base + begin, base + end)


def _check_gapless(entries: Mapping[str, HeaderEntry], base: int, file_bytes: int) -> None:
    offset = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != offset:
            raise ValueError(
                f"tensor {name[:200]!r} begins at byte {entry.begin}, not where the one before "
                f"ends, at {offset}"
            )
        offset = entry.end
    if offset != file_bytes:
        raise ValueError(f"the tensors end at byte {offset}, the file at {file_bytes}")


CHUNK_BYTES = 1 << 18
"""How many bytes of a slice one checksum covers."""

DIGITS = 16
"""How many hexadecimal digits a checksum has."""

_WORD = np.dtype("<u4")
_ROW_WORDS = 512
_ROW_BYTES = _ROW_WORDS * _WORD.itemsize


def checksum(chunk: memoryview | bytes) -> int:
    """Of up to `CHUNK_BYTES`; zeros make up for what is missing of the last row.

    Example:
        >>> f"{checksum(b'shoal'):016x}"
        '7ec7197a0ceea74b'
    """
    missing = -len(chunk) % _ROW_BYTES
    data = b"".join((chunk, bytes(missing))) if missing else chunk
    words = np.frombuffer(data, _WORD).reshape(-1, _ROW_WORDS)
    digest = hashlib.sha256(np.add.reduce(words, axis=0, dtype=_WORD))
    digest.update(np.add.reduce(words, axis=1, dtype=_WORD))
    return int.from_bytes(digest.digest()[: DIGITS // 2], "big")


def chunks(block: memoryview) -> Iterator[memoryview]:
    """What one checksum each covers."""
    for start in range(0, len(block), CHUNK_BYTES):
        yield block[start : start + CHUNK_BYTES]


def num_chunks(num_bytes: int) -> int:
    """How many checksums a slice has."""
    return -(-num_bytes // CHUNK_BYTES)
