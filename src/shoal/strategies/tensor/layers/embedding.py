"""Embeddings of which each rank has some rows, or some columns."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm import differentiable as collective
from shoal.strategies.tensor.plan.cut import Cut
from shoal.strategies.tensor.region import TensorGroup
from shoal.torch_internals.modules import parameters_of


def may_split_rows(embedding: nn.Module) -> bool:
    """Whether looking up some rows is independent of the others."""
    return (
        isinstance(embedding, nn.Embedding)
        and isinstance(parameters_of(embedding).get("weight"), nn.Parameter)
        and "forward" not in vars(embedding)
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
        rows = self.weight
        with self._group.guard.own_forward(rows, input):
            found = self._own_rows(input, rows)
        return collective.reduce(found, self._group.backend)

    def _own_rows(self, tokens: Tensor, rows: Tensor) -> Tensor:
        local = tokens - self._first
        is_on_other_rank = (local < 0) | (local >= len(rows))
        if not len(rows):  # a rank without rows still takes part in the sum
            rows = rows.new_zeros(1, self.embedding_dim)
        indices = local.masked_fill(is_on_other_rank, 0)
        found = F.embedding(indices, rows, self._own_padding, sparse=self.sparse)
        return found.masked_fill(is_on_other_rank.unsqueeze(-1), 0.0)


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


class HeadTable(nn.Embedding):
    """An embedding with a column for each head; the rank has the columns of its heads."""

    _group: TensorGroup

    def forward(self, input: Tensor) -> Tensor:
        """The columns of this rank's heads."""
        with self._group.guard.own_forward(self.weight, input):
            return super().forward(input)


def make_head_table(embedding: nn.Embedding, group: TensorGroup, cut: Cut) -> None:
    """Turns an embedding, whose columns are split already, into a `HeadTable`."""
    embedding.__class__ = HeadTable
    vars(embedding)["_group"] = group
    embedding.embedding_dim = cut.length(group.backend.rank, group.backend.size)
