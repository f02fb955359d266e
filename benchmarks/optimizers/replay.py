"""One process that trains as the ranks together do, also when rounding falls out differently.

What a rank computes may round in another way than one process does for two reasons: sums are taken
in another order, and kernels treat the ends of tensors by where they lie in memory. Both can be
had in one process: gradients that change in their last bit, and gradients that lie elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.verification.comparison import Comparison
from shoal.verification.trainers.one_process import SplitBatch

Change = Callable[[Tensor], Tensor]
# Far beyond what a few steps make of the models here, unless training diverges.
_BOUNDS = {"parameter": 1e2, "loss": 1e5, "gradient": 1e5}


class Replay(SplitBatch):
    """The reference of ``shoal.verify(reference="split")``, to be run by itself."""

    def __init__(
        self,
        build: Any,
        steps: int,
        num_ranks: int,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """``change``: What becomes of each gradient, before the optimizer sees it."""
        super().__init__(build, steps, num_ranks)
        self._steps, self._change = steps, change

    def compute(self, step: int) -> Tensor:
        """Forward and backward, and the change."""
        loss = super().compute(step)
        for parameter in self.setup.model.parameters():
            if self._change is not None and parameter.grad is not None:
                parameter.grad = self._change(parameter.grad)
        return loss

    def is_stable(self) -> bool:
        """Trains; returns whether nothing grew without bounds."""
        seen = (each for step in range(self._steps) for each in self.observe(step))
        return all(
            bool((each.value.detach().abs() <= _BOUNDS[each.kind]).all())
            for each in seen
            if each.value is not None
        )

    def distance_to(self, other: Replay, kind: str) -> float:
        """Trains both; returns the largest difference of a loss, a gradient or a parameter."""
        comparison = Comparison(math.inf)
        for step in range(self._steps):
            comparison.compare(step, self.observe(step), other.observe(step))
        return comparison.largest[kind]


@dataclass
class Nudge:
    """Moves each element of a gradient to one of its two neighbours."""

    seed: int

    def __post_init__(self) -> None:
        """Other seeds move other elements up."""
        self._generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, gradient: Tensor) -> Tensor:
        """The gradient, off by one in the last bit."""
        coins = torch.rand(gradient.shape, generator=self._generator)
        return torch.nextafter(gradient, torch.where(coins < 0.5, math.inf, -math.inf))


def moved(gradient: Tensor) -> Tensor:
    """The same values, at an address that only single elements are aligned to."""
    elsewhere = gradient.new_empty(gradient.numel() + 1)[1:].view(gradient.shape)
    return elsewhere.copy_(gradient)
