"""Cross entropy of logits of which each rank has some classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm import Backend
from shoal.comm.operation.partition import offsets, split_sizes


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
    losses: Tensor = _CrossEntropy.apply(flat, wanted, group, first, ignore_index)
    return losses.sum() / (wanted != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any) -> Any: ...

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
