"""The state of a rank's segments under full names: what it has of it, and how it is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm import Backend
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
        names: set[str],
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

    def gather(self, backend: Backend) -> dict[str, State]:
        """The whole state of each parameter by name, from all ranks, which call it together.

        It has the form that the plain torch optimizer would have in one process, so that either can
        load what the other saved, at any number of ranks.
        """
        own = [
            [held.name, *_run(held), {k: v.clone() for k, v in held.tensors.items()}, held.shared]
            for held in self.held()
        ]
        whole: dict[str, State] = {}
        for found in backend.all_gather_object(own):
            for name, shape, start, stop, tensors, shared in found:
                state = whole.setdefault(name, dict(shared))
                for key, flat in tensors.items():
                    if key not in state:
                        state[key] = torch.zeros(shape, dtype=flat.dtype, device=flat.device)
                    state[key].view(-1)[start:stop] = flat
        return whole

    def receive(
        self, saved: Mapping[str, FullState], options: GroupOptions, on_accept: Callable[[], None]
    ) -> Reception:
        """Makes room for a state that is loaded; see `ShardedOptimizer.receive`.

        New state is made in runs as long as can be, and then cut into segments that are stepped.
        """
        # The state of parameters that nothing was saved for stays.
        is_complete = saved.keys() >= self._names
        old = [] if is_complete else [held for held in self.held() if held.name not in saved]
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
            self._optimizer.state.clear()
            self._optimizer.state.update(states)
            for group, settings in zip(self._optimizer.param_groups, options, strict=True):
                group.update(settings)
            self._segments.adopt(segments)
            on_accept()

        return Reception(missing, accept)

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


def _run(held: HeldState) -> tuple[list[int], int, int]:
    """The shape of what the ranks of the data axis have between them, and which run this is."""
    extent = held.extent
    shape = extent.shape if extent.split is None else extent.split.local_shape
    return list(shape), extent.start, extent.stop
