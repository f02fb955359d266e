"""The engine of all data-parallel strategies: three switches decide what is sharded.

[Note: passes]
A *pass* is one forward or one backward. In a pass groups are gathered as they are needed; in
backward their gradients leave as soon as they are complete. Gathers and reductions run on two
groups of ranks of their own, so that the order of one does not depend on the other.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.errors import ShoalError
from shoal.strategies.consistency import drift
from shoal.strategies.consistency.holders import Holders
from shoal.strategies.consistency.input_watch import InputWatch
from shoal.strategies.consistency.progress import Progress
from shoal.strategies.consistency.voting import Vote
from shoal.strategies.engine.flat_group import FlatGroup, Residence
from shoal.strategies.engine.gathering import Gathering, Plan
from shoal.strategies.engine.grouping import Grouping
from shoal.strategies.engine.heap import keep_freed_memory
from shoal.strategies.engine.steps import Steps
from shoal.strategies.gradients.arrivals import Arrivals
from shoal.strategies.gradients.buffer_pool import BufferPool
from shoal.strategies.gradients.clipping import clip_norm, held_gradients, norm_like
from shoal.strategies.gradients.group_gradients import GroupGradients
from shoal.strategies.gradients.hand_made import HandMade
from shoal.strategies.gradients.reductions import Reductions
from shoal.strategies.gradients.sharded.owners import GradientOwners
from shoal.strategies.guards.admission import check_models, check_trains_alike, refuse_copy
from shoal.strategies.guards.forward_mode import check_forward_mode
from shoal.strategies.guards.pins import pin_compiled, pin_parents
from shoal.strategies.guards.roster import Roster
from shoal.strategies.layers.buffers import share_buffers
from shoal.strategies.layers.precision import Precision
from shoal.strategies.ranks import Ranks
from shoal.strategies.settings import Settings, Sharding


class Engine:
    """Parameters, gradients and their way between the ranks, for one model on one rank."""

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        sharding: Sharding,
        settings: Settings,
        undivided: Collection[nn.Parameter] = (),
    ) -> None:
        """Takes the module's parameters over; rank 0's values count.

        Args:
            module: The user's module.
            ranks: Those that train it together.
            sharding: What is sharded.
            settings: What users may choose.
            undivided: Parameters that must not be cut: their optimizer looks at all of one.
        """
        self.module, self.sharding, self.settings = module, sharding, settings
        self.ranks, self.backend, self.shards = ranks, ranks.all, ranks.shards
        self.auto_sync = True
        self.holders = Holders()
        """Who holds the rest of the model, where these ranks have a part of it only."""
        check_models(module, self.backend)
        check_trains_alike(module, self.backend)
        if any(parameter.is_cpu for parameter in module.parameters()):
            keep_freed_memory()
        self._gather_group, self._reduce_group = self.shards.lane(self), self.shards.lane(self)
        self._buffer_group = self.backend.lane(self)
        self.progress = Progress()
        self.backend.compare_at_exit(self.progress)
        self.input_watch = InputWatch(self._buffer_group, self.progress)
        self._precision = Precision(module, settings.compute_dtype)
        narrowing = self._precision.install(module)
        self.account = self.backend.open_account()
        weakref.finalize(self, self.account.close).atexit = False
        self.account.add("buffers", sum(buffer.nbytes for buffer in module.buffers()))
        self.groups = Grouping(module, ranks, sharding, settings, undivided).make(self.account)
        self._place = {
            id(parameter): (group.index, place)
            for group in self.groups
            for place, parameter in enumerate(group.parameters)
        }
        self._roster = Roster(module, lambda parameter: id(parameter) in self._place)
        self.gathering = Gathering(self.groups, self._gather_group, self.progress)
        self._forward_plan = Plan([group.index for group in self.groups])
        self._backward_plan = Plan([group.index for group in reversed(self.groups)])
        pool = BufferPool(self.shards, self.account)
        is_sharded = sharding.gradients and self.shards.size > 1
        # Where a rank does something else instead, that is what it does next.
        meeting = self._gather_group if self.gathering.is_needed else self._reduce_group
        self._owners = GradientOwners(module, meeting if is_sharded else None, lambda: self.holders)
        self.gradients = [
            GroupGradients(
                group, pool, self._reduce_group, self._owners, is_sharded, settings.hides_gradients
            )
            for group in self.groups
        ]
        # Ranks that hold other layers, or parts of them, do other things to what they hold.
        self.progress.follow_edits(lambda: 0 if self.holders.axes else self._owners.edits)
        self.hand_made = HandMade(self.gradients, meeting, ranks.replicas)
        may_wait = not self.gathering.is_needed and not settings.has_meetings
        self._reductions = Reductions(
            self.gradients, self._reduce_group, self.progress, may_wait=may_wait
        )
        self.num_rounds = 0
        """How often gradients were averaged as part of a backward."""
        self.num_averaged = 0
        """How often there were averaged gradients afterwards, on any rank and so on all."""
        self._num_averaged_stepped = 0
        self._in_backward = self._is_in_parts = False
        self._saving: list[Any] = []
        self._arrivals = Arrivals(self._arrived)
        self._steps = Steps(self.groups, self._reduce_group, self.progress)
        self._common_bytes = sum(
            group.whole.nbytes for group in self.groups if group.residence is Residence.COMMON
        )
        self._hooks = self._install() + narrowing
        share_buffers(module, self._buffer_group)
        self.gathering.free_all()

    def dissolve(self) -> None:
        """Gives the parameters memory of their own again, and lets go of the module."""
        values: dict[nn.Parameter, Tensor] = {}
        with self.full_parameters(keep_changes=False):
            for group in self.groups:
                group.residence = Residence.REPLICATED  # it is not this engine's to free any more
                values |= {parameter: parameter.data.clone() for parameter in group.parameters}
        for parameter, value in values.items():
            parameter.data = value
        for handle in self._hooks:
            handle.remove()
        self.account.close()

    def __reduce__(self) -> NoReturn:
        """Refused."""
        refuse_copy()

    def locate(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """Group and place of a parameter of the model; None for a stranger."""
        return self._place.get(id(parameter))

    # Forward ----------------------------------------------------------------------------

    def _install(self) -> list[Any]:
        handles: list[Any] = [
            self.module.register_forward_pre_hook(
                self._begin_forward, prepend=True, with_kwargs=True
            ),
            self.module.register_forward_hook(self._end_forward, always_call=True),
        ]
        for gradients in self.gradients:
            handles += self._arrivals.watch(gradients)
        if any(group.is_sharded for group in self.groups):
            handles += pin_parents(self.module, self._group_of)
            compiled = pin_compiled(self.module, self._group_of, self.gathering.need)
            if compiled:
                self.gathering.hide_from_compiler()
            handles += compiled
        return handles

    def _group_of(self, parameter: nn.Parameter) -> FlatGroup:
        return self.groups[self._place[id(parameter)][0]]

    @torch._disable_dynamo
    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.gathering.is_needed:
            check_forward_mode(self.backend)
        if self._is_recomputing() or _is_transforming():
            return None
        self._steps.check()
        if torch.is_grad_enabled():
            self._roster.check()
            if module.training:
                self.input_watch.see((args, kwargs))
        self._steps.begin_forward(is_training=torch.is_grad_enabled())
        if module.training and not self._is_in_parts:
            self.share_buffers()
        self._begin_pass(self._forward_plan, is_backward=False)
        saving: Any = contextlib.nullcontext()
        if self.gathering.is_needed and torch.is_grad_enabled():
            saving = self.gathering.saving()
        saving.__enter__()
        self._saving.append(saving)
        return self._precision.narrowed((args, kwargs))

    def _begin_pass(self, plan: Plan, *, is_backward: bool) -> None:
        forward = "a forward" if torch.is_grad_enabled() else "a forward without gradients"
        what = "a backward" if is_backward else forward
        self.gathering.begin_pass(plan, what, is_backward=is_backward)
        if self._common_bytes:
            self.backend.count_in_place(self._common_bytes)

    @torch._disable_dynamo
    def _end_forward(self, module: nn.Module, args: object, output: object) -> Any:
        if self._is_recomputing() or _is_transforming():
            return None
        if not self._saving:
            return None  # it never began
        self._saving.pop().__exit__(None, None, None)
        if output is None and sys.exception() is not None:
            return None  # forward failed: this rank has nothing more to share with the others
        self.gathering.end_pass()
        output = self._precision.widened(output)
        if torch.is_grad_enabled():
            self._arrivals.let_others_go_first()
            if self._arrivals.are_stepped and self.backend.size > 1:
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

    def _is_recomputing(self) -> bool:
        """Whether this forward is part of a backward pass, which then just goes on.

        A backward that failed leaves the flag behind, so autograd itself is asked.
        """
        self._in_backward &= torch._C._current_graph_task_id() != -1
        return self._in_backward

    # Backward ---------------------------------------------------------------------------

    def _begin_backward(self, _: Tensor | None = None) -> None:
        if self._is_recomputing():
            return
        self._in_backward = True
        self._begin_pass(self._backward_plan, is_backward=True)
        self._reductions.begin()
        self._owners.settle()
        self.hand_made.add_to()
        for gradients in self.gradients:
            gradients.expect()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _arrived(self, index: int, place: int) -> None:
        gradients = self.gradients[index]
        if self._only_adds_up and gradients.was_added(place):
            return
        gradients.arrived.append(place)
        gradients.waiting -= 1
        if gradients.waiting <= 0:
            self._group_arrived(gradients)

    @property
    def _only_adds_up(self) -> bool:
        """Whether gradients are neither averaged nor the end of a pass that has others to tell."""
        return self._is_in_parts and not self.auto_sync and not self.gathering.is_needed

    def _group_arrived(self, gradients: GroupGradients) -> None:
        if not self._in_backward:
            self._begin_backward()
            if gradients.waiting > 0:
                return
        if self._arrivals.are_stepped:  # by hooks that are yet to come
            return
        gradients.collect()
        if self.auto_sync:
            self._reductions.completed(gradients.group.index)

    def _end_backward(self) -> None:
        self._in_backward = False
        self.gathering.end_pass()
        for gradients in self.gradients:
            gradients.waiting = 0
            gradients.collect()
            if self.backend.size > 1:
                gradients.check_unchanged()
        if self.auto_sync:
            self._complete_round()
        self._show_gradients()

    def _complete_round(self) -> None:
        self.num_rounds += 1
        self._reductions.complete_round()
        self._finish_reductions()

    def share_buffers(self) -> None:
        """All ranks have the same buffers; see [Note: buffers that learn]."""
        averages = self.settings.averages_buffers
        share_buffers(self.module, self._buffer_group, averages=averages)

    def _finish_reductions(self) -> None:
        self._reductions.finish()
        if self.ranks.replicas is not None:
            self._reductions.average_over(self.ranks.replicas)
        if self.settings.averages_buffers:
            self.share_buffers()
        self.input_watch.compare()
        self.num_averaged += any(gradients.used for gradients in self.gradients)

    def _show_gradients(self) -> None:
        for gradients in self.gradients:
            gradients.show()
        self._owners.refresh()

    @contextlib.contextmanager
    def batch_in_parts(self) -> Iterator[None]:
        """Around passes in a row that are one: between them nobody looks at the gradients.

        Buffers are shared once, because graphs of earlier parts may need them unchanged.
        """
        if self.module.training:
            self.share_buffers()
        self._owners.settle()
        self.hand_made.add_to()
        for gradients in self.gradients:
            gradients.add_in_place(True)
        self._is_in_parts = True
        try:
            yield
        finally:
            self._is_in_parts = False
            for gradients in self.gradients:
                gradients.add_in_place(False)
            self._show_gradients()

    # What users ask for -----------------------------------------------------------------

    def synchronize(self) -> None:
        """Averages the gradients now, where that was not done in backward."""
        self._owners.settle()
        self.hand_made.add_to()
        self._reductions.reduce_all()
        self._finish_reductions()
        self._show_gradients()

    def average_late(self) -> None:
        """Does what a backward does at its end, for one that reached nothing on this rank.

        Other ranks may be in such an end: unlike `synchronize`, this meets them there.
        """
        self._reductions.begin()
        self._complete_round()
        self._show_gradients()

    def gradient_buffers(self) -> list[Tensor]:
        """All averaged gradients that this rank holds."""
        self.adopt_gradients()
        held = [gradients.held() for gradients in self.gradients]
        return [buffer for buffer in held if buffer is not None and buffer.numel()]

    def adopt_gradients(self, num_averaged: int | None = None) -> None:
        """What users did to gradients counts, and what they put in by hand is averaged.

        Args:
            num_averaged: What `num_averaged` was when this was last asked for; by default at the
                last step. Where nothing was averaged since, all ranks meet; see [Note: by hand].
        """
        self._owners.settle()
        seen = self._num_averaged_stepped if num_averaged is None else num_averaged
        self.hand_made.average(is_due=self.num_averaged == seen)

    def check_averaged(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises if this rank's gradients of some parameters are still only its own."""
        if any(gradients.local for gradients in self.gradients):
            for parameter in parameters:
                group, place = self._place[id(parameter)]
                self.gradients[group].check_averaged((place,))

    def gradient_shard(self, name: str) -> Tensor | None:
        """This rank's part of a parameter's averaged gradient."""
        parameter = dict(self.module.named_parameters()).get(name)
        found = None if parameter is None else self.locate(parameter)
        if found is None:
            raise KeyError(f"the model has no parameter named {name!r}")
        group, place = found
        self._owners.settle()
        self.hand_made.adopt()
        if place in self.gradients[group].by_hand:
            raise ShoalError(
                f"the gradient of {name} was put in by hand and is this rank's own: call "
                "model.synchronize_gradients() first, which averages it over the ranks"
            )
        own = self.gradients[group].own()
        if own is None or place not in self.gradients[group].used:
            return None
        layout = self.groups[group].layout
        first_name = layout.slots[place].name
        for piece in layout.pieces(self.shards.rank):
            if piece.name == first_name:
                return own[piece.offset : piece.offset + piece.stop - piece.start]
        return own[:0]

    def clip_norm(
        self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales the gradients so that their norm over all elements is at most ``max_norm``."""
        self.adopt_gradients()
        held = held_gradients(self.groups, self.gradients, self.holders)
        groups = [self.shards] if self.sharding.gradients else []
        groups += self.holders.axes
        like = norm_like(self.groups, self.backend.device)
        norm = clip_norm(
            held, max_norm, norm_type, groups, like, error_if_nonfinite=error_if_nonfinite
        )
        self._owners.refresh()
        return norm

    def clip_value(self, limit: float) -> None:
        """Clamps every element of the gradients."""
        for buffer in self.gradient_buffers():
            buffer.clamp_(-limit, limit)
        self._owners.refresh()

    def clear_gradients(self) -> None:
        """Forgets all gradients."""
        for gradients in self.gradients:
            gradients.clear()

    def zero_gradients(self, parameters: Collection[nn.Parameter], *, set_to_none: bool) -> None:
        """Forgets the gradients of some parameters, or makes them zero."""
        places: dict[int, set[int]] = {}
        for parameter in parameters:
            group, place = self._place[id(parameter)]
            places.setdefault(group, set()).add(place)
        for group, own in places.items():
            gradients = self.gradients[group]
            if not set_to_none:
                gradients.adopt()
                gradients.make_zero(own)
            elif len(own) == len(self.groups[group].parameters):
                gradients.clear()
            else:
                gradients.forget(own)

    def gather_gradients(self, num_averaged: int) -> None:
        """Every rank gets the whole averaged gradient, for optimizers that need all of it.

        ``num_averaged``: see `adopt_gradients`.
        """
        self.adopt_gradients(num_averaged)
        for gradients in self.gradients:
            gradients.gather(self._gather_group)

    @contextlib.contextmanager
    def full_parameters(self, *, keep_changes: bool = True) -> Iterator[None]:
        """All parameters whole on every rank; what is changed is kept."""
        self.adopt_changes("model.full_parameters()")
        try:
            with self.gathering.keeping():
                plan = Plan(self._forward_plan.order, is_learned=True)
                self.gathering.begin_pass(plan, "model.full_parameters()")
                for group in self.groups:
                    if group.is_sharded:
                        self.gathering.need(group)
                self.gathering.end_pass()
                for group in self.groups:
                    group.stop_watching()  # nothing is freed in here
                with self._exposed(keep_changes):
                    yield
        finally:
            self.gathering.free_unless_kept()

    def check_steps(self) -> None:
        """Raises if a step has stopped half-way, so that nobody keeps what it left."""
        self._steps.check()

    def tear(self) -> None:
        """Some parameters have been stepped, and the others will not be."""
        self._steps.tear()

    def mend(self) -> None:
        """All parameters have been given new values, whatever went wrong before."""
        self._steps.mend()

    @contextlib.contextmanager
    def _exposed(self, keep_changes: bool) -> Iterator[None]:
        """What has masters in another precision is shown as a private copy of them."""
        exposed = [group for group in self.groups if group.is_mixed and group.exposed is None]
        for group in exposed:
            group.expose(self._all_masters(group))
        try:
            yield
        finally:
            for group in self.groups:
                group.take_back()
            self._steps.begin_writing("model.full_parameters()", keep_changes=keep_changes)
            for group in exposed:
                if group.exposed is not None:
                    group.conceal(keep=keep_changes)
            self._keep_changes(keep_changes)
            self._steps.meet("the end of model.full_parameters()")
            for group in self.groups:
                if keep_changes or not group.is_sharded:
                    group.settle()

    def _all_masters(self, group: FlatGroup) -> Tensor:
        if not group.owns_part:
            return group.master.clone()
        masters: Tensor = self._gather_group.all_gather(group.master)
        return masters

    def _keep_changes(self, is_wanted: bool) -> None:
        if is_wanted:
            self.gathering.everything_changed()
            for group in self.groups:
                if group.is_sharded:
                    group.keep_changes()

    def adopt_changes(self, what: str) -> None:
        """What users did to the parameters counts, before ``what``; see [Note: changes by hand]."""
        if self._steps.is_torn:  # that was no user
            return
        self._adopt_own_changes()
        self._steps.adopt_common(what)

    def _adopt_own_changes(self) -> None:
        for group in self.groups:
            self.gathering.adopt_changes(group)

    @contextlib.contextmanager
    def stepping(self, changing: Sequence[nn.Parameter]) -> Iterator[None]:
        """Around an optimizer's step on masters of some parameters; then everybody has them all."""
        if any(group.exposed is not None for group in self.groups):
            raise ShoalError("an optimizer cannot step inside of full_parameters(): leave it first")
        if self._is_recomputing() and self.backend.size > 1:
            raise ShoalError(
                "an optimizer cannot step inside of backward: gradients are averaged over the "
                "ranks by its end. Call optimizer.step() after backward"
            )
        self.gathering.finish_coming()
        if not self._steps.is_torn:
            self._adopt_own_changes()
        with self._steps.taking():
            yield
        self._tell_autograd(changing)
        self.gathering.free_all()
        for group in self.groups:
            group.age()
        self._num_averaged_stepped = self.num_averaged

    def note_step(self) -> None:
        """A step is over; see [Note: edits of gradients]."""
        self._owners.note_step()

    def check_step(self, number: int) -> None:
        """Before an optimizer's step ``number``: the ranks must have done the same so far.

        Raises:
            MismatchError: Otherwise; see [Note: ranks that train alike].
        """
        for axis in self.holders.axes:
            Vote.cast(axis, self.progress, "the beginning of optimizer.step()")
        if drift.is_due(number, self.settings.check_every):
            self._compare_replicas(self.gradients, "optimizer.step()")

    def check_replicas(self, doing: str) -> None:
        """Compares the parameters that every rank holds; ``doing`` is said in the error."""
        if self.settings.check_every:
            self._compare_replicas([], doing)

    def _compare_replicas(self, gradients: Sequence[GroupGradients], doing: str) -> None:
        group, copies = self._reduce_group, self.holders.copies
        if drift.differing(group, drift.replicated_buffers(self.groups, gradients), doing):
            drift.check(group, drift.replicated_tensors(self.groups, gradients), doing)
        if copies:  # the last axis is that of layers which are split
            held = drift.replicated_tensors(self.groups, gradients)
            copied = [n for n in held if copies.get(n.removeprefix(drift.GRADIENT_OF), 1) > 1]
            drift.check(self.holders.axes[-1], {name: held[name] for name in copied}, doing)

    def _tell_autograd(self, changed: Sequence[nn.Parameter]) -> None:
        """A backward that still needs the old values must fail, as it does in plain PyTorch."""
        if self.gathering.is_needed:
            places = [self._place[id(parameter)] for parameter in changed]
            is_sharded = [self.groups[index].is_sharded for index, _ in places]
            self.gathering.changed(itertools.compress(places, is_sharded))
            changed = [p for p, is_away in zip(changed, is_sharded, strict=True) if not is_away]
        torch.autograd.graph.increment_version(changed)
        for group in self.groups:
            if not group.is_sharded:
                group.settle()


def _is_transforming() -> bool:
    """Whether forward is inside of `torch.func.grad` or the like, which leaves no gradients."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(each.key() is not torch._C._functorch.TransformType.Vmap for each in stack)
