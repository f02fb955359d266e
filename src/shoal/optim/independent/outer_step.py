"""The step at the end of a round: from what all ranks agreed on to what they agree on next.

Where the average itself counts and travels as it is, it is taken directly. Otherwise every rank
keeps the parameters that the round began with. Their *outer gradient* is what they were minus the
average of what they became; the outer optimizer steps with it (DiLoCo, arXiv:2311.08105). It is the
same on all ranks, and so is its state. What no rank has changed has no outer gradient: weight decay
and momentum leave frozen parameters alone, as they do in any optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm import Backend
from shoal.optim.optimizer import needs_closure
from shoal.strategies.consistency.progress import StepRecord, compare
from shoal.strategies.independent.averaging import AveragedGroup
from shoal.strategies.independent.local_model import OUTER_IN_WORDS, Outer


class OuterStep:
    """The ends of one optimizer's rounds."""

    def __init__(
        self, groups: Sequence[AveragedGroup], make: Outer | None, backend: Backend
    ) -> None:
        """A round begins."""
        self.groups = groups
        self._keeps_start = make is not None or any(each.exchange for each in groups)
        self._starts = [each.buffer() for each in groups] if self._keeps_start else []
        self._parameters = [
            nn.Parameter(view)
            for group, start in zip(groups, self._starts, strict=False)
            for view in group.views(start)
        ]
        names = [name for group in groups for name in group.names]
        self.names = {id(p): n for p, n in zip(self._parameters, names, strict=False)}
        """Full names of the parameters that the outer optimizer has, by their id."""
        self.optimizer = None if make is None else _made(make, self._parameters)
        """The outer one, if there is one."""
        if self.optimizer is not None:
            facts = StepRecord(self.optimizer).facts()
            compare(backend, {f"{name} of the outer optimizer": facts[name] for name in facts})

    @property
    def num_bytes_kept(self) -> int:
        """Of the parameters that a round began with."""
        return sum(start.nbytes for start in self._starts)

    @torch.no_grad()
    def begin_round(self) -> None:
        """The parameters are what all ranks agree on now."""
        for group, start in zip(self.groups, self._starts, strict=False):
            start.copy_(group.buffer())

    @torch.no_grad()
    def end_round(self, doing: str) -> None:
        """Gives the parameters what all ranks agree on; ``doing`` is said in errors."""
        if not self._keeps_start:
            for group in self.groups:
                average = group.buffer()
                group.average(average, doing)
                group.take(average)
            return
        changes = [self._averaged_change(n, doing) for n in range(len(self.groups))]
        self._step(changes)
        for group, start in zip(self.groups, self._starts, strict=True):
            group.take(start)

    def _averaged_change(self, number: int, doing: str) -> Tensor:
        group = self.groups[number]
        change = torch.sub(self._starts[number], group.buffer())
        group.average(change, doing)
        return change

    def _step(self, changes: Sequence[Tensor]) -> None:
        if self.optimizer is None:
            for start, change in zip(self._starts, changes, strict=True):
                start.sub_(change)
            return
        gradients = [
            view
            for group, change in zip(self.groups, changes, strict=True)
            for view in group.views(change)
        ]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient if gradient.any() else None
        self.optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None


def _made(make: Outer, parameters: list[nn.Parameter]) -> Optimizer:
    outer = make(parameters)
    if not isinstance(outer, Optimizer):
        raise TypeError(f"{OUTER_IN_WORDS}; it returned a {type(outer).__name__}")
    if needs_closure(outer):
        raise TypeError(
            f"outer made a {type(outer).__name__}, which calls a closure that computes the loss "
            "again; at the end of a round there is no loss, only what the round has changed: take "
            "an optimizer that steps without one, such as SGD with nesterov=True"
        )
    known = {id(parameter) for parameter in parameters}
    found = [id(each) for group in outer.param_groups for each in group["params"]]
    if set(found) != known or len(found) != len(known):
        raise ValueError(
            "outer must make an optimizer of all parameters that it is given, and of no others, "
            "such as the model's own: it was given "
            f"{len(known)}, of which its optimizer has {len(known & set(found))}, and "
            f"{len(set(found) - known)} others"
        )
    return outer
