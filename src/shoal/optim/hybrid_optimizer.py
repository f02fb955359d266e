"""`HybridShardedOptimizer`: steps what a rank has of split layers in its stage."""

from __future__ import annotations

from types import MappingProxyType

from shoal.optim.kinds import Kind
from shoal.optim.pipeline_optimizer import PipelineParallelOptimizer, UndividedStages
from shoal.optim.tensor_optimizer import SPLIT_DIVISIONS, TensorParallelOptimizer, UndividedParts
from shoal.strategies.hybrid import HybridShardedModel


class UndividedStagesOfParts(UndividedStages, UndividedParts):
    """Refuses stages, and split layers."""


class HybridShardedOptimizer(PipelineParallelOptimizer, TensorParallelOptimizer):
    """The partner of `HybridShardedModel`.

    Gradients are summed over the tensor axis where layers are split, averaged over the data axis,
    and then stepped; its ``state_dict`` is that of the plain optimizer over the whole model.

    Example:
        >>> optimizer = HybridShardedOptimizer(torch.optim.AdamW(module.parameters()), model)
    """

    model_class = HybridShardedModel  # type: ignore[assignment]
    divisions = MappingProxyType({**SPLIT_DIVISIONS, Kind.GLOBAL: UndividedStagesOfParts})
    model: HybridShardedModel  # type: ignore[assignment]
