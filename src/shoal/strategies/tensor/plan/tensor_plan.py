"""The plan: which layers are split, how, why others are not, and what that means for parameters.

A `Cut` says how one dimension of a weight is shared out over the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor, nn

from shoal.comm.operation.partition import offsets, split_sizes
from shoal.sharding.split import Split
from shoal.strategies.tensor.layers.linear import dim_of


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


class Style(StrEnum):
    """How a layer is split."""

    COLUMN = "column"
    """A linear layer by its outputs."""
    ROW = "row"
    """A linear layer by its inputs; the ranks' results are summed."""
    VOCABULARY = "vocabulary"
    """An embedding by its rows."""
    HEADS = "heads"
    """`nn.MultiheadAttention`, or a table with a column for each head, by heads."""


_ALIASES = {"colwise": Style.COLUMN, "rowwise": Style.ROW, "vocab": Style.VOCABULARY}


def parse_style(text: str) -> Style | None:
    """What users and Hugging Face call a split; None for what is none."""
    return {**_ALIASES, **{style.value: style for style in Style}}.get(text)


@dataclass(frozen=True)
class Layer:
    """One layer that is split.

    Attributes:
        is_alone: No partner takes its part, or hands it one: outputs of columns are joined,
            inputs of rows are cut.
        gives_logits: Whether it gives a number for each token of a vocabulary.
    """

    name: str
    style: Style
    cut: Cut
    is_alone: bool = False
    gives_logits: bool = False


@dataclass(frozen=True)
class SplitBlock:
    """Layers between which activations are split.

    Attributes:
        layers: Columns and their row.
        adjustments: Numbers that modules keep, such as how many heads they have, and what becomes
            of them: the module, the attribute, its cut.
        partial: Parameters in between that every rank has whole: each rank's gradient comes from
            its part of the activations only, so they are summed.
        heads: How many heads there are and who has which; for attention.
        inside: Modules in between: they work on parts of activations and must not be split.
        drops: Whether a trial found that something of the split activations is dropped in
            training; where a user's plan cannot be tried, it may be.
    """

    name: str
    layers: tuple[Layer, ...]
    adjustments: tuple[tuple[str, str, Cut], ...] = ()
    partial: tuple[str, ...] = ()
    heads: Cut | None = None
    inside: tuple[str, ...] = ()
    drops: bool = False


def alone(name: str, style: Style, size: int, *, gives_logits: bool = False) -> SplitBlock:
    """A block of one layer, which takes and gives what is whole."""
    return SplitBlock(name, (Layer(name, style, Cut.of(size), True, gives_logits),))


@dataclass
class TensorPlan:
    """What is split; whatever is not in here every rank has whole.

    Example:
        >>> model = shoal.as_distributed(model, strategy="tensor")
        >>> print(model.plan)
    """

    num_ranks: int
    blocks: list[SplitBlock] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    """Why something that might have been split is not, or is not split in the best way."""
    whole: str = ""
    """What every rank has all of."""

    @property
    def layers(self) -> list[Layer]:
        """All of them."""
        return [layer for block in self.blocks for layer in block.layers]

    def __str__(self) -> str:
        """A table: a line for each layer, equal neighbours of a stack together."""
        rows: list[tuple[str, ...]] = [("layer", "split", "by", "each rank's part")]
        rows += _merged(self._row(layer) for layer in self.layers)
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        head = f"tensor parallel over {self.num_ranks} ranks: {len(self.layers)} layers split"
        named = {name or "the model": text for name, text in self.notes.items()}
        notes = [f"note: {' '.join(row)}" for row in _merged(named.items())]
        if self.whole:
            notes.append(f"whole on every rank: {self.whole}")
        return "\n".join([head, *lines, *notes])

    def _row(self, layer: Layer) -> tuple[str, str, str, str]:
        sizes = [layer.cut.length(rank, self.num_ranks) for rank in range(self.num_ranks)]
        parts = str(sizes[0]) if len(set(sizes)) == 1 else "/".join(map(str, sizes))
        sections = {section.unit for section in layer.cut.sections}
        units = "" if sections == {1} else f" in units of {max(sections)}"
        ways = {Style.COLUMN: "outputs joined", Style.ROW: "inputs cut"}
        how = ways.get(layer.style, "alone") if layer.is_alone else ""
        return layer.name, layer.style.value, how, f"{parts} of {layer.cut.size}{units}"


def starred(name: str) -> str:
    """A name with stars for its numbers: the same for the like of a stack."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _merged(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows whose names differ in numbers only become one, with a star for the number."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        found.setdefault((starred(name), *rest), []).append(name)
    return [
        (f"{pattern} ({len(names)})" if len(names) > 1 else names[0], *rest)
        for (pattern, *rest), names in found.items()
    ]


def parameter_splits(
    module: nn.Module, layer: Layer, num_ranks: int
) -> dict[str, tuple[Split, ...]]:
    """Every rank's part of each of a layer's parameters that are split, by their own names."""
    if isinstance(module, nn.MultiheadAttention):
        return _attention_splits(module, num_ranks)
    weight: Tensor = module.weight  # type: ignore[assignment]
    if isinstance(module, nn.Embedding):
        dim = 0 if layer.style is Style.VOCABULARY else 1
        return {"weight": layer.cut.splits(weight.shape, dim, num_ranks)}
    is_column = layer.style is Style.COLUMN
    dim = dim_of(module, outputs=is_column)
    splits = {"weight": layer.cut.splits(weight.shape, dim, num_ranks)}
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    if is_column and bias is not None:
        splits["bias"] = layer.cut.splits(bias.shape, 0, num_ranks)
    return splits


def _attention_splits(
    attention: nn.MultiheadAttention, num_ranks: int
) -> dict[str, tuple[Split, ...]]:
    width, size = attention.embed_dim, attention.head_dim
    one, three = Cut.of(width, size), Cut.of(3 * width, size, 3)
    by_name = {
        "in_proj_weight": (three, 0), "in_proj_bias": (three, 0),
        "q_proj_weight": (one, 0), "k_proj_weight": (one, 0), "v_proj_weight": (one, 0),
        "bias_k": (one, 2), "bias_v": (one, 2), "out_proj.weight": (one, 1),
    }  # fmt: skip
    own = dict(attention.named_parameters())
    return {
        name: cut.splits(own[name].shape, dim, num_ranks)
        for name, (cut, dim) in by_name.items()
        if name in own
    }


def all_splits(
    module: nn.Module, plan: TensorPlan
) -> Iterator[tuple[SplitBlock, str, tuple[Split, ...]]]:
    """The full name of every parameter that a plan splits, with every rank's part."""
    for block in plan.blocks:
        for layer in block.layers:
            part = module.get_submodule(layer.name)
            for key, splits in parameter_splits(part, layer, plan.num_ranks).items():
                yield block, join_names(layer.name, key), splits


def describe_rest(module: nn.Module, plan: TensorPlan) -> str:
    """How much of a model every rank has all of, and where most of that is."""
    split = {id(module.get_parameter(name)) for _, name, _ in all_splits(module, plan)}
    sizes: Counter[str] = Counter()
    for name, parameter in module.named_parameters():
        if id(parameter) not in split:
            sizes[starred(name)] += parameter.numel()
    total = sum(parameter.numel() for parameter in module.parameters())
    if not sizes.total():
        return ""
    largest = ", ".join(name for name, _ in sizes.most_common(3))
    return f"{sizes.total() / total:.1%} of {total} elements, most of it in {largest}"


def drop_contradictions(module: nn.Module, plan: TensorPlan) -> None:
    """Takes blocks out that share a parameter with modules that need it otherwise."""
    while (odd := find_contradiction(module, plan)) is not None:
        block, name = odd
        plan.blocks.remove(block)
        plan.notes[block.name] = f"stays whole: {name} is used elsewhere too, in another way"


def find_contradiction(module: nn.Module, plan: TensorPlan) -> tuple[SplitBlock, str] | None:
    """A block and its parameter that other modules have too and need otherwise."""
    owners: dict[int, set[tuple[int, str]]] = {}
    for part in module.modules():
        for key, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), set()).add((id(part), key))
    found: dict[int, list[tuple[SplitBlock, str, tuple[Split, ...]]]] = {}
    for block, name, splits in all_splits(module, plan):
        found.setdefault(id(module.get_parameter(name)), []).append((block, name, splits))
    for identity, uses in found.items():
        paths = [name.rpartition(".") for _, name, _ in uses]
        known = {(id(module.get_submodule(owner)), key) for owner, _, key in paths}
        if owners[identity] != known or len({splits for _, _, splits in uses}) > 1:
            return uses[-1][0], uses[-1][1]
    return None


def join_names(block: str, path: str) -> str:
    """A full name."""
    return ".".join(part for part in (block, path) if part)
