"""One training step under any strategy: how inputs become a call, and batches are weighted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm import Backend
from shoal.torch_internals.trees import tree_leaves


def call_module(model: Callable[..., Any], module: nn.Module, inputs: Any) -> Any:
    """Calls the model: a tuple is expanded, a dict only if its keys name forward's parameters."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    if isinstance(inputs, Mapping) and _names_parameters(module, inputs):
        return model(**inputs)
    return model(inputs)


def _names_parameters(module: nn.Module, inputs: Mapping[Any, Any]) -> bool:
    known = inspect.signature(module.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    named = [key for key in inputs if key in known]
    if takes_any:
        return bool(named) and all(isinstance(key, str) for key in inputs)
    return len(named) == len(inputs) and bool(inputs)


def count_items(inputs: Any) -> int:
    """The items of a local batch: the first dimension of the first tensor that has one."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    return 1


def weighted_backward(loss: Any, output: Any, weight: float, backend: Backend) -> Tensor:
    """Backward of this rank's share of the mean over the global batch; returns that mean.

    Gradients are averaged over ranks with equal weights, so a rank's loss is scaled by how its
    weight compares to the average one.
    """
    if not isinstance(loss, Tensor) or loss.dim():
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"the loss must be one number, the mean over the local batch, as a tensor without "
            f"dimensions; got {found}"
        )
    value = loss.detach().double() if weight else torch.zeros((), dtype=torch.float64)
    sums = torch.stack([value.to(loss.device) * weight, loss.new_tensor(weight).double()])
    total, weights = backend.all_reduce(sums).unbind()
    if weight:
        (loss * (weight * backend.size / weights).to(loss.dtype)).backward()
    else:
        nothing(output).backward()
    mean: Tensor = (total / weights).to(loss.dtype)
    return mean


def nothing(output: Any) -> Tensor:
    """A loss without gradient: a rank whose batch is empty still takes part in the pass."""
    tensors = [
        leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    return sum((tensor.sum() * 0 for tensor in tensors), start=torch.zeros(()))


LossFunction = Callable[[Any, Any], Tensor]
