"""An experiment that ended in a difference, replayed in one process to find the cause.

One cause is what the loss counts: rows, all there is, or tokens, whose number differs between parts
of a batch. The loss of a whole batch is compared with those of its parts. If it is their sum, the
loss is one. If it is their mean when each counts by how many of some tensor's elements are not
padding, that is what it is a mean over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shoal.strategies.training import call_module, count_items
from shoal.torch_internals.modules import BatchNorm
from shoal.torch_internals.trees import keystr, tree_leaves_with_path
from shoal.verification.comparison import Comparison, Difference
from shoal.verification.experiment import Experiment, Findings
from shoal.verification.trainers.one_process import SplitBatch, WholeBatch
from shoal.verification.trainers.trainer import Batch, Setup, share


@dataclass(frozen=True)
class Replay:
    """An experiment that ended in a difference."""

    experiment: Experiment
    findings: Findings
    difference: Difference

    @cached_property
    def num_steps(self) -> int:
        """The steps up to and including the one that differed."""
        return self.difference.step

    def whole(self, variation: int = 0) -> WholeBatch:
        """One process on the whole batch."""
        return WholeBatch(self.experiment.build, self.num_steps, variation=variation)

    def split(self) -> SplitBatch:
        """One process that replays the ranks, and the micro-batches of each."""
        return SplitBatch(
            self.experiment.build, self.num_steps, self.num_parts, weight=self.experiment.weight
        )

    @cached_property
    def num_parts(self) -> int:
        """What a batch is cut into, over all ranks."""
        rows = count_items(self.setup.batches[self.num_steps - 1][0])
        most = self.findings.num_shares * self.findings.num_micro_batches
        return min(most, rows) if self.has_micro_batches else most

    @property
    def has_micro_batches(self) -> bool:
        """Whether a rank's rows are cut once more, in a pipeline."""
        return self.findings.num_micro_batches > 1

    @property
    def is_replayed(self) -> bool:
        """Whether the reference cuts batches as the ranks do."""
        return self.experiment.reference == "split" and not self.has_micro_batches

    def compare(self, left: WholeBatch, right: WholeBatch) -> Difference | None:
        """The first difference of two single processes."""
        comparison = Comparison(self.findings.tolerance)
        for step in range(self.num_steps):
            if not comparison.compare(step, left.observe(step), right.observe(step)):
                break
        return comparison.first

    @cached_property
    def division(self) -> Difference | None:
        """How one process on the parts of a batch differs from one on the whole."""
        return self.compare(self.whole(), self.split())

    @cached_property
    def setup(self) -> Setup:
        """What the user has built, as it is before training."""
        return self.whole().setup

    @property
    def has_batch_statistics(self) -> bool:
        """Whether a layer in training looks at all rows of a batch."""
        modules = self.setup.model.modules()
        return any(isinstance(m, BatchNorm) and m.training for m in modules)

    @cached_property
    def losses(self) -> PartLosses:
        """Of the batch in which training differed, whole and in parts."""
        setup = self.whole().setup
        return PartLosses(setup, setup.batches[self.num_steps - 1], self.num_parts)


# What padding and ignored targets are marked with: torch's default, labels, masks, RoBERTa, images.
_MARKS = (-100, 0, -1, 1, 255)
_CLOSE = 1e-4


@dataclass(frozen=True)
class Tokens:
    """What a loss is a mean over.

    Attributes:
        name: The tensor that says what counts.
        mark: What does not count.
        counts: How many count in each part.
    """

    name: str
    mark: int
    counts: list[int]


class PartLosses:
    """The loss of one batch, and those of its parts."""

    def __init__(self, setup: Setup, batch: Batch, num_parts: int) -> None:
        """Calls the model as it is, without training it."""
        self._shares = [share(batch, number, num_parts) for number in range(num_parts)]
        with torch.no_grad():
            self._whole = _loss(setup, batch)
            self._losses = [_loss(setup, each) for each in self._shares]
        self._rows = [count_items(inputs) for inputs, _ in self._shares]

    @property
    def is_mean_over_rows(self) -> bool:
        """Whether the loss is what shoal expects: a mean over rows."""
        return self._is_mean(self._rows)

    @property
    def is_sum(self) -> bool:
        """Whether parts add up to the whole."""
        return math.isclose(self._whole, sum(self._losses), rel_tol=_CLOSE)

    def find_tokens(self) -> Tokens | None:
        """What the loss is a mean over, if a tensor of the batch explains it."""
        for tokens in self._candidates():
            if self._is_mean(tokens.counts):
                return tokens
        return None

    def _is_mean(self, weights: Sequence[int]) -> bool:
        total = sum(weight * loss for weight, loss in zip(weights, self._losses, strict=True))
        return math.isclose(self._whole * sum(weights), total, rel_tol=_CLOSE)

    def _candidates(self) -> Iterator[Tokens]:
        leaves = [
            tree_leaves_with_path({"inputs": inputs, "targets": targets})
            for inputs, targets in self._shares
        ]
        for of_parts in zip(*leaves, strict=True):
            name = keystr(of_parts[0][0]).replace("['inputs']", "inputs", 1)
            name = name.replace("['targets']", "targets", 1)
            tensors = [leaf for _, leaf in of_parts]
            if all(isinstance(tensor, Tensor) and _may_mark(tensor) for tensor in tensors):
                yield from _counted(name, tensors)


def _counted(name: str, tensors: Sequence[Tensor]) -> Iterator[Tokens]:
    for mark in _MARKS:
        yield Tokens(name, mark, [int((tensor != mark).sum()) for tensor in tensors])
        if tensors[0].dim() > 1:  # each position predicts the next, and none predicts the first
            yield Tokens(name, mark, [int((tensor[:, 1:] != mark).sum()) for tensor in tensors])


def _may_mark(tensor: Tensor) -> bool:
    """Numbers of classes or tokens, or a mask of zeros and ones."""
    if not tensor.dim():
        return False
    return not tensor.is_floating_point() or bool(((tensor == 0) | (tensor == 1)).all())


def _loss(setup: Setup, batch: Batch) -> float:
    inputs, targets = batch
    return float(setup.loss_fn(call_module(setup.model, setup.model, inputs), targets))
