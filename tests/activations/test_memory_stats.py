"""Figures of kept activations: sizes as text, every field, JSON."""

from __future__ import annotations

import json

import pytest

from shoal.activations import DistributedMemoryStats, MemoryStats, format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0B"),
        (512, "512B"),
        (1023, "1023B"),
        (1024, "1.00KB"),
        (1536, "1.50KB"),
        (2359296, "2.25MB"),
        (1 << 30, "1.00GB"),
        (1 << 40, "1.00TB"),
        (5000 << 40, "5000.00TB"),
        ((1 << 20) - 1, "1.00MB"),  # not 1024.00KB
        (1023.6, "1.00KB"),
    ],
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


RANKS = [MemoryStats(512, 2048, 1), MemoryStats(1536, 1536, 3)]


def test_every_field() -> None:
    stats = DistributedMemoryStats.of(RANKS, timestamp=12.5)
    assert stats.total_current_memory_used == 2048
    assert stats.total_peak_memory_used == 3584
    assert stats.per_rank_memory_used == (512, 1536)
    assert stats.average_memory_per_rank == 1024.0
    assert (stats.max_memory_used, stats.min_memory_used) == (1536, 512)
    assert stats.total_checkpoint_count == 4
    assert stats.per_rank_checkpoint_count == (1, 3)
    assert stats.timestamp == 12.5


def test_text() -> None:
    assert str(DistributedMemoryStats.of(RANKS)).splitlines() == [
        "Distributed Memory Statistics:",
        "  Total Memory Used: 2.00KB",
        "  Total Peak Memory: 3.50KB",
        "  Average Memory Per Rank: 1.00KB",
        "  Max Memory Used: 1.50KB",
        "  Min Memory Used: 512B",
        "  Total Checkpoints: 4",
        "  Per-Rank Memory: [512B, 1.50KB]",
    ]


def test_json() -> None:
    data = json.loads(DistributedMemoryStats.of(RANKS, timestamp=12.5).to_json())
    assert data["per_rank_memory_used"] == [512, 1536]
    assert data["timestamp"] == 12.5
    assert len(data) == 9


def test_nothing() -> None:
    stats = DistributedMemoryStats.of([])
    assert stats.average_memory_per_rank == stats.max_memory_used == 0
    assert "Per-Rank Memory: []" in str(stats)
