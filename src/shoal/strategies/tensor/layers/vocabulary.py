"""Embeddings of which each rank has some rows, or some columns."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shoal.comm import Backend
from shoal.comm import differentiable as collective
from shoal.comm.operation.partition import offsets, split_sizes
from shoal.strategies.tensor.plan.tensor_plan import Cut
from shoal.strategies.tensor.region import TensorGroup
from shoal.torch_internals.modules import parameters_of


def may_split_rows(embedding: nn.Module) -> bool:
    """Whether looking up some rows is independent of the others."""
    forward: Any = getattr(type(embedding), "forward", None)  # TorchScript's classes have none
    return (
        isinstance(embedding, nn.Embedding)
        and isinstance(parameters_of(embedding).get("weight"), nn.Parameter)
        and "forward" not in vars(embedding)
        # It leaves the looking up to `nn.Embedding`, whatever it does with the result.
        and (forward is nn.Embedding.forward or "super" in forward.__code__.co_names)
        and embedding.max_norm is None
        and not embedding.scale_grad_by_freq
    )


class VocabularyEmbedding(nn.Embedding):
    """Each rank looks up the tokens whose rows it has; the others' are zero, and all are summed."""

    _group: TensorGroup
    _first: int
    _own_padding: int | None

    def forward(self, input: Tensor) -> Tensor:
        """The same embeddings on every rank."""
        self._group.check()
        rows: Tensor = self.weight
        with self._group.guard.own_forward(rows, input):
            local = input - self._first
            is_on_other_rank = (local < 0) | (local >= len(rows))
            if not len(rows):  # a rank without rows still takes part in the sum
                rows = rows.new_zeros(1, self.embedding_dim)
            indices = local.masked_fill(is_on_other_rank, 0)
            found = F.embedding(indices, rows, self._own_padding, sparse=self.sparse)
            found = found.masked_fill(is_on_other_rank.unsqueeze(-1), 0.0)
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


def vocabulary_cross_entropy(
    logits: Tensor, targets: Tensor, group: Backend, num_classes: int, ignore_index: int = -100
) -> Tensor:
    """The mean of `torch.nn.functional.cross_entropy`, the same on every rank of the group.

    The whole logits are never put together: per token two numbers travel instead of all classes.

    Args:
        logits: This rank's classes, in the last dimension.
        targets: The classes by number, among all of them; of the shape of logits without the last.
        group: The ranks that have the other classes.
        num_classes: All of them.
        ignore_index: Targets of this number do not count.

    Example:
        >>> loss = vocabulary_cross_entropy(logits, targets, model.tensor_group, 50257)
    """
    edges = offsets(split_sizes(num_classes, group.size))
    first, stop = edges[group.rank : group.rank + 2]
    if logits.shape[-1] != stop - first:
        raise ValueError(
            f"rank {group.rank} of {group.size} has {stop - first} of {num_classes} classes; got "
            f"logits with {logits.shape[-1]}"
        )
    flat, wanted = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    losses: Tensor = _CrossEntropy.apply(flat, wanted, group, first, ignore_index)  # type: ignore[no-untyped-call]
    return losses.sum() / (wanted != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: Backend, first: int, ignore_index: int
    ) -> Tensor:
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        largest = wide.new_full((len(wide),), -torch.inf)
        if wide.shape[1]:
            largest = wide.amax(1)
        group.all_reduce(largest, "max")
        exponentials = (wide - largest[:, None]).exp()
        local = targets - first
        is_here = (local >= 0) & (local < wide.shape[1]) & (targets != ignore_index)
        rows = is_here.nonzero().squeeze(1)
        chosen = wide.new_zeros(len(wide))
        chosen[rows] = wide[rows, local[rows]] - largest[rows]
        sums = torch.stack([exponentials.sum(1), chosen])
        total, chosen = group.all_reduce(sums).unbind()
        ctx.save_for_backward(exponentials / total[:, None], rows, local, targets)
        ctx.dtype, ctx.ignore_index = logits.dtype, ignore_index
        losses: Tensor = (total.log() - chosen).masked_fill(targets == ignore_index, 0.0)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, rows, local, targets = ctx.saved_tensors
        result = probabilities.clone()
        result[rows, local[rows]] -= 1
        scale = gradients[0].masked_fill(targets == ctx.ignore_index, 0.0)
        return (result * scale[:, None]).to(ctx.dtype), None, None, None, None
