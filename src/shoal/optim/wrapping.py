"""Wraps a model and its optimizers with a strategy, or returns what is wrapped with it already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.comm import World
from shoal.optim.optimizer import ShardedOptimizer
from shoal.optim.proof.judge import judge
from shoal.optim.proof.judgement import Judgement
from shoal.optim.registry import PAIRS, choose_strategy
from shoal.strategies import ShardedModel
from shoal.strategies.options import check_options


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
    judged = [None if isinstance(each, ShardedOptimizer) else judge(each) for each in optimizers]
    divisions = PAIRS[model.strategy].optimizer.divisions

    def comes_later(index: int) -> bool:
        judgement = judged[index]
        return judgement is None or not divisions[judgement.kind].lays_out_memory

    order = sorted(range(len(optimizers)), key=comes_later)
    wrapped = {index: wrap_optimizer(optimizers[index], model, judged[index]) for index in order}
    return [wrapped[index] for index in range(len(optimizers))]


def wrap_optimizer(
    optimizer: Optimizer, model: ShardedModel, judgement: Judgement | None = None
) -> ShardedOptimizer:
    """The optimizer, wrapped with the class that goes with the model's strategy."""
    optimizer_class = PAIRS[model.strategy].optimizer
    if isinstance(optimizer, ShardedOptimizer):
        if type(optimizer) is optimizer_class and optimizer.model is model:
            return optimizer
        raise ValueError("the optimizer is wrapped already, with another strategy or model")
    return optimizer_class(optimizer, model, kind=judgement)
