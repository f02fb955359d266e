"""`HybridShardedOptimizer`: steps what a rank has of split layers in its stage."""

from __future__ import annotations

from shoal.optim.pipeline_optimizer import PipelineParallelOptimizer
from shoal.optim.tensor_optimizer import TensorParallelOptimizer
from shoal.strategies.hybrid import HybridShardedModel


class HybridShardedOptimizer(PipelineParallelOptimizer, TensorParallelOptimizer):
    """The partner of `HybridShardedModel`.

    Gradients are summed over the tensor axis where layers are split, averaged over the data axis,
    and then stepped; its ``state_dict`` is that of the plain optimizer over the whole model.

    Example:
        >>> optimizer = HybridShardedOptimizer(torch.optim.AdamW(module.parameters()), model)
    """

    model_class = HybridShardedModel  # type: ignore[assignment]
    model: HybridShardedModel  # type: ignore[assignment]
