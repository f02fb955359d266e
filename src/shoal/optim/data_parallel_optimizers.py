"""The optimizers of the data-parallel strategies: `ShardedOptimizer`, each with its model."""

from __future__ import annotations

from torch.optim import Optimizer

from shoal.optim.optimizer import ShardedOptimizer, check_optimizer
from shoal.strategies.data_parallel import (
    DDPModel,
    FSDPModel,
    ZeRO1Model,
    ZeRO2Model,
    ZeRO3Model,
)
from shoal.strategies.model import ShardedModel

__all__ = ["DDPOptimizer", "FSDPOptimizer", "ZeRO1Optimizer", "ZeRO2Optimizer", "ZeRO3Optimizer"]


class DDPOptimizer(ShardedOptimizer):
    """The same step everywhere, on averaged gradients."""

    model_class = DDPModel

    def _pair(self, optimizer: Optimizer, model: ShardedModel) -> None:
        super()._pair(optimizer, model)
        if model.sharding != DDPModel.sharding:
            raise TypeError(
                "the model's memory is laid out for a ZeRO1Optimizer, which was wrapped for it "
                "before: wrap all of its optimizers as ZeRO1Optimizer, or all as DDPOptimizer"
            )


class ZeRO1Optimizer(ShardedOptimizer):
    """Each rank steps its part and has its part of the state; new parameters are gathered.

    A `DDPModel` becomes what a `ZeRO1Model` is: its memory is laid out anew.
    """

    model_class = ZeRO1Model

    def _pair(self, optimizer: Optimizer, model: ShardedModel) -> None:
        if type(model) is DDPModel:
            check_optimizer(optimizer)
        else:
            super()._pair(optimizer, model)
        if model.sharding != ZeRO1Model.sharding:
            model.shard_as(ZeRO1Model.sharding, type(self).__name__)

    def describe(self) -> str:
        """Its kind, and whether it shards more than the model does by itself."""
        about = super().describe()
        if isinstance(self.model, ZeRO1Model):
            return about
        return f"{about}; each rank has its part of the state, as under {ZeRO1Model.strategy}"


class ZeRO2Optimizer(ShardedOptimizer):
    """As `ZeRO1Optimizer`, on gradients that were only kept for the rank's part."""

    model_class = ZeRO2Model


class ZeRO3Optimizer(ShardedOptimizer):
    """Parameters, gradients and state are all the rank's part."""

    model_class = ZeRO3Model


class FSDPOptimizer(ZeRO3Optimizer):
    """`ZeRO3Optimizer` by the name that PyTorch has for it."""

    model_class = FSDPModel
