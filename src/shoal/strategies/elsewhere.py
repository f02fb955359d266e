"""What a parameter shows for its gradient when that is spread over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError


class ShardedGradient(torch.Tensor):
    """Stands for a gradient of which each rank holds a part; it has no values to compute with.

    Whoever would compute with it, such as ``torch.nn.utils.clip_grad_norm_`` or torch's
    ``GradScaler``, gets an error instead of a number that is only this rank's.
    """

    arrived: Tensor | None
    """What autograd has just added to it."""

    @staticmethod
    def __new__(cls, parameter: Tensor) -> ShardedGradient:
        """One that may be assigned to ``parameter.grad``."""
        stand_in: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        stand_in.arrived = None
        return stand_in

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Keeps what autograd accumulates, refuses everything else."""
        in_backward = torch._C._current_graph_task_id() != -1
        is_sum = func is torch.ops.aten.add_.Tensor and isinstance(args[0], ShardedGradient)
        if is_sum and in_backward:
            stand_in, known = args[0], args[0].arrived
            stand_in.arrived = args[1] if known is None else known + args[1]
            return stand_in
        if in_backward and torch.is_grad_enabled():
            raise ShoalError(
                "backward(create_graph=True) cannot add to a gradient that is spread over the "
                "ranks: use torch.autograd.grad(loss, parameters, create_graph=True) instead"
            )
        raise ShoalError(
            f"{func} was asked of a gradient that is spread over the ranks: use "
            "model.clip_grad_norm_ or clip_grad_value_ to clip, shoal.optim.GradScaler (not "
            "torch.amp's) to scale and unscale, zero_grad() to forget or to make zero, "
            "model.gradient_shard(name) for this rank's part, model.full_gradients() on every rank "
            "for whole ones (to log norms, say), and to step the optimizer that "
            "shoal.as_distributed(model, optimizer) returned"
        )

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        """Shape only."""
        return f"ShardedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"
