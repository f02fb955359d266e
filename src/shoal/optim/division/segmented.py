"""`ByElement` and `ByParameter`: each rank steps its part of the memory, in segments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.optim.division.segment import ParameterSegment
from shoal.optim.division.segment_state import SegmentState
from shoal.optim.division.segmentation import Segmentation, WholeParameters
from shoal.optim.division.state_view import StateView
from shoal.optim.division.work_division import Closure, WorkDivision
from shoal.optim.state.reception import Reception, placed
from shoal.optim.stepping import kernels
from shoal.optim.stepping.supervision import Supervision
from shoal.sharding.holding import FullState, HeldState
from shoal.strategies.model import ShardedModel


class Segmented(WorkDivision):
    """Each rank steps the segments of its part of the memory; see [Note: segments].

    Attributes:
        segments: What this rank steps.
    """

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
        self.optimizer.register_state_dict_pre_hook(_refuse_state)
        self.optimizer.register_load_state_dict_pre_hook(_refuse_state)

    def may_fuse(self) -> bool:
        """Not in mixed precision: a last bit of a master may be more in its copy."""
        return self.engine.settings.compute_dtype is None

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
                self.stepping(),
                self.segments.stepping(),
                self.kernels(),
                self.supervision.step(self._first_parameters),
            ):
                self.optimizer.step()
        finally:
            for segment in self.segments:
                segment.parameter.grad = None
        self.note_step()
        return loss

    def _first_parameters(self) -> list[Tensor]:
        return [segment.parameters[0] for segment in self.segments]

    def _hand_out(self, which: int, segment: ParameterSegment) -> None:
        """Gives a segment its gradient, if its parameters have one."""
        gradients = self.engine.gradients[segment.group.index]
        used = [index in gradients.used for index in segment.indices]
        if any(used) and not all(used):
            for part in self.segments.divide(which, segment, used):
                self._hand_out(which, part)
            return
        buffer = gradients.own() if self.engine.sharding.optimizer else gradients.held()
        segment.show(buffer if used[0] else None)

    # State --------------------------------------------------------------------------------

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """Read-only: the state belongs to segments."""
        return StateView(self.optimizer.state, self.segments, self.flat_parameters)

    def state_dict(self) -> dict[str, Any]:
        """The parts of all ranks together."""
        numbers = {self.name_of(each): number for number, each in enumerate(self.flat_parameters)}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [numbers[self.name_of(parameter)] for parameter in own]}
            for group, own in zip(self.optimizer.param_groups, self.parameters, strict=True)
        ]
        whole = self._segment_state().gather(self.engine.shard_group)
        state = {number: whole[name] for name, number in numbers.items() if name in whole}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps this rank's part."""
        saved = state_dict["param_groups"]
        check_sizes(saved, self.parameters)
        order = [(number, group) for group in saved for number in group["params"]]
        self.optimizer.state.clear()
        for (number, options), parameter in zip(order, self.flat_parameters, strict=True):
            master = self.engine.groups[self.locate(parameter)[0]].master
            state = state_dict["state"].get(number, {})
            loaded = {
                key: placed(key, value, master, options, is_cast=True)
                for key, value in state.items()
            }
            if loaded:
                self.optimizer.state[parameter] = loaded
        for group, own in zip(saved, self.optimizer.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        self.segments.take_over()

    def held_state(self) -> Iterator[HeldState]:
        """That of this rank's segments."""
        return self._segment_state().held()

    def receive(
        self, saved: Mapping[str, FullState], options: Sequence[Mapping[str, Any]]
    ) -> Reception:
        """Makes room for what this rank's segments will have."""
        return self._segment_state().receive(saved, options, self.count_state)

    def _segment_state(self) -> SegmentState:
        return SegmentState(
            self.optimizer, self.segments, self.parameters, set(self.names.values())
        )


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
