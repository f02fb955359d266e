"""Parameters on demand: gathers groups when they are needed and frees them afterwards.

Every gather begins in `Gathering._start` and is waited for in `Gathering._wait`. Groups whose
memory the ranks of a host share (`Residence.COMMON`) are not gathered at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm import Backend, Work
from shoal.comm.operation import AllGather
from shoal.strategies.consistency.progress import Progress
from shoal.strategies.consistency.rounds import Round, Vote
from shoal.strategies.engine.absent import SavedParameters
from shoal.strategies.engine.flat_group import ABSENT, COMING, EXPOSED, HIDDEN, FlatGroup
from shoal.strategies.engine.gather_buffers import GatherBuffers
from shoal.strategies.engine.rounding import RoundedGather
from shoal.torch_internals.autograd import has_saved_tensors_hooks
from shoal.torch_internals.modules import is_compiled
from shoal.torch_internals.tensors import keeping_version

_OUTSIDE = "a use of parameters outside of forward and backward"


@dataclass
class PassPlan:
    """What was learned of a kind of pass, the same on every rank."""

    order: list[int]  # in which order groups take their turns
    # Groups that are needed again later in the pass, so that freeing them is a waste.
    lasting: set[int] = field(default_factory=set)
    # Whether the order is one that was seen, not that of registration (in backward its reverse).
    is_learned: bool = False


class Gathering:
    """The sharded groups of a model: which are here, which are on their way.

    Needing a group gathers it, and those after it in the background; groups that are not in use
    any more are freed then. See [Note: the round] for the order, `GroupState` for the states.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        backend: Backend,
        progress: Progress,
        prefetch_bytes: int,
    ) -> None:
        """``backend`` must carry nothing else: the order of its operations is the rounds'.

        Behind the group that is needed, so many bytes are gathered in the background.
        """
        self._groups = {group.index: group for group in groups if group.is_sharded}
        self._backend, self._progress = backend, progress
        self._prefetch_bytes = prefetch_bytes
        self._here = dict(self._groups)
        self._coming: dict[int, Work[Tensor]] = {}
        self._operations: dict[int, AllGather] = {}
        self._buffers = GatherBuffers(self._groups.values())
        self._plan = PassPlan(list(self._groups))
        self._round = Round([])
        self._seen: list[int] = []
        self._again: set[int] = set()
        self._keep_all = self._is_in_pass = self._is_backward = False
        self.is_needed = bool(self._groups)
        """Whether anything is gathered at all."""
        self.saved = SavedParameters(self.need_whole)
        for group in self._groups.values():
            self.saved.note_whole(group)
        self._what = _OUTSIDE

    # Passes -----------------------------------------------------------------------------

    def begin_pass(self, plan: PassPlan, what: str, *, is_backward: bool = False) -> None:
        """Groups take their turns by a plan from now on; ``what`` must be the same on all ranks.

        In backward, parts of forward may be computed again without hooks on what autograd saves,
        so parameters are watched there.
        """
        self._plan, self._is_backward = plan, is_backward
        self._is_in_pass, self._what = True, what
        for group in self._here.values():
            self.need(group)  # a backward that failed may have left it hidden
            if is_backward:
                group.watch(self)
            else:
                group.stop_watching()
        for group in self._groups.values():
            if group.is_present or group.changes.referenced:
                self.adopt_changes(group)
        self._round = Round([])  # the first has to be voted for like any other
        self._seen, self._again = [], set()

    def end_pass(self) -> None:
        """Joins the rounds that others still want, frees everything, and learns."""
        if not self._groups:
            return
        self._is_in_pass = self._is_backward = False
        self._finish_round()
        while self._vote(False):
            self._finish_round()
        self._what = _OUTSIDE
        self.free_unless_kept()
        self._buffers.clear()
        for group in self._here.values():
            self.need(group)  # not hidden any more
            group.was_outside_pass = True
        if not self._plan.is_learned:
            self._learn()

    def _finish_round(self) -> None:
        for index in self._round.rest():
            self._start(self._groups[index])
        self.finish_coming()

    def _vote(self, wish: bool) -> bool:
        """Whether there is another round; if so it begins."""
        doing = f"gathers for {self._what}"
        vote = Vote.cast(self._backend, self._progress, doing, wish=wish, numbers=self._again)
        self._plan.lasting |= vote.united
        if vote.is_wanted:
            self._round = Round([index for index in self._plan.order if index in self._groups])
        return vote.is_wanted

    def _learn(self) -> None:
        """Rank 0's order counts; groups it did not need come last."""
        seen = self._backend.broadcast_object(list(self._seen))
        if not seen:  # everything was kept from before: nothing to learn from this pass
            return
        self._plan.order = [*seen, *(index for index in self._plan.order if index not in seen)]
        self._plan.is_learned = True

    # Gathering --------------------------------------------------------------------------

    def need(self, group: FlatGroup) -> None:
        """Has the group's parameters here when it returns."""
        self.need_whole(group)
        if group.state is HIDDEN:
            self._show(group)

    def need_whole(self, group: FlatGroup) -> None:
        """Has the group's whole here when it returns: in backward, mostly nothing else is used."""
        if group.has_whole:
            return
        if group.state is ABSENT:
            if group.index in self._seen:
                self._again.add(group.index)
            self._take_turns(group.index)
        if not self._keep_all:
            self._free_others(group)
        self._finish(group)
        if group.index not in self._seen:
            self._seen.append(group.index)
        self._prefetch(group.index)

    def _take_turns(self, index: int) -> None:
        if self._round.following() is None or self._round.has_had(index):
            self._finish_round()
            self._vote(True)
        self._start_until(index)

    def _start_until(self, index: int) -> None:
        for turn in self._round.until(index):
            self._start(self._groups[turn])

    def _prefetch(self, index: int) -> None:
        num_bytes = 0
        for following in self._round.behind(index):
            if num_bytes >= self._prefetch_bytes:
                return
            group = self._groups[following]
            num_bytes += group.layout.num_elements * group.dtype.itemsize
            if not (self._round.has_had(following) or group.has_whole):
                self._start_until(following)

    def _start(self, group: FlatGroup) -> None:
        self._finish(group)
        is_shown = group.is_present  # another rank needs it, or a group that comes after it
        if is_shown or group.changes.referenced:
            is_changed = group.changes.adopt()
            if is_changed and is_shown:
                self.saved.note_whole(group)
        if group.state is ABSENT:
            group.to_coming(self._buffers.take(group))
            self.saved.note_whole(group)
        self._fill(group, self._begin_gather)
        if is_shown and not self._is_in_pass:
            self._finish(group)  # what users write from here on must not be overwritten

    def _begin_gather(self, group: FlatGroup) -> None:
        known = self._operations.get(group.index)
        if known is None:
            whole = None if group.rounding is not None else group.whole
            known = AllGather(group.shard, whole).again(None)  # it must not keep the whole
            known.signature = f"gather of parameter group {group.index}: {known.signature}"
            known.is_foreseeable = True
            self._operations[group.index] = known
        self._coming[group.index] = self._run_gather(group, known)

    def _run_gather(self, group: FlatGroup, operation: AllGather) -> Work[Tensor]:
        if group.rounding is not None:
            return RoundedGather(group, operation, self._backend)
        work: Work[Tensor] = self._backend.run(operation.again(group.whole), async_op=True)
        return work

    def _finish(self, group: FlatGroup) -> None:
        if group.index not in self._coming:
            return
        self._fill(group, self._wait)
        del self._coming[group.index]
        if group.state is COMING:
            self._here[group.index] = group
            if self._is_backward:
                group.to_hidden()
            else:
                self._show(group)
        if not self._is_in_pass:
            group.was_outside_pass = True
            group.changes.is_doubtful = True

    def _show(self, group: FlatGroup) -> None:
        may_save = torch.is_grad_enabled() or self._is_backward
        group.to_present(is_watched=may_save and not has_saved_tensors_hooks())

    def _wait(self, group: FlatGroup) -> None:
        self._coming[group.index].wait()

    def _fill(self, group: FlatGroup, task: Callable[[FlatGroup], object]) -> None:
        """Does what fills the whole: no change for autograd, and undone where it fails."""
        try:
            if group.state is COMING:  # memory that nobody has seen yet
                task(group)
            else:
                with keeping_version(group.whole):
                    task(group)
        except BaseException:
            self._coming.pop(group.index, None)
            if group.state is COMING:
                self.saved.forget_whole(group)
                self._buffers.give(group, group.to_failed(), may_reuse=False)
            raise

    def finish_coming(self) -> None:
        """Nothing is on its way any more: it would arrive with values of before."""
        for index in list(self._coming):
            self._finish(self._groups[index])

    def adopt_changes(self, group: FlatGroup) -> None:
        """What a user did to a group's parameters counts; see [Note: changes by hand]."""
        if group.changes.referenced and group.index in self._coming:
            self._fill(group, self._wait)  # what is written now must not be overwritten
        if group.changes.adopt():
            self.saved.changed((group.index, index) for index in range(len(group.parameters)))
            if group.is_sharded and group.is_present:
                self.saved.note_whole(group)  # it may be another: [Note: swapped parameters]

    # Freeing ----------------------------------------------------------------------------

    def free_all(self) -> None:
        """Frees every group that is not in use."""
        for group in list(self._here.values()):
            self._free(group)

    def free_unless_kept(self) -> None:
        """Frees every group that is not in use, outside of `keeping`."""
        if not self._keep_all:
            self.free_all()

    def _free_others(self, needed: FlatGroup) -> None:
        lasting = self._plan.lasting
        for index, group in list(self._here.items()):
            if group is not needed and index not in lasting:
                self._free(group)

    def _free(self, group: FlatGroup) -> None:
        is_idle = group.state is not EXPOSED and not group.pins
        if is_idle and group.is_sharded and group.index not in self._coming:
            self.saved.forget_whole(group)
            is_private = self._is_in_pass and not group.was_outside_pass
            buffer = group.to_absent(self)
            del self._here[group.index]
            self._buffers.give(group, buffer, may_reuse=is_private)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside, nothing is freed."""
        before, self._keep_all = self._keep_all, True
        try:
            yield
        finally:
            self._keep_all = before


def pin_parents(root: nn.Module, group_of: Callable[[nn.Parameter], FlatGroup]) -> list[Any]:
    """A module with parameters and children may keep a view of a parameter across a child."""
    handles = []
    for module in root.modules():
        own = {group.index: group for group in map(group_of, module.parameters(recurse=False))}
        if own and any(True for _ in module.children()):
            groups = list(own.values())
            handles.append(module.register_forward_pre_hook(_pinning(groups, 1)))
            handles.append(module.register_forward_hook(_pinning(groups, -1), always_call=True))
    return handles


def pin_compiled(
    root: nn.Module,
    group_of: Callable[[nn.Parameter], FlatGroup],
    need: Callable[[FlatGroup], None],
) -> list[Any]:
    """What `torch.compile` traces is gathered before and not freed meanwhile."""
    handles = []
    for module in root.modules():
        if is_compiled(module):
            groups = list({g.index: g for g in map(group_of, module.parameters())}.values())
            begin = torch.compiler.disable(_pinning(groups, 1, need))
            end = torch.compiler.disable(_pinning(groups, -1))
            handles.append(module.register_forward_pre_hook(begin))
            handles.append(module.register_forward_hook(end, always_call=True))
    return handles


def _pinning(
    groups: Sequence[FlatGroup], step: int, need: Callable[[FlatGroup], None] | None = None
) -> Any:
    def hook(*_: object) -> None:
        for group in groups:
            group.pins += step
        if need is not None:
            for group in groups:
                need(group)

    return hook
