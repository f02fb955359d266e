"""The plan: which layers are split, how, and why others are not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.strategies.tensor.plan.cut import Cut


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
    known = {**_ALIASES, **{style.value: style for style in Style}}
    return known.get(text)


@dataclass(frozen=True)
class Layer:
    """One layer that is split.

    Attributes:
        name: The module's.
        style: How it is split.
        cut: How the dimension is shared out.
        is_alone: No partner takes its part, or hands it one: outputs of columns are joined,
            inputs of rows are cut.
        block: The module that it and its partners are in; they share what they receive.
        gives_logits: Whether it gives a number for each token of a vocabulary.
    """

    name: str
    style: Style
    cut: Cut
    is_alone: bool = False
    block: str = ""
    gives_logits: bool = False


@dataclass(frozen=True)
class Adjustment:
    """A number that a module keeps, such as how many heads it has, and what becomes of it."""

    module: str
    attribute: str
    cut: Cut


@dataclass(frozen=True)
class SplitBlock:
    """Layers between which activations are split.

    Attributes:
        name: The module they are in.
        layers: Columns and their row.
        adjustments: What the modules between them must be told.
        partial: Parameters in between that every rank has whole: each rank's gradient comes from
            its part of the activations only, so they are summed.
        heads: How many heads there are and who has which; for attention.
        inside: Modules in between: they work on parts of activations and must not be split.
        drops: Whether a trial found that something of the split activations is dropped in
            training; where a user's plan cannot be tried, it may be.
    """

    name: str
    layers: tuple[Layer, ...]
    adjustments: tuple[Adjustment, ...] = ()
    partial: tuple[str, ...] = ()
    heads: Cut | None = None
    inside: tuple[str, ...] = ()
    drops: bool = False


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
        how = "alone" if layer.is_alone else ""
        if layer.is_alone and layer.style is Style.COLUMN:
            how = "outputs joined"
        elif layer.is_alone and layer.style is Style.ROW:
            how = "inputs cut"
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
