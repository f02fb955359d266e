"""What `model(inputs)` returns: on every rank, and without a backward.

The graph behind an output is spread over the ranks, so it cannot be differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.errors import ShoalError
from shoal.strategies.pipeline.learning.unit_results import example_of, structure_of
from shoal.torch_internals.trees import tree_flatten, tree_map, tree_unflatten


def spread(output: Any, group: Backend, *, is_here: bool) -> Any:
    """The last stage's output on every rank; ``is_here`` on the rank that has it."""
    root = group.size - 1
    if not is_here:
        leaves, example = group.broadcast_object(root=root)
        structure = structure_of(example)
    else:
        found, structure = tree_flatten(output)
        leaves = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in found]
        group.broadcast_object((leaves, example_of(structure, found)), root=root)
    values = []
    for number, leaf in enumerate(leaves):
        if leaf is not None:
            values.append(leaf[0])
            continue
        own = found[number].detach().clone() if is_here else None
        values.append(group.broadcast(own, root=root))
    return tree_unflatten(values, structure)


class _NoBackward(torch.autograd.Function):
    """The identity; its backward is an error that says what to do instead."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        """``anchor`` requires gradients, so that backward comes here."""
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuses."""
        raise ShoalError(
            "a pipelined model cannot be trained by loss.backward(), because its graph is spread "
            "over the ranks and its micro-batches must alternate: call "
            "model.train_step(inputs, targets, loss_fn) for forward and backward, on every rank"
        )


def without_backward(output: Any) -> Any:
    """The same values; backward on them raises an error that names ``train_step``."""
    anchor = torch.zeros((), requires_grad=True)

    def guard(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        return _NoBackward.apply(leaf, anchor) if is_float else leaf  # type: ignore[no-untyped-call]

    return tree_map(guard, output)
