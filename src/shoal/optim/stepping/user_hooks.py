"""The hooks that users hung on an optimizer's steps, called once for the step of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

from shoal.errors import ShoalError
from shoal.torch_internals.optimizers import hooks_after_step, hooks_before_step


@contextlib.contextmanager
def users_hooks(
    optimizer: Optimizer,
    wrapped: Optimizer,
    closure: Callable[[], Any] | None,
    *,
    own: Callable[..., Any],
) -> Iterator[None]:
    """Around a step: users' hooks see the parameters, before and after, not what is stepped.

    Args:
        optimizer: The user's, which has the hooks.
        wrapped: What they are called with.
        closure: The argument of the step, if any.
        own: A hook that is not the user's, and stays.
    """
    before = hooks_before_step(optimizer)
    after = hooks_after_step(optimizer)
    others = {key: hook for key, hook in before.items() if hook != own}
    if not others and not after:
        yield
        return
    args: tuple[Any, ...] = () if closure is None else (closure,)
    for hook in others.values():
        if hook(wrapped, args, {}) is not None:
            raise ShoalError(
                "a hook before a step must not replace the step's arguments: there are several "
                "ranks that make the same step"
            )
    kept = dict(after)
    for key in others:
        del before[key]
    after.clear()
    try:
        yield
    finally:
        before.update(others)
        after.update(kept)
    for hook in kept.values():
        hook(wrapped, args, {})
