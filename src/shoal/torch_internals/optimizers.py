"""Optimizers, gradient scalers and data loaders: what is called in a step, and what was read."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

# The attribute of a parameter whose optimizer steps in backward.
IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"
# The attribute of a loader that keeps its workers, which a copy of the loader must not share.
LOADER_READER = "_iterator"


def is_initialised(optimizer: Optimizer) -> bool:
    """Whether a class of the user's has called `Optimizer.__init__`."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def hooks_before_step(optimizer: Optimizer) -> MutableMapping[int, Any]:
    """What `register_step_pre_hook` has put on an optimizer; changing it changes the optimizer."""
    hooks: MutableMapping[int, Any] = optimizer._optimizer_step_pre_hooks
    return hooks


def hooks_after_step(optimizer: Optimizer) -> MutableMapping[int, Any]:
    """What `register_step_post_hook` has put on one."""
    hooks: MutableMapping[int, Any] = optimizer._optimizer_step_post_hooks
    return hooks


def has_own_step(optimizer: Optimizer) -> bool:
    """Whether ``step`` was replaced on the object, other than by a scheduler that counts steps."""
    step: Any = vars(optimizer).get("step")
    if getattr(step, "_wrapped_by_lr_sched", False):
        return step.__wrapped__ is not type(optimizer).step
    return step is not None


class UnscalingScaler(torch.amp.GradScaler):
    """A gradient scaler whose way to unscale gradients, and to find infinities, can be replaced."""

    def unscale_gradients(
        self, optimizer: Optimizer, inverse: Tensor, found: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiplies gradients by the inverse scale; a number above 0 for each device: infinite."""
        return super()._unscale_grads_(optimizer, inverse, found, allow_fp16)

    @property
    def scale_tensor(self) -> Tensor:
        """The scale, as a tensor that the host need not read."""
        assert self._scale is not None
        return self._scale

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self.unscale_gradients(optimizer, inv_scale, found_inf, allow_fp16)


def num_yielded(reader: Any) -> int:
    """How many batches a loader's iterator has handed out."""
    count: int = reader._num_yielded
    return count


def reads_ahead(reader: Any) -> bool:
    """Whether a loader's iterator has workers, which draw indices before batches are asked for."""
    return isinstance(reader, _BaseDataLoaderIter) and reader._num_workers > 0


def forget_unscaling(scaler: torch.amp.GradScaler) -> None:
    """Lets a scaler unscale again, after a step that was given up between unscaling and update."""
    if scaler.is_enabled():
        scaler._per_optimizer_states.clear()
