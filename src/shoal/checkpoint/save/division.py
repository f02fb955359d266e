"""Which rank writes what: each element once, and all ranks about as many bytes.

Ranks may hold the same elements (replicas), parts of them, or parts that were cut otherwise than
other ranks' parts. What several hold is divided among them.

[Note: the same as last time]
From one save to the next ranks seldom hold anything else. So each shows the others a digest of what
it holds, and one of what all ranks held last time. Only if every rank remembers what all ranks hold
now is the last division taken again; if not, they show each other everything. All ranks see the
same digests, so all decide alike, also if some of them remember another save or none.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from shoal.checkpoint.format.manifest import extent_json, parse_extent, parse_shape
from shoal.checkpoint.together import caller, together
from shoal.comm import Backend
from shoal.sharding.extent import Extent
from shoal.sharding.split import Split
from shoal.torch_support.dtypes import dtype_called, dtype_name

# Smaller tensors are not worth cutting: the rank that has the least to write gets them.
_DIVIDED_BYTES = 1 << 18


@dataclass(frozen=True)
class Claim:
    """What one rank holds of a tensor.

    It is divisible if all holders are known to have the same values; if not, the first rank's
    count.
    """

    dtype: torch.dtype
    shape: torch.Size
    extents: tuple[Extent, ...]
    is_same_everywhere: bool = True

    def to_json(self) -> list[Any]:
        """As plain data, to be sent."""
        extents = [extent_json(each) for each in self.extents]
        return [dtype_name(self.dtype), list(self.shape), extents, self.is_same_everywhere]

    @classmethod
    def from_json(cls, content: Sequence[Any]) -> Claim:
        """The inverse of `to_json`."""
        dtype, sizes, extents, is_same_everywhere = content
        shape = parse_shape(sizes)
        parsed = tuple(parse_extent(each, shape) for each in extents)
        return cls(dtype_called(dtype), shape, parsed, is_same_everywhere)


Claims = Mapping[str, Claim]
"""What one rank holds, by the key of the tensor."""
Assigned = dict[str, list[Extent]]
"""What one rank writes, by the key of the tensor."""


def assign(claims: Sequence[Claims]) -> list[Assigned]:
    """What each rank writes, from what each rank holds, by rank.

    Raises:
        ValueError: If ranks hold tensors of one name that differ in shape or dtype.
    """
    load = [0] * len(claims)
    work: list[Assigned] = [{} for _ in claims]
    keys = dict.fromkeys(key for own in claims for key in own)
    for key in sorted(keys, key=lambda key: -_num_bytes(claims, key)):
        holders = [rank for rank, own in enumerate(claims) if key in own]
        first = claims[holders[0]][key]
        _check_same(key, first, holders, claims)
        if not first.is_same_everywhere:
            holders = holders[:1]
        for split, ranges in _by_split(key, holders, claims).items():
            for rank, start, stop in _divide(ranges, first.dtype.itemsize, load):
                load[rank] += (stop - start) * first.dtype.itemsize
                extent = Extent(first.shape, start, stop, split)
                work[rank].setdefault(key, []).append(extent)
    return [{key: own[key] for key in keys if key in own} for own in work]


def _num_bytes(claims: Sequence[Claims], key: str) -> int:
    claim = next(own[key] for own in claims if key in own)
    return claim.shape.numel() * claim.dtype.itemsize


def _check_same(key: str, first: Claim, holders: Sequence[int], claims: Sequence[Claims]) -> None:
    for rank in holders:
        other = claims[rank][key]
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise ValueError(
                f"ranks hold different tensors as {key}: {first.dtype} of shape "
                f"{tuple(first.shape)} on rank {holders[0]}, {other.dtype} of shape "
                f"{tuple(other.shape)} on rank {rank}"
            )


_Range = tuple[int, int, int]


def _by_split(
    key: str, holders: Sequence[int], claims: Sequence[Claims]
) -> dict[Split | None, list[_Range]]:
    """Runs of each part, with the rank that holds them: (start, stop, rank)."""
    found: dict[Split | None, list[_Range]] = {}
    for rank in holders:
        for extent in claims[rank][key].extents:
            found.setdefault(extent.split, []).append((extent.start, extent.stop, rank))
    return found


def _divide(ranges: Sequence[_Range], itemsize: int, load: Sequence[int]) -> list[_Range]:
    """Runs without overlap as (rank, start, stop); neighbours of one rank are joined."""
    if all(start == stop for start, stop, _ in ranges):
        # Empty, but a rank must record that it exists.
        start, _, rank = ranges[0]
        return [(rank, start, start)]
    edges = sorted({edge for start, stop, _ in ranges for edge in (start, stop)})
    extra = [0] * len(load)
    result: list[_Range] = []
    for low, high in pairwise(edges):
        ranks = sorted({rank for start, stop, rank in ranges if start <= low and high <= stop})
        for rank, start, stop in _share(low, high, ranks, itemsize, load, extra):
            extra[rank] += (stop - start) * itemsize
            if result and result[-1][0] == rank and result[-1][2] == start:
                result[-1] = (rank, result[-1][1], stop)
            else:
                result.append((rank, start, stop))
    return result


def _share(
    low: int,
    high: int,
    ranks: Sequence[int],
    itemsize: int,
    load: Sequence[int],
    extra: Sequence[int],
) -> list[_Range]:
    if not ranks:
        return []
    if len(ranks) > 1 and (high - low) * itemsize >= _DIVIDED_BYTES * len(ranks):
        edges = [low + (high - low) * i // len(ranks) for i in range(len(ranks) + 1)]
        return [(rank, edges[i], edges[i + 1]) for i, rank in enumerate(ranks)]
    return [(min(ranks, key=lambda rank: load[rank] + extra[rank]), low, high)]


@dataclass(frozen=True)
class Division:
    """All tensors that any rank holds, what each rank writes, a digest of what each holds."""

    keys: Sequence[str]
    assigned: Sequence[Assigned]
    digest: str


_last: weakref.WeakKeyDictionary[object, Division] = weakref.WeakKeyDictionary()


def digests(ranks: Backend | None, claims: Claims) -> tuple[str, str]:
    """Of what this rank holds, and of what all ranks held last time."""
    last = _last.get(caller(ranks))
    return _digest(repr(claims)), last.digest if last else ""


def divide(
    ranks: Backend | None, claims: Claims, shown: Sequence[tuple[str, str]], doing: str
) -> Division:
    """Divides what all ranks hold among them, from what this one claims and each rank's `digests`.

    See [Note: the same as last time].
    """
    digest = _digest("".join(own for own, _ in shown))
    if all(known == digest for _, known in shown):
        return _last[caller(ranks)]
    own = {key: claim.to_json() for key, claim in claims.items()}
    by_rank = [
        {key: Claim.from_json(content) for key, content in contents.items()}
        for contents in together(ranks, lambda: own, doing)
    ]
    keys = list(dict.fromkeys(key for claims in by_rank for key in claims))
    division = _last[caller(ranks)] = Division(keys, assign(by_rank), digest)
    return division


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
