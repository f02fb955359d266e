"""`ByElement` and `ByParameter`: each rank steps its part of the memory, in segments.

`DIVISIONS` at the end is the table of all divisions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.optim.division.segmentation import ParameterSegment, Segmentation, WholeParameters
from shoal.optim.division.work_division import Closure, Undivided, WorkDivision
from shoal.optim.kinds import Kind
from shoal.optim.state import (
    Reception,
    State,
    comparable,
    copy_held,
    cut_state,
    divided,
    fresh_state,
    full_states,
    is_per_element,
    join_states,
    placed,
)
from shoal.optim.stepping import kernels
from shoal.optim.stepping.supervision import Supervision
from shoal.sharding.holding import FullState, Held, HeldState
from shoal.strategies.engine.flat_group import FlatGroup
from shoal.strategies.model import ShardedModel


class Segmented(WorkDivision):
    """Each rank steps the segments of its part of the memory; see [Note: segments]."""

    segmentation: ClassVar[type[Segmentation]]

    def __init__(self, model: ShardedModel, supervision: Supervision) -> None:
        """Moves the state that there is to this rank's segments."""
        super().__init__(model, supervision)
        self._may_fuse = self.may_fuse()
        self.segments = self.segmentation(
            self.optimizer,
            model,
            may_fuse=self._may_fuse,
            is_watched=supervision.judgement.is_watched,
        )
        self.segments.take_over()
        self.optimizer.state = self.state  # type: ignore[assignment]
        self._hooks = [
            self.optimizer.register_state_dict_pre_hook(_refuse_state),
            self.optimizer.register_load_state_dict_pre_hook(_refuse_state),
        ]

    def let_go(self) -> None:
        """Takes its hooks off the user's optimizer and drops the state there is."""
        self.optimizer.state = self.segments.states
        super().let_go()

    def may_fuse(self) -> bool:
        """Not where masters are rounded: a last bit of one may be more in its copy."""
        settings = self.engine.settings
        return settings.compute_dtype is None and settings.gather_codec is None

    def kernels(self) -> contextlib.AbstractContextManager[None]:
        """Around a step: which kernels make it."""
        if self._may_fuse:
            return kernels.fused_where_free(self.optimizer)
        return contextlib.nullcontext()

    # Steps --------------------------------------------------------------------------------

    def step(self, closure: Closure | None, check_ranks: Closure) -> Any:
        """A step on this rank's part; then all ranks have the new parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = self.mean(closure())
        parameters = self.flat_parameters
        self.engine.gradients.check_averaged(parameters)
        self.engine.gradients.adopt(self._num_averaged)
        check_ranks()
        for which, segment in self.segments.by_group():
            self._hand_out(which, segment)
        try:
            with (
                self.engine.parameters.stepping(parameters),
                self.segments.stepping(),
                self.kernels(),
                self.supervision.step(lambda: [each.parameters[0] for each in self.segments]),
            ):
                shown = [segment.parameter.grad for segment in self.segments]
                self.optimizer.step()
                self._keep_gradients(shown)
        finally:
            for segment in self.segments:
                segment.parameter.grad = None
        self.note_step()
        return loss

    def _hand_out(self, which: int, segment: ParameterSegment) -> None:
        """Gives a segment its gradient, if its parameters have one."""
        gradients = self.engine.gradients.groups[segment.group.index]
        used = [index in gradients.used for index in segment.indices]
        looks: Sequence[object] = used
        may_look = self.supervision.judgement.is_watched
        if may_look:
            trained = [parameter.requires_grad for parameter in segment.parameters]
            looks = list(zip(used, trained, strict=True))
        if any(look != looks[0] for look in looks):
            for part in self.segments.cut_where_unlike(which, segment, looks):
                self._hand_out(which, part)
            return
        memory = gradients.memory
        buffer = memory.own() if self.engine.sharding.optimizer else memory.held()
        segment.show(buffer if used[0] else None)
        if may_look:
            segment.parameter.requires_grad_(trained[0])

    @torch.no_grad()
    def _keep_gradients(self, shown: Sequence[Tensor | None]) -> None:
        """What a step has put in the place of gradients is what users see of them afterwards."""
        for segment, gradient in zip(self.segments, shown, strict=True):
            other = segment.parameter.grad
            if gradient is not None and other is not None and other is not gradient:
                gradient.copy_(other)

    # State --------------------------------------------------------------------------------

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """Read-only: the state belongs to segments."""
        return StateView(self.segments.states, self.segments, self.flat_parameters)

    def state_dict(self) -> dict[str, Any]:
        """The parts of all ranks together."""
        numbers = {self.names[id(each)]: n for n, each in enumerate(self.flat_parameters)}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [numbers[self.names[id(parameter)]] for parameter in own]}
            for group, own in zip(self.optimizer.param_groups, self.parameters, strict=True)
        ]
        whole = self._gather_state()
        state = {number: whole[name] for name, number in numbers.items() if name in whole}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps this rank's part."""
        saved = state_dict["param_groups"]
        check_sizes(saved, self.parameters)
        order = [(number, group) for group in saved for number in group["params"]]
        self.segments.states.clear()
        for (number, options), parameter in zip(order, self.flat_parameters, strict=True):
            master = self.engine.groups[self.engine.index_of[id(parameter)][0]].master
            state = state_dict["state"].get(number, {})
            loaded = {
                key: placed(key, value, master, options, is_cast=True)
                for key, value in state.items()
            }
            if loaded:
                self.segments.states[parameter] = loaded
        for group, own in zip(saved, self.optimizer.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        self.segments.take_over()

    def held_state(self) -> Iterator[HeldState]:
        """That of this rank's segments."""
        for segment in self.segments:
            state = self.segments.states.get(segment.parameter, {})
            if not state:
                continue
            tensors, shared = divided(state, self.segments.state_like(segment))
            pieces = list(self.segments.pieces(segment))
            for name, extent, own in pieces:
                part = tensors if len(pieces) == 1 else {k: v[own] for k, v in tensors.items()}
                yield HeldState(name, extent, part, shared)

    def _gather_state(self) -> dict[str, State]:
        """The whole state of each parameter by name, from all ranks, which call it together."""
        own = [
            [held.name, *_run(held), {k: v.clone() for k, v in held.tensors.items()}, held.shared]
            for held in self.held_state()
        ]
        whole: dict[str, State] = {}
        for found in self.engine.shard_group.all_gather_object(own):
            for name, shape, start, stop, tensors, shared in found:
                state = whole.setdefault(name, dict(shared))
                for key, flat in tensors.items():
                    if key not in state:
                        state[key] = torch.zeros(shape, dtype=flat.dtype, device=flat.device)
                    state[key].view(-1)[start:stop] = flat
        return whole

    def receive(
        self, saved: Mapping[str, FullState], options: Sequence[Mapping[str, Any]]
    ) -> Reception:
        """Makes room for what this rank's segments will have.

        New state is made in runs as long as can be, and then cut into segments that are stepped.
        """
        # The state of parameters that nothing was saved for stays.
        is_complete = saved.keys() >= set(self.names.values())
        old = [] if is_complete else [held for held in self.held_state() if held.name not in saved]
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
            self.segments.states.clear()
            self.segments.states.update(states)
            for group, settings in zip(self.optimizer.param_groups, options, strict=True):
                group.update(settings)
            self.segments.adopt(segments)
            self.count_state()

        return Reception(missing, accept)

    def _make_room(
        self, known: Mapping[str, FullState], options: Sequence[Mapping[str, Any]]
    ) -> tuple[list[tuple[str, Held]], dict[tuple[int, int], tuple[ParameterSegment, State]]]:
        """Memory that is to be filled, and by group and parameter the run that it is for."""
        wanted: list[tuple[str, Held]] = []
        rooms: dict[tuple[int, int], tuple[ParameterSegment, State]] = {}
        for settings, own in zip(options, self._cut(known, is_short=False), strict=True):
            for run in own:
                pieces = list(self.segments.pieces(run))
                full = known.get(pieces[0][0], FullState())
                memory, state = fresh_state(full, self.segments.state_like(run), settings)
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

        with self.segments.in_place():  # whose state says how they can be stepped
            return self.segments.cut(self.parameters, key_of, is_short=is_short)


class ByElement(Segmented):
    """For optimizers that work element by element: a rank's part may be cut anywhere."""

    segmentation = Segmentation


class ByParameter(Segmented):
    """For optimizers that look at whole parameters: none is cut between ranks."""

    lays_out_memory = True
    segmentation = WholeParameters

    def __init__(self, model: ShardedModel, supervision: Supervision) -> None:
        """Lays out the model's memory anew."""
        model.keep_whole([parameter for group in supervision.parameters for parameter in group])
        super().__init__(model, supervision)


def check_sizes(saved: Sequence[Mapping[str, Any]], own: Sequence[Sequence[Any]]) -> None:
    """Raises if a state was saved for parameter groups of other sizes."""
    sizes, here = [len(group["params"]) for group in saved], [len(group) for group in own]
    if sizes != here:
        raise ValueError(
            f"the state was saved for groups of {sizes} parameters; this optimizer has groups "
            f"of {here}"
        )


def _refuse_state(*_: Any) -> NoReturn:
    raise ShoalError(
        "this optimizer was wrapped for several ranks, and this rank has a part of its state: save "
        "and load with the one that shoal.as_distributed(model, optimizer) returned instead"
    )


GroupOptions = Sequence[Mapping[str, Any]]
"""The hyperparameters of each parameter group."""


def _run(held: HeldState) -> tuple[list[int], int, int]:
    """The shape of what the ranks of the data axis have between them, and which run this is."""
    extent = held.extent
    shape = extent.shape if extent.split is None else extent.split.local_shape
    return list(shape), extent.start, extent.stop


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
                "parameter's state: optimizer.state_dict() has all of it, if every rank calls it. "
                'For methods of the optimizer that look at its state, wrap it with kind="global"'
            )
        flat = torch.empty(count, device="meta")
        with torch.inference_mode():  # copies, which torch lets nobody write to in vain
            state = parts[0] if len(parts) == 1 else join_states(parts, flat)
        return StateOfParameter(
            (key, value.view(parameter.shape) if is_per_element(key, value, flat) else value)
            for key, value in state.items()
        )

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._state or any(parameter is own for own in self._parameters)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: it would be changed on this rank only, or in a copy."""
        raise ShoalError(
            "the state of a wrapped optimizer is divided over the ranks and cannot be set here: "
            "change what optimizer.state_dict() returns, and load it with load_state_dict()"
        )

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _refuse


class StateOfParameter(dict[str, Any]):
    """One parameter's state, put together from that of segments: its tensors may be written to."""

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        """Copied as the plain dict that it looks like."""
        return dict, (dict(self),)

    __setitem__ = __delitem__ = clear = pop = popitem = StateView._refuse
    setdefault = update = __ior__ = StateView._refuse


DIVISIONS: Mapping[Kind, type[WorkDivision]] = {
    Kind.ELEMENT_WISE: ByElement,
    Kind.PER_PARAMETER: ByParameter,
    Kind.GLOBAL: Undivided,
}
"""How the work of an optimizer of each kind is divided."""
