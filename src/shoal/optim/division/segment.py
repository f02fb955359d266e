"""What the user's optimizer steps: runs of flat memory instead of single parameters.

[Note: segments]
An optimizer that works element by element does not care where parameters begin and end. So it
is given *segments*: runs of this rank's memory whose parameters have the same hyperparameters.
Few long tensors are stepped faster than many short ones, up to what the cache holds; a fused step,
which goes over the memory once, has no such limit. When some parameters of a segment have a
gradient and others have not, it is cut there, its state with it, and stays so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from shoal.optim.state.tensor_state import State, cut_state
from shoal.strategies.engine.flat_group import FlatGroup

_CACHED_BYTES = 256 << 10


@dataclass(frozen=True)
class ParameterPiece:
    """The elements of one parameter that a segment has.

    Attributes:
        index: The parameter's index in its group of memory.
        start: The first of its elements.
        stop: The end of its elements.
        offset: Where they begin in the segment.
    """

    index: int
    start: int
    stop: int
    offset: int

    @property
    def in_segment(self) -> slice:
        """Where the elements are in the segment."""
        return slice(self.offset, self.offset + self.stop - self.start)


@dataclass
class ParameterSegment:
    """A run of one group's memory that the optimizer steps as one tensor.

    Attributes:
        group: The group it is part of.
        indices: The parameters it covers, by their index in the group.
        start: Where it begins in this rank's part of the buffer, in elements.
        parameter: What the optimizer has instead of the parameters.
    """

    group: FlatGroup
    indices: list[int]
    start: int
    parameter: nn.Parameter

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

    def restore_shape(self) -> None:
        """For a segment that is one whole parameter: that parameter's shape."""
        (index,) = self.indices
        self.parameter = nn.Parameter(
            self.parameter.detach().view(self.group.layout.slots[index].shape)
        )


def make_segments(
    group: FlatGroup,
    memory: Tensor,
    bounds: tuple[int, int],
    keys: Sequence[object],
    longest: int | None = None,
) -> Iterator[ParameterSegment]:
    """Cuts ``memory``, which holds ``bounds`` of the group, where neighbours' keys differ.

    Args:
        group: The group.
        memory: The part of the buffer that this rank steps.
        bounds: Where that part begins and ends in the buffer.
        keys: For each parameter what must be equal inside a segment; None: not stepped.
        longest: The most elements of a segment.
    """
    run: list[tuple[int, int, int]] = []
    for index, slot in enumerate(group.layout.slots):
        start, end = max(slot.start, bounds[0]), min(slot.stop, bounds[1])
        # A parameter without elements has state all the same: a number of steps.
        is_due = start < end or slot.start == slot.stop == start == end
        while is_due:
            first = run[0][1] if run else start
            is_full = longest is not None and start - first >= longest
            if run and (is_full or keys[run[-1][0]] != keys[index]):
                yield from _segment(group, memory, bounds[0], run, keys)
                run, first = [], start
            stop = end if longest is None else min(end, first + longest)
            run.append((index, start, stop))
            start, is_due = stop, stop < end
    yield from _segment(group, memory, bounds[0], run, keys)


def longest_segment(memory: Tensor) -> int | None:
    """What a CPU's cache holds through the several passes of a step; GPUs like long ones."""
    return _CACHED_BYTES // memory.itemsize if memory.is_cpu else None


def _segment(
    group: FlatGroup,
    memory: Tensor,
    base: int,
    run: Sequence[tuple[int, int, int]],
    keys: Sequence[object],
) -> Iterator[ParameterSegment]:
    if run and keys[run[0][0]] is not None:
        start, stop = run[0][1] - base, run[-1][2] - base
        parameter = nn.Parameter(memory[start:stop].detach())
        yield ParameterSegment(group, [index for index, _, _ in run], start, parameter)
