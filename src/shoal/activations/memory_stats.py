"""How much memory kept activations take, on one rank and on all."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

_UNITS = ("KB", "MB", "GB", "TB")


def format_bytes(num_bytes: float) -> str:
    """A size for people, in powers of 1024.

    Example:
        >>> format_bytes(512), format_bytes(1536), format_bytes(2359296), format_bytes(1 << 30)
        ('512B', '1.50KB', '2.25MB', '1.00GB')
    """
    if round(num_bytes) < 1024:
        return f"{num_bytes:.0f}B"
    size = num_bytes / 1024
    for unit in _UNITS[:-1]:
        if round(size, 2) < 1024:
            return f"{size:.2f}{unit}"
        size /= 1024
    return f"{size:.2f}{_UNITS[-1]}"


@dataclass(frozen=True)
class MemoryStats:
    """The activations that one rank keeps.

    Attributes:
        current_memory_used: Bytes of their memory now. Tensors that share memory count once.
        peak_memory_used: The most bytes there were at once.
        checkpoint_count: How many activations there are now.
    """

    current_memory_used: int = 0
    peak_memory_used: int = 0
    checkpoint_count: int = 0


@dataclass(frozen=True)
class DistributedMemoryStats:
    """The activations that all ranks of a group keep.

    Attributes:
        total_current_memory_used: Bytes on all ranks now.
        total_peak_memory_used: The sum of the ranks' peaks, which may have been at other times.
        per_rank_memory_used: Bytes now, by rank.
        average_memory_per_rank: Their mean.
        max_memory_used: Those of the rank that has the most.
        min_memory_used: Those of the rank that has the least.
        total_checkpoint_count: How many activations there are on all ranks.
        per_rank_checkpoint_count: How many there are, by rank.
        timestamp: When the figures were gathered, in seconds since 1970 (rank 0's clock).
    """

    total_current_memory_used: int
    total_peak_memory_used: int
    per_rank_memory_used: tuple[int, ...]
    average_memory_per_rank: float
    max_memory_used: int
    min_memory_used: int
    total_checkpoint_count: int
    per_rank_checkpoint_count: tuple[int, ...]
    timestamp: float

    @classmethod
    def of(cls, ranks: Sequence[MemoryStats], timestamp: float | None = None) -> Self:
        """The figures of all ranks, by rank."""
        used = tuple(each.current_memory_used for each in ranks)
        counts = tuple(each.checkpoint_count for each in ranks)
        return cls(
            total_current_memory_used=sum(used),
            total_peak_memory_used=sum(each.peak_memory_used for each in ranks),
            per_rank_memory_used=used,
            average_memory_per_rank=sum(used) / len(used) if used else 0.0,
            max_memory_used=max(used, default=0),
            min_memory_used=min(used, default=0),
            total_checkpoint_count=sum(counts),
            per_rank_checkpoint_count=counts,
            timestamp=time.time() if timestamp is None else timestamp,
        )

    def to_json(self) -> str:
        """All fields as JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        """A summary for people."""
        per_rank = ", ".join(map(format_bytes, self.per_rank_memory_used))
        return "\n".join(
            [
                "Distributed Memory Statistics:",
                f"  Total Memory Used: {format_bytes(self.total_current_memory_used)}",
                f"  Total Peak Memory: {format_bytes(self.total_peak_memory_used)}",
                f"  Average Memory Per Rank: {format_bytes(self.average_memory_per_rank)}",
                f"  Max Memory Used: {format_bytes(self.max_memory_used)}",
                f"  Min Memory Used: {format_bytes(self.min_memory_used)}",
                f"  Total Checkpoints: {self.total_checkpoint_count}",
                f"  Per-Rank Memory: [{per_rank}]",
            ]
        )
