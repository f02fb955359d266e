"""`TensorParallelOptimizer`: steps each rank's parts of split layers, and how that is divided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import ShoalError
from shoal.optim.division.segmentation import NamedPiece, ParameterSegment, WholeParameters
from shoal.optim.division.segmented import ByElement, ByParameter, Segmented
from shoal.optim.division.work_division import DECLARE, Undivided, WorkDivision
from shoal.optim.kinds import Kind
from shoal.optim.optimizer import ShardedOptimizer
from shoal.optim.state import State, is_per_element
from shoal.optim.stepping.kernels import unfused_on_cpu
from shoal.optim.stepping.supervision import Supervision
from shoal.sharding.extent import Extent
from shoal.strategies.model import ShardedModel
from shoal.strategies.tensor import TensorParallelModel, TensorParts


class SplitSegments(Segmented):
    """Segments of parts of layers."""

    @property
    def parts(self) -> TensorParts:
        """The model's."""
        return parts_of(self.model)

    def may_fuse(self) -> bool:
        """Not where parts are uneven, so that ranks cut their memory at different offsets.

        Fused kernels round by the offset, so the copies that all ranks have of a parameter that is
        not split would drift apart by last bits.
        """
        return super().may_fuse() and self._is_even

    @cached_property
    def _is_even(self) -> bool:
        return all(map(self.parts.is_even, self.parts.splits))

    def kernels(self) -> AbstractContextManager[None]:
        """No fused ones where parts are uneven."""
        return super().kernels() if self._is_even else unfused_on_cpu(self.optimizer)


class SplitByElement(SplitSegments, ByElement):
    """Each rank steps its parts of split layers, and has their part of the state."""

    def __init__(self, model: ShardedModel, supervision: Supervision) -> None:
        """State from before the layers were split is split with them."""
        parts, states = parts_of(model), supervision.optimizer.state
        for parameter in (each for group in supervision.parameters for each in group):
            name = parts.name_of(parameter)
            if name is not None and parameter in states:
                states[parameter] = _part(states[parameter], name, parts)
        super().__init__(model, supervision)

    def state_dict(self) -> dict[str, Any]:
        """The parts of all ranks together, over both axes."""
        whole = super().state_dict()
        for number, parameter in enumerate(self.flat_parameters):
            name = self.parts.name_of(parameter)
            if name is not None and number in whole["state"]:
                whole["state"][number] = self._joined(whole["state"][number], name, parameter)
        return whole

    def _joined(self, state: State, name: str, parameter: Tensor) -> State:
        return {
            key: self.parts.join(name, value) if is_per_element(key, value, parameter) else value
            for key, value in state.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps this rank's part."""
        order = [number for group in state_dict["param_groups"] for number in group["params"]]
        state = dict(state_dict["state"])
        for number, parameter in zip(order, self.flat_parameters, strict=False):
            name = self.parts.name_of(parameter)
            if name is not None and number in state:
                state[number] = _part(state[number], name, self.parts)
        super().load_state_dict({**state_dict, "state": state})


class JoinedParameters(WholeParameters):
    """Split parameters are put together for each step, and their state is that of the whole."""

    @property
    def _parts(self) -> TensorParts:
        return parts_of(self._model)

    def _split_name(self, segment: ParameterSegment) -> str | None:
        """The name of a parameter that is split; None for another."""
        (parameter,) = segment.parameters
        return self._parts.name_of(parameter)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a step of the optimizer, which has whole parameters and gradients."""
        found = {self._split_name(segment): segment.parameter for segment in self}
        # In the order of the model, because parts of other sizes are in memory in another one.
        split = [(name, found[name]) for name in self._parts.splits if name in found]
        own = []
        for name, parameter in split:
            own.append((name, parameter, parameter.data))
            gradient, parameter.grad = parameter.grad, None
            parameter.data = self._parts.join(name, parameter.data)
            if gradient is not None:
                parameter.grad = self._parts.join(name, gradient)
        try:
            with self.in_place():
                yield
        finally:
            for name, parameter, part in own:
                part.copy_(self._parts.take(name, parameter.data))
                parameter.grad = None
                parameter.data = part

    def state_like(self, segment: ParameterSegment) -> Tensor:
        """The whole parameter, also of one that is split."""
        name, own = self._split_name(segment), super().state_like(segment)
        return own if name is None else own.new_empty(()).expand(self._parts.shape_of(name))

    def pieces(self, segment: ParameterSegment) -> Iterator[NamedPiece]:
        """All elements of a parameter that is split."""
        name = self._split_name(segment)
        if name is None:
            yield from super().pieces(segment)
            return
        extent = Extent.whole(self._parts.shape_of(name))
        yield name, extent, slice(0, extent.num_elements)


class SplitByParameter(SplitSegments, ByParameter):
    """Every rank of a tensor group makes the same step on wholes, and has the state of wholes."""

    segmentation = JoinedParameters

    @classmethod
    def admit(cls, optimizer: Optimizer, model: ShardedModel) -> None:
        """Refuses uneven parts where ranks share out the steps by the memory of their parts."""
        super().admit(optimizer, model)
        parts = parts_of(model)
        # The memory of one such parameter decides who steps the others of its group.
        uneven = [name for name in parts.splits if not parts.is_even(name)]
        is_divided = model.sharding.optimizer and model.data_group.size > 1
        if uneven and is_divided and _first_split(optimizer, parts) is not None:
            raise ShoalError(
                f"{type(optimizer).__name__} looks at whole parameters, and {uneven[0]} "
                "is split unevenly, so ranks would disagree about who steps it: use zero=0, or "
                "as many ranks as divide it"
            )


class UndividedParts(Undivided):
    """Refuses split layers."""

    @classmethod
    def admit(cls, optimizer: Optimizer, model: ShardedModel) -> None:
        """No rank has all parameters."""
        super().admit(optimizer, model)
        name = _first_split(optimizer, parts_of(model))
        if name is not None:
            raise ShoalError(
                f"{type(optimizer).__name__} may couple any of its parameters, and {name} and "
                "others are split over the tensor group: use an optimizer that works element by "
                f"element or parameter by parameter. {DECLARE}"
            )


SPLIT_DIVISIONS: Mapping[Kind, type[WorkDivision]] = {
    Kind.ELEMENT_WISE: SplitByElement,
    Kind.PER_PARAMETER: SplitByParameter,
    Kind.GLOBAL: UndividedParts,
}
"""How the work of an optimizer of each kind is divided where layers are split."""


class TensorParallelOptimizer(ShardedOptimizer):
    """The partner of `TensorParallelModel`.

    What works element by element steps the rank's parts. What looks at whole parameters (Muon,
    Adafactor) gets those that are split put together for the step: every rank of a tensor group
    then makes the same step and has the state of the whole. What may couple all parameters (LBFGS)
    is refused where layers are split.

    Example:
        >>> optimizer = TensorParallelOptimizer(torch.optim.AdamW(model.parameters()), model)
    """

    model_class = TensorParallelModel
    divisions = SPLIT_DIVISIONS
    model: TensorParallelModel


def parts_of(model: ShardedModel) -> TensorParts:
    """How the layers of a model are split, of one that has such layers."""
    parts: TensorParts = model.parts
    return parts


def _first_split(optimizer: Optimizer, parts: TensorParts) -> str | None:
    """The name of the first of an optimizer's parameters that is split."""
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return next((name for name in map(parts.name_of, every) if name is not None), None)


def _part(state: State, name: str, parts: TensorParts) -> State:
    """What belongs to this rank's part of a parameter."""
    whole = torch.empty(parts.shape_of(name), device="meta")
    return {
        key: parts.take(name, value) if is_per_element(key, value, whole) else value
        for key, value in state.items()
    }
