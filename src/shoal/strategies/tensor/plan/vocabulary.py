"""Embeddings of tokens, and the layers that give a number for each token."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from torch import nn

from shoal.strategies.tensor.layers.embedding import may_split_rows
from shoal.strategies.tensor.layers.linear import is_linear, sizes_of
from shoal.strategies.tensor.plan.cut import Cut
from shoal.strategies.tensor.plan.known_names import OUTPUTS
from shoal.strategies.tensor.plan.tensor_plan import Layer, SplitBlock, Style


def find_vocabularies(
    module: nn.Module, taken: Container[int], certified: Mapping[str, Style], num_ranks: int
) -> Iterator[SplitBlock]:
    """Embeddings and heads of one vocabulary.

    An embedding without a head stays whole, unless the model itself says otherwise: many use its
    weight as the head, without a layer that would know that it is split.
    """
    embeddings = {n: p for n, p in module.named_modules() if isinstance(p, nn.Embedding)}
    sizes = {part.num_embeddings for part in embeddings.values()}
    heads = {
        name: part
        for name, part in module.named_modules()
        if is_linear(part) and id(part) not in taken and sizes_of(part)[1] in sizes
    }
    tied = {id(part.weight) for part in embeddings.values()}
    for size in sorted(sizes):
        own = {
            name: head
            for name, head in heads.items()
            if sizes_of(head)[1] == size
            and (id(head.weight) in tied or name.rpartition(".")[2] in OUTPUTS)
        }
        if size < num_ranks:
            continue
        for name, part in embeddings.items():
            is_known = bool(own) or certified.get(name) is Style.VOCABULARY
            if is_known and part.num_embeddings == size and may_split_rows(part):
                yield _alone(name, Style.VOCABULARY, size)
        for name in own:
            yield _alone(name, Style.COLUMN, size)


def _alone(name: str, style: Style, size: int) -> SplitBlock:
    gives_logits = style is Style.COLUMN
    return SplitBlock(name, (Layer(name, style, Cut.of(size), True, name, gives_logits),))
