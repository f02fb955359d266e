"""`StateView`: an optimizer's state on this rank, looked up by the user's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.optim.division.segmentation import Segmentation
from shoal.optim.state import State, cut_state, is_per_element, join_states


class StateView(Mapping[Tensor, Any]):
    """What ``optimizer.state`` shows of a state that belongs to segments.

    Looked up by one of the user's parameters it gives that parameter's state where this rank has
    all of it. One iterates over the tensors that this rank steps, to count what they take.
    """

    def __init__(
        self,
        state: Mapping[Tensor, State],
        segments: Segmentation,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """``state`` is that of the user's optimizer, by segment."""
        self._state, self._segments, self._parameters = state, segments, parameters

    def __getitem__(self, parameter: Tensor) -> State:
        """A parameter's state, as it would be in one process; empty before the first step."""
        if parameter in self._state:
            return self._state[parameter]
        if not any(parameter is own for own in self._parameters):
            raise KeyError("no parameter of this optimizer")
        parts, count = [], 0
        for segment in self._segments:
            for own, piece in zip(segment.parameters, segment.pieces(), strict=True):
                if own is parameter:
                    stepped, bounds = segment.parameter, piece.in_segment
                    state = self._state.get(stepped, {})
                    parts.append(cut_state(state, stepped, bounds.start, bounds.stop))
                    count += piece.stop - piece.start
        if count < parameter.numel() or not parts:
            raise ShoalError(
                f"this rank has {count:,} of the {parameter.numel():,} elements of this "
                "parameter's state: optimizer.state_dict() has all of it, if every rank calls it"
            )
        flat = torch.empty(count, device="meta")
        state = parts[0] if len(parts) == 1 else join_states(parts, flat)
        return {
            key: value.view(parameter.shape) if is_per_element(key, value, flat) else value
            for key, value in state.items()
        }

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._state or any(parameter is own for own in self._parameters)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __setitem__(self, parameter: Tensor, state: State) -> NoReturn:
        """Refused: it would be changed on this rank only."""
        raise ShoalError(
            "the state of a wrapped optimizer is divided over the ranks and cannot be set here: "
            "change what optimizer.state_dict() returns, and load it with load_state_dict()"
        )
