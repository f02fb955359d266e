"""`PipelineParallelOptimizer`: steps the layers of this rank, knows the whole model's state."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch.optim import Optimizer

from shoal.optim.division import DIVISIONS
from shoal.optim.division.segmented import check_sizes
from shoal.optim.division.work_division import DECLARE, Undivided
from shoal.optim.kinds import Kind
from shoal.optim.optimizer import ShardedOptimizer, refuse_parameter
from shoal.optim.proof.judgement import Judgement
from shoal.optim.proof.judging import judge_or_believe
from shoal.strategies.model import ShardedModel
from shoal.strategies.pipeline import PipelineParallelModel


class UndividedStages(Undivided):
    """Refuses a model that is cut into stages."""

    @classmethod
    def admit(cls, optimizer: Optimizer, model: ShardedModel) -> None:
        """No rank has all parameters."""
        assert isinstance(model, PipelineParallelModel)
        if model.pipeline.stage.group.size > 1:
            raise ValueError(
                f"{type(optimizer).__name__} may couple any of its parameters, but each rank of a "
                f"pipeline has some layers only. {DECLARE}"
            )
        super().admit(optimizer, model)


class PipelineParallelOptimizer(ShardedOptimizer):
    """The user's optimizer over all of a model, of which this rank steps its own layers.

    Its ``state_dict`` is that of the plain optimizer over the whole model.
    """

    model_class = PipelineParallelModel
    divisions = MappingProxyType({**DIVISIONS, Kind.GLOBAL: UndividedStages})
    model: PipelineParallelModel

    def __init__(
        self,
        optimizer: Optimizer,
        model: ShardedModel,
        *,
        kind: Kind | str | Judgement | None = None,
    ) -> None:
        """See `ShardedOptimizer`; ``optimizer`` may be built for this rank's part of the model."""
        self._pair(optimizer, model)
        assert isinstance(model, PipelineParallelModel)
        judgement = judge_or_believe(optimizer, kind)
        self.division_for(judgement.kind).admit(optimizer, model)  # before anything is changed
        self._take_own(optimizer, model)
        super().__init__(optimizer, model, kind=judgement)

    def _take_own(self, optimizer: Optimizer, model: PipelineParallelModel) -> None:
        names = [_names(group["params"], model) for group in optimizer.param_groups]
        self._names = _united(model, names)
        """All parameters of each group, over all stages."""
        self._own_names = _keep_own(optimizer, names, model)

    def follow_model(self, num_steps: int) -> None:
        """Takes those parameters of the user's that this rank has now."""
        by_name = self.model.pipeline.stage.parameters.by_name
        for group, names in zip(self.param_groups, self._names, strict=True):
            group["params"] = [by_name[name] for name in names]
        self._take_own(self.optimizer, self.model)
        super().follow_model(num_steps)

    def _pair(self, optimizer: Optimizer, model: ShardedModel) -> None:
        super()._pair(optimizer, model)
        if model.strategy != self.model_class.strategy:  # layers that are split need more
            self._refuse_model(model)

    # The whole state ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the plain optimizer would have it; every rank calls it."""
        own = super().state_dict()
        names = [name for group in self._own_names for name in group]
        found = {names[number]: state for number, state in own["state"].items()}
        everything: dict[str, Any] = {}
        for part in self.model.pipeline.stage.group.all_gather_object(found):
            everything |= part
        numbers = self._numbers_by_name()
        groups = [
            group | {"params": [numbers[name] for name in of_group]}
            for group, of_group in zip(own["param_groups"], self._names, strict=True)
        ]
        state = {numbers[name]: everything[name] for name in numbers if name in everything}
        return {"state": state, "param_groups": groups} | self.saved_streams()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a whole state, of this optimizer or a plain one; every rank calls it."""
        saved = state_dict["param_groups"]
        check_sizes(saved, self._names)
        number_of = {
            name: number
            for group, names in zip(saved, self._names, strict=True)
            for name, number in zip(names, group["params"], strict=True)
        }
        groups = [
            group | {"params": [number_of[name] for name in names]}
            for group, names in zip(saved, self._own_names, strict=True)
        ]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _numbers(self) -> dict[int, int]:
        """Counted over all stages."""
        numbers = self._numbers_by_name()
        return {
            id(parameter): numbers[name]
            for group, names in zip(self.param_groups, self._own_names, strict=True)
            for parameter, name in zip(group["params"], names, strict=True)
        }

    def _numbers_by_name(self) -> dict[str, int]:
        return {
            name: number
            for number, name in enumerate(name for group in self._names for name in group)
        }


def _names(parameters: list[Any], model: PipelineParallelModel) -> list[str]:
    known = model.pipeline.stage.parameters.names
    for parameter in parameters:
        if id(parameter) not in known:
            refuse_parameter(parameter)
    return [known[id(parameter)] for parameter in parameters]


def _united(model: PipelineParallelModel, names: list[list[str]]) -> list[list[str]]:
    """Each group's parameters over all stages: the user's order, or the model's."""
    everybody = model.pipeline.stage.group.all_gather_object(names)
    if all(other == names for other in everybody):
        return names
    order = list(model.pipeline.stage.parameters.by_name)
    united = []
    for groups in zip(*everybody, strict=True):
        members = {name for group in groups for name in group}
        united.append([name for name in order if name in members])
    return united


def _keep_own(
    optimizer: Optimizer, names: list[list[str]], model: PipelineParallelModel
) -> list[list[str]]:
    """Takes the other ranks' parameters, and their state, out of the optimizer."""
    parameters = model.pipeline.stage.parameters
    own_names = []
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], of_group, strict=True):
            if not parameters.is_own(name):
                optimizer.state.pop(parameter, None)
        own = [name for name in of_group if parameters.is_own(name)]
        group["params"] = [parameters.by_name[name] for name in own]
        own_names.append(own)
    return own_names
