"""`GradScaler`: torch's, and an error where ranks scale differently."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.comm import Backend
from shoal.optim.optimizer import ShardedOptimizer
from shoal.strategies.gradients.sharded.numbers import different_scales
from shoal.torch_internals.optimizers import UnscalingScaler


class GradScaler(UnscalingScaler):
    """``torch.amp.GradScaler`` that notices when ranks scale their losses differently.

    Torch's own works, too: ranks skip a step together or not at all. It cannot know that another
    rank has another scale where every rank has whole gradients.

    Example:
        >>> scaler = shoal.optim.GradScaler("cuda")
        >>> scaler.scale(loss_fn(model(inputs), targets)).backward()
        >>> scaler.unscale_(optimizer)
        >>> model.clip_grad_norm_(1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    def unscale_gradients(
        self, optimizer: Optimizer, inverse: Tensor, found: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscales the optimizer's gradients; all ranks call it."""
        if not isinstance(optimizer, ShardedOptimizer):
            return super().unscale_gradients(optimizer, inverse, found, allow_fp16)
        engine = optimizer.model.engine
        engine.gradients.adopt()  # what was put in by hand is averaged first
        everywhere = super().unscale_gradients(optimizer, inverse, found, allow_fp16)
        found = torch.stack([found, *(each.to(found) for each in everywhere.values())]).amax(0)
        for group in (engine.backend, *engine.ownership.axes):
            found = self._found_anywhere(found, group)
        return {found.device: found}

    def _found_anywhere(self, found: Tensor, backend: Backend) -> Tensor:
        """Whether any rank has found an infinity; also checks that all scale alike."""
        scale = self.scale_tensor
        numbers = torch.stack([found, scale, -scale]).to(backend.device, torch.float64)
        is_found, highest, negative_lowest = backend.all_reduce(numbers, "max").unbind()
        if highest != -negative_lowest:
            raise different_scales(-float(negative_lowest), float(highest))
        anywhere: Tensor = is_found.to(found.device, found.dtype)
        return anywhere
