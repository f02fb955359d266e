"""The way through a model: which units are called where, and which values travel.

It is learned once for each kind of input, with one micro-batch that goes through all chunks one
after the other, and is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec

Root = tuple[int, int]
"""A value that a call returned: the number of the call and of the leaf."""


class Shape(NamedTuple):
    """What is known of a tensor that is elsewhere."""

    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Call:
    """One call of a unit, the same in every micro-batch of a kind.

    Attributes:
        unit: Its name.
        chunk: Where it runs.
        skeleton: The structure of what it returns and of what it leaves in attributes.
        left: The names of these attributes.
        leaves: For each leaf its shape, or what it is if it is not a tensor.
        needs_grad: The leaves that gradients are wanted of.
        rewritten: The leaves that the model writes into afterwards.
    """

    unit: str
    chunk: int
    skeleton: TreeSpec
    left: list[str]
    leaves: list[Any]
    needs_grad: set[int]
    rewritten: set[int]


@dataclass
class Itinerary:
    """Calls in order, and what travels.

    Attributes:
        calls: All calls of units, in order.
        wanted: For each chunk the values of earlier chunks that it needs.
        overwritten: For each chunk those of them that it writes into.
        borrowed: For each rank the parameters of other ranks that it needs.
    """

    calls: list[Call] = field(default_factory=list)
    wanted: dict[int, list[Root]] = field(default_factory=dict)
    overwritten: dict[int, set[Root]] = field(default_factory=dict)
    borrowed: dict[int, list[str]] = field(default_factory=dict)

    def producer(self, root: Root) -> int:
        """The chunk that a value comes from."""
        return self.calls[root[0]].chunk

    def needs_grad(self, root: Root) -> bool:
        """Whether its gradient goes back."""
        return root[1] in self.calls[root[0]].needs_grad

    def incoming(self, chunk: int) -> dict[int, list[Root]]:
        """What a chunk needs, by the chunk it comes from."""
        found: dict[int, list[Root]] = {}
        for root in self.wanted.get(chunk, ()):
            found.setdefault(self.producer(root), []).append(root)
        return found

    def outgoing(self, chunk: int) -> dict[int, list[Root]]:
        """What others need of a chunk, by the chunk that needs it."""
        found = {
            other: [root for root in roots if self.producer(root) == chunk]
            for other, roots in sorted(self.wanted.items())
        }
        return {other: roots for other, roots in found.items() if roots}

    def exported(self, chunk: int) -> set[Root]:
        """All values of a chunk that travel."""
        return {root for roots in self.outgoing(chunk).values() for root in roots}

    def lent(self, owner_of: Any, rank: int) -> list[tuple[int, str]]:
        """Who borrows what from a rank, in the order it is sent."""
        return [
            (borrower, name)
            for borrower, names in sorted(self.borrowed.items())
            for name in names
            if owner_of(name) == rank
        ]


Shapes = Sequence[Sequence[Any]]
"""For each call what `Call.leaves` says, for micro-batches of one size."""
