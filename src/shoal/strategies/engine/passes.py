"""Forward and backward of a model, as hooks on its module and its parameters.

[Note: passes]
A *pass* is one forward or one backward. In a pass groups are gathered as they are needed; in
backward the reduction of a group's gradients begins as soon as they are complete. Gathers and
reductions run on two groups of ranks of their own, so that the order of one does not depend on the
other.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, MutableMapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.comm import Backend
from shoal.errors import ShoalError
from shoal.strategies.engine.admission import (
    ParameterRoster,
    check_forward_mode,
    is_transforming,
    refuse_surrounding_ddp,
)
from shoal.strategies.engine.gathering import PassPlan, pin_compiled, pin_parents
from shoal.strategies.gradients.group_gradients import GroupGradients
from shoal.strategies.gradients.reductions import Reductions
from shoal.strategies.layers.buffers import share_buffers
from shoal.torch_internals.autograd import call_after_backward, is_in_backward, not_compiled
from shoal.torch_internals.optimizers import IN_BACKWARD_OPTIMIZERS
from shoal.torch_internals.tensors import hooks_after_gradient
from shoal.torch_internals.trees import tree_leaves

if TYPE_CHECKING:
    from shoal.strategies.engine.engine import Engine
    from shoal.strategies.engine.flat_group import FlatGroup


class Passes:
    """The passes of one model on one rank; see [Note: passes]."""

    def __init__(self, engine: Engine, reduce_group: Backend, buffer_group: Backend) -> None:
        """``reduce_group`` carries reductions of gradients, ``buffer_group`` the buffers."""
        self._engine, self._buffer_group = engine, buffer_group
        self._gathering, self._steps = engine.gathering, engine.steps
        self._gradients = engine.gradients
        self.auto_sync = True
        """Whether each backward averages the gradients."""
        self.forward_plan = PassPlan([group.index for group in engine.groups])
        self._backward_plan = PassPlan([group.index for group in reversed(engine.groups)])
        self._roster = ParameterRoster(
            engine.module, lambda parameter: id(parameter) in engine.index_of
        )
        may_wait = not engine.gathering.is_needed and not engine.settings.has_meetings
        self._reductions = Reductions(
            engine.gradients.groups, reduce_group, engine.progress, may_wait=may_wait
        )
        self.num_rounds = 0
        """How often gradients were averaged as part of a backward."""
        self.num_trained = 0
        """How many forwards in training mode and backwards there were."""
        self._in_backward = self._is_in_parts = False
        self._saving: list[Any] = []
        self._arrivals = Arrivals(self._arrived)  # type: ignore[arg-type]
        self._common_bytes = sum(group.whole.nbytes for group in engine.groups if group.is_common)

    def install(self) -> list[Any]:
        """Hangs the hooks; returns their handles."""
        module, gathering = self._engine.module, self._gathering
        handles: list[Any] = [
            module.register_forward_pre_hook(self._begin_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._end_forward, always_call=True),
        ]
        for gradients in self._gradients:
            handles += self._arrivals.watch(gradients)
        if gathering.is_needed:
            handles += pin_parents(module, self._group_of)
            compiled = pin_compiled(module, self._group_of, gathering.need)
            if compiled:
                gathering.saved.hide_from_compiler()
            handles += compiled
        return handles

    def _group_of(self, parameter: nn.Parameter) -> FlatGroup:
        return self._engine.groups[self._engine.index_of[id(parameter)][0]]

    def _begin_pass(self, plan: PassPlan, *, is_backward: bool) -> None:
        forward = "a forward" if torch.is_grad_enabled() else "a forward without gradients"
        what = "a backward" if is_backward else forward
        self._gathering.begin_pass(plan, what, is_backward=is_backward)
        if self._common_bytes:
            self._engine.backend.count_in_place(self._common_bytes)

    # Forward ------------------------------------------------------------------------------

    @not_compiled
    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        engine, gathering, is_training = self._engine, self._gathering, torch.is_grad_enabled()
        if gathering.is_needed:
            check_forward_mode(engine.backend)
        if self.is_recomputing() or is_transforming():
            return None
        if is_training:
            refuse_surrounding_ddp()
            self._roster.check()
            if module.training and engine.input_watch.rounds_left:
                engine.input_watch.see((args, kwargs))
        self.num_trained += module.training
        for group in engine.groups:
            group.changes.check_memory()
        if self._steps.is_direct or self._steps.is_torn:
            self._steps.begin_forward(is_training=is_training)
        if module.training and not self._is_in_parts:
            self.share_buffers()
        self._begin_pass(self.forward_plan, is_backward=False)
        saving: Any = contextlib.nullcontext()
        if gathering.is_needed and is_training:
            saving = gathering.saved.saving()
        saving.__enter__()
        self._saving.append(saving)
        return engine.precision.narrowed((args, kwargs)) if engine.precision.is_mixed else None

    @not_compiled
    def _end_forward(self, module: nn.Module, args: object, output: object) -> Any:
        if self.is_recomputing() or is_transforming():
            return None
        if not self._saving:
            return None  # it never began
        self._saving.pop().__exit__(None, None, None)
        if output is None and sys.exception() is not None:
            return None  # forward failed: this rank has nothing more to share with the others
        self._gathering.end_pass()
        if self._engine.precision.is_mixed:
            output = self._engine.precision.widened(output)
        if torch.is_grad_enabled():
            self._arrivals.run_last()
            if self._arrivals.are_stepped and self._engine.backend.size > 1:
                raise ShoalError(
                    "an optimizer was applied in backward, but gradients are averaged over the "
                    "ranks by its end: each rank would step with its own. Step after backward, "
                    "with the optimizer that shoal.as_distributed(model, optimizer) returned"
                )
            self.expect_backward(output)
        return output

    def expect_backward(self, output: Any) -> None:
        """A backward pass may begin at any tensor of this."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn:
                tensor.register_hook(self._begin_backward)

    def is_recomputing(self) -> bool:
        """Whether a backward pass is under way, which a forward inside of it is part of.

        A backward that failed leaves the flag behind, so autograd itself is asked.
        """
        self._in_backward &= is_in_backward()
        return self._in_backward

    def share_buffers(self) -> None:
        """All ranks have the same buffers; see [Note: buffers that learn]."""
        buffers = self._roster.buffers()
        if buffers:
            averages = self._engine.settings.averages_buffers
            share_buffers(buffers, self._buffer_group, averages=averages)

    # Backward -----------------------------------------------------------------------------

    def _begin_backward(self, _: Tensor | None = None) -> None:
        if self.is_recomputing():
            return
        self._in_backward = True
        self.num_trained += 1
        self._begin_pass(self._backward_plan, is_backward=True)
        self._reductions.begin(is_averaged=self.auto_sync)
        self._gradients.add_to()
        self._gradients.expect(one_by_one=self._only_adds)
        call_after_backward(self._end_backward)

    @property
    def _only_adds(self) -> bool:
        """Between the parts of a batch, gradients are neither averaged nor end a gathering pass."""
        return self._is_in_parts and not self.auto_sync and not self._gathering.is_needed

    def _arrived(self, group: int, index: int) -> None:
        gradients = self._gradients.groups[group]
        if self._only_adds and gradients.was_added(index):
            gradients.arrived.pop()
        elif not gradients.are_missing:
            self._group_arrived(gradients)

    def _group_arrived(self, gradients: GroupGradients) -> None:
        if not self._in_backward:
            self._begin_backward()
            if gradients.are_missing:
                return
        if self._arrivals.are_stepped:  # by hooks that are yet to come
            return
        gradients.expect_nothing()
        gradients.collect()
        if self.auto_sync:
            self._reductions.completed(gradients.group.index)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._gathering.end_pass()
        is_alone = self._engine.backend.size == 1
        for gradients in self._gradients.groups:
            gradients.expect_nothing()
            gradients.collect()
        if not is_alone:
            self._gradients.check_unchanged()
        if self.auto_sync:
            self._complete_round()
        self._gradients.show()

    def _complete_round(self) -> None:
        self.num_rounds += 1
        self._reductions.complete_round()
        self._finish_reductions()

    def _finish_reductions(self) -> None:
        engine, replicas = self._engine, self._engine.ranks.replica_group
        self._reductions.finish()
        if replicas is not None:
            self._reductions.average_over(replicas)
        if engine.settings.averages_buffers:
            self.share_buffers()
        if engine.input_watch.rounds_left:
            engine.input_watch.compare()
        self._gradients.note_averaged()
        self._gradients.pool.release()

    # Outside of backward ------------------------------------------------------------------

    @contextlib.contextmanager
    def batch_in_parts(self) -> Iterator[None]:
        """Around the micro-batches of one batch; gradients are not shown in between.

        Buffers are shared once, because graphs of earlier parts may need them unchanged.
        """
        if self._engine.module.training:
            self.share_buffers()
        self._gradients.add_to()
        for gradients in self._gradients:
            gradients.add_in_place(True)
        self._is_in_parts = True
        try:
            yield
        finally:
            self._is_in_parts = False
            for gradients in self._gradients:
                gradients.add_in_place(False)
            self._gradients.show()

    def synchronize(self) -> None:
        """Averages the gradients now, where that was not done in backward."""
        self._gradients.add_to()
        self._reductions.reduce_all()
        self._finish_reductions()
        self._gradients.show()

    def average_late(self) -> None:
        """Does what a backward does at its end, for one that reached nothing on this rank.

        Other ranks may be at the end of a backward: unlike `synchronize`, this meets them there.
        """
        self._reductions.begin(is_averaged=True)
        self._complete_round()
        self._gradients.show()


class Arrivals:
    """The hooks of one engine."""

    def __init__(self, tell: MethodType) -> None:
        """``tell``: a method that is given a parameter's group and its index there."""
        # Python's collector does not follow references from a parameter to its hooks.
        self._owner, self._tell = weakref.ref(tell.__self__), tell.__func__
        self._hooks: list[tuple[MutableMapping[int, Any], int, dict[str, Any]]] = []
        self.are_stepped = False
        """Whether an optimizer steps some parameters as their gradients arrive."""

    def watch(self, gradients: GroupGradients) -> list[Any]:
        """Hangs a hook on each parameter of a group that may ever have a gradient."""
        return [
            self._hang_on(parameter, gradients, index)
            for index, parameter in enumerate(gradients.group.parameters)
            if parameter.is_floating_point() or parameter.is_complex()
        ]

    def _hang_on(self, parameter: nn.Parameter, gradients: GroupGradients, index: int) -> Any:
        was_trainable = parameter.requires_grad
        # A hook can only be hung on a parameter that is trainable, and it may become so later.
        parameter.requires_grad_(True)
        owner, tell, group = self._owner, self._tell, gradients.group.index
        arrived, append = gradients.arrived, gradients.arrived.append

        def note(_: Tensor) -> None:
            append(index)  # mostly that is all: this is called for each parameter in each step
            if len(arrived) >= arrived.num_worth_telling and (passes := owner()) is not None:
                tell(passes, group, index)

        note.owner = owner  # type: ignore[attr-defined]
        handle = parameter.register_post_accumulate_grad_hook(note)
        self._hooks.append((hooks_after_gradient(parameter), handle.id, vars(parameter)))
        parameter.requires_grad_(was_trainable)
        return handle

    def run_last(self) -> None:
        """Puts our hooks behind those of users, which see gradients before they are collected."""
        self.are_stepped = False
        for hooks, own, attributes in self._hooks:
            if IN_BACKWARD_OPTIMIZERS in attributes:
                self.are_stepped = True
            if len(hooks) > 1 and next(reversed(hooks)) != own:
                hooks[own] = hooks.pop(own)  # autograd does not see what move_to_end does
