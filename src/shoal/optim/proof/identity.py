"""Optimizers that may know their parameters, and not only what is in them.

A step that goes by which parameter it has in hand (``p is self.first``, ``self.scales[id(p)]``), or
by what somebody has written on it (``p.lr_scale``), does something else with any stand-in. No
operation shows that, so such an optimizer is given the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

# What libraries write on parameters for purposes of their own, and what a wrapped model does.
_HARMLESS = {"_is_hf_initialized", "_group", "_appear", "_using"}
_OF_TORCH = {"param_groups", "state", "defaults"}


def telling_apart(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> str | None:
    """By what the optimizer could tell parameters apart, in words; None for nothing."""
    for parameter in parameters:
        written = vars(parameter).keys() - _HARMLESS
        if written:
            return f"its step may look at `{min(written)}`, which is written on a parameter"
    numbers = {id(parameter) for parameter in parameters}
    for name, value in vars(optimizer).items():
        if name not in _OF_TORCH and any(_names_one(leaf, numbers) for leaf in _leaves(value)):
            return f"its step may tell parameters apart by `{name}`"
    return None


def _leaves(value: Any) -> list[Any]:
    keys = list(value) if isinstance(value, dict) else []
    return [*tree_leaves(value), *keys]


def _names_one(leaf: Any, numbers: set[int]) -> bool:
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return leaf in numbers
    return id(leaf) in numbers
