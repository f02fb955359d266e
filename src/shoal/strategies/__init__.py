"""Strategies: who holds what, and when it travels."""

from shoal.strategies.data_parallel import (
    DDPModel,
    FSDPModel,
    ZeRO1Model,
    ZeRO2Model,
    ZeRO3Model,
)
from shoal.strategies.hybrid import HybridShardedModel
from shoal.strategies.model import ShardedModel
from shoal.strategies.pipeline.model import PipelineParallelModel
from shoal.strategies.tensor.model import TensorParallelModel

__all__ = [
    "DDPModel",
    "FSDPModel",
    "HybridShardedModel",
    "PipelineParallelModel",
    "ShardedModel",
    "TensorParallelModel",
    "ZeRO1Model",
    "ZeRO2Model",
    "ZeRO3Model",
]
