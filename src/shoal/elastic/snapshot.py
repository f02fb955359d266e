"""What only a rank itself needs to go back to the beginning of an attempt."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from shoal.errors import ShoalError
from shoal.torch_internals.optimizers import forget_unscaling
from shoal.torch_support.random_state import RandomState


@dataclass(frozen=True)
class AttemptSnapshot:
    """Taken where the first batch after a commit is asked for, or with a commit.

    Attributes:
        step: How many steps were committed.
        num_steps: How many the optimizer had made.
        random: The generators of this rank.
        options: Hyperparameters of each parameter group.
        also: The states of what goes along: schedulers, scalers, loaders.
    """

    step: int
    num_steps: int
    random: RandomState
    options: list[dict[str, Any]]
    also: list[Any]

    @classmethod
    def take(
        cls, step: int, num_steps: int, optimizer: Optimizer, also: Sequence[Any]
    ) -> AttemptSnapshot:
        """Of everything as it is now."""
        options = [
            {key: deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        states = [deepcopy(each.state_dict()) for each in also]
        return cls(step, num_steps, RandomState.capture(), options, states)

    def common(self) -> list[Any]:
        """What another rank can go on with, too, as plain data."""
        return [self.step, self.num_steps, self.options, self.also]

    @classmethod
    def of(cls, common: list[Any]) -> AttemptSnapshot:
        """The inverse of `common`, with the generators of this rank."""
        step, num_steps, options, also = common
        return cls(step, num_steps, RandomState.capture(), options, also)

    def put_options(self, optimizer: Optimizer) -> None:
        """Gives the parameter groups their hyperparameters back."""
        if len(self.options) != len(optimizer.param_groups):
            raise ShoalError(
                f"this rank's optimizer has {len(optimizer.param_groups)} parameter groups, the "
                f"others' have {len(self.options)}: build the same one on every rank"
            )
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(deepcopy(options))

    def put_also(self, also: Sequence[Any]) -> None:
        """Gives what goes along its state back."""
        if len(also) != len(self.also):
            raise ShoalError(
                f"this rank has {len(also)} objects in optimizer.also, the others have "
                f"{len(self.also)}: append the same ones on every rank, before the first attempt"
            )
        for each, state in zip(also, self.also, strict=True):
            each.load_state_dict(deepcopy(state))
            if isinstance(each, torch.amp.GradScaler):
                forget_unscaling(each)
