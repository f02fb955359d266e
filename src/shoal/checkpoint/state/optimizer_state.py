"""What optimizers have to save, whether they are wrapped or plain, in full names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint.state.model_state import plain_module
from shoal.errors import CheckpointMismatchError
from shoal.optim import ShardedOptimizer
from shoal.optim.state.reception import Reception, held_whole, receive_whole
from shoal.sharding.holding import FullState, HeldState

Groups = list[tuple[list[str], dict[str, Any]]]


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """None, one or several, as a list."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]


def class_name(optimizer: Optimizer) -> str:
    """The user's own class."""
    inner = optimizer.optimizer if isinstance(optimizer, ShardedOptimizer) else optimizer
    return type(inner).__name__


def held_groups(optimizer: Optimizer, model: nn.Module) -> Groups:
    """Each parameter group's full names and hyperparameters."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.held_groups()
    names = _names(optimizer, model)
    return [
        (
            [names[id(parameter)] for parameter in group["params"]],
            {key: value for key, value in group.items() if key != "params"},
        )
        for group in optimizer.param_groups
    ]


def held_state(optimizer: Optimizer, model: nn.Module) -> Iterator[HeldState]:
    """This rank's part of the state."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.held_state()
    return held_whole(optimizer, _names(optimizer, model))


def streams(optimizer: Optimizer) -> dict[str, Any]:
    """What it takes to go on with its random draws; empty if it draws none."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.supervision.with_streams({})
    return {}


def receive(
    optimizer: Optimizer,
    model: nn.Module,
    saved: Mapping[str, FullState],
    options: Sequence[Mapping[str, Any]],
    streams: Mapping[str, Any],
) -> Reception:
    """Makes room for new state; see `ShardedOptimizer.receive`."""
    if isinstance(optimizer, ShardedOptimizer):
        reception = optimizer.receive(saved, options)
        return Reception(reception.wanted, lambda: _accept(reception, optimizer, streams))
    return receive_whole(optimizer, _names(optimizer, model), saved, options)


def _accept(reception: Reception, optimizer: ShardedOptimizer, streams: Mapping[str, Any]) -> None:
    reception.accept()
    optimizer.supervision.load_streams(streams)


def _names(optimizer: Optimizer, model: nn.Module) -> dict[int, str]:
    names = {id(p): name for name, p in plain_module(model).named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointMismatchError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not "
                    "part of the model: pass the model that it was built for"
                )
    return names
