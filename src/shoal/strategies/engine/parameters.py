"""The parameters of a model between passes: shown whole, changed by users, stepped.

[Note: torn parameters]
Where ranks write into memory that others read, they meet before any of them writes and again when
all have written. A rank that fails in between leaves parameters of which some are old and
some new. The surviving ranks must not go on with them: forward refuses.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.comm import Backend
from shoal.comm.operation import AllGather
from shoal.errors import ShoalError
from shoal.strategies.consistency.progress import Progress
from shoal.strategies.consistency.rounds import Vote
from shoal.strategies.engine.common_memory import CommonChanges
from shoal.strategies.engine.flat_group import FlatGroup, GroupState, Residence
from shoal.strategies.engine.gathering import PassPlan
from shoal.torch_support.memory import copy

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
            own, gathers = group.master, self._engine.gather_group
            group.to_exposed(gathers.all_gather(own) if group.owns_part else own.clone())
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
                self._gathering.saved.everything_changed()
                for group in self._groups:
                    if group.is_sharded:
                        group.changes.keep()
            self._steps.meet("the end of model.full_parameters()")
            for group in self._groups:
                if keep_changes or not group.is_sharded:
                    group.changes.settle()

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


class Steps:
    """The optimizer's steps of one model, as its memory sees them."""

    def __init__(self, groups: Sequence[FlatGroup], backend: Backend, progress: Progress) -> None:
        """``backend`` are the ranks that the memory is divided among.

        It carries the reductions of gradients too, so that a rank that leaves out a step is found
        at the next reduction, and the error names both.
        """
        self._groups, self._backend, self._progress = groups, backend, progress
        self.is_torn = False
        """Whether a step has stopped half-way; see [Note: torn parameters]."""
        common = [group for group in groups if group.is_common]
        self._common = CommonChanges(common) if common else None
        self._divided = [
            group
            for group in groups
            if group.residence is Residence.REPLICATED and group.owns_part and backend.size > 1
        ]
        self._others = [self._reach(group) for group in self._divided]
        self.is_direct = self._common is not None or any(self._others)
        """Whether ranks read or write memory of others."""

    def _reach(self, group: FlatGroup) -> list[Tensor]:
        """The wholes of all ranks, where ranks can read each other's; or nothing."""
        if not self._backend.shares_memory or not group.whole.is_cpu or not group.whole.numel():
            return []
        return self._backend.reach(group.whole) or []

    def meet(self, doing: str) -> None:
        """No rank goes on while another still reads or writes what is shared.

        ``doing`` is what the ranks are doing, in words.
        """
        if self.is_direct:
            Vote.cast(self._backend, self._progress, doing)

    def begin_forward(self, *, is_training: bool) -> None:
        """Ranks that share parameters must call the model equally often, as where they gather.

        A forward with gradients is counted, and compared at the step.
        """
        self.check()
        if self._common is None:
            return
        if is_training:
            self._common.num_calls += 1
        else:
            self._common.meet(self._backend, "a forward of the model without gradients")

    def adopt_common(self, what: str, *, keep_changes: bool = True) -> None:
        """What users did to what ranks share counts, before ``what``, which all of them call.

        See [Note: changes of common memory].
        """
        if self._common is not None and self._common.compare(self._backend, what):
            if keep_changes:
                self._common.keep()
            self.meet(f"{what}, changes kept")
            self._common.drop()

    def begin_writing(self, what: str, *, keep_changes: bool = True) -> None:
        """All ranks are here and none computes: what is shared may be written to."""
        if self._common is not None:
            self.adopt_common(what, keep_changes=keep_changes)
        else:
            self.meet(what)

    def check(self) -> None:
        """Raises if the parameters are half old, half new; see [Note: torn parameters]."""
        if self.is_torn:
            raise ShoalError(
                "the parameters are a mixture: a step failed while they were being updated. Load "
                "them again with load_state_dict(), for example from a checkpoint, and the "
                "optimizer's state too."
            )

    @contextlib.contextmanager
    def taking(self, what: str) -> Iterator[None]:
        """Around new values for the masters; ``what`` is the call that gives them."""
        self.begin_writing(what)
        self.is_torn = self.is_direct
        yield
        for group in self._groups:
            group.refresh()
        self.meet(f"the end of {what}")
        self._spread(what)
        if any(self._others):  # no rank changes what another still reads
            self.meet(f"the end of {what}, everything read")
        self.is_torn = False

    def _spread(self, what: str) -> None:
        """Where every rank has all parameters and steps its part, the parts are exchanged."""
        for group, others in zip(self._divided, self._others, strict=True):
            if others:
                self._read(group, others)
            else:
                self._gather(group, what)

    def _gather(self, group: FlatGroup, what: str) -> None:
        rounding = group.rounding
        sent, out = group.shard, group.whole
        if rounding is not None:
            sent, out = group.sent(group.master), rounding.make_room(group.whole.device)
            rounding.count(self._backend)
        operation = AllGather(sent, out)
        operation.signature += f" of new parameters in {what}"
        self._backend.run(operation)
        if rounding is not None:
            rounding.decode(out, group.whole)

    def _read(self, group: FlatGroup, others: Sequence[Tensor]) -> None:
        begin = time.perf_counter()
        for rank, other in enumerate(others):
            part = slice(*group.layout.bounds[rank : rank + 2])
            if rank != self._backend.rank:
                copy(group.whole[part], other[part])
        self._backend.count_reading(group.whole.nbytes, time.perf_counter() - begin)
