"""The parameters of a model between passes: shown whole, changed by users, stepped."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.strategies.engine.flat_group import FlatGroup, GroupState
from shoal.strategies.engine.gathering import PassPlan

if TYPE_CHECKING:
    from shoal.strategies.engine.engine import Engine


class Parameters:
    """The parameters of one model on one rank."""

    def __init__(self, engine: Engine) -> None:
        """All of them are what they should be."""
        self._engine, self._groups = engine, engine.groups
        self._gathering, self._steps = engine.gathering, engine.steps

    @contextlib.contextmanager
    def full(self, *, keep_changes: bool = True) -> Iterator[None]:
        """All parameters whole on every rank; what is changed is kept."""
        self.adopt_changes("model.full_parameters()")
        try:
            with self._gathering.keeping():
                self._gather_all()
                with self._exposed(keep_changes):
                    yield
        finally:
            self._gathering.free_unless_kept()

    def _gather_all(self) -> None:
        plan = PassPlan(self._engine.passes.forward_plan.order, is_learned=True)
        self._gathering.begin_pass(plan, "model.full_parameters()")
        for group in self._groups:
            if group.is_sharded:
                self._gathering.need(group)
        self._gathering.end_pass()
        for group in self._groups:
            group.stop_watching()  # nothing is freed in here

    @contextlib.contextmanager
    def _exposed(self, keep_changes: bool) -> Iterator[None]:
        """What has masters in another precision is shown as a private copy of them."""
        exposed = [g for g in self._groups if g.is_mixed and g.state is GroupState.PRESENT]
        for group in exposed:
            group.to_exposed(self._all_masters(group))
        try:
            yield
        finally:
            for group in self._groups:
                group.changes.take_back()
            self._steps.begin_writing("model.full_parameters()", keep_changes=keep_changes)
            for group in exposed:
                if group.state is GroupState.EXPOSED:
                    group.to_concealed(keep=keep_changes)
            if keep_changes:
                self._keep_changes()
            self._steps.meet("the end of model.full_parameters()")
            for group in self._groups:
                if keep_changes or not group.is_sharded:
                    group.changes.settle()

    def _all_masters(self, group: FlatGroup) -> Tensor:
        if not group.owns_part:
            return group.master.clone()
        masters: Tensor = self._engine.gather_group.all_gather(group.master)
        return masters

    def _keep_changes(self) -> None:
        self._gathering.saved.everything_changed()
        for group in self._groups:
            if group.is_sharded:
                group.changes.keep()

    def adopt_changes(self, what: str) -> None:
        """What users did to the parameters counts, before ``what``; see [Note: changes by hand]."""
        if self._steps.is_torn:  # that was no user
            return
        self._adopt_own_changes()
        self._steps.adopt_common(what)

    def _adopt_own_changes(self) -> None:
        for group in self._groups:
            self._gathering.adopt_changes(group)

    def check_concealed(self, reason: str) -> None:
        """Raises inside of `full`, where users may be changing a copy of the masters."""
        if any(group.state is GroupState.EXPOSED for group in self._groups):
            raise ShoalError(f"{reason} inside of full_parameters(): leave it first")

    @contextlib.contextmanager
    def stepping(
        self, changing: Sequence[nn.Parameter], what: str = "optimizer.step()"
    ) -> Iterator[None]:
        """Around new values for the masters of some parameters; then all ranks have them all.

        ``what`` is the call that gives them: an optimizer's step, or loading a checkpoint.
        """
        self.check_concealed(f"{what} cannot change parameters")
        if self._engine.passes.is_recomputing() and self._engine.backend.size > 1:
            raise ShoalError(
                f"{what} cannot change parameters inside of backward: gradients are averaged over "
                f"the ranks by its end. Call {what} after backward"
            )
        self._gathering.finish_coming()
        if not self._steps.is_torn:
            self._adopt_own_changes()
        with self._steps.taking(what):
            yield
        self._tell_autograd(changing)
        self._gathering.free_all()
        for group in self._groups:
            group.changes.age()
        self._engine.gradients.note_stepped()

    def _tell_autograd(self, changed: Sequence[nn.Parameter]) -> None:
        """A backward that still needs the old values must fail, as it does in plain PyTorch."""
        if self._gathering.is_needed:
            located = [self._engine.index_of[id(parameter)] for parameter in changed]
            is_sharded = [self._groups[group].is_sharded for group, _ in located]
            self._gathering.saved.changed(itertools.compress(located, is_sharded))
            changed = [p for p, is_away in zip(changed, is_sharded, strict=True) if not is_away]
        torch.autograd.graph.increment_version(changed)
        for group in self._groups:
            if not group.is_sharded:
                group.changes.settle()
