"""Embeddings of which each rank has some rows, or some columns."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm import differentiable as collective
from shoal.strategies.tensor.group import TensorGroup
from shoal.strategies.tensor.plan.cut import Cut


def may_split_rows(embedding: nn.Module) -> bool:
    """Whether looking up some rows is independent of the others."""
    return (
        isinstance(embedding, nn.Embedding)
        and isinstance(embedding._parameters.get("weight"), nn.Parameter)
        and _looks_up(type(embedding))
        and embedding.max_norm is None
        and not embedding.scale_grad_by_freq
    )


def _looks_up(kind: type[nn.Embedding]) -> bool:
    """Whether it leaves the looking up to `nn.Embedding`, whatever it does with the result."""
    forward = kind.forward
    return forward is nn.Embedding.forward or "super" in forward.__code__.co_names


class VocabularyEmbedding(nn.Embedding):
    """Each rank looks up the tokens whose rows it has; the others' are zero, and all are summed."""

    _group: TensorGroup
    _first: int
    _own_padding: int | None

    def forward(self, input: Tensor) -> Tensor:
        """The same embeddings on every rank."""
        self._group.check()
        local = input - self._first
        is_elsewhere = (local < 0) | (local >= len(self.weight))
        # Whoever has no rows at all still takes part in the sum.
        rows = self.weight if len(self.weight) else self.weight.new_zeros(1, self.embedding_dim)
        found = F.embedding(
            local.masked_fill(is_elsewhere, 0), rows, self._own_padding, sparse=self.sparse
        )
        found = found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return collective.reduce(found, self._group.backend)


def make_vocabulary(embedding: nn.Embedding, group: TensorGroup, cut: Cut) -> None:
    """Turns an embedding, whose rows are split already, into a vocabulary-parallel one."""
    ((first, stop),) = cut.runs(group.backend.rank, group.backend.size)
    _check_tokens(embedding, cut.size)
    padding = embedding.padding_idx
    is_here = padding is not None and first <= padding < stop
    kind: Any = type(embedding)
    embedding.__class__ = _kind(kind)
    own_padding = padding - first if is_here and padding is not None else None
    vars(embedding).update(_group=group, _first=first, _own_padding=own_padding)


@functools.cache
def _kind(base: Any) -> Any:
    """A subclass of the user's class for which `super().forward` communicates."""
    if base is nn.Embedding:
        return VocabularyEmbedding
    return type(f"Vocabulary{base.__name__}", (base, VocabularyEmbedding), {})


def _check_tokens(embedding: nn.Embedding, size: int) -> None:
    """A token that no rank has would be zero everywhere, where plain torch raises."""

    def check(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        tokens = inputs[0]
        if tokens.is_cpu and tokens.numel():
            low, high = torch.aminmax(tokens)
            if low < 0 or high >= size:
                raise IndexError(
                    f"tokens must be from 0 to {size - 1}; got some from {int(low)} to {int(high)}"
                )

    embedding.register_forward_pre_hook(check)


def make_head_table(embedding: nn.Embedding, group: TensorGroup, cut: Cut) -> None:
    """An embedding with a column for each head: the rank has its heads' columns, that is all."""
    embedding.embedding_dim = cut.length(group.backend.rank, group.backend.size)
