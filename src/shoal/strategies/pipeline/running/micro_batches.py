"""A batch cut into micro-batches, and the loss of the batch from the losses of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.comm import Backend, ReduceOp
from shoal.comm.operation.partition import offsets, split_sizes
from shoal.strategies.pipeline.learning.absent_value import AbsentValue, absent_error
from shoal.strategies.pipeline.stages.stage import Stage
from shoal.strategies.training import LossFunction, count_items, nothing
from shoal.torch_internals.trees import tree_map


class MicroBatch(NamedTuple):
    """A part of a batch.

    Attributes:
        inputs: Its rows of the inputs.
        targets: Its rows of the targets.
        share: Its part of the batch's items, from 0 to 1.
    """

    inputs: Any
    targets: Any
    share: float


def count_parts(inputs: Any, most: int, data: Backend) -> int:
    """How many micro-batches all pipelines make: no more than the smallest batch has rows.

    Pipelines side by side must do the same passes, since they gather sharded parameters in each of
    them. A pipeline whose batch is empty does as many as the others.
    """
    own = min(most, count_items(inputs)) or most
    if data.size == 1:
        return own
    return int(data.all_reduce(torch.tensor(own, device=data.device), ReduceOp.MIN))


def split(inputs: Any, targets: Any, count: int) -> list[MicroBatch]:
    """Cuts every tensor that has the batch's rows.

    Example:
        >>> [part.inputs.tolist() for part in split(torch.arange(5), None, 2)]
        [[0, 1, 2], [3, 4]]
    """
    num_rows = count_items(inputs)
    sizes = split_sizes(num_rows, count)
    return [
        MicroBatch(
            _rows(inputs, num_rows, start, size),
            _rows(targets, num_rows, start, size),
            size / num_rows if num_rows else 1 / count,
        )
        for start, size in zip(offsets(sizes), sizes, strict=False)
    ]


def _rows(tree: Any, num_rows: int, start: int, size: int) -> Any:
    def cut(leaf: Any) -> Any:
        has_rows = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == num_rows
        return leaf[start : start + size] if has_rows else leaf

    return tree_map(cut, tree)


class Losses:
    """The losses of one batch's micro-batches on the last stage."""

    def __init__(
        self, batches: Sequence[MicroBatch], loss_fn: LossFunction, weight: float, data: Backend
    ) -> None:
        """``weight`` is the weight of this batch among those of the data axis."""
        self._batches, self._loss_fn, self._weight, self._data = batches, loss_fn, weight, data
        self._sum: Tensor | None = None
        weights = torch.tensor(weight, dtype=torch.float64, device=data.device)
        self._total = float(data.all_reduce(weights)) if data.size > 1 else weight

    def scaled(self, number: int, output: Any) -> Tensor:
        """A micro-batch's loss, scaled so that gradients are those of the global batch's mean.

        They are summed over micro-batches and averaged over the data axis.
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
