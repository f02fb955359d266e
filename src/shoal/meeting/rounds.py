"""What ranks have brought to one round of a meeting, and who waits for the others."""

from __future__ import annotations

from shoal.meeting.server_thread import Guest


class GatherRound:
    """What ranks have brought to one round, and who waits for the others.

    Attributes:
        came: The process that came as each rank, in words.
        refusal: Why this round can never be complete.
    """

    def __init__(self, first: int, size: int) -> None:
        """``first`` is the rank that came first: the others must have been told its size."""
        self.first, self.size = first, size
        self.brought: dict[int, str] = {}
        self.waiting: dict[int, Guest] = {}
        self.came: dict[int, str] = {}
        self.refusal = ""

    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank in range(self.size) if rank not in self.came]

    def conflict(self, rank: int, size: int, process: str) -> str:
        """What speaks against one more rank, if anything does."""
        if size != self.size:
            return (
                f"rank {rank} was told WORLD_SIZE={size}, rank {self.first} {self.size}: "
                "every rank must be told the same"
            )
        if rank in self.came:
            return (
                f"rank {rank} was started twice: {self.came[rank]} and {process} both say that "
                f"they are rank {rank} of {size}. Give each process a RANK of its own"
            )
        if not 0 <= rank < size:
            return f"there is no rank {rank} of {size}"
        return ""

    def leave(self, guest: Guest) -> None:
        """A rank has hung up before the others came: it may come again."""
        for rank in [each for each, waiting in self.waiting.items() if waiting is guest]:
            del self.waiting[rank], self.came[rank], self.brought[rank]
