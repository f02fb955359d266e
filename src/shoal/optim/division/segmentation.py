"""The segments that an optimizer steps in place of its parameters, and how they come about."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim.division.segment import ParameterSegment, longest_segment, make_segments
from shoal.optim.state.tensor_state import State, cut_state, join_states, shared_state, split_state
from shoal.optim.stepping import kernels
from shoal.sharding.extent import Extent
from shoal.strategies.engine.flat_group import FlatGroup
from shoal.strategies.model import ShardedModel

KeyOf = Callable[[int, FlatGroup, int], object]
"""What must be equal inside a segment, by parameter group, group of memory and index in that."""
NamedPiece = tuple[str, Extent, slice]
"""A parameter's full name, which of its elements a segment has, and where in the segment."""


class Segmentation:
    """For each parameter group of an optimizer its segments; see [Note: segments].

    The optimizer's state belongs to them. Its ``param_groups`` have the user's parameters, and the
    segments only while it steps. Segments are cut anywhere, for optimizers that work element by
    element.
    """

    def __init__(
        self, optimizer: Optimizer, model: ShardedModel, *, may_fuse: bool, is_watched: bool
    ) -> None:
        """Of none yet.

        Args:
            optimizer: The user's.
            model: The wrapped model.
            may_fuse: Whether fused kernels may make the steps.
            is_watched: Whether each operation costs more than the cache saves.
        """
        self._optimizer, self._model = optimizer, model
        self._may_fuse, self._is_watched = may_fuse, is_watched
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
        segments = self.cut([group["params"] for group in param_groups], self._key_at)
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
        """Inside, the optimizer has the segments in place of the parameters."""
        param_groups = self._optimizer.param_groups
        parameters = [group["params"] for group in param_groups]
        for group, own in zip(param_groups, self._by_group, strict=True):
            group["params"] = [segment.parameter for segment in own]
        try:
            yield
        finally:
            for group, own_parameters in zip(param_groups, parameters, strict=True):
                group["params"] = own_parameters

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Around a step of the optimizer, which has the segments and their gradients."""
        return self.in_place()

    # Cutting ------------------------------------------------------------------------------

    def cut(
        self, parameters: Sequence[Sequence[nn.Parameter]], key_of: KeyOf, *, is_short: bool = True
    ) -> list[list[ParameterSegment]]:
        """Segments for each parameter group; inside of one, ``key_of`` is the same everywhere.

        They are short enough to be stepped fast, or as long as can be.
        """
        is_one_pass = self._may_fuse and kernels.is_one_pass(self._optimizer)
        is_short = is_short and not is_one_pass and not self._is_watched
        membership = {id(p): which for which, own in enumerate(parameters) for p in own}
        segments: list[list[ParameterSegment]] = [[] for _ in parameters]
        for group in self._model.engine.groups:
            belongs = [membership.get(id(parameter)) for parameter in group.parameters]
            keys = [
                None if which is None else key_of(which, group, index)
                for index, which in enumerate(belongs)
            ]
            for segment in self._cut_group(group, keys, is_short=is_short):
                which = belongs[segment.indices[0]]
                assert which is not None
                segments[which].append(segment)
        return segments

    def _cut_group(
        self, group: FlatGroup, keys: Sequence[object], *, is_short: bool
    ) -> Iterator[ParameterSegment]:
        longest = longest_segment(group.master) if is_short else None
        return make_segments(group, group.master, group.master_bounds, keys, longest)

    def _key_at(self, which: int, group: FlatGroup, index: int) -> object:
        """What must be equal inside a segment: settings, and state that is not per element."""
        parameter = group.parameters[index]
        return which, shared_state(self._optimizer.state.get(parameter, {}), parameter)

    def divide(
        self, which: int, segment: ParameterSegment, used: Sequence[bool]
    ) -> list[ParameterSegment]:
        """Cuts a segment where parameters with a gradient meet parameters without."""
        keys: list[object] = [None] * len(segment.group.parameters)
        for index, is_used in zip(segment.indices, used, strict=True):
            keys[index] = ("used" if is_used else "unused",)
        memory = segment.group.master[segment.start :]
        parts = list(make_segments(segment.group, memory, segment.bounds, keys))
        for part in parts:
            part.start += segment.start
        state = self._optimizer.state.pop(segment.parameter, {})
        sizes = [part.parameter.numel() for part in parts]
        for part, part_state in zip(parts, split_state(state, sizes), strict=True):
            if part_state:
                self._optimizer.state[part.parameter] = part_state
        own = self._by_group[which]
        index = own.index(segment)
        own[index : index + 1] = parts
        return parts

    # State --------------------------------------------------------------------------------

    def state_like(self, segment: ParameterSegment) -> Tensor:
        """What per-element state of a segment has the shape of."""
        return segment.parameter

    def pieces(self, segment: ParameterSegment) -> Iterator[NamedPiece]:
        """A segment's parameters by full name: which elements, and where in the segment."""
        for piece in segment.pieces():
            slot = segment.group.layout.slots[piece.index]
            split = self._model.split_of(slot.name)
            shape = slot.shape if split is None else split.shape
            yield slot.name, Extent(shape, piece.start, piece.stop, split), piece.in_segment

    def _moved_state(self, segments: Sequence[Sequence[ParameterSegment]]) -> dict[Tensor, State]:
        """The state of the parameters, for the segments that take their place."""
        moved: dict[Tensor, State] = {}
        for segment in (segment for own in segments for segment in own):
            state = self._state_for(segment)
            if state:
                moved[segment.parameter] = state
        return moved

    def _state_for(self, segment: ParameterSegment) -> State:
        """What a segment's parameters have for a state, cut and joined like them."""
        states = self._optimizer.state
        parts = []
        for parameter, piece in zip(segment.parameters, segment.pieces(), strict=True):
            parts.append(cut_state(states.get(parameter, {}), parameter, piece.start, piece.stop))
        return join_states(parts, segment.parameter)


class WholeParameters(Segmentation):
    """Each segment is one parameter in its own shape, for optimizers that look at all of it."""

    def _cut_group(
        self, group: FlatGroup, keys: Sequence[object], *, is_short: bool
    ) -> Iterator[ParameterSegment]:
        apart = [None if key is None else (index, key) for index, key in enumerate(keys)]
        for segment in super()._cut_group(group, apart, is_short=False):
            segment.restore_shape()
            yield segment

    def _state_for(self, segment: ParameterSegment) -> State:
        """The parameter's own: a segment is that parameter, in other memory."""
        (parameter,) = segment.parameters
        return dict(self._optimizer.state.get(parameter, {}))
