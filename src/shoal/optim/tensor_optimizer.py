"""`TensorParallelOptimizer`: steps each rank's parts of split layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import ShoalError
from shoal.optim.kinds import Judgement, Kind
from shoal.optim.optimizer import ShardedOptimizer
from shoal.optim.state.tensor_state import State, is_per_element
from shoal.optim.stepping.kernels import unfused_on_cpu
from shoal.optim.stepping.segment import ParameterSegment
from shoal.sharding.extent import Extent
from shoal.strategies.tensor import TensorParallelModel, TensorParts


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
    model: TensorParallelModel

    def __init__(
        self,
        optimizer: Optimizer,
        model: TensorParallelModel,
        *,
        kind: Kind | str | Judgement | None = None,
    ) -> None:
        """See `ShardedOptimizer`; state from before the layers were split is split with them."""
        self._check_pair(optimizer, model)
        judgement = self._judge(optimizer, kind)
        if judgement.kind is not Kind.PER_PARAMETER:  # those keep the state of wholes
            _split_state(optimizer, model.parts)
        super().__init__(optimizer, model, kind=judgement)

    def _check_kind(self) -> None:
        """Refuses what cannot be right on parts."""
        split = [name for name in map(self._split_name, self.parameters) if name is not None]
        if self.kind is Kind.GLOBAL and split:
            raise ShoalError(
                f"{type(self.optimizer).__name__} may couple any of its parameters, and {split[0]} "
                "and others are split over the tensor group: use an optimizer that works element "
                "by element or parameter by parameter. If this one does, say so with "
                'kind="element-wise" or "per-parameter".'
            )
        if self.kind is Kind.PER_PARAMETER and split and self.model.sharding.optimizer:
            # The memory of one such parameter decides who steps the others of its group.
            uneven = [name for name in self._parts.splits if not self._parts.is_even(name)]
            if uneven and self.model.data_group.size > 1:
                raise ShoalError(
                    f"{type(self.optimizer).__name__} looks at whole parameters, and {uneven[0]} "
                    "is split unevenly, so ranks would disagree about who steps it: use zero=0, or "
                    "as many ranks as divide it"
                )

    @property
    def _parts(self) -> TensorParts:
        return self.model.parts

    def _split_name(self, parameter: Tensor) -> str | None:
        return self._parts.name_of(parameter)

    # Steps --------------------------------------------------------------------------------

    def _inner_step(self) -> None:
        """Parameters that must be seen whole are put together for it."""
        if self.kind is not Kind.PER_PARAMETER:
            super()._inner_step()
            return
        with self._whole_segments():
            super()._inner_step()

    def _may_fuse(self) -> bool:
        """Not where ranks cut memory in different places: fused kernels round by place.

        What every rank has of a parameter that is not split would drift apart by last bits.
        """
        return super()._may_fuse() and self._is_even

    @cached_property
    def _is_even(self) -> bool:
        return all(map(self._parts.is_even, self._parts.splits))

    def _kernels(self) -> AbstractContextManager[None]:
        return super()._kernels() if self._is_even else unfused_on_cpu(self.optimizer)

    @contextmanager
    def _whole_segments(self) -> Iterator[None]:
        own = {}
        for name, parameter in self._split_segments():
            own[name] = (parameter, parameter.data)
            gradient, parameter.grad = parameter.grad, None
            parameter.data = self._parts.join(name, parameter.data)
            if gradient is not None:
                parameter.grad = self._parts.join(name, gradient)
        try:
            yield
        finally:
            for name, (parameter, part) in own.items():
                part.copy_(self._parts.take(name, parameter.data))
                parameter.grad = None
                parameter.data = part

    def _split_segments(self) -> list[tuple[str, nn.Parameter]]:
        """In the order of the model, because parts of other sizes are in memory in another one."""
        found = {}
        for segment in self._segments:
            (place,) = segment.places
            name = self._split_name(segment.group.parameters[place])
            if name is not None:
                found[name] = segment.parameter
        return [(name, found[name]) for name in self._parts.splits if name in found]

    # State --------------------------------------------------------------------------------

    def _whole_name(self, segment: ParameterSegment) -> str | None:
        """The name of a split parameter whose state is that of the whole."""
        if self.kind is not Kind.PER_PARAMETER:
            return None
        (place,) = segment.places
        return self._split_name(segment.group.parameters[place])

    def _state_like(self, segment: ParameterSegment) -> Tensor:
        name, own = self._whole_name(segment), super()._state_like(segment)
        return own if name is None else own.new_empty(()).expand(self._parts.shape_of(name))

    def _pieces(self, segment: ParameterSegment) -> Iterator[tuple[str, Extent, slice]]:
        name = self._whole_name(segment)
        if name is None:
            yield from super()._pieces(segment)
            return
        extent = Extent.whole(self._parts.shape_of(name))
        yield name, extent, slice(0, extent.num_elements)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the plain optimizer would have it; every rank calls it."""
        whole = super().state_dict()
        for number, parameter in enumerate(self.parameters):
            name = self._split_name(parameter)
            if name is not None and number in whole["state"]:
                whole["state"][number] = self._joined(whole["state"][number], name, parameter)
        return whole

    def _joined(self, state: State, name: str, parameter: Tensor) -> State:
        return {
            key: self._parts.join(name, value) if is_per_element(key, value, parameter) else value
            for key, value in state.items()
        }

    @torch.inference_mode(mode=False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a whole state, of this optimizer or a plain one; every rank calls it."""
        if self.kind is Kind.PER_PARAMETER:  # it keeps the state of wholes
            super().load_state_dict(state_dict)
            return
        order = [number for group in state_dict["param_groups"] for number in group["params"]]
        state = dict(state_dict["state"])
        for number, parameter in zip(order, self.parameters, strict=False):
            name = self._split_name(parameter)
            if name is not None and number in state:
                state[number] = _part(state[number], name, self._parts)
        super().load_state_dict({**state_dict, "state": state})


def _split_state(optimizer: Optimizer, parts: TensorParts) -> None:
    """State from before the layers were split goes with them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = parts.name_of(parameter)
            if name is not None and parameter in optimizer.state:
                optimizer.state[parameter] = _part(optimizer.state[parameter], name, parts)


def _part(state: State, name: str, parts: TensorParts) -> State:
    """What belongs to this rank's part of a parameter."""
    shape = parts.shape_of(name)
    return {
        key: parts.take(name, value) if _is_whole(key, value, shape) else value
        for key, value in state.items()
    }


def _is_whole(key: str, value: Any, shape: torch.Size) -> bool:
    return is_per_element(key, value, torch.empty(shape, device="meta"))
