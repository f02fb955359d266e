"""What might be split: blocks by the names or sizes of their layers, and vocabularies."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from torch import nn
from torch.nn.modules import activation

from shoal.strategies.tensor.layers.linear import is_linear, sizes_of
from shoal.strategies.tensor.layers.vocabulary import may_split_rows
from shoal.strategies.tensor.plan.known_names import ATTENTION, FEED_FORWARD, OUTPUTS, Pattern
from shoal.strategies.tensor.plan.obstacles import has_own_forward, hook_reads_weights
from shoal.strategies.tensor.plan.tensor_plan import SplitBlock, Style, alone, join_names
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
        block: The module they are in, by name; the layers' names are relative to it.
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

    @property
    def paths(self) -> tuple[str, ...]:
        """All layers, relative to the block."""
        return (*self.columns, self.row)

    @property
    def names(self) -> list[str]:
        """All layers, by their full names."""
        return [join_names(self.block, path) for path in self.paths]


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
            if first and sizes_of(module.get_submodule(first))[1] == sizes_of(child)[0]:
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
        for pattern, text in plan.items() if isinstance(plan, dict) else ():
            style = _HUGGING_FACE_STYLES.get(str(text))
            for name, _ in part.named_modules():
                if style is not None and fnmatchcase(name, pattern):
                    found[join_names(prefix, name)] = style
    return found


def find_vocabularies(
    module: nn.Module, taken: Container[int], certified: Mapping[str, Style], num_ranks: int
) -> Iterator[SplitBlock]:
    """Embeddings and heads of one vocabulary.

    An embedding without a head stays whole, unless the model itself says otherwise: many use its
    weight as the head, without a layer that would know that it is split.
    """
    embeddings = {n: p for n, p in module.named_modules() if isinstance(p, nn.Embedding)}
    tied = {id(part.weight) for part in embeddings.values()}
    heads = {
        name: sizes_of(part)[1]
        for name, part in module.named_modules()
        if is_linear(part)
        and id(part) not in taken
        and (id(part.weight) in tied or name.rpartition(".")[2] in OUTPUTS)
    }
    for size in sorted({part.num_embeddings for part in embeddings.values()}):
        own = [name for name, num_outputs in heads.items() if num_outputs == size]
        if size < num_ranks:
            continue
        for name, part in embeddings.items():
            is_known = bool(own) or certified.get(name) is Style.VOCABULARY
            if is_known and part.num_embeddings == size and may_split_rows(part):
                yield alone(name, Style.VOCABULARY, size)
        for name in own:
            yield alone(name, Style.COLUMN, size, gives_logits=True)
