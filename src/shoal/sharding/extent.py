"""Which elements of a full tensor a rank holds, and what two extents have in common.

[Note: extents]
A rank holds a tensor-parallel part of a full tensor, or all of it; of that part, flattened, it owns
one run of elements. Two such extents of one tensor, however they were cut, share runs of elements
that are contiguous in both. Finding these runs is all it takes to move state from any division to
any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shoal.sharding.split import Split

Indices = npt.NDArray[np.int64]


class Overlap(NamedTuple):
    """Runs of elements that two extents share: where each has them, and how many."""

    left: Indices
    right: Indices
    lengths: Indices

    @property
    def num_elements(self) -> int:
        """In all runs together."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements ``start`` to ``stop`` of a full tensor's part, flattened; see [Note: extents].

    Example:
        >>> rows = Extent(torch.Size([4, 2]), 2, 6)
        >>> column = Extent.whole(torch.Size([4, 2]), Split(torch.Size([4, 2]), 1, ((0, 1),)))
        >>> overlap(rows, column).left.tolist()
        [0, 2]
    """

    shape: torch.Size  # of the full tensor
    start: int  # the first element, counted in the part
    stop: int  # behind the last one
    split: Split | None = None  # which part of the full tensor; None for all of it

    @classmethod
    def whole(cls, shape: torch.Size, split: Split | None = None) -> Extent:
        """All of a tensor, or of a part of it."""
        return cls(shape, 0, (split.local_shape if split else shape).numel(), split)

    @property
    def num_elements(self) -> int:
        """How many."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the full tensor, in its order."""
        return self.split is None and self.num_elements == self.shape.numel()

    def narrowed(self, start: int, stop: int) -> Extent:
        """Another run of the same part."""
        return Extent(self.shape, start, stop, self.split)

    def runs(self) -> tuple[Indices, Indices, Indices]:
        """Contiguous runs: where in the full tensor, where in this extent, how many elements.

        They are in the order of the full tensor.
        """
        if self.split is None:
            return _array(self.start), _array(0), _array(self.num_elements)
        split = self.split
        inner = split.shape[split.dim + 1 :].numel()
        row, full_row = split.local_shape[split.dim] * inner, split.shape[split.dim] * inner
        if self.num_elements == 0 or row == 0:
            return _array(0), _array(0), _array(0)
        firsts = np.array([start for start, _ in split.runs], np.int64) * inner
        lengths = np.array([stop - start for start, stop in split.runs], np.int64) * inner
        run_starts = np.cumsum(lengths) - lengths
        rows = np.arange(self.start // row, -(-self.stop // row), dtype=np.int64)[:, None]
        full = (rows * full_row + firsts).ravel()
        own = (rows * row + run_starts).ravel() - self.start
        sizes = np.tile(lengths, len(rows))
        before = np.clip(-own, 0, sizes)
        behind = np.clip(own + sizes - self.num_elements, 0, sizes - before)
        full, own, sizes = full + before, own + before, sizes - before - behind
        order = np.argsort(full, kind="stable")
        return full[order], own[order], sizes[order]


def overlap(left: Extent, right: Extent) -> Overlap:
    """What two extents of one tensor share, in runs contiguous in both, ordered by ``right``."""
    if left.shape != right.shape:
        raise ValueError(
            f"extents of one tensor have one shape: got {tuple(left.shape)} and "
            f"{tuple(right.shape)}"
        )
    if left.split == right.split:  # the usual case, and it needs no tables
        start, stop = max(left.start, right.start), min(left.stop, right.stop)
        length = max(stop - start, 0)
        if not length:
            return Overlap(_array(), _array(), _array())
        return Overlap(_array(start - left.start), _array(start - right.start), _array(length))
    return _joined(_meeting_runs(left, right))


def _meeting_runs(left: Extent, right: Extent) -> Overlap:
    """Both sides' runs are disjoint and sorted, so each meets a range of the other's."""
    full, own, sizes = (column[left.runs()[2] > 0] for column in left.runs())
    other_full, other_own, other_sizes = (column[right.runs()[2] > 0] for column in right.runs())
    first = np.searchsorted(other_full + other_sizes, full, side="right")
    last = np.searchsorted(other_full, full + sizes, side="left")
    counts = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(len(full)), counts)
    steps = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts)
    theirs = np.repeat(first, counts) + steps
    begin = np.maximum(full[mine], other_full[theirs])
    end = np.minimum(full[mine] + sizes[mine], other_full[theirs] + other_sizes[theirs])
    left_at = own[mine] + begin - full[mine]
    right_at = other_own[theirs] + begin - other_full[theirs]
    return Overlap(left_at, right_at, end - begin)


def _joined(found: Overlap) -> Overlap:
    """Neighbours on both sides become one run."""
    order = np.argsort(found.right, kind="stable")
    left, right, lengths = (column[order] for column in found)
    if not len(lengths):
        return Overlap(left, right, lengths)
    follows = (left[:-1] + lengths[:-1] == left[1:]) & (right[:-1] + lengths[:-1] == right[1:])
    heads = np.flatnonzero(np.concatenate(([True], ~follows)))
    return Overlap(left[heads], right[heads], np.add.reduceat(lengths, heads))


def _array(*values: int) -> Indices:
    return np.array(values, np.int64)
