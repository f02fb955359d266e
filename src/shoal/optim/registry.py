"""The table of strategies: which model and optimizer go together; and wrapping by the table.

[Note: adding a strategy]
A strategy is a subclass of `ShardedModel` that has its name, a subclass of `ShardedOptimizer` that
has the model's class, and an entry here. What users may choose by name is read from this table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from shoal.comm import World
from shoal.optim.data_parallel_optimizers import (
    DDPOptimizer,
    FSDPOptimizer,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from shoal.optim.hybrid_optimizer import HybridShardedOptimizer
from shoal.optim.independent.async_optimizer import AsyncSGDOptimizer
from shoal.optim.independent.local_optimizer import LocalSGDOptimizer
from shoal.optim.optimizer import ShardedOptimizer
from shoal.optim.pipeline_optimizer import PipelineParallelOptimizer
from shoal.optim.proof.judgement import Judgement
from shoal.optim.proof.judging import judge
from shoal.optim.tensor_optimizer import TensorParallelOptimizer
from shoal.strategies import ShardedModel
from shoal.strategies.options import check_options


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
INDEPENDENT = _by_name(LocalSGDOptimizer, AsyncSGDOptimizer)
"""Strategies whose ranks step apart: equal to their own definition, not to one process."""
PAIRS = (
    DATA_PARALLEL
    | _by_name(TensorParallelOptimizer, PipelineParallelOptimizer, HybridShardedOptimizer)
    | INDEPENDENT
)
"""All strategies by name."""
ELASTIC = DATA_PARALLEL | _by_name(HybridShardedOptimizer)
"""Strategies under which ranks may come and go; see `shoal.elastic`."""


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


def wrap_model(
    model: nn.Module, strategy: str, world: World, options: Mapping[str, Any]
) -> ShardedModel:
    """The model, wrapped with a strategy of this name or with the one that "auto" stands for."""
    name = choose_strategy(model, world.size) if strategy == "auto" else strategy
    if name not in PAIRS:
        raise ValueError(f"strategy must be one of {', '.join(PAIRS)} or auto; got {strategy!r}")
    check_options(options, name, {each: pair.model for each, pair in PAIRS.items()})
    model_class = PAIRS[name].model
    if not isinstance(model, ShardedModel):
        return model_class(model, world, **options)
    is_same = type(model) is model_class and all(
        model.options.get(option) == value for option, value in options.items()
    )
    if not is_same:
        raise ValueError(
            f"the model is wrapped already, as {type(model).__name__}: "
            "wrap the plain module once, with the options you want"
        )
    return model


def wrap_optimizers(optimizers: Sequence[Optimizer], model: ShardedModel) -> list[ShardedOptimizer]:
    """All optimizers of a model.

    The memory is laid out for optimizers that need whole parameters, so they are wrapped first.
    """
    known = [each.optimizer for each in model.optimizers]
    is_new = [
        not isinstance(each, ShardedOptimizer) and all(each is not other for other in known)
        for each in optimizers
    ]
    judged = [judge(each) if new else None for each, new in zip(optimizers, is_new, strict=True)]
    division_for = PAIRS[model.strategy].optimizer.division_for

    def comes_later(index: int) -> bool:
        judgement = judged[index]
        return judgement is None or not division_for(judgement.kind).lays_out_memory

    order = sorted(range(len(optimizers)), key=comes_later)
    wrapped = {index: wrap_optimizer(optimizers[index], model, judged[index]) for index in order}
    return [wrapped[index] for index in range(len(optimizers))]


def wrap_optimizer(
    optimizer: Optimizer, model: ShardedModel, judgement: Judgement | None = None
) -> ShardedOptimizer:
    """The optimizer, wrapped with the class that goes with the model's strategy."""
    optimizer_class = PAIRS[model.strategy].optimizer
    if isinstance(optimizer, ShardedOptimizer):
        if isinstance(optimizer, optimizer_class) and optimizer.model is model:
            return optimizer
        raise ValueError("the optimizer is wrapped already, with another strategy or model")
    known: ShardedOptimizer
    for known in model.optimizers:
        if known.optimizer is optimizer:  # a second wrapper would begin with a state of its own
            return known
    return optimizer_class(optimizer, model, kind=judgement)
