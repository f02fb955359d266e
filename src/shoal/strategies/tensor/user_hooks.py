"""Hooks that users hang on modules and parameters before a model is split.

[Note: hooks]
Between a column and its row a hook would be given a rank's part, and what it does with that is
beyond any trial: it may keep a statistic where nobody looks. So a region has no hooks in it. Its
layers are split each on its own instead, and then whatever goes through a module is whole again. A
hook of a parameter would be given a part of the gradient however the layer is split, and one that
reads weights a part of them: these layers stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from shoal.strategies.tensor.plan.source_code import hook_reads_weights
from shoal.torch_internals.modules import hooks_of
from shoal.torch_internals.tensors import hooks_after_gradient, hooks_before_gradient


def have_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether any of the modules has a hook; see [Note: hooks]."""
    return any(map(hooks_of, modules))


def inner_modules(block: nn.Module) -> list[nn.Module]:
    """All modules in a block, without the block itself."""
    return [part for part in block.modules() if part is not block]


def reason_to_stay_whole(layer: nn.Module) -> str | None:
    """Why a layer must not be split in any way; None if its hooks allow for it."""
    if any(hooks_before_gradient(p) or hooks_after_gradient(p) for p in layer.parameters()):
        return "its parameters have hooks, which would get parts of gradients"
    if any(type(p) is not nn.Parameter for p in layer.parameters()):
        return "its parameters have a class of their own"
    if have_reading_hooks(layer):
        return "it has a hook that reads weights, and would get parts"
    return None


def have_reading_hooks(module: nn.Module) -> bool:
    """Whether a hook of a module, or of one in it, uses weights itself."""
    return any(hook_reads_weights(hook) for part in module.modules() for hook in hooks_of(part))
