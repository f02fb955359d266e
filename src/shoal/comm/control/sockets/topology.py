"""Who is connected to whom.

[Note: the graph of a group]
Up to `ALL_PAIRS_RANKS`, each two ranks of a group have a connection and say everything to each
other directly. In a larger group, a rank's neighbours are those 1, 2, 4, 8 ... positions before
and after it, on a ring. That is about two connections for each bit of the group's size.

- Headers take as many rounds as the size has bits: in round k, what a rank knows goes to the rank
  2**k positions after it (`relay.py`). There is no root that could be slow for all.
- News (failures, goodbyes) goes from neighbour to neighbour, and each rank passes it on once. The
  graph stays in one piece unless more ranks vanish at once than a rank has neighbours.
- Ranks that have left are taken out of the ring of the world: see `SocketControl.to_call`.

A group smaller than the world connects its own graph when it is first used, and two ranks that
exchange messages connect at the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

ALL_PAIRS_RANKS = 8
"""The largest group whose ranks are all connected: up to here that is the faster way."""


def is_sparse(size: int) -> bool:
    """Whether a group of this size has a graph rather than all pairs."""
    return size > ALL_PAIRS_RANKS


def num_rounds(size: int) -> int:
    """After how many rounds every rank knows the headers of all."""
    return (size - 1).bit_length()


def neighbours(rank: int, ranks: Sequence[int]) -> list[int]:
    """The members of a group with which one of them is connected."""
    if not is_sparse(len(ranks)):
        return [each for each in ranks if each != rank]
    size, position = len(ranks), ranks.index(rank)
    steps = [1 << number for number in range(num_rounds(size))]
    found = {(position + way * step) % size for step in steps for way in (1, -1)}
    return [ranks[each] for each in sorted(found - {position})]
