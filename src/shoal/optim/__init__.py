"""Optimizers that step only what their rank owns, around any torch optimizer."""

from shoal.optim.data_parallel_optimizers import (
    DDPOptimizer,
    FSDPOptimizer,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from shoal.optim.hybrid_optimizer import HybridShardedOptimizer
from shoal.optim.kinds import Kind, find_kind
from shoal.optim.optimizer import ShardedOptimizer
from shoal.optim.pipeline_optimizer import PipelineParallelOptimizer
from shoal.optim.scaler import GradScaler
from shoal.optim.tensor_optimizer import TensorParallelOptimizer
from shoal.strategies import (
    DDPModel,
    FSDPModel,
    ShardedModel,
    TensorParallelModel,
    ZeRO1Model,
    ZeRO2Model,
    ZeRO3Model,
)
from shoal.strategies.hybrid import HybridShardedModel
from shoal.strategies.pipeline import PipelineParallelModel

PAIRS: dict[str, tuple[type[ShardedModel], type[ShardedOptimizer]]] = {
    "ddp": (DDPModel, DDPOptimizer),
    "zero1": (ZeRO1Model, ZeRO1Optimizer),
    "zero2": (ZeRO2Model, ZeRO2Optimizer),
    "zero3": (ZeRO3Model, ZeRO3Optimizer),
    "fsdp": (FSDPModel, FSDPOptimizer),
    "tensor": (TensorParallelModel, TensorParallelOptimizer),
    "pipeline": (PipelineParallelModel, PipelineParallelOptimizer),
    "hybrid": (HybridShardedModel, HybridShardedOptimizer),
}
"""Which optimizer goes with which model, by the name of the strategy."""
DATA_PARALLEL = ("ddp", "zero1", "zero2", "zero3", "fsdp")
"""Those whose ranks all see other data."""

__all__ = [
    "DATA_PARALLEL",
    "PAIRS",
    "DDPOptimizer",
    "FSDPOptimizer",
    "GradScaler",
    "HybridShardedOptimizer",
    "Kind",
    "PipelineParallelOptimizer",
    "ShardedOptimizer",
    "TensorParallelOptimizer",
    "ZeRO1Optimizer",
    "ZeRO2Optimizer",
    "ZeRO3Optimizer",
    "find_kind",
]
