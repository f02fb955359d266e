"""One process that trains as the ranks together do, also with gradients changed in the last bit."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shoal.verification.judge import Judge
from shoal.verification.single import SplitBatch

# Far beyond what a few steps make of the models here, unless training diverges.
_BOUNDS = {"parameter": 1e2, "loss": 1e5, "gradient": 1e5}


class Replay(SplitBatch):
    """The reference of ``shoal.verify(reference="split")``, to be run by itself."""

    def __init__(self, build: Any, steps: int, num_ranks: int, *, is_nudged: bool = False) -> None:
        """``is_nudged``: each element of each gradient moves to a neighbouring number."""
        super().__init__(build, steps, num_ranks)
        self._steps, self._is_nudged = steps, is_nudged
        self._generator = torch.Generator().manual_seed(2)

    def compute(self, step: int) -> Tensor:
        """Forward and backward, and the nudge."""
        loss = super().compute(step)
        if self._is_nudged:
            for parameter in self.parts.model.parameters():
                if parameter.grad is not None:
                    parameter.grad = self._nudge(parameter.grad)
        return loss

    def _nudge(self, gradient: Tensor) -> Tensor:
        coins = torch.rand(gradient.shape, generator=self._generator)
        return torch.nextafter(gradient, torch.where(coins < 0.5, math.inf, -math.inf))

    def is_stable(self) -> bool:
        """Trains; returns whether nothing grew without bounds."""
        seen = (each for step in range(self._steps) for each in self.walk(step))
        return all(
            bool((each.value.detach().abs() <= _BOUNDS[each.kind]).all())
            for each in seen
            if each.value is not None
        )

    def distance(self, other: Replay, kind: str) -> float:
        """Trains both; returns the largest difference of a loss, a gradient or a parameter."""
        judge = Judge(math.inf)
        for step in range(self._steps):
            judge.compare(step, self.walk(step), other.walk(step))
        return judge.largest[kind]
