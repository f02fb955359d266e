"""What a rank shows the others of an operation before any payload moves."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from shoal.errors import MismatchError
from shoal.system.rank_names import name_ranks

_LENGTHS = struct.Struct("<HHHH")
_MAX_SITE_BYTES = 240


class Header(NamedTuple):
    """One rank's view of one operation.

    Attributes:
        signature: What must be equal on every rank, as a reader would write the call.
        meta: Numbers that may differ between ranks and that the others need.
        wire: What the transport adds, for example where the data lies.
        site: File and line in the user's code.
    """

    signature: str
    meta: tuple[int, ...]
    wire: bytes
    site: str

    def encode(self) -> bytes:
        """The header as bytes, small enough for the control page."""
        signature = self.signature.encode(errors="replace")
        meta = array("q", self.meta).tobytes()
        site = self.site.encode(errors="replace")[-_MAX_SITE_BYTES:]
        lengths = _LENGTHS.pack(len(signature), len(meta), len(self.wire), len(site))
        return b"".join((lengths, signature, meta, self.wire, site))

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """The inverse of `encode`."""
        cuts = []
        end = _LENGTHS.size
        for length in _LENGTHS.unpack_from(data):
            cuts.append(slice(end, end + length))
            end += length
        signature, meta, wire, site = (data[cut] for cut in cuts)
        return cls(
            signature.decode(),
            tuple(array("q", meta)),
            bytes(wire),
            site.decode(errors="replace"),
        )


@lru_cache(maxsize=4096)
def spec(dtype: torch.dtype, shape: tuple[int | str, ...]) -> str:
    """A dtype and a shape the way error messages show them: ``float32[3, 5]``."""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


# A training loop shows the same few headers again and again.
encode = lru_cache(maxsize=4096)(Header.encode)
decode = lru_cache(maxsize=4096)(Header.decode)


def check_equal(headers: Sequence[Header], ranks: Sequence[int], number: int) -> None:
    """Raises unless every rank of the group called the same thing as operation ``number``."""
    first = headers[0].signature
    for header in headers:
        if header.signature != first:
            raise mismatch(headers, ranks, f"the ranks called different operations as #{number}")


def mismatch(headers: Sequence[Header], ranks: Sequence[int], problem: str) -> MismatchError:
    """An error that lists who called what, and from where; equal calls share a line."""
    callers: dict[tuple[str, str], list[int]] = {}
    for rank, header in zip(ranks, headers, strict=True):
        callers.setdefault((header.signature, header.site), []).append(rank)
    lines = [f"{problem}; nothing was moved:"]
    for (signature, site), members in callers.items():
        lines.append(f"  {name_ranks(members)}: {signature} at {site}")
    lines.append("Make every rank of the group issue the same operations in the same order.")
    return MismatchError("\n".join(lines))
