"""Optimizers that step only what their rank owns, around any torch optimizer."""

from shoal.optim.kinds import Kind, find_kind
from shoal.optim.optimizer import (
    DDPOptimizer,
    FSDPOptimizer,
    ShardedOptimizer,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from shoal.optim.pipeline import PipelineParallelOptimizer
from shoal.optim.scaler import GradScaler
from shoal.strategies import (
    DDPModel,
    FSDPModel,
    ShardedModel,
    ZeRO1Model,
    ZeRO2Model,
    ZeRO3Model,
)
from shoal.strategies.pipeline import PipelineParallelModel

PAIRS: dict[str, tuple[type[ShardedModel], type[ShardedOptimizer]]] = {
    "ddp": (DDPModel, DDPOptimizer),
    "zero1": (ZeRO1Model, ZeRO1Optimizer),
    "zero2": (ZeRO2Model, ZeRO2Optimizer),
    "zero3": (ZeRO3Model, ZeRO3Optimizer),
    "fsdp": (FSDPModel, FSDPOptimizer),
    "pipeline": (PipelineParallelModel, PipelineParallelOptimizer),
}
"""Which optimizer goes with which model, by the name of the strategy."""

__all__ = [
    "PAIRS",
    "DDPOptimizer",
    "FSDPOptimizer",
    "GradScaler",
    "Kind",
    "PipelineParallelOptimizer",
    "ShardedOptimizer",
    "ZeRO1Optimizer",
    "ZeRO2Optimizer",
    "ZeRO3Optimizer",
    "find_kind",
]
