"""Which of torch's kernels makes a step: the fused one, where the user left the choice to torch.

On a CPU torch's own choice is a dozen small operations on each tensor in turn. The fused kernel
computes the same in one pass, two to four times as fast where it was measured, and rounds some
elements differently in the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Adam, AdamW, Optimizer

from shoal.torch_internals.trees import tree_leaves

# Exactly these: what a subclass computes is its own affair. SGD's fused kernel fails when some
# parameters get their first gradient later than others.
_HAVE_FUSED = (Adam, AdamW, Adagrad)
# With fewer bits the plain kernel rounds after every operation, which is more than a last bit.
_WIDE = (torch.float32, torch.float64)


def fused_where_free(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Steps inside of it use fused kernels unless ``fused`` or ``foreach`` was chosen."""
    groups = [group for group in optimizer.param_groups if _is_free(optimizer, group)]
    return _fusing(groups, inside=True, outside=None)


def unfused_on_cpu(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Steps inside of it use no fused kernels on CPUs, also if the user chose them."""
    groups = [
        group
        for group in optimizer.param_groups
        if group.get("fused") and all(each.is_cpu for each in group["params"])
    ]
    return _fusing(groups, inside=False, outside=True)


@contextmanager
def _fusing(groups: list[dict[str, Any]], *, inside: bool, outside: bool | None) -> Iterator[None]:
    for group in groups:
        group["fused"] = inside
    try:
        yield
    finally:
        for group in groups:
            if group["fused"] is inside:  # a hook may have changed it meanwhile
                group["fused"] = outside


def is_one_pass(optimizer: Optimizer) -> bool:
    """Whether a step goes over the memory once, if it may be fused where the user left it open."""
    return all(group.get("fused") or _is_free(optimizer, group) for group in optimizer.param_groups)


def _is_free(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    options = {name: value for name, value in group.items() if name != "params"}
    return (
        type(optimizer) in _HAVE_FUSED
        and options["fused"] is options["foreach"] is None
        and not options["differentiable"]
        and not any(isinstance(value, Tensor) for value in tree_leaves(options))
        and all(_fits(each, optimizer.state.get(each, {})) for each in group["params"])
    )


def _fits(parameter: Tensor, state: dict[str, Any]) -> bool:
    """Fused kernels count steps in float32; others in the default dtype of when they began."""
    count = state.get("step")
    counts_in_float = count is None or (isinstance(count, Tensor) and count.dtype is torch.float32)
    return parameter.is_cpu and parameter.dtype in _WIDE and counts_in_float
