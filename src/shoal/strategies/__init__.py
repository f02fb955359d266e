"""Strategies: who holds what, and when it travels."""

from shoal.strategies.model import (
    DDPModel,
    FSDPModel,
    ShardedModel,
    ZeRO1Model,
    ZeRO2Model,
    ZeRO3Model,
)
from shoal.strategies.tensor.model import TensorParallelModel

__all__ = [
    "DDPModel",
    "FSDPModel",
    "ShardedModel",
    "TensorParallelModel",
    "ZeRO1Model",
    "ZeRO2Model",
    "ZeRO3Model",
]
