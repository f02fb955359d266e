"""Groups that are not freed while a module runs that may reference a view of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shoal.strategies.engine.flat_group import FlatGroup
from shoal.torch_internals.modules import is_compiled


def pin_parents(root: nn.Module, group_of: Callable[[nn.Parameter], FlatGroup]) -> list[Any]:
    """A module with parameters and children may keep a view of a parameter across a child."""
    handles = []
    for module in root.modules():
        own = {group.index: group for group in map(group_of, module.parameters(recurse=False))}
        if own and any(True for _ in module.children()):
            groups = list(own.values())
            handles.append(module.register_forward_pre_hook(_pinning(groups, 1)))
            handles.append(module.register_forward_hook(_pinning(groups, -1), always_call=True))
    return handles


def pin_compiled(
    root: nn.Module,
    group_of: Callable[[nn.Parameter], FlatGroup],
    need: Callable[[FlatGroup], None],
) -> list[Any]:
    """What `torch.compile` traces is gathered before and not freed meanwhile."""
    handles = []
    for module in root.modules():
        if is_compiled(module):
            groups = list({g.index: g for g in map(group_of, module.parameters())}.values())
            begin, end = _gathering(groups, need), torch.compiler.disable(_pinning(groups, -1))
            handles.append(module.register_forward_pre_hook(torch.compiler.disable(begin)))
            handles.append(module.register_forward_hook(end, always_call=True))
    return handles


def _gathering(groups: Sequence[FlatGroup], need: Callable[[FlatGroup], None]) -> Any:
    pin = _pinning(groups, 1)

    def hook(*_: object) -> None:
        pin()
        for group in groups:
            need(group)

    return hook


def _pinning(groups: Sequence[FlatGroup], step: int) -> Any:
    def hook(*_: object) -> None:
        for group in groups:
            group.pins += step

    return hook
