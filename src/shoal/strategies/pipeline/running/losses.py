"""The loss of a batch from the losses of its micro-batches, and how each of them is weighted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.strategies.pipeline.learning.absent_value import AbsentValue, absent_error
from shoal.strategies.pipeline.running.micro_batches import MicroBatch
from shoal.strategies.pipeline.stages.stage import Stage
from shoal.strategies.training import LossFunction, nothing


class Losses:
    """The losses of one batch's micro-batches on the last stage."""

    def __init__(
        self, batches: Sequence[MicroBatch], loss_fn: LossFunction, weight: float, data: Backend
    ) -> None:
        """``weight`` is how much this batch counts beside the others on the data axis."""
        self._batches, self._loss_fn, self._weight, self._data = batches, loss_fn, weight, data
        self._sum: Tensor | None = None
        weights = torch.tensor(weight, dtype=torch.float64, device=data.device)
        self._total = float(data.all_reduce(weights)) if data.size > 1 else weight

    def scaled(self, number: int, output: Any) -> Tensor:
        """A micro-batch's part of the loss.

        Gradients averaged over the data axis are then those of the mean over the global batch.
        """
        batch = self._batches[number]
        loss = self._loss_fn(output, batch.targets)
        if isinstance(loss, AbsentValue):
            raise absent_error([loss])
        if not self._weight:
            self._add(torch.zeros_like(loss.detach()))
            return nothing(output)
        self._add(loss.detach() * batch.share)
        return loss * (batch.share * self._weight * self._data.size / self._total)

    def _add(self, part: Tensor) -> None:
        wide = part.double()
        self._sum = wide if self._sum is None else self._sum + wide
        self._dtype = part.dtype

    def mean(self, stage: Stage) -> Tensor:
        """The mean over the global batch, on every rank."""
        value = None
        if stage.is_last:
            assert self._sum is not None
            total = self._sum * self._weight
            if self._data.size > 1:
                total = self._data.all_reduce(total)
            value = (total / self._total if self._total else total).to(self._dtype)
        found: Tensor = stage.group.broadcast(value, root=stage.group.size - 1)
        return found
