"""Which step the ranks that are left can go on from, and who has which part of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.elastic.kept_part import KeptPart, Seat


class Head(NamedTuple):
    """What a rank says of a part that it keeps; plain data."""

    generation: int
    rank: int
    size: int
    step: int

    @classmethod
    def of(cls, part: KeptPart) -> Head:
        """Of one part."""
        return cls(*part.seat, part.step)


class Chosen(NamedTuple):
    """A step of which every part is there, and by the rank whose part it is: who has it."""

    generation: int
    size: int
    step: int
    holders: dict[int, int]


def freshest(reports: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
    """Of each part the newest only, as of one step: where ranks have no steps in common."""
    newest: dict[tuple[int, int, int], tuple[int, int]] = {}
    for holder, heads in enumerate(reports):
        for head in (Head(*each) for each in heads):
            part = (head.generation, head.rank, head.size)
            newest[part] = max(newest.get(part, (-1, -1)), (head.step, holder))
    return [
        [[*part, 0] for part, (_, holder) in newest.items() if holder == reporter]
        for reporter in range(len(reports))
    ]


def newest_complete(reports: Sequence[Sequence[Sequence[int]]]) -> Chosen | None:
    """The newest step of which some rank has each part; ``reports`` has each rank's heads."""
    found: dict[tuple[int, int, int], dict[int, int]] = {}
    for holder, heads in enumerate(reports):
        for head in (Head(*each) for each in heads):
            parts = found.setdefault((head.step, head.generation, head.size), {})
            parts.setdefault(head.rank, holder)
    complete = [key for key, parts in found.items() if len(parts) == key[2]]
    if not complete:
        return None
    step, generation, size = max(complete)
    return Chosen(generation, size, step, found[step, generation, size])


def missing_parts(reports: Sequence[Sequence[Sequence[int]]]) -> tuple[int, list[int]]:
    """Of the newest step that any rank has something of: which parts nobody has."""
    heads = [Head(*each) for own in reports for each in own]
    if not heads:
        return 0, []
    newest = max(heads, key=lambda head: (head.step, head.generation))
    known = {h.rank for h in heads if (h.step, h.generation) == (newest.step, newest.generation)}
    return newest.step, [rank for rank in range(newest.size) if rank not in known]


def inherited(new_rank: int, old_ranks: Sequence[int | None], seat: Seat) -> int:
    """Whose random numbers a new rank goes on with: its own, or those of one that is gone.

    A number beyond the old ranks stands for none of them.
    """
    own = old_ranks[new_rank]
    if own is not None:
        return own
    gone = [rank for rank in range(seat.size) if rank not in old_ranks]
    if new_rank in gone:
        return new_rank
    free = [rank for rank in gone if rank >= len(old_ranks) or old_ranks[rank] is not None]
    coming = [rank for rank, old in enumerate(old_ranks) if old is None and rank not in gone]
    place = coming.index(new_rank)
    return free[place] if place < len(free) else seat.size + new_rank
