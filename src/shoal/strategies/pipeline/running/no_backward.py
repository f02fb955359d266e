"""Outputs that cannot be differentiated: the graph they came from is spread over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shoal.errors import ShoalError


class _NoBackward(torch.autograd.Function):
    """The identity; its backward says what to do instead."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        """``anchor`` wants gradients, so that somebody will ask."""
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refused."""
        raise ShoalError(
            "a pipelined model cannot be trained by loss.backward(), because its graph is spread "
            "over the ranks and its micro-batches must alternate: call "
            "model.train_step(inputs, targets, loss_fn) for forward and backward, on every rank"
        )


def without_backward(output: Any) -> Any:
    """The same values; whoever calls backward on them is told about ``train_step``."""
    anchor = torch.zeros((), requires_grad=True)

    def guard(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        return _NoBackward.apply(leaf, anchor) if is_float else leaf  # type: ignore[no-untyped-call]

    return tree_map(guard, output)
