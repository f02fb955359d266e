"""Blocks that might be split: found by the names of their layers, or by how their sizes fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from torch import nn
from torch.nn.modules import activation

from shoal.strategies.tensor.layers.linear import is_linear, sizes_of
from shoal.strategies.tensor.plan.known_names import ATTENTION, FEED_FORWARD, Pattern
from shoal.strategies.tensor.plan.source_code import has_own_forward, hook_reads_weights
from shoal.strategies.tensor.plan.tensor_plan import Style
from shoal.torch_internals.modules import hooks_of

_HUGGING_FACE_STYLES = {
    "colwise": Style.COLUMN,
    "colwise_gather_output": Style.COLUMN,
    "rowwise": Style.ROW,
    "embedding_rowwise": Style.VOCABULARY,
}
_NOT_BY_ELEMENT = (
    activation.Softmax, activation.Softmax2d, activation.LogSoftmax, activation.Softmin,
    activation.GLU, activation.MultiheadAttention, activation.PReLU, activation.RReLU,
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """Layers that might be split together.

    Attributes:
        block: The module they are in, by name.
        columns: Layers by name, relative to the block.
        row: The one that ends the region.
        may_attend: Whether there may be heads in between.
        is_named: Whether their names say what they are, not only their sizes.
        is_certain: Whether what is between them works element by element for sure, but for hooks.
        inside: What is between them, where that is known without a trial.
    """

    block: str
    columns: tuple[str, ...]
    row: str
    may_attend: bool = False
    is_named: bool = True
    is_certain: bool = False
    inside: tuple[str, ...] = ()


def find_candidates(name: str, module: nn.Module) -> Iterator[Candidate]:
    """Candidates whose block is this module, the likeliest first."""
    if isinstance(module, nn.Sequential):
        yield from _in_a_row(name, module)
        return
    for patterns, may_attend in ((ATTENTION, True), (FEED_FORWARD, False)):
        for pattern in patterns:
            yield from _named(name, module, pattern, may_attend)
    yield from _fitting(name, module)


def _in_a_row(name: str, module: nn.Sequential) -> Iterator[Candidate]:
    """Two linear layers of a sequence with nothing but activations and dropout between them."""
    kind = type(module)
    is_plain = kind.forward is nn.Sequential.forward and not has_own_forward(module)
    is_plain = is_plain and kind.__iter__ is nn.Sequential.__iter__
    is_certain = is_plain and not any(map(hook_reads_weights, hooks_of(module)))
    first: str | None = None
    inside: list[str] = []
    for key, child in module.named_children():
        if is_linear(child):
            if first is not None and _fits(module.get_submodule(first), child):
                yield Candidate(name, (first,), key, False, is_plain, is_certain, tuple(inside))
                first = None
            else:
                first = key
            inside = []
        elif _works_by_element(child):
            inside.append(key)
        else:
            first = None


def _works_by_element(module: nn.Module) -> bool:
    # Other kinds of dropout look at channels or at statistics, or draw in their own way.
    is_known = type(module) in (nn.Dropout, nn.Identity)
    is_activation = type(module).__module__ == activation.__name__
    return is_known or (is_activation and not isinstance(module, _NOT_BY_ELEMENT))


def _fits(column: nn.Module, row: nn.Module) -> bool:
    return sizes_of(column)[1] == sizes_of(row)[0]


def _named(name: str, module: nn.Module, pattern: Pattern, may_attend: bool) -> Iterator[Candidate]:
    columns, rows = pattern
    if not all(_is_linear_at(module, column) for column in columns):
        return
    for row in rows:
        if row not in columns and _is_linear_at(module, row):
            yield Candidate(name, columns, row, may_attend)
            return


def _is_linear_at(module: nn.Module, path: str) -> bool:
    for part in path.split("."):
        children = dict(module.named_children())
        if part not in children:
            return False
        module = children[part]
    return is_linear(module)


def _fitting(name: str, module: nn.Module) -> Iterator[Candidate]:
    """Linear layers of a module that may feed the last of them, or one the next."""
    linear = [key for key, child in module.named_children() if is_linear(child)]
    yield from _feeding_the_last(name, module, linear)
    for column, row in pairwise(linear):
        wide, narrow = module.get_submodule(column), module.get_submodule(row)
        widens = sizes_of(wide)[1] > max(sizes_of(wide)[0], sizes_of(narrow)[1])
        if widens and sizes_of(wide)[1] % sizes_of(narrow)[0] == 0:
            yield Candidate(name, (column,), row, is_named=False)


def _feeding_the_last(name: str, module: nn.Module, linear: list[str]) -> Iterator[Candidate]:
    if not 2 <= len(linear) <= 4:
        return
    *columns, row = linear
    inputs = {sizes_of(module.get_submodule(column))[0] for column in columns}
    outputs = [sizes_of(module.get_submodule(column))[1] for column in columns]
    width = sizes_of(module.get_submodule(row))[0]
    if len(inputs) > 1 or any(size % width for size in outputs[:1]):
        return
    may_attend = len(columns) == 3 or outputs[0] == 3 * width
    if may_attend or all(size in (width, 2 * width) for size in outputs):
        yield Candidate(name, tuple(columns), row, may_attend, is_named=False)


def certified(module: nn.Module) -> dict[str, Style]:
    """Layers that Hugging Face's own ``_tp_plan`` splits, in the styles that are known here."""
    found: dict[str, Style] = {}
    for prefix, part in module.named_modules():
        plan = getattr(part, "_tp_plan", None)
        if isinstance(plan, dict) and plan:
            names = [name for name, _ in part.named_modules()]
            for pattern, text in plan.items():
                style = _HUGGING_FACE_STYLES.get(str(text))
                if style is None:
                    continue
                for name in names:
                    if fnmatchcase(name, pattern):
                        found[f"{prefix}.{name}" if prefix else name] = style
    return found
