"""What the user's optimizer steps: runs of flat memory instead of single parameters.

[Note: segments]
An optimizer that works element by element does not care where parameters begin and end. So it
is given *segments*: runs of this rank's memory whose parameters have the same hyperparameters.
Few long tensors are stepped faster than many short ones, up to what the cache holds; a fused step,
which goes over the memory once, has no such limit. When some parameters of a segment have a
gradient and others have not, it is cut there, its state with it, and stays so.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim.state import State, cut_state, join_states, shared_state
from shoal.optim.stepping import kernels
from shoal.sharding.extent import Extent
from shoal.strategies.engine.flat_group import FlatGroup
from shoal.strategies.model import ShardedModel

_CACHED_BYTES = 256 << 10


@dataclass(frozen=True)
class ParameterPiece:
    """The elements of one parameter that a segment has."""

    index: int  # the parameter's index in its group of memory
    start: int  # the first of its elements
    stop: int  # the end of its elements
    offset: int  # where they begin in the segment

    @property
    def in_segment(self) -> slice:
        """Where the elements are in the segment."""
        return slice(self.offset, self.offset + self.stop - self.start)


@dataclass
class ParameterSegment:
    """A run of one group's memory that the optimizer steps as one tensor."""

    group: FlatGroup  # the group it is part of
    indices: list[int]  # the parameters it covers, by their index in the group
    start: int  # where it begins in this rank's part of the buffer, in elements
    parameter: nn.Parameter  # what the optimizer has instead of the parameters

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The user's that it covers."""
        return [self.group.parameters[index] for index in self.indices]

    def show(self, buffer: Tensor | None) -> None:
        """Gives the parameter its part of this rank's gradient, or none."""
        gradient = None
        if buffer is not None:
            gradient = buffer[self.start : self.start + self.parameter.numel()]
            gradient = gradient.view(self.parameter.shape)
        self.parameter.grad = gradient

    def pieces(self) -> Iterator[ParameterPiece]:
        """Parameter by parameter what it has of them."""
        low, high = self.bounds
        for index in self.indices:
            slot = self.group.layout.slots[index]
            start, stop = max(slot.start, low), min(slot.stop, high)
            yield ParameterPiece(index, start - slot.start, stop - slot.start, start - low)

    @property
    def bounds(self) -> tuple[int, int]:
        """Where it begins and ends in the group's buffer."""
        low = self.group.master_bounds[0] + self.start
        return low, low + self.parameter.numel()

    def state_of_part(self, state: State, part: ParameterSegment) -> State:
        """Of a segment that lies in this one: in the same memory, as far as it is per element."""
        if part.parameter.numel() == self.parameter.numel():
            return state
        start = part.start - self.start
        return cut_state(state, self.parameter, start, start + part.parameter.numel())


def make_segments(
    group: FlatGroup,
    bounds: tuple[int, int],
    keys: Sequence[object],
    longest: int | None = None,
) -> Iterator[ParameterSegment]:
    """Cuts the masters that lie in ``bounds`` of a group's buffer where neighbours' keys differ.

    ``keys`` has for each parameter what must be equal inside a segment; None: it is not stepped.
    ``longest``: the most elements of a segment.
    """
    run: list[tuple[int, int, int]] = []
    for index, slot in enumerate(group.layout.slots):
        start, end = max(slot.start, bounds[0]), min(slot.stop, bounds[1])
        # A parameter without elements has state all the same: a number of steps.
        is_due = start < end or slot.start == slot.stop == start == end
        while is_due:
            first = run[0][1] if run else start
            is_full = longest is not None and start - first >= longest
            ends = run and (run[-1][2] != start or keys[run[-1][0]] != keys[index])
            if run and (is_full or ends):
                yield from _segment(group, run, keys)
                run, first = [], start
            stop = end if longest is None else min(end, first + longest)
            run.append((index, start, stop))
            start, is_due = stop, stop < end
    yield from _segment(group, run, keys)


def _segment(
    group: FlatGroup, run: Sequence[tuple[int, int, int]], keys: Sequence[object]
) -> Iterator[ParameterSegment]:
    if run and keys[run[0][0]] is not None:
        base = group.master_bounds[0]
        start, stop = run[0][1] - base, run[-1][2] - base
        parameter = _as_parameter(group.master[start:stop].detach())
        yield ParameterSegment(group, [index for index, _, _ in run], start, parameter)


def _as_parameter(memory: Tensor) -> nn.Parameter:
    """Whole numbers have no gradients, and optimizers pass over them."""
    return nn.Parameter(memory, memory.is_floating_point() or memory.is_complex())


KeyOf = Callable[[int, FlatGroup, int], object]
"""What must be equal inside a segment, by parameter group, group of memory and index in that."""
NamedPiece = tuple[str, Extent, slice]
"""A parameter's full name, which of its elements a segment has, and where in the segment."""


class Segmentation:
    """For each parameter group of an optimizer its segments; see [Note: segments].

    The optimizer's state belongs to them. Its ``param_groups`` have the user's parameters, and the
    segments only while it steps; so it is with its ``state``, which other methods of the optimizer
    may look up by parameter. Segments are cut anywhere, for optimizers that work element by
    element.

    Attributes:
        states: The optimizer's state, by segment.
    """

    def __init__(
        self, optimizer: Optimizer, model: ShardedModel, *, may_fuse: bool, is_watched: bool
    ) -> None:
        """``is_watched``: whether each operation of a step costs more than the cache saves."""
        self._optimizer, self._model = optimizer, model
        self._may_fuse, self._is_watched = may_fuse, is_watched
        self._by_group: list[list[ParameterSegment]] = []
        self.states = optimizer.state

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
        with self._own_state():
            segments = self.cut([group["params"] for group in param_groups], self._key_at)
        moved = {segment.parameter: self._state_for(segment) for own in segments for segment in own}
        for group in param_groups:
            for parameter in group["params"]:
                self.states.pop(parameter, None)
        self.states.update({key: state for key, state in moved.items() if state})
        self.adopt(segments)

    def adopt(self, segments: list[list[ParameterSegment]]) -> None:
        """Has the optimizer step these from now on."""
        for change, by_group in ((-1, self._by_group), (1, segments)):
            for segment in itertools.chain.from_iterable(by_group):
                segment.group.changes.count_own_views(change)
        self._by_group = segments

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the optimizer has the segments in place of the parameters."""
        param_groups = self._optimizer.param_groups
        parameters = [group["params"] for group in param_groups]
        for group, own in zip(param_groups, self._by_group, strict=True):
            group["params"] = [segment.parameter for segment in own]
        try:
            with self._own_state():
                yield
        finally:
            for group, own_parameters in zip(param_groups, parameters, strict=True):
                group["params"] = own_parameters

    @contextlib.contextmanager
    def _own_state(self) -> Iterator[None]:
        shown, self._optimizer.state = self._optimizer.state, self.states
        try:
            yield
        finally:
            self._optimizer.state = shown

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
        # What a CPU's cache holds through the several passes of a step; GPUs like long ones.
        is_short = is_short and group.master.is_cpu
        longest = _CACHED_BYTES // group.master.itemsize if is_short else None
        return make_segments(group, group.master_bounds, keys, longest)

    def _key_at(self, which: int, group: FlatGroup, index: int) -> object:
        """What must be equal inside a segment: settings, and state that is not per element."""
        parameter = group.parameters[index]
        return which, shared_state(self.states.get(parameter, {}), parameter)

    def cut_where_unlike(
        self, which: int, segment: ParameterSegment, looks: Sequence[object]
    ) -> list[ParameterSegment]:
        """Cuts a segment where parameters with a gradient, say, meet parameters without."""
        keys: list[object] = [None] * len(segment.group.parameters)
        for index, look in zip(segment.indices, looks, strict=True):
            keys[index] = (look,)
        parts = list(make_segments(segment.group, segment.bounds, keys))
        state = self.states.pop(segment.parameter, {})
        if state:
            for part in parts:
                self.states[part.parameter] = segment.state_of_part(state, part)
        own = self._by_group[which]
        index = own.index(segment)
        own[index : index + 1] = parts
        segment.group.changes.count_own_views(len(parts) - 1)
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

    def _state_for(self, segment: ParameterSegment) -> State:
        """What a segment's parameters have for a state, cut and joined like them."""
        states = self.states
        parts = [
            cut_state(states.get(parameter, {}), parameter, piece.start, piece.stop)
            for parameter, piece in zip(segment.parameters, segment.pieces(), strict=True)
        ]
        return join_states(parts, segment.parameter)


class WholeParameters(Segmentation):
    """Each segment is one parameter in its own shape, for optimizers that look at all of it."""

    def _cut_group(
        self, group: FlatGroup, keys: Sequence[object], *, is_short: bool
    ) -> Iterator[ParameterSegment]:
        apart = [None if key is None else (index, key) for index, key in enumerate(keys)]
        for segment in super()._cut_group(group, apart, is_short=False):
            shape = group.layout.slots[segment.indices[0]].shape
            segment.parameter = _as_parameter(segment.parameter.detach().view(shape))
            yield segment

    def _state_for(self, segment: ParameterSegment) -> State:
        """The parameter's own: a segment is that parameter, in other memory."""
        (parameter,) = segment.parameters
        return dict(self.states.get(parameter, {}))
