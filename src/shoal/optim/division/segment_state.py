"""The state of a rank's segments under full names: what it has of it, and how it is replaced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim.division.segment import ParameterSegment
from shoal.optim.division.segmentation import Segmentation
from shoal.optim.state.reception import Reception, copy_held, divided, fresh_state, full_states
from shoal.optim.state.tensor_state import State, comparable
from shoal.sharding.holding import FullState, Held, HeldState
from shoal.strategies.engine.flat_group import FlatGroup

GroupOptions = Sequence[Mapping[str, Any]]
"""The hyperparameters of each parameter group."""


class SegmentState:
    """The state that an optimizer has for its segments."""

    def __init__(
        self,
        optimizer: Optimizer,
        segments: Segmentation,
        parameters: Sequence[Sequence[nn.Parameter]],
        names: Collection[str],
    ) -> None:
        """``parameters`` are the user's of each parameter group, ``names`` their full names."""
        self._optimizer, self._segments = optimizer, segments
        self._parameters, self._names = parameters, names

    def held(self) -> Iterator[HeldState]:
        """This rank's part of the state, under full names."""
        for segment in self._segments:
            state = self._optimizer.state.get(segment.parameter, {})
            if not state:
                continue
            tensors, shared = divided(state, self._segments.state_like(segment))
            pieces = list(self._segments.pieces(segment))
            for name, extent, own in pieces:
                part = tensors if len(pieces) == 1 else {k: v[own] for k, v in tensors.items()}
                yield HeldState(name, extent, part, shared)

    def receive(
        self, saved: Mapping[str, FullState], options: GroupOptions, on_accept: Callable[[], None]
    ) -> Reception:
        """Makes room for a state that is loaded; see `ShardedOptimizer.receive`.

        New state is made in runs as long as can be, and then cut into segments that are stepped.
        """
        old = [] if saved.keys() >= set(self._names) else self._held_besides(saved)
        known = {**saved, **full_states(old)}
        segments = self._cut(known, is_short=True)
        wanted, rooms = self._make_room(known, options)
        kept = {held.name for held in old}
        copy_held(old, [each for each in wanted if each[1].name in kept])
        missing = [each for each in wanted if each[1].name not in kept]
        states: dict[Tensor, State] = {}
        for segment in (segment for own in segments for segment in own):
            run, state = rooms[segment.group.index, segment.indices[0]]
            if state:
                states[segment.parameter] = run.state_of_part(state, segment)

        def accept() -> None:
            self._accept(segments, states, options)
            on_accept()

        return Reception(missing, accept)

    def _held_besides(self, saved: Mapping[str, FullState]) -> list[HeldState]:
        """The state of parameters that nothing was saved for."""
        return [held for held in self.held() if held.name not in saved]

    def _make_room(
        self, known: Mapping[str, FullState], options: GroupOptions
    ) -> tuple[list[tuple[str, Held]], dict[tuple[int, int], tuple[ParameterSegment, State]]]:
        """Memory that is to be filled, and by group and parameter the run that it is for."""
        wanted: list[tuple[str, Held]] = []
        rooms: dict[tuple[int, int], tuple[ParameterSegment, State]] = {}
        for settings, own in zip(options, self._cut(known, is_short=False), strict=True):
            for run in own:
                pieces = list(self._segments.pieces(run))
                full = known.get(pieces[0][0], FullState())
                memory, state = fresh_state(full, self._segments.state_like(run), settings)
                rooms |= {(run.group.index, index): (run, state) for index in run.indices}
                wanted += [
                    (key, Held(name, extent, flat[part]))
                    for key, flat in memory.items()
                    for name, extent, part in pieces
                ]
        return wanted, rooms

    def _cut(
        self, known: Mapping[str, FullState], *, is_short: bool
    ) -> list[list[ParameterSegment]]:
        def key_of(which: int, group: FlatGroup, index: int) -> object:
            full = known.get(group.names[index], FullState())
            shared = [(key, comparable(value)) for key, value in sorted(full.shared.items())]
            return which, tuple(sorted(full.dtypes.items(), key=str)), tuple(shared)

        with self._segments.in_place():  # whose state says how they can be stepped
            return self._segments.cut(self._parameters, key_of, is_short=is_short)

    def _accept(
        self,
        segments: list[list[ParameterSegment]],
        states: Mapping[Tensor, State],
        options: GroupOptions,
    ) -> None:
        self._optimizer.state.clear()
        self._optimizer.state.update(states)
        for group, settings in zip(self._optimizer.param_groups, options, strict=True):
            group.update(settings)
        self._segments.adopt(segments)
