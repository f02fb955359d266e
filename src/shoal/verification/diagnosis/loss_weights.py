"""What a loss counts: rows, all there is, or tokens, whose number differs between parts of a batch.

The loss of a whole batch is compared with those of its parts. If it is their sum, the loss is one.
If it is their mean when each counts by how many of some tensor's elements are not padding, that is
what it is a mean over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.strategies.training import call_module, count_items
from shoal.torch_internals.trees import keystr, tree_leaves_with_path
from shoal.verification.trainers.global_batches import Batch, share
from shoal.verification.trainers.trainer import Setup

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
