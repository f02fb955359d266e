"""What a training has to save, whether it is wrapped or plain: model, optimizers, companions.

Companions are schedulers, scalers and samplers: anything that has a ``state_dict()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm import Backend
from shoal.comm.world import find_current
from shoal.errors import CheckpointMismatchError
from shoal.optim import LocalSGDOptimizer, ShardedOptimizer
from shoal.optim.state import Reception, held_whole, receive_whole, refuse_more_to_save
from shoal.sharding.extent import Extent
from shoal.sharding.holding import FullState, Held, HeldState
from shoal.strategies import ShardedModel
from shoal.strategies.gradients.compressed.state import CompressionState
from shoal.torch_internals.modules import buffers_of, is_persistent
from shoal.torch_support.memory import copy

Groups = list[tuple[list[str], dict[str, Any]]]


# Models -----------------------------------------------------------------------------------


def ranks_of(model: nn.Module) -> Backend | None:
    """Everybody who holds something of a model; None for a process of its own."""
    if isinstance(model, ShardedModel):
        return model.all_ranks
    world = find_current()
    return None if world is None or world.size == 1 else world.backend


def is_same_everywhere(model: nn.Module) -> bool:
    """Whether ranks that hold the same elements are known to have the same values of them."""
    return isinstance(model, ShardedModel) or ranks_of(model) is None


def plain_module(model: nn.Module) -> nn.Module:
    """The user's own module."""
    return model.module if isinstance(model, ShardedModel) else model


def held_parameters(model: nn.Module) -> Iterator[Held]:
    """What this rank holds of the parameters, tied ones once, under their first names."""
    if isinstance(model, ShardedModel):
        yield from model.held()
        return
    for name, parameter in model.named_parameters():
        memory = parameter.detach()
        if not memory.is_contiguous():  # read only; what is loaded is copied in another way
            memory = memory.contiguous()
        yield Held(name, Extent.whole(parameter.shape), memory.reshape(-1))


def held_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """What optimizers step the parameters in, by name."""
    own = {name: parameter.dtype for name, parameter in model.named_parameters()}
    return own | model.held_dtypes() if isinstance(model, ShardedModel) else own


def check_has_memory(model: nn.Module) -> None:
    """Raises for a plain module on the meta device, where nothing can be put."""
    if isinstance(model, ShardedModel):
        return
    for name, tensor in [*model.named_parameters(), *buffers(model).items()]:
        if tensor.is_meta:
            raise CheckpointMismatchError(
                f"{name} is on the meta device and has no memory to load into: call "
                'model.to_empty(device="cpu") first, or wrap the model with as_distributed'
            )


def put_parameter(model: nn.Module, held: Held, values: Tensor) -> None:
    """Gives this rank's elements of a parameter new values."""
    if isinstance(model, ShardedModel):
        copy(held.memory, values)
    else:
        parameter = model.get_parameter(held.name)
        parameter.copy_(values.view(parameter.shape))


def aliases(module: nn.Module) -> dict[str, str]:
    """Further names of tied parameters and shared buffers, with the first name of each."""
    first: dict[int, str] = {}
    further: dict[str, str] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    for name, tensor in [*parameters, *_persistent_buffers(module)]:
        known = first.setdefault(id(tensor), name)
        if known != name:
            further[name] = known
    return further


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """This rank's buffers that are part of the state, each once, under their first names."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, buffer in _persistent_buffers(plain_module(model)):
        if not isinstance(model, ShardedModel) or model.holds_buffer(name):
            found.setdefault(id(buffer), (name, buffer))
    return dict(found.values())


def unsaved_buffers(model: ShardedModel) -> dict[str, Tensor]:
    """The others: those that are no part of the state, or another rank's part of it."""
    saved = {id(buffer) for buffer in buffers(model).values()}
    named = model.module.named_buffers()
    return {name: buffer for name, buffer in named if id(buffer) not in saved}


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for name, buffer in buffers_of(inner).items():
            if buffer is not None and is_persistent(inner, name):
                yield (f"{prefix}.{name}" if prefix else name), buffer


def modules_with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Parts that have something of their own to save, by name; each once."""
    for name, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            yield name, inner


def compression_state(model: nn.Module) -> CompressionState | None:
    """What compressed gradients have to save; None where they are not compressed."""
    return model.compression_state if isinstance(model, ShardedModel) else None


# Optimizers -------------------------------------------------------------------------------


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
    return named_groups(optimizer, _names(optimizer, model))


def named_groups(optimizer: Optimizer, names: Mapping[int, str]) -> Groups:
    """The same of an optimizer that has whole parameters; ``names`` are by their id."""
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
    refuse_more_to_save(optimizer)
    return held_whole(optimizer, _names(optimizer, model))


def own_state(optimizer: Optimizer) -> list[HeldState] | None:
    """This rank's state where every rank has another one; None where all have one between them."""
    return optimizer.own_state() if isinstance(optimizer, ShardedOptimizer) else None


def outer_of(optimizer: Optimizer) -> tuple[Optimizer, Mapping[int, str]] | None:
    """The optimizer of averages that one has, and the names of its parameters by their id."""
    if not isinstance(optimizer, LocalSGDOptimizer) or optimizer.outer is None:
        return None
    return optimizer.outer, optimizer.outer_names


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

        def accept() -> None:
            reception.accept()
            optimizer.load_streams(streams)

        return Reception(reception.wanted, accept)
    return receive_whole(optimizer, _names(optimizer, model), saved, options)


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


# Companions -------------------------------------------------------------------------------


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
    before = [deepcopy(each.state_dict()) for each, _ in pairs]
    for number, (each, state) in enumerate(pairs):
        try:
            each.load_state_dict(state)
        except Exception as error:
            for done, old in zip(pairs[: number + 1], before, strict=False):
                done[0].load_state_dict(old)
            raise CheckpointMismatchError(
                f"{type(each).__name__} refuses its saved state: {type(error).__name__}: {error}"
            ) from error
