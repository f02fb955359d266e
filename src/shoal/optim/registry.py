"""The table of strategies: which model and which optimizer go together, and under what name.

[Note: adding a strategy]
A strategy is a subclass of `ShardedModel` that has its name, a subclass of `ShardedOptimizer` that
has the model's class, and an entry here. What users may choose by name is read from this table.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from shoal.optim.data_parallel_optimizers import (
    DDPOptimizer,
    FSDPOptimizer,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from shoal.optim.hybrid_optimizer import HybridShardedOptimizer
from shoal.optim.optimizer import ShardedOptimizer
from shoal.optim.pipeline_optimizer import PipelineParallelOptimizer
from shoal.optim.tensor_optimizer import TensorParallelOptimizer
from shoal.strategies import ShardedModel


class Pair(NamedTuple):
    """What a strategy consists of."""

    model: type[ShardedModel]
    optimizer: type[ShardedOptimizer]


def _by_name(*optimizers: type[ShardedOptimizer]) -> dict[str, Pair]:
    return {each.model_class.strategy: Pair(each.model_class, each) for each in optimizers}


DATA_PARALLEL = _by_name(
    DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer, FSDPOptimizer
)
"""Strategies whose ranks all see other data."""
PAIRS = DATA_PARALLEL | _by_name(
    TensorParallelOptimizer, PipelineParallelOptimizer, HybridShardedOptimizer
)
"""All strategies by name."""


def choose_strategy(model: nn.Module, num_ranks: int) -> str:
    """What "auto" stands for.

    Everything is replicated below a billion parameters, all but the parameters is sharded up to ten
    billion, and everything beyond.
    """
    if isinstance(model, ShardedModel):
        return model.strategy
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_ranks == 1 or num_parameters < 10**9:
        return "ddp"
    return "zero2" if num_parameters < 10**10 else "zero3"
