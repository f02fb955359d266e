"""How a length is shared out over ranks: contiguous parts, the remainder to the first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def split_sizes(length: int, num_parts: int) -> list[int]:
    """Sizes of ``num_parts`` contiguous parts that differ by at most one.

    Example:
        >>> split_sizes(10, 4)
        [3, 3, 2, 2]
    """
    base, extra = divmod(length, num_parts)
    return [base + (part < extra) for part in range(num_parts)]


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each part begins, and at the end the total.

    Example:
        >>> offsets([3, 3, 2])
        [0, 3, 6, 8]
    """
    return [0, *accumulate(sizes)]


def check_sizes(sizes: Sequence[int], length: int, num_parts: int) -> list[int]:
    """A caller's own split, once it adds up."""
    parts = [int(size) for size in sizes]
    if len(parts) != num_parts or min(parts) < 0 or sum(parts) != length:
        raise ValueError(
            f"sizes must be {num_parts} non-negative numbers that add up to {length} rows; "
            f"got {parts}"
        )
    return parts
