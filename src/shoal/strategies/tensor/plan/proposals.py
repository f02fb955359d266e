"""Ways to split a candidate, each to be tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.strategies.tensor.layers.linear import sizes_of
from shoal.strategies.tensor.plan.candidates import Candidate
from shoal.strategies.tensor.plan.cut import Cut, Section
from shoal.strategies.tensor.plan.known_names import (
    HEAD_COUNTS,
    HEAD_SIZES,
    KEY_HEAD_COUNTS,
    WIDTHS,
)


@dataclass(frozen=True)
class Proposal:
    """One way to split a block.

    Attributes:
        columns: For each of the candidate's columns.
        row: For its row.
        numbers: Attributes to adjust: a module's path in the block, the attribute, its cut.
        heads: Who has which heads; for attention.
        tables: Embeddings in the block with a column for each head.
    """

    columns: tuple[Cut, ...]
    row: Cut
    numbers: tuple[tuple[str, str, Cut], ...] = ()
    heads: Cut | None = None
    tables: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether each rank gets neighbouring features, and no module is told anything."""
        return not self.numbers and all(len(cut.sections) == 1 for cut in self.columns)

    @property
    def num_units(self) -> int:
        """More ranks than this cannot share it."""
        return min(cut.num_units for cut in (*self.columns, self.row))


def propose(candidate: Candidate, block: nn.Module) -> Iterator[Proposal]:
    """The likeliest first."""
    columns = [sizes_of(block.get_submodule(path))[1] for path in candidate.columns]
    width = sizes_of(block.get_submodule(candidate.row))[0]
    if candidate.may_attend:
        yield from _attention(candidate, block, columns, width)
        if candidate.is_named:
            return
    if all(size % width == 0 for size in columns):
        yield Proposal(
            tuple(Cut.of(size, num_sections=size // width) for size in columns), Cut.of(width)
        )
    if any(size != width for size in columns) and not any(size % width for size in columns):
        # What belongs together may also lie side by side.
        yield Proposal(tuple(Cut.of(size, size // width) for size in columns), Cut.of(width))


def _attention(
    candidate: Candidate, block: nn.Module, columns: Sequence[int], width: int
) -> Iterator[Proposal]:
    heads = _Heads.find(candidate, block, columns, width)
    if heads is None:
        return
    tables = tuple(
        path
        for path, part in block.named_modules()
        if type(part) is nn.Embedding and part.embedding_dim == heads.num_queries
    )
    for cuts in heads.cuts(columns):
        for numbers in heads.numbers(candidate, block):
            yield Proposal(cuts, heads.row, numbers, heads.queries, tables)


@dataclass(frozen=True)
class _Heads:
    """How many heads of queries and of keys there are, and how large they are."""

    num_queries: int
    num_keys: int
    size: int

    @classmethod
    def find(
        cls, candidate: Candidate, block: nn.Module, columns: Sequence[int], width: int
    ) -> _Heads | None:
        holders = [block.get_submodule(path) for path in _holders(candidate)]
        size = _number(holders, HEAD_SIZES)
        count = _number(holders, HEAD_COUNTS)
        if size is None and count is not None and width % count == 0:
            size = width // count
        if not size or width % size:
            return None
        num_queries = width // size
        if len(columns) == 3:
            num_keys = columns[1] // size
        else:
            num_keys = _number(holders, KEY_HEAD_COUNTS) or num_queries
        is_possible = num_keys and num_queries % num_keys == 0
        return cls(num_queries, num_keys, size) if is_possible else None

    @property
    def _ratio(self) -> int:
        return self.num_queries // self.num_keys

    @property
    def queries(self) -> Cut:
        """In units of those that share a key."""
        return Cut.of(self.num_queries, self._ratio)

    @property
    def row(self) -> Cut:
        """What the row takes."""
        return Cut.of(self.num_queries * self.size, self._ratio * self.size)

    def cuts(self, columns: Sequence[int]) -> Iterator[tuple[Cut, ...]]:
        """Of the projections; joined ones have sections, or everything of a head together."""
        query = Section(self.num_queries * self.size, self._ratio * self.size)
        key = Section(self.num_keys * self.size, self.size)
        if list(columns) == [query.size, key.size, key.size]:
            yield (Cut((query,)), Cut((key,)), Cut((key,)))
        elif list(columns) == [query.size + 2 * key.size]:
            yield (Cut((query, key, key)),)
            unit = (self._ratio + 2) * self.size
            yield (Cut((Section(query.size + 2 * key.size, unit),)),)

    def numbers(
        self, candidate: Candidate, block: nn.Module
    ) -> Iterator[tuple[tuple[str, str, Cut], ...]]:
        """What attention may keep of heads and widths; some keep it and do not use it."""
        paths = _holders(candidate)
        keys = Cut.of(self.num_keys)
        counts = [
            *_found(block, paths, HEAD_COUNTS, self.queries),
            *_found(block, paths, KEY_HEAD_COUNTS, keys),
        ]
        widths = [
            *_found(block, paths, WIDTHS, self.row),
            *_found(block, paths, ("kv_dim",), Cut.of(self.num_keys * self.size, self.size)),
        ]
        yield from dict.fromkeys([tuple(counts + widths), tuple(counts), (), tuple(widths)])


def _holders(candidate: Candidate) -> list[str]:
    """The modules whose code uses the projections, from the inside out."""
    parents = [path.rpartition(".")[0] for path in candidate.columns]
    return list(dict.fromkeys([*parents, ""]))


def _number(holders: Sequence[nn.Module], names: Sequence[str]) -> int | None:
    for holder in holders:
        for name in names:
            value = getattr(holder, name, None)
            if type(value) is int and value > 0:
                return value
    return None


def _found(
    block: nn.Module, paths: Sequence[str], names: Sequence[str], cut: Cut
) -> list[tuple[str, str, Cut]]:
    return [
        (path, name, cut)
        for path in paths
        for name in names
        if vars(block.get_submodule(path)).get(name) == cut.size
    ]
