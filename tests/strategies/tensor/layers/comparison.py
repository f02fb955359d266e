"""A split copy of a module beside the whole one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.strategies.tensor import parallelize
from strategies.models import random_numbers

RANKS = 3


def run(fn: Any, *args: Any, ranks: int = RANKS) -> list[Any]:
    return shoal.run(fn, ranks, "memory", args=args, timeout=40)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def both(make: Any, call: Any, plan: Any = None) -> tuple[Any, Any]:
    """What a whole module and its split copy give: results, and whole gradients."""
    torch.manual_seed(0)
    whole, split = make().double(), make().double()
    split.load_state_dict(whole.state_dict())
    parts = parallelize(split, shoal.world().backend, plan)
    results = []
    for module in (whole, split):
        outputs = call(module)
        sum((out * (1 + torch.arange(out.numel()).view(out.shape) % 5)).sum() for out in outputs
            if out is not None).backward()  # fmt: skip
        results.append([None if out is None else out.detach() for out in outputs])
    found = {
        name: parts.join(name, gradient) if name in parts.splits and gradient is not None
        else gradient
        for name, gradient in gradients(split).items()
    }  # fmt: skip
    return (results[0], gradients(whole)), (results[1], found)


def assert_same(pair: tuple[Any, Any]) -> None:
    (outputs, wanted), (found, gradients) = pair
    for one, other in zip(outputs, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=0, atol=1e-12)
    for name, gradient in wanted.items():
        if gradient is None:
            assert gradients[name] is None, name
        else:
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-11, msg=name)


def inputs(*shape: int) -> Tensor:
    return random_numbers(1, *shape).requires_grad_()
