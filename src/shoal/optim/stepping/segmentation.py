"""The segments that an optimizer steps in place of its parameters, and how they come about."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim.kinds import Kind
from shoal.optim.state.tensor_state import State, cut_state, join_states, shared_state, split_state
from shoal.optim.stepping import kernels
from shoal.optim.stepping.segment import ParameterSegment, longest_segment, make_segments
from shoal.strategies.engine.engine import Engine
from shoal.strategies.engine.flat_group import FlatGroup

KindOf = Callable[[int, FlatGroup, int], object]
"""What must be equal inside a segment, by parameter group, group in memory and place in that."""


class Segmentation:
    """For each parameter group of an optimizer its segments; see [Note: segments].

    The optimizer's state belongs to them. Its ``param_groups`` have the user's parameters, and the
    segments only while it steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engine: Engine,
        kind: Kind,
        *,
        may_fuse: bool,
        is_watched: bool = False,
    ) -> None:
        """Of none yet.

        Args:
            optimizer: The user's.
            engine: Of the model.
            kind: What the optimizer may be divided into.
            may_fuse: Whether fused kernels may make the steps.
            is_watched: Whether each operation costs more than the cache saves.
        """
        self._optimizer, self._engine = optimizer, engine
        self._kind, self._may_fuse, self._is_watched = kind, may_fuse, is_watched
        self._by_group: list[list[ParameterSegment]] = []

    def __iter__(self) -> Iterator[ParameterSegment]:
        """All of them."""
        for own in self._by_group:
            yield from own

    def by_group(self) -> list[tuple[int, ParameterSegment]]:
        """All of them as they are now, with the number of the parameter group."""
        return [(which, segment) for which, own in enumerate(self._by_group) for segment in own]

    def take_over(self) -> None:
        """Makes segments for the parameters that the optimizer has, and moves their state."""
        param_groups = self._optimizer.param_groups
        segments = self.cut([group["params"] for group in param_groups], self._kind_at)
        moved = self._moved_state(segments)
        for group in param_groups:
            for parameter in group["params"]:
                self._optimizer.state.pop(parameter, None)
        self._optimizer.state.update(moved)
        self.adopt(segments)

    def adopt(self, segments: list[list[ParameterSegment]]) -> None:
        """Has the optimizer step these from now on."""
        self._by_group = segments

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Around a step: the optimizer has the segments in place of the parameters."""
        param_groups = self._optimizer.param_groups
        parameters = [group["params"] for group in param_groups]
        for group, own in zip(param_groups, self._by_group, strict=True):
            group["params"] = [segment.parameter for segment in own]
        try:
            yield
        finally:
            for group, own_parameters in zip(param_groups, parameters, strict=True):
                group["params"] = own_parameters

    # Cutting ------------------------------------------------------------------------------

    def cut(
        self,
        parameters: Sequence[Sequence[nn.Parameter]],
        kind_of: KindOf,
        *,
        is_short: bool = True,
    ) -> list[list[ParameterSegment]]:
        """Segments for each parameter group; inside of one, ``kind_of`` is the same everywhere.

        They are short enough to be stepped fast, or as long as can be.
        """
        is_one_pass = self._may_fuse and kernels.is_one_pass(self._optimizer)
        membership = {id(p): which for which, own in enumerate(parameters) for p in own}
        segments: list[list[ParameterSegment]] = [[] for _ in parameters]
        for group in self._engine.groups:
            belongs = [membership.get(id(parameter)) for parameter in group.parameters]
            kinds = [
                None if which is None else self._kind_in(which, group, place, kind_of)
                for place, which in enumerate(belongs)
            ]
            is_best_long = is_one_pass or self._is_watched
            may_be_cut = is_short and self._kind is Kind.ELEMENT_WISE and not is_best_long
            longest = longest_segment(group.master, may_be_cut=may_be_cut)
            found = make_segments(group, group.master, group.master_bounds, kinds, longest)
            for _, segment in found:
                if self._kind is Kind.PER_PARAMETER:
                    segment.restore_shape()
                which = belongs[segment.places[0]]
                assert which is not None
                segments[which].append(segment)
        return segments

    def _kind_in(self, which: int, group: FlatGroup, place: int, kind_of: KindOf) -> object:
        if self._kind is Kind.PER_PARAMETER:
            return which, place
        return kind_of(which, group, place)

    def _kind_at(self, which: int, group: FlatGroup, place: int) -> object:
        """What must be equal inside a segment: settings, and state that is not per element."""
        parameter = group.parameters[place]
        return which, shared_state(self._optimizer.state.get(parameter, {}), parameter)

    def divide(
        self, which: int, segment: ParameterSegment, used: Sequence[bool]
    ) -> list[ParameterSegment]:
        """Cuts a segment where parameters with a gradient meet parameters without."""
        kinds: list[object] = [None] * len(segment.group.parameters)
        for place, is_used in zip(segment.places, used, strict=True):
            kinds[place] = ("used" if is_used else "unused",)
        base = segment.group.master_bounds[0] + segment.start
        bounds = (base, base + segment.parameter.numel())
        memory = segment.group.master[segment.start :]
        parts = [part for _, part in make_segments(segment.group, memory, bounds, kinds)]
        for part in parts:
            part.start += segment.start
        state = self._optimizer.state.pop(segment.parameter, {})
        sizes = [part.parameter.numel() for part in parts]
        for part, part_state in zip(parts, split_state(state, sizes), strict=True):
            if part_state:
                self._optimizer.state[part.parameter] = part_state
        own = self._by_group[which]
        place = own.index(segment)
        own[place : place + 1] = parts
        return parts

    # State from before the wrapping -------------------------------------------------------

    def _moved_state(self, segments: Sequence[Sequence[ParameterSegment]]) -> dict[Tensor, State]:
        """For what takes the parameters' place."""
        moved: dict[Tensor, State] = {}
        for segment in (segment for own in segments for segment in own):
            state = self._state_of(segment)
            if state:
                moved[segment.parameter] = state
        return moved

    def _state_of(self, segment: ParameterSegment) -> State:
        states = self._optimizer.state
        if self._kind is Kind.PER_PARAMETER:  # it is that parameter, in other memory
            (place,) = segment.places
            return dict(states.get(segment.group.parameters[place], {}))
        low = segment.group.master_bounds[0] + segment.start
        bounds = (low, low + segment.parameter.numel())
        parts = []
        for place in segment.places:
            parameter, slot = segment.group.parameters[place], segment.group.layout.slots[place]
            start, stop = (min(max(edge - slot.start, 0), parameter.numel()) for edge in bounds)
            parts.append(cut_state(states.get(parameter, {}), parameter, start, stop))
        return join_states(parts, segment.parameter)
