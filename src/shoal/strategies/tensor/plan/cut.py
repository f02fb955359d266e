"""How one dimension of a weight is shared out over the ranks of a tensor group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.comm.operation.partition import offsets, split_sizes
from shoal.sharding.split import Split


@dataclass(frozen=True)
class Section:
    """Some neighbouring indices that are shared out in whole units, such as heads."""

    size: int
    unit: int = 1

    @property
    def num_units(self) -> int:
        """What there is to share out."""
        return self.size // self.unit


@dataclass(frozen=True)
class Cut:
    """Sections one after the other, of each of which every rank gets its part.

    One section is the usual case; a projection to queries, keys and values at once has three.

    Example:
        >>> cut = Cut.of(12, unit=2, num_sections=2)  # two sections of three heads each
        >>> cut.runs(0, 2), cut.runs(1, 2)
        (((0, 4), (6, 10)), ((4, 6), (10, 12)))
    """

    sections: tuple[Section, ...]

    @classmethod
    def of(cls, size: int, unit: int = 1, num_sections: int = 1) -> Cut:
        """Sections of one size."""
        return cls((Section(size // num_sections, unit),) * num_sections)

    @property
    def size(self) -> int:
        """Of the whole dimension."""
        return sum(section.size for section in self.sections)

    @property
    def num_units(self) -> int:
        """The fewest units of a section: more ranks than this would leave some with nothing."""
        return min(section.num_units for section in self.sections)

    def is_even(self, num_ranks: int) -> bool:
        """Whether every rank gets the same."""
        return all(section.num_units % num_ranks == 0 for section in self.sections)

    def runs(self, rank: int, num_ranks: int) -> tuple[tuple[int, int], ...]:
        """A rank's indices; the first ranks get more where units do not divide."""
        runs, begin = [], 0
        for section in self.sections:
            edges = offsets(split_sizes(section.num_units, num_ranks))
            start, stop = (begin + edge * section.unit for edge in edges[rank : rank + 2])
            runs.append((start, stop))
            begin += section.size
        return tuple(runs)

    def order(self, num_ranks: int) -> list[int]:
        """The indices of all ranks one after the other, as a gather would put them."""
        runs = [run for rank in range(num_ranks) for run in self.runs(rank, num_ranks)]
        return [index for start, stop in runs for index in range(start, stop)]

    def length(self, rank: int, num_ranks: int) -> int:
        """How many indices a rank gets."""
        return sum(stop - start for start, stop in self.runs(rank, num_ranks))

    def splits(self, shape: torch.Size, dim: int, num_ranks: int) -> tuple[Split, ...]:
        """Every rank's part of a tensor of that shape."""
        return tuple(Split(shape, dim, self.runs(rank, num_ranks)) for rank in range(num_ranks))
