"""The models of the data-parallel strategies: `ShardedModel`, each with what it shards."""

from __future__ import annotations

from shoal.strategies.model import ShardedModel
from shoal.strategies.settings import Sharding


class DDPModel(ShardedModel):
    """Everything replicated; gradients are averaged."""

    strategy = "ddp"
    sharding = Sharding()


class ZeRO1Model(ShardedModel):
    """Parameters and gradients replicated; each rank has its part of the optimizer's state."""

    strategy = "zero1"
    sharding = Sharding(optimizer=True)


class ZeRO2Model(ShardedModel):
    """Parameters replicated; each rank has its part of the gradients and the state."""

    strategy = "zero2"
    sharding = Sharding(optimizer=True, gradients=True)


class ZeRO3Model(ShardedModel):
    """Parameters, gradients and state sharded; parameters are gathered while they are used."""

    strategy = "zero3"
    sharding = Sharding(optimizer=True, gradients=True, parameters=True)


class FSDPModel(ZeRO3Model):
    """As `ZeRO3Model`, in units that are grouped automatically."""

    strategy = "fsdp"
