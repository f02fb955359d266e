"""The ranks that hold the parts of gradients between them.

[Note: numbers of gradients]
A number that is computed from a gradient (a norm, a sum) is put together from what each rank
computes of its part. All ranks exchange these in one message, whether they hold anything or not,
and combine them in the order of the ranks, so that all have the same bits.

[Note: edits of gradients]
A rank changes its own elements of an averaged gradient, so every rank must do the same to it, with
the same numbers. Nothing is communicated for that. So what was done is summed up as it happens: the
operation, numbers, a checksum of plain tensors (on a CPU), and gradients that were dropped. The sum
rides with the votes and is compared there. Inside of a step the order does not count: ranks may go
different ways about the same edit, if a user of one of them references what was gathered for it.
Plain tensors (gradients that are whole, and what was gathered of others) do not tell what is done
to them. Of those only counts that they were written to: one rank alone is found, other values are
not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.comm.operation import AllGather
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.strategies.engine.engine import Engine
    from shoal.strategies.gradients.sharded.part import GradientPart


@dataclass(frozen=True)
class Combination:
    """How numbers of parts become one."""

    of_rows: Callable[[Tensor], Tensor]  # combines the rows of a matrix, one for each rank
    nothing: float  # what a rank contributes that holds no elements


SUM = Combination(lambda rows: rows.sum(0), 0.0)
LARGEST = Combination(lambda rows: rows.amax(0), float("-inf"))
SMALLEST = Combination(lambda rows: rows.amin(0), float("inf"))


class GradientOwners:
    """Who holds the rest of the gradients of one model."""

    def __init__(self, engine: Engine, shard_group: Backend | None) -> None:
        """``shard_group``: ranks that gradients are divided among; None where all are whole."""
        self._engine, self._shard_group = engine, shard_group
        self.kept: list[GradientPart] = []
        """Parts whose whole users may still write to; see [Note: gathered gradients]."""

    def note(self, edit: str, count: int = 1) -> None:
        """A user has changed a gradient so often; see [Note: edits of gradients]."""
        # Ranks that hold other layers, or parts of them, do other things to what they hold. So do
        # replicas that are trained apart, each on a group of one rank.
        if self._engine.backend.size > 1 and not self._engine.ownership.axes:
            self._engine.progress.note_edit(edit, count)

    def gather(self, values: Tensor, what: str) -> Tensor:
        """The parts of all ranks in a row; all of them call it."""
        return values if self._shard_group is None else _gathered(self._shard_group, values, what)

    def combine(self, numbers: Tensor, names: Sequence[str], how: Combination, what: str) -> Tensor:
        """Numbers of parts, one for each named parameter, become those of whole gradients.

        All ranks call it; see [Note: numbers of gradients].
        """
        ownership = self._engine.ownership
        if ownership.other_layers is not None and ownership.other_layers.size > 1:
            raise ShoalError(
                f"{what}: each rank of a pipeline has the gradients of its own layers only, so the "
                "number would not be the whole model's. Use model.clip_grad_norm_ or "
                "clip_grad_value_ to clip, and model.full_gradients() on every rank to look at all"
            )
        if self._shard_group is not None:
            numbers = how.of_rows(_gathered(self._shard_group, numbers[None], what))
        for axis in ownership.axes:
            if axis.size > 1:
                numbers = self._over_axis(axis, numbers, names, how, what)
        return numbers

    def _over_axis(
        self, axis: Backend, numbers: Tensor, names: Sequence[str], how: Combination, what: str
    ) -> Tensor:
        """Parameters that every rank of the axis has alike count once."""
        copies = self._engine.ownership.copies
        if axis.rank > 0:
            is_copy = torch.tensor([copies.get(name, 1) > 1 for name in names])
            numbers = numbers.masked_fill(is_copy.to(numbers.device), how.nothing)
        return how.of_rows(_gathered(axis, numbers[None], what))

    def largest_anywhere(self, numbers: Tensor, what: str) -> Tensor:
        """The largest that any rank has which holds something of the model."""
        axes = [] if self._shard_group is None else [self._shard_group]
        for axis in (*axes, *self._engine.ownership.axes):
            if axis.size > 1:
                numbers = _gathered(axis, numbers[None], what).amax(0)
        return numbers

    def check_none_of(self, gradients: Collection[int]) -> None:
        """Raises if plain tensors, by their id, are gradients of the model's parameters."""
        for name, parameter in self._engine.module.named_parameters():
            if parameter.grad is not None and id(parameter.grad) in gradients:
                raise ShoalError(
                    f"the gradient of {name} was put in by hand and is this rank's own, the others "
                    "are averaged over the ranks: call model.synchronize_gradients() before you "
                    "compute with them together"
                )

    def settle(self) -> None:
        """Takes over what was written to gathered gradients."""
        self.kept = [part for part in self.kept if part.settle()]

    def refresh(self) -> None:
        """Gradients have changed: what was gathered of them follows, as far as it is here."""
        for part in self.kept:
            part.refresh()


def _gathered(group: Backend, values: Tensor, what: str) -> Tensor:
    operation = AllGather(values, None)
    operation.signature = f"{what}: {operation.signature}"
    joined: Tensor = group.run(operation)
    return joined
