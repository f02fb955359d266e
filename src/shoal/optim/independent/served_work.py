"""An optimizer's work where servers do it: workers push gradients, servers make the steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import ShoalError
from shoal.optim.division.segmented import check_sizes
from shoal.optim.division.work_division import Closure, WorkDivision
from shoal.optim.independent.average_state import averaged_states, whole_states
from shoal.optim.optimizer import needs_closure
from shoal.optim.proof.small_copy import similar
from shoal.optim.state import Reception, held_whole, placed, receive_whole
from shoal.optim.stepping.kernels import fused_where_free
from shoal.optim.stepping.supervision import Supervision
from shoal.sharding.holding import FullState, HeldState
from shoal.strategies.independent.async_model import AsyncModel
from shoal.strategies.independent.versions import Admission
from shoal.strategies.model import ShardedModel

_PLAIN = (bool, int, float, str, type(None))


class ServedWork(WorkDivision):
    """Steps are made by the servers of the parameters, each on whole ones.

    A server has an optimizer like the user's for each parameter group, over what it serves. A step
    is made with the options that the pushing worker has.
    """

    model: AsyncModel

    @classmethod
    def admit(cls, optimizer: Optimizer, model: ShardedModel) -> None:
        """Refuses what could not be damped, and what computes the loss itself."""
        if needs_closure(optimizer):
            raise TypeError(
                f"{type(optimizer).__name__} calls a closure that computes the loss again, several "
                "times in a step; under strategy 'async' servers make the steps, without any data"
            )
        wants_rate = model.options["when_stale"] == "damp"
        if wants_rate and not all("lr" in group for group in optimizer.param_groups):
            raise ValueError(
                f'when_stale="damp" scales the learning rate, and {type(optimizer).__name__} has '
                'none: choose "drop" or "wait"'
            )

    def __init__(self, model: ShardedModel, supervision: Supervision) -> None:
        """Moves the state that there is to the servers."""
        super().__init__(model, supervision)
        if supervision.judgement.may_draw:
            raise ShoalError(
                f"{type(self.optimizer).__name__} draws random numbers in its steps, which servers "
                "make in the order of pushes: strategy 'async' cannot repeat its draws"
            )
        self.admission: Admission | None = None
        """What became of the last push."""
        self._served = [self._serve(which) for which in range(len(self.parameters))]
        self.number = self.model.add_ledger()
        """Which of the model's optimizers it is."""
        self.model.shard.apply.append(self._apply)
        # A rank that pulls must find the ledger, and who pushes a server that can make the step.
        self.model.meet("an optimizer whose steps are made on servers")

    def _serve(self, which: int) -> tuple[Optimizer | None, list[str]]:
        """For a parameter group the optimizer of what this rank serves, and the names of that."""
        group, owned = self.optimizer.param_groups[which], self.model.shard.parameters
        names = [self.names[id(each)] for each in self.parameters[which]]
        served = [name for name in names if name in owned]
        if not served:
            return None, []
        made = similar(self.optimizer, group, [owned[name] for name in served])
        for parameter, name in zip(self.parameters[which], names, strict=True):
            if name in owned and parameter in self.optimizer.state:
                made.state[owned[name]] = deepcopy(self.optimizer.state[parameter])
        return made, served

    # Workers ------------------------------------------------------------------------------

    def step(self, closure: Closure | None, check_ranks: Closure) -> Any:
        """Pushes this rank's gradients; the servers make the step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self.engine.gradients
        gradients.check_averaged(self.flat_parameters)
        gradients.adopt(self._num_averaged)
        self.admission = self.model.push(self.number, self._used(), self._options())
        gradients.note_stepped()
        self.note_step()
        return loss

    def _used(self) -> dict[str, Tensor]:
        """Gradients by name, of the parameters that have one."""
        found = {}
        for parameter in self.flat_parameters:
            group, index = self.engine.index_of[id(parameter)]
            gradients = self.engine.gradients.groups[group]
            if index in gradients.used:
                found[self.names[id(parameter)]] = gradients.part(index).view(parameter.shape)
        return found

    def _options(self) -> list[dict[str, Any]]:
        return [
            {key: plain for key, value in group.items() if (plain := _as_plain(value)) is not ...}
            for group in self.optimizer.param_groups
        ]

    # Servers ------------------------------------------------------------------------------

    def _apply(
        self,
        gradients: Mapping[str, Tensor],
        factor: float,
        options: Sequence[Mapping[str, Any]],
    ) -> None:
        """Makes a step with what was pushed; the shard is locked."""
        for (optimizer, names), settings in zip(self._served, options, strict=True):
            if optimizer is None:
                continue
            (group,) = optimizer.param_groups
            for key, value in settings.items():
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
            if factor != 1.0:
                group["lr"] = group["lr"] * factor
            for name in names:
                self.model.shard.parameters[name].grad = gradients.get(name)
            with fused_where_free(optimizer):
                optimizer.step()
            for name in names:
                self.model.shard.parameters[name].grad = None

    # State --------------------------------------------------------------------------------

    def count_state(self) -> None:
        """Says how much memory the state takes on this server."""

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """What this rank serves, by the served parameters."""
        made = [each for each, _ in self._served if each is not None]
        return {parameter: state for each in made for parameter, state in each.state.items()}

    def held_state(self) -> Iterator[HeldState]:
        """Of what this rank serves."""
        names = {id(p): name for name, p in self.model.shard.parameters.items()}
        for optimizer, _ in self._served:
            if optimizer is not None:
                yield from held_whole(optimizer, names)

    def state_dict(self) -> dict[str, Any]:
        """The servers' parts together, or with "gossip" the average; every rank calls it."""
        self.model.meet("state_dict() of an asynchronous optimizer")
        parts = whole_states(self.held_state())
        if self.model.is_gossip:
            parts = averaged_states(parts, self.model.meeting_lane)
        own = [
            [held.name, list(held.extent.shape), dict(held.tensors), dict(held.shared)]
            for held in parts
        ]
        whole: dict[str, dict[str, Any]] = {}
        for found in self.model.meeting_lane.all_gather_object(own):
            for name, shape, tensors, shared in found:
                values = {key: flat.clone().view(shape) for key, flat in tensors.items()}
                whole[name] = shared | values
        numbers = {self.names[id(each)]: n for n, each in enumerate(self.flat_parameters)}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [numbers[self.names[id(each)]] for each in own_parameters]}
            for group, own_parameters in zip(
                self.optimizer.param_groups, self.parameters, strict=True
            )
        ]
        return {"state": {numbers[n]: s for n, s in whole.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Servers keep their parts; every rank calls it."""
        saved = state_dict["param_groups"]
        check_sizes(saved, self.parameters)
        self.model.meet("load_state_dict() of an asynchronous optimizer")
        order = [number for group in saved for number in group["params"]]
        by_name = {
            self.names[id(each)]: state_dict["state"].get(number, {})
            for number, each in zip(order, self.flat_parameters, strict=True)
        }
        for (optimizer, names), options in zip(self._served, saved, strict=True):
            for name in names if optimizer is not None else ():
                assert optimizer is not None
                parameter = self.model.shard.parameters[name]
                optimizer.state[parameter] = {
                    key: placed(key, value, parameter, options, is_cast=True)
                    for key, value in by_name[name].items()
                }
        self._set_options(saved)
        self.model.meet("the end of load_state_dict() of an asynchronous optimizer")

    def _set_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        for group, settings in zip(self.optimizer.param_groups, options, strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})

    def receive(
        self, saved: Mapping[str, FullState], options: Sequence[Mapping[str, Any]]
    ) -> Reception:
        """Makes room for what this rank serves."""
        names = {id(p): name for name, p in self.model.shard.parameters.items()}
        receptions = [
            receive_whole(optimizer, names, saved, [settings])
            for (optimizer, _), settings in zip(self._served, options, strict=True)
            if optimizer is not None
        ]

        def accept() -> None:
            for each in receptions:
                each.accept()
            self._set_options(options)

        return Reception([wanted for each in receptions for wanted in each.wanted], accept)


class ServedByOne(ServedWork):
    """For optimizers that may couple any of their parameters: one server has all of them."""

    @classmethod
    def admit(cls, optimizer: Optimizer, model: ShardedModel) -> None:
        """Refuses several servers."""
        super().admit(optimizer, model)
        assert isinstance(model, AsyncModel)
        if len(model.servers) > 1 or len(optimizer.param_groups) > 1:
            raise ValueError(
                f"{type(optimizer).__name__} may couple any of its parameters, so one server must "
                "have all of them: say servers=[0], with one parameter group; or, if it works "
                'parameter by parameter, kind="per-parameter"'
            )


def _as_plain(value: Any) -> Any:
    """What a request can say of an option; nothing of what is no plain value."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
        return value.item()
    if isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value):
        return list(value)
    return value if isinstance(value, _PLAIN) else ...
