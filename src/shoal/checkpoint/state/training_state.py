"""What optimizers have to save, in full names, and what else goes with a model: its companions.

Optimizers may be wrapped or plain. Companions are schedulers, scalers and samplers: anything that
has a ``state_dict()``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint.state.model_state import plain_module
from shoal.errors import CheckpointMismatchError
from shoal.optim import ShardedOptimizer
from shoal.optim.state import Reception, held_whole, receive_whole
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
        return optimizer.saved_streams()
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
    optimizer.load_streams(streams)


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


@dataclass(frozen=True)
class Companions:
    """Schedulers, scalers and samplers; each may be one, or a list."""

    scheduler: Any = None
    scaler: Any = None
    sampler: Any = None

    def items(self) -> Iterator[tuple[str, list[Any]]]:
        """Each as a list, by name; only what there is."""
        for name in ("scheduler", "scaler", "sampler"):
            value = getattr(self, name)
            if value is not None:
                yield name, list(value) if isinstance(value, list | tuple) else [value]


def companion_state(companion: Any) -> Any:
    """What is saved of it; a state that the caller has taken is saved as it is."""
    return companion if isinstance(companion, Mapping) else companion.state_dict()


def prepared_companions(
    companions: Companions, saved: Mapping[str, Any], what: str, *, strict: bool
) -> Callable[[], None]:
    """A function that gives all of them their saved state, or, if one refuses, none of them.

    Raises:
        CheckpointMismatchError: If the checkpoint has not what is to be loaded.
    """
    pairs: list[tuple[Any, Any]] = []
    for name, objects in companions.items():
        states = saved.get(name)
        if states is None and not strict:
            continue
        if not isinstance(states, list) or len(states) != len(objects):
            found = len(states) if isinstance(states, list) else 0
            raise CheckpointMismatchError(
                f"{what} has the state of {found} objects for {name}=, and {len(objects)} are to "
                "be loaded"
            )
        pairs += zip(objects, states, strict=True)
    return lambda: _load_all(pairs)


def _load_all(pairs: Sequence[tuple[Any, Any]]) -> None:
    before = [copy.deepcopy(each.state_dict()) for each, _ in pairs]
    for number, (each, state) in enumerate(pairs):
        try:
            each.load_state_dict(state)
        except Exception as error:
            for done, old in zip(pairs[: number + 1], before, strict=False):
                done[0].load_state_dict(old)
            raise CheckpointMismatchError(
                f"{type(each).__name__} refuses its saved state: {type(error).__name__}: {error}"
            ) from error
