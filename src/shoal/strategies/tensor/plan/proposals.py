"""Ways to split a candidate, and whether one is right: blocks that look alike are tried once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.sharding.split import Split
from shoal.strategies.tensor.layers.linear import sizes_of
from shoal.strategies.tensor.plan import known_names
from shoal.strategies.tensor.plan.candidates import Candidate
from shoal.strategies.tensor.plan.obstacles import have_hooks, reason_to_stay_whole
from shoal.strategies.tensor.plan.tensor_plan import (
    Cut,
    Layer,
    Section,
    SplitBlock,
    Style,
    join_names,
    parameter_splits,
)
from shoal.strategies.tensor.trial.split_trial import TrialFinding, may_split
from shoal.strategies.tensor.trial.trial_run import SplitTrial
from shoal.torch_internals.modules import hooks_of


@dataclass(frozen=True)
class Proposal:
    """One way to split a block.

    Attributes:
        numbers: Attributes to adjust: a module's path in the block, the attribute, its cut.
        heads: Who has which heads; for attention.
        tables: Embeddings in the block with a column for each head.
    """

    columns: tuple[Cut, ...]
    row: Cut
    numbers: tuple[tuple[str, str, Cut], ...] = ()
    heads: Cut | None = None
    tables: tuple[str, ...] = ()

    @classmethod
    def by_sections(cls, columns: Sequence[int], width: int) -> Proposal:
        """Columns of some sizes, which give a row as many sections as it is wide."""
        cuts = (Cut.of(size, num_sections=size // width) for size in columns)
        return cls(tuple(cuts), Cut.of(width))

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
        yield Proposal.by_sections(columns, width)
        if any(size != width for size in columns):
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
        size = _number(holders, known_names.HEAD_SIZES)
        count = _number(holders, known_names.HEAD_COUNTS)
        if size is None and count is not None and width % count == 0:
            size = width // count
        if not size or width % size:
            return None
        num_queries = width // size
        if len(columns) == 3:
            num_keys = columns[1] // size
        else:
            num_keys = _number(holders, known_names.KEY_HEAD_COUNTS) or num_queries
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
            *_found(block, paths, known_names.HEAD_COUNTS, self.queries),
            *_found(block, paths, known_names.KEY_HEAD_COUNTS, keys),
        ]
        widths = [
            *_found(block, paths, known_names.WIDTHS, self.row),
            *_found(block, paths, ("kv_dim",), Cut.of(self.num_keys * self.size, self.size)),
        ]
        yield from dict.fromkeys([tuple(counts + widths), tuple(counts), (), tuple(widths)])


def _holders(candidate: Candidate) -> list[str]:
    """The modules whose code uses the projections, from the inside out."""
    parents = [path.rpartition(".")[0] for path in candidate.columns]
    return list(dict.fromkeys([*parents, ""]))


def _number(holders: Sequence[nn.Module], names: Sequence[str]) -> int | None:
    values = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def _found(
    block: nn.Module, paths: Sequence[str], names: Sequence[str], cut: Cut
) -> list[tuple[str, str, Cut]]:
    return [
        (path, name, cut)
        for path in paths
        for name in names
        if vars(block.get_submodule(path)).get(name) == cut.size
    ]


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
# What torch keeps in every module, and the number of a layer among its like.
_NOT_DESCRIBED = {*vars(nn.Module()), "layer_idx"}


class Verdict(NamedTuple):
    """A way to split a block that is right, and what is known of it."""

    proposal: Proposal
    finding: TrialFinding = TrialFinding()


def try_proposal(
    candidate: Candidate,
    block: nn.Module,
    proposal: Proposal,
    num_ranks: int,
    stand_in: nn.Module | None = None,
) -> Verdict | None:
    """How the block may be split; None if it may not be split this way.

    Raises:
        TypeError: If the block cannot be called with one tensor, so that nothing is known.
    """
    layers = make_block(candidate, Verdict(proposal)).layers
    prefix = f"{candidate.block}." if candidate.block else ""
    splits: dict[str, tuple[Split, ...]] = {}
    numbers = []
    for layer in layers:
        path = layer.name.removeprefix(prefix)
        part = block.get_submodule(path)
        for key, values in parameter_splits(part, layer, num_ranks).items():
            splits[f"{path}.{key}"] = values
        if hasattr(part, "nf") and layer.style is Style.COLUMN:
            numbers.append((part, "nf", layer.cut))
    numbers += [(block.get_submodule(p), name, cut) for p, name, cut in proposal.numbers]
    trial = SplitTrial(
        stand_in or block,
        [block.get_submodule(path) for path in candidate.columns],
        block.get_submodule(candidate.row),
        splits,
        [
            (m, name, [cut.length(r, num_ranks) for r in range(num_ranks)])
            for m, name, cut in numbers
        ],
        attends=proposal.heads is not None,
    )
    found = may_split(trial, num_ranks)
    return None if found is None else Verdict(proposal, found)


def are_hooked(candidate: Candidate, block: nn.Module) -> bool:
    """Whether hooks would get parts if a candidate were split; see [Note: hooks]."""
    layers = [block.get_submodule(path) for path in candidate.paths]
    inside = [block.get_submodule(path) for path in candidate.inside]
    return have_hooks([*layers, *inside]) or any(map(reason_to_stay_whole, layers))


def untried(
    candidate: Candidate, block: nn.Module, proposal: Proposal, *, drops: bool = False
) -> Verdict:
    """A verdict without a trial: all parameters but those of columns and row may be in between."""
    names = [name for name, _ in block.named_parameters()]
    partial = frozenset(n for n in names if n.rpartition(".")[0] not in candidate.paths)
    return Verdict(proposal, TrialFinding(partial, drops=drops))


def make_block(candidate: Candidate, verdict: Verdict) -> SplitBlock:
    """A candidate, split in a way that is right."""
    name, (proposal, finding) = candidate.block, verdict
    layers = [
        Layer(join_names(name, path), Style.COLUMN, cut)
        for path, cut in zip(candidate.columns, proposal.columns, strict=True)
    ]
    layers.append(Layer(join_names(name, candidate.row), Style.ROW, proposal.row))
    for path in proposal.tables:
        assert proposal.heads is not None
        layers.append(Layer(join_names(name, path), Style.HEADS, proposal.heads))
    return SplitBlock(
        name,
        tuple(layers),
        tuple((join_names(name, path), key, cut) for path, key, cut in proposal.numbers),
        tuple(join_names(name, path) for path in sorted(finding.partial)),
        proposal.heads,
        tuple(join_names(name, path) for path in sorted(finding.inside)),
        finding.drops,
    )


def describe(block: nn.Module) -> str:
    """Everything that decides how a block computes, but for its weights."""
    parts = []
    for name, part in block.named_modules():
        own = {k: _described(v) for k, v in vars(part).items() if k not in _NOT_DESCRIBED}
        shapes = [(key, tuple(p.shape)) for key, p in part.named_parameters(recurse=False)]
        shapes += [(key, tuple(b.shape)) for key, b in part.named_buffers(recurse=False)]
        hooks = [id(hook) for hook in hooks_of(part)]
        parts.append(f"{name} {id(type(part))} {sorted(own.items())} {shapes} {hooks}")
    return "\n".join(parts)


def _described(value: Any) -> str:
    """By value where it can be told; objects and functions are like themselves only."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}{[_described(each) for each in value]}"
    return repr(value) if isinstance(value, _PLAIN) else f"{type(value).__name__} {id(value)}"
