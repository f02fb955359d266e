"""`CheckpointDirectory`: who holds which activation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CheckpointDirectory:
    """What each rank held when the directory was made; the same on every rank.

    Attributes:
        holders: The ranks that hold an activation, by its name.
        disagreements: A sentence for each name under which ranks hold tensors of different shapes
            or dtypes, by that name.
        size: How many ranks there are.
    """

    holders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    disagreements: dict[str, str] = field(default_factory=dict)
    size: int = 1

    @classmethod
    def of(cls, listings: Sequence[list[list[Any]]]) -> CheckpointDirectory:
        """From what `CheckpointManager.listing` says on each rank."""
        described: dict[str, dict[int, str]] = {}
        for rank, listing in enumerate(listings):
            for key, shape, dtype, _ in listing:
                described.setdefault(key, {})[rank] = f"{dtype} {tuple(shape)}"
        holders = {key: tuple(by_rank) for key, by_rank in described.items()}
        disagreements = {
            key: _sentence(key, by_rank)
            for key, by_rank in described.items()
            if len(set(by_rank.values())) > 1
        }
        return cls(holders, disagreements, len(listings))

    def missing(self, rank: int) -> list[str]:
        """The names that other ranks hold and this one does not."""
        return [key for key, ranks in self.holders.items() if rank not in ranks]

    def __str__(self) -> str:
        """A line for each name, then the disagreements."""
        lines = [f"{key!r}: ranks {list(ranks)}" for key, ranks in self.holders.items()]
        return "\n".join([*lines, *self.disagreements.values()]) or "no rank holds an activation"


def _sentence(key: str, by_rank: dict[int, str]) -> str:
    held = "; ".join(f"rank {rank}: {what}" for rank, what in by_rank.items())
    return f"the ranks hold different tensors as {key!r}: {held}"
