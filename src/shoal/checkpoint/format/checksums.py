"""The checksum of a chunk: as fast as memory, since every byte that is loaded goes through it.

[Note: sums of rows and columns]
A chunk is a matrix of 32-bit numbers, 512 to a row. Its checksum is made of the sums of its columns
and of its rows, all modulo 2**32. What changes one number changes one of both; only if four or more
change so that every row and every column comes to the same as before, no sum shows it. The sums
are a hundredth of the data, and 64 bits of their sha256 are kept.
It guards against accidents. Files that are changed on purpose can get new checksums as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

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
