"""Hooks on parameters that tell when their gradients have arrived."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor, nn

from shoal.strategies.gradients.group_gradients import GroupGradients
from shoal.torch_internals.optimizers import IN_BACKWARD_OPTIMIZERS
from shoal.torch_internals.tensors import hooks_after_gradient

# Where torch's `_apply_optimizer_in_backward` leaves the optimizers of a parameter.


class Arrivals:
    """The hooks of one engine."""

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        """``tell``: a method that is given a parameter's group and its index there."""
        # Python's collector does not follow references from a parameter to its hooks.
        self._tell = weakref.WeakMethod(tell)
        self._hooks: list[tuple[MutableMapping[int, Any], int, dict[str, Any]]] = []
        self.are_stepped = False
        """Whether an optimizer steps some parameters as their gradients arrive."""

    def watch(self, gradients: GroupGradients) -> list[Any]:
        """Hangs a hook on each parameter of a group that may ever have a gradient."""
        return [
            self._hang_on(parameter, gradients.group.index, index)
            for index, parameter in enumerate(gradients.group.parameters)
            if parameter.is_floating_point() or parameter.is_complex()
        ]

    def _hang_on(self, parameter: nn.Parameter, group: int, index: int) -> Any:
        was_trainable = parameter.requires_grad
        # A hook can only be hung on a parameter that is trainable, and it may become so later.
        parameter.requires_grad_(True)
        owner = self._tell

        def arrived(_: Tensor) -> None:
            if (tell := owner()) is not None:
                tell(group, index)

        arrived.owner = owner  # type: ignore[attr-defined]
        handle = parameter.register_post_accumulate_grad_hook(arrived)
        self._hooks.append((hooks_after_gradient(parameter), handle.id, vars(parameter)))
        parameter.requires_grad_(was_trainable)
        return handle

    def run_last(self) -> None:
        """Puts our hooks behind those of users, which see gradients before they are collected."""
        self.are_stepped = False
        for hooks, own, attributes in self._hooks:
            if IN_BACKWARD_OPTIMIZERS in attributes:
                self.are_stepped = True
            if len(hooks) > 1 and next(reversed(hooks)) != own:
                hooks[own] = hooks.pop(own)  # autograd does not see what move_to_end does


def is_watched(parameter: nn.Parameter) -> bool:
    """Whether the hook of an engine that still exists is on it."""
    hooks = hooks_after_gradient(parameter)
    owners = [getattr(hook, "owner", None) for hook in hooks.values()]
    return any(owner is not None and owner() is not None for owner in owners)
