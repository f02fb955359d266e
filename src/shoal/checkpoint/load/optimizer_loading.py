"""From an optimizer's saved state, in full names, to what an optimizer of this rank needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import training_state
from shoal.checkpoint.format import plain_json
from shoal.checkpoint.load.slice_reader import read_tensors
from shoal.checkpoint.load.tensor_source import TensorSource
from shoal.errors import CheckpointMismatchError
from shoal.optim.state.reception import Reception
from shoal.sharding.holding import FullState


@dataclass
class OptimizerLoading:
    """One optimizer's saved state.

    Attributes:
        source: The checkpoint.
        saved: What its manifest says of this optimizer.
        number: Which of the checkpoint's optimizers it is.
        strict: Whether it must be of the same class.
        ties: From a name here to the one in the checkpoint, where they differ.
        new: Names of parameters that are not those of the checkpoint: they keep their state.
    """

    source: TensorSource
    saved: Mapping[str, Any]
    number: int
    strict: bool
    ties: Mapping[str, str] = field(default_factory=dict)
    new: Collection[str] = ()

    def receive(self, optimizer: Optimizer, model: nn.Module) -> Reception:
        """Makes room for the state."""
        self._check_class(optimizer)
        groups = training_state.held_groups(optimizer, model)
        known = {name for group in self.saved["groups"] for name in group["parameters"]}
        tensors = read_tensors(self.source, plain_json.references(self._shared_of(groups)))
        dtypes = training_state.held_dtypes(model)
        states = {
            name: self._full_state(name, tensors, dtypes[name])
            for names, _ in groups
            for name in names
            if self._saved_name(name) in known and name not in self.new
        }
        options = [self._options(which, *group) for which, group in enumerate(groups)]
        return training_state.receive(optimizer, model, states, options, _streams(self.saved))

    def _saved_name(self, name: str) -> str:
        return self.ties.get(name, name)

    def key(self, name: str, state_key: str) -> str:
        """Where the files have what each element of a parameter has."""
        return f"optimizer/{self.number}/{self._saved_name(name)}/{state_key}"

    def _check_class(self, optimizer: Optimizer) -> None:
        wanted, found = training_state.class_name(optimizer), self.saved["class"]
        if self.strict and found != wanted:
            raise CheckpointMismatchError(
                f"{self.source.folder} has the state of {found} where {wanted} is to be loaded; "
                "pass strict=False if one can go on with the other's state"
            )

    def _shared_of(self, groups: training_state.Groups) -> list[Any]:
        names = {self._saved_name(name) for own, _ in groups for name in own}
        states = [about["shared"] for name, about in self.saved["state"].items() if name in names]
        return [states, [group["options"] for group in self.saved["groups"]]]

    def _full_state(
        self, name: str, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> FullState:
        about = self.saved["state"].get(self._saved_name(name))
        if about is None:
            return FullState()
        stored = self.source.tensors.get(f"model/{self._saved_name(name)}")
        dtypes = {}
        for key in about["elements"]:
            found = self.source.tensors[self.key(name, key)].dtype
            # State that has the parameter's own dtype follows it, where that is another now.
            follows = stored is not None and found is stored.dtype and found.is_floating_point
            dtypes[key] = dtype if follows else found
        return FullState(dtypes, plain_json.decode(about["shared"], tensors))

    def _options(self, index: int, names: list[str], own: Mapping[str, Any]) -> Mapping[str, Any]:
        """Hyperparameters of the saved group that has these parameters."""
        groups = self.saved["groups"]
        members = {name: which for which, own in enumerate(groups) for name in own["parameters"]}
        found = {members[self._saved_name(n)] for n in names if self._saved_name(n) in members}
        if len(found) > 1:
            raise CheckpointMismatchError(
                f"parameter group {index} of the optimizer has parameters of the groups "
                f"{sorted(found)} of {self.source.folder}: build it with the same groups"
            )
        if not found and (names or index >= len(groups)):
            return own  # all of its parameters are new
        which = found.pop() if found else index
        options = plain_json.decode(groups[which]["options"], self._option_tensors(groups[which]))
        if not isinstance(options, dict) or "params" in options:
            raise ValueError("hyperparameters must be a dict")
        return options

    def _option_tensors(self, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return read_tensors(self.source, plain_json.references(group["options"]))


def _streams(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where random draws go on, in the form that `training_state.streams` gives it."""
    found = saved.get("streams", {})
    numbers = [number for each in found.values() for number in each.values()]
    if not all(type(number) is int for number in numbers):
        raise ValueError("what an optimizer draws from must be given in whole numbers")
    return found  # type: ignore[no-any-return]
