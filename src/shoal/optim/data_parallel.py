"""The optimizers of the data-parallel strategies: `ShardedOptimizer`, each with its model."""

from __future__ import annotations

from shoal.optim.optimizer import ShardedOptimizer
from shoal.strategies.data_parallel import (
    DDPModel,
    FSDPModel,
    ZeRO1Model,
    ZeRO2Model,
    ZeRO3Model,
)


class DDPOptimizer(ShardedOptimizer):
    """The same step everywhere, on averaged gradients."""

    model_class = DDPModel


class ZeRO1Optimizer(ShardedOptimizer):
    """Each rank steps its part and has its part of the state; new parameters are gathered."""

    model_class = ZeRO1Model


class ZeRO2Optimizer(ShardedOptimizer):
    """As `ZeRO1Optimizer`, on gradients that were only kept for the rank's part."""

    model_class = ZeRO2Model


class ZeRO3Optimizer(ShardedOptimizer):
    """Parameters, gradients and state are all the rank's part."""

    model_class = ZeRO3Model


class FSDPOptimizer(ZeRO3Optimizer):
    """The partner of `FSDPModel`."""

    model_class = FSDPModel
