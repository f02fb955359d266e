"""The models of the data-parallel strategies: `ShardedModel`, each with what it shards."""

from __future__ import annotations

from typing import Literal

from shoal.strategies.model import ShardedModel
from shoal.strategies.settings import LEVELS

DataParallelStrategy = Literal["auto", "ddp", "zero1", "zero2", "zero3", "fsdp"]
"""What type checkers know of them."""

__all__ = ["DDPModel", "FSDPModel", "ZeRO1Model", "ZeRO2Model", "ZeRO3Model"]


class DDPModel(ShardedModel):
    """Everything replicated; gradients are averaged."""

    strategy = "ddp"
    sharding = LEVELS[0]


class ZeRO1Model(ShardedModel):
    """Parameters and gradients replicated; each rank has its part of the optimizer's state."""

    strategy = "zero1"
    sharding = LEVELS[1]


class ZeRO2Model(ShardedModel):
    """Parameters replicated; each rank has its part of the gradients and the state."""

    strategy = "zero2"
    sharding = LEVELS[2]


class ZeRO3Model(ShardedModel):
    """Parameters, gradients and state sharded; parameters are gathered while they are used."""

    strategy = "zero3"
    sharding = LEVELS[3]


class FSDPModel(ZeRO3Model):
    """`ZeRO3Model` by the name that PyTorch has for it."""

    strategy = "fsdp"
