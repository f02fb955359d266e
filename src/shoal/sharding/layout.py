"""Who owns which slice of which group's buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

# Owners' slices begin at multiples of this, so that vector instructions and copies are aligned.
_ALIGNMENT_BYTES = 128


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its group's buffer, in elements."""

    name: str
    shape: torch.Size
    start: int

    @cached_property
    def stop(self) -> int:
        """Where the parameter ends."""
        return self.start + self.shape.numel()

    @property
    def bounds(self) -> tuple[int, int]:
        """Where the parameter begins and ends."""
        return self.start, self.stop


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that one rank owns, in elements of the parameter."""

    name: str
    start: int
    stop: int
    offset: int
    """Where in the owner's shard the part begins."""


@dataclass(frozen=True)
class GroupLayout:
    """One group's buffer: parameters one after the other, cut into one slice for each rank.

    The buffer may be longer than its parameters; what is beyond or between them never leaves the
    layout. With ``block``, parameters and slices begin at multiples of it.

    Example:
        >>> layout = GroupLayout.even([("a", torch.Size([3])), ("b", torch.Size([2, 2]))], 2, 4)
        >>> layout.bounds
        (0, 32, 64)
        >>> [(piece.name, piece.start, piece.stop) for piece in layout.pieces(0)]
        [('a', 0, 3), ('b', 0, 4)]
    """

    slots: tuple[Slot, ...]  # where the parameters lie
    # Where each rank's slice begins, and at the end the length of the buffer.
    bounds: tuple[int, ...]

    @cached_property
    def num_elements(self) -> int:
        """The length of the buffer."""
        return self.bounds[-1]

    @cached_property
    def sizes(self) -> list[int]:
        """Each rank's number of elements."""
        return [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """What of the buffer is no parameter's."""
        starts = [*(slot.start for slot in self.slots), self.num_elements]
        stops = [0, *(slot.stop for slot in self.slots)]
        return [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]

    def pieces(self, rank: int) -> list[Piece]:
        """What the rank owns, parameter by parameter."""
        low, high = self.bounds[rank], self.bounds[rank + 1]
        pieces = []
        for slot in self.slots:
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                part = (start - slot.start, stop - slot.start)
                pieces.append(Piece(slot.name, *part, offset=start - low))
        return pieces

    @classmethod
    def even(
        cls,
        shapes: Sequence[tuple[str, torch.Size]],
        num_ranks: int,
        itemsize: int,
        block: int = 1,
    ) -> GroupLayout:
        """Slices of one length, wherever they cut; for optimizers that work element by element."""
        slots = _in_a_row(shapes, block)
        grain = math.lcm(max(1, _ALIGNMENT_BYTES // itemsize), block)
        length = -(-slots[-1].stop // (num_ranks * grain)) * grain
        return cls(slots, tuple(rank * length for rank in range(num_ranks + 1)))

    @classmethod
    def whole(
        cls,
        shapes: Sequence[tuple[str, torch.Size]],
        owners: Sequence[int],
        num_ranks: int,
        block: int = 1,
    ) -> GroupLayout:
        """Whole parameters for each rank; for optimizers that need to see one entirely."""
        order = sorted(range(len(shapes)), key=lambda index: owners[index])
        slots = _in_a_row([shapes[index] for index in order], block)
        lengths = [0] * num_ranks
        for index, slot in zip(order, slots, strict=True):
            lengths[owners[index]] += _rounded_up(slot.stop - slot.start, block)
        bounds = [0]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        return cls(slots, tuple(bounds))


def _in_a_row(shapes: Sequence[tuple[str, torch.Size]], block: int) -> tuple[Slot, ...]:
    slots, start = [], 0
    for name, shape in shapes:
        slots.append(Slot(name, torch.Size(shape), start))
        start = _rounded_up(slots[-1].stop, block)
    return tuple(slots)


def _rounded_up(length: int, block: int) -> int:
    return -(-length // block) * block


def balanced_owners(sizes: Sequence[int], num_ranks: int, load: list[int]) -> list[int]:
    """An owner for each parameter, the largest first, to the rank that has the least.

    ``load`` is what each rank has already; it is brought up to date.
    """
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = min(range(num_ranks), key=lambda rank: load[rank])
        owners[index] = owner
        load[owner] += sizes[index]
    return owners
