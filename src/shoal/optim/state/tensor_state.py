"""An optimizer's state of one tensor, cut up and joined like the tensor itself.

State that has the tensor's shape belongs to its elements; the rest (the number of steps) to all
of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


_STEPS = "step"
"""What torch's optimizers call the number of steps: one number, also for a long parameter."""


def is_per_element(key: str, value: Any, parameter: Tensor) -> bool:
    """Whether a piece of state has one number for each element of a parameter."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return False
    return value.dim() > 0 or key != _STEPS


def counts_on_device(options: Mapping[str, Any]) -> bool:
    """Whether kernels count the steps, so that counters are where the parameters are.

    That is torch's own rule; other counters stay where they are.
    """
    return bool(options.get("capturable") or options.get("fused"))


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
    """The state of some elements of a parameter, flat."""
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


def split_state(state: State, sizes: Sequence[int]) -> list[State]:
    """The state of a flat tensor, for the parts it was cut into, in the same memory."""
    total = sum(sizes)
    parts: list[State] = [{} for _ in sizes]
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.numel() == total:
            for part, piece in zip(parts, value.split(list(sizes)), strict=True):
                part[key] = piece
        else:
            for part in parts:
                part[key] = _copied(value)
    return parts


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
