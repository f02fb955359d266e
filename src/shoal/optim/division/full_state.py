"""An optimizer's state in terms of whole parameters, put together from what the ranks have.

It has the form that the plain torch optimizer would have in one process, so either can load what
the other saved, at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm import Backend
from shoal.optim.division.segment import ParameterSegment
from shoal.optim.state.tensor_state import State, counts_on_device, is_per_element


class Fragment(NamedTuple):
    """State of some elements of one parameter."""

    number: int
    """Which parameter, counted through all groups."""
    start: int
    stop: int
    state: State


def fragments(
    optimizer: Optimizer, segments: Iterable[ParameterSegment], numbers: dict[int, int]
) -> Iterator[Fragment]:
    """What the segments of this rank have, parameter by parameter.

    ``numbers`` counts the parameters by their id.
    """
    for segment in segments:
        state = optimizer.state.get(segment.parameter, {})
        if not state:
            continue
        for parameter, piece in zip(segment.parameters, segment.pieces(), strict=True):
            cut = {
                key: value.reshape(-1)[piece.in_segment].clone()
                if is_per_element(key, value, segment.parameter)
                else value
                for key, value in state.items()
            }
            yield Fragment(numbers[id(parameter)], piece.start, piece.stop, cut)


def assemble(
    backend: Backend, own: Sequence[Fragment], parameters: Sequence[nn.Parameter]
) -> dict[int, State]:
    """The whole state of each parameter, on every rank."""
    whole: dict[int, State] = {}
    for found in backend.all_gather_object([list(fragment) for fragment in own]):
        for number, start, stop, state in found:
            target = whole.setdefault(number, {})
            for key, value in state.items():
                _put(target, key, value, parameters[number], start, stop)
    return dict(sorted(whole.items()))


def _put(
    target: State, key: str, value: Any, parameter: nn.Parameter, start: int, stop: int
) -> None:
    is_part = isinstance(value, Tensor) and value.dim() == 1 and value.numel() == stop - start
    if not is_part:
        target[key] = value
        return
    if key not in target:
        target[key] = torch.zeros(parameter.shape, dtype=value.dtype, device=value.device)
    target[key].view(-1)[start:stop] = value


def as_loaded(key: str, value: Any, like: Tensor, options: Mapping[str, Any]) -> Any:
    """A piece of saved state where and as an optimizer with these options wants it."""
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        return value.to(like.device, copy=True) if counts_on_device(options) else value.clone()
    dtype = like.dtype if value.is_floating_point() else value.dtype
    return value.to(device=like.device, dtype=dtype, copy=True)
