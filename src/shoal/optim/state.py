"""The state of optimizers: cut up and joined like its parameter, loaded, or made anew.

State that has the parameter's shape belongs to its elements; the rest (the number of steps) to all
of it. What is loaded is put beside the old state, so that loading can fail without a trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import ShoalError
from shoal.optim.proof.small_copy import similar
from shoal.sharding.extent import Extent, overlap
from shoal.sharding.holding import FullState, Held, HeldState

State = dict[str, Any]


_STEPS = "step"
"""What torch's optimizers call the number of steps: one number, also for a long parameter."""


def is_per_element(key: str, value: Any, parameter: Tensor) -> bool:
    """Whether a piece of state has one number for each element of a parameter."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return False
    return value.dim() > 0 or key != _STEPS


def shared_state(state: State, parameter: Tensor) -> Hashable:
    """What state there is, and what of it all elements share.

    Tensors for which this is equal can be stepped as one.
    """
    return tuple(
        (key, "" if is_per_element(key, value, parameter) else comparable(value))
        for key, value in sorted(state.items())
    )


def comparable(value: Any) -> Hashable:
    """Something that is equal for equal values, tensors among them."""
    return tuple(value.flatten().tolist()) if isinstance(value, Tensor) else repr(value)


def cut_state(state: State, parameter: Tensor, start: int, stop: int) -> State:
    """The state of some elements of a parameter, flat, in the same memory."""
    return {
        key: value.reshape(-1)[start:stop]
        if is_per_element(key, value, parameter)
        else _copied(value)
        for key, value in state.items()
    }


def join_states(parts: Sequence[State], parameter: Tensor) -> State:
    """The state of a tensor that is made of parts; what they share is taken from the first."""
    joined = {}
    for key, value in parts[0].items():
        if isinstance(value, Tensor) and value.dim() > 0:
            joined[key] = torch.cat([part[key] for part in parts]).view(parameter.shape)
        else:
            joined[key] = value
    return joined


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Reception:
    """What an optimizer waits for."""

    # The state's key, and the parameter's elements with the memory for them.
    wanted: Sequence[tuple[str, Held]]
    accept: Callable[[], None]  # makes the new state the optimizer's own


def has_more_to_save(optimizer: Optimizer) -> bool:
    """Whether its own ``state_dict`` has more than the state of parameters, and their groups."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return False
    with contextlib.suppress(Exception):  # of a wrapped one, which has other state, a small copy
        parameter = nn.Parameter(torch.zeros(2, 2))
        optimizer = similar(optimizer, optimizer.param_groups[0], [parameter])
    return optimizer.state_dict().keys() != {"state", "param_groups"}


def refuse_more_to_save(optimizer: Optimizer) -> None:
    """Refuses to save less than the optimizer itself would."""
    if has_more_to_save(optimizer):
        raise ShoalError(
            f"{type(optimizer).__name__} has a state_dict() with more than the state of its "
            "parameters, which a checkpoint would lose: save the model without it, with "
            'extra={"optimizer": optimizer.state_dict()}, and load that into it'
        )


def held_whole(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[HeldState]:
    """The state of an optimizer that has whole parameters; ``names`` are by their id."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            tensors, shared = divided(state, parameter)
            if state:
                extent = Extent.whole(parameter.shape)
                yield HeldState(names[id(parameter)], extent, tensors, shared)


def divided(state: State, parameter: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What each element has, flat, and what they share."""
    tensors, shared = {}, {}
    for key, value in state.items():
        if is_per_element(key, value, parameter):
            is_flat = value.dim() == 1 and not value.requires_grad
            tensors[key] = value if is_flat else value.detach().reshape(-1)
        else:
            shared[key] = value
    return tensors, shared


@torch.inference_mode(mode=False)
def receive_whole(
    optimizer: Optimizer,
    names: Mapping[int, str],
    saved: Mapping[str, FullState],
    options: Sequence[Mapping[str, Any]],
) -> Reception:
    """For an optimizer that has whole parameters; see `ShardedOptimizer.receive`."""
    wanted: list[tuple[str, Held]] = []
    states: dict[nn.Parameter, State] = {}
    for group, settings in zip(optimizer.param_groups, options, strict=True):
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name not in saved:  # the parameter is new: what it has stays
                states[parameter] = optimizer.state.get(parameter, {})
                continue
            memory, state = fresh_state(saved[name], parameter, settings)
            states[parameter] = state
            extent = Extent.whole(parameter.shape)
            wanted += [(key, Held(name, extent, flat)) for key, flat in memory.items()]

    def accept() -> None:
        optimizer.state.clear()
        optimizer.state.update({key: state for key, state in states.items() if state})
        for group, settings in zip(optimizer.param_groups, options, strict=True):
            group.update(settings)

    return Reception(wanted, accept)


def fresh_state(
    full: FullState, parameter: Tensor, options: Mapping[str, Any]
) -> tuple[dict[str, Tensor], State]:
    """State for a parameter: the flat memory that is to be filled, and the state made of it."""
    memory = {
        key: torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)
        for key, dtype in full.dtypes.items()
    }
    state: State = {key: flat.view(parameter.shape) for key, flat in memory.items()}
    for key, value in full.shared.items():
        state[key] = placed(key, value, parameter, options)
    return memory, state


def placed(
    key: str, value: Any, like: Tensor, options: Mapping[str, Any], *, is_cast: bool = False
) -> Any:
    """A copy of a piece of state where an optimizer with these options wants it.

    ``like`` is what the state belongs to; ``is_cast``: floating numbers get its dtype.
    """
    if isinstance(value, list | tuple):
        return type(value)(placed(key, item, like, options, is_cast=is_cast) for item in value)
    if not isinstance(value, Tensor):
        return value
    is_counter = key == _STEPS
    # Torch's own rule: kernels that count the steps want counters where the parameters are.
    if is_counter and not (options.get("capturable") or options.get("fused")):
        return value.clone()
    is_cast = is_cast and value.is_floating_point() and not is_counter
    return value.to(like.device, like.dtype if is_cast else value.dtype, copy=True)


def full_states(held: Sequence[HeldState]) -> dict[str, FullState]:
    """What the state of parameters consists of, from what is held of them."""
    return {
        each.name: FullState({k: v.dtype for k, v in each.tensors.items()}, each.shared)
        for each in held
    }


def copy_held(held: Sequence[HeldState], wanted: Sequence[tuple[str, Held]]) -> None:
    """Fills memory from what is held already."""
    for key, target in wanted:
        for source in held:
            if source.name == target.name and key in source.tensors:
                for left, right, length in zip(*overlap(source.extent, target.extent), strict=True):
                    part = source.tensors[key][left : left + length]
                    target.memory[right : right + length].copy_(part)


def renew_state(optimizer: Optimizer) -> None:
    """Makes what is on the meta device anew; the parameters have their values by now.

    Most optimizers make their state in the first step. Adagrad, for one, makes it when it is built:
    over a model on the meta device that state has no memory either.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if _has_meta(optimizer.state.get(parameter, {})):
                optimizer.state[parameter] = _fresh_state(optimizer, group, parameter)


def _has_meta(state: dict[str, Any]) -> bool:
    return any(isinstance(value, Tensor) and value.is_meta for value in state.values())


def _fresh_state(
    optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> dict[str, Any]:
    twin = nn.Parameter(parameter.detach().clone())
    state: dict[str, Any] = dict(similar(optimizer, group, [twin]).state.get(twin, {}))
    if state.keys() != optimizer.state[parameter].keys() or _has_meta(state):
        raise ShoalError(
            f"{type(optimizer).__name__} has state for parameters on the meta device that it did "
            "not make when it was built, so it has no values: build it after the model is wrapped"
        )
    return state
