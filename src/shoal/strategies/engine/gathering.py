"""Parameters on demand: gathers groups when they are needed and frees them afterwards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shoal.comm import Backend, Work
from shoal.comm.operation import AllGather
from shoal.strategies.consistency.progress import Progress
from shoal.strategies.consistency.voting import Vote
from shoal.strategies.engine.flat_group import FlatGroup
from shoal.strategies.engine.rounds import Round

_OUTSIDE = "a use of parameters outside of forward and backward"


@dataclass
class Plan:
    """What was learned of a kind of pass, the same on every rank.

    Attributes:
        order: In which order groups take their turns.
        lasting: Groups that are needed again later in the pass, so that freeing them is a waste.
        is_learned: Whether the order is one that was seen, not the order of registration.
    """

    order: list[int]
    lasting: set[int] = field(default_factory=set)
    is_learned: bool = False


class Gathering:
    """The sharded groups of a model: which are here, which are on their way.

    Needing a group gathers it, and the one after it in the background; whatever is not in use
    any more is freed then. See [Note: the round] for the order.
    """

    def __init__(self, groups: Sequence[FlatGroup], backend: Backend, progress: Progress) -> None:
        """``backend`` must carry nothing else: the order of its operations is the schedule's."""
        self._groups = {group.index: group for group in groups if group.is_sharded}
        self._backend, self._progress = backend, progress
        self._coming: dict[int, Work[Tensor]] = {}
        self._plan = Plan(list(self._groups))
        self._round = Round([])
        self._seen: list[int] = []
        self._again: set[int] = set()
        self._keep_all = self._is_in_pass = self._is_backward = False
        self.is_needed = bool(self._groups)
        """Whether anything is sharded at all."""
        self._storages = {group.storage_id: group for group in self._groups.values()}
        self._what = _OUTSIDE
        self.num_gathers = 0
        self._generation = self._all_changed = 0
        self._changed: dict[tuple[int, int], int] = {}
        self._packing: Callable[[Tensor], object] = self._pack

    # Passes -----------------------------------------------------------------------------

    def begin_pass(self, plan: Plan, what: str, *, is_backward: bool = False) -> None:
        """Groups take their turns by a plan from now on; ``what`` must be the same on all ranks.

        In backward, parts of forward may be computed again without hooks on what autograd saves,
        so parameters are watched there.
        """
        self._plan, self._is_backward = plan, is_backward
        self._is_in_pass, self._what = True, what
        for group in self._groups.values():
            if group.is_present:
                if is_backward:
                    group.watch(self.need, self._watching)
                else:
                    group.stop_watching()
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
        for group in self._groups.values():
            group.was_outside = group.is_present
        if not self._plan.is_learned:
            self._learn()

    def _finish_round(self) -> None:
        for index in self._round.rest():
            self._start(index)
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

    def free_all(self) -> None:
        """Frees every group that nobody holds on to."""
        for group in self._groups.values():
            if not group.pins and group.index not in self._coming:
                self._free(group)

    def finish_coming(self) -> None:
        """Nothing is on its way any more: it would arrive with values of before."""
        for group in self._groups.values():
            self._finish(group)

    def free_unless_kept(self) -> None:
        """Frees what nobody holds on to, outside of `keeping`."""
        if not self._keep_all:
            self.free_all()

    def _free(self, group: FlatGroup) -> None:
        self._storages.pop(group.storage_id, None)
        group.vanish(self.need, self._watching)

    # Groups -----------------------------------------------------------------------------

    def need(self, group: FlatGroup) -> None:
        """Has the group's parameters here when it returns."""
        if group.is_present:
            return
        if group.index not in self._coming:
            if group.index in self._seen:
                self._again.add(group.index)
            self._let_turns_come(group.index)
        self._free_idle(group)
        self._finish(group)
        if group.index not in self._seen:
            self._seen.append(group.index)
        self._prefetch()

    def _let_turns_come(self, index: int) -> None:
        following = self._round.following()
        if following is None or self._round.has_had(index):
            self._finish_round()
            self._vote(True)
        for turn in self._round.until(index):
            self._start(turn)

    def _start(self, index: int) -> None:
        group = self._groups[index]
        self._finish(group)  # a second turn, for others' sake: take part as if it were gone
        group.adopt_changes()
        whole = group.allocate()
        self._storages[group.storage_id] = group
        with torch.autograd._unsafe_preserve_version_counter(whole):
            operation = AllGather(group.shard, whole)
            operation.signature = f"gather of parameter group {index}: {operation.signature}"
            self._coming[index] = self._backend.run(operation, async_op=True)
        self.num_gathers += 1

    def _finish(self, group: FlatGroup) -> None:
        work = self._coming.pop(group.index, None)
        if work is not None:
            with torch.autograd._unsafe_preserve_version_counter(group.whole):
                work.wait()
            may_save = torch.is_grad_enabled() or self._is_backward
            group.appear(is_watched=may_save and not _is_saving())
            if not self._is_in_pass:
                group.was_outside = True
                if group.changes is not None:
                    group.changes.doubt()

    def _prefetch(self) -> None:
        following = self._round.following()
        if following is not None and not self._groups[following].is_present:
            for index in self._round.until(following):
                self._start(index)

    def _free_idle(self, needed: FlatGroup) -> None:
        if self._keep_all:
            return
        for group in self._groups.values():
            is_idle = group.is_present and not group.pins and group.index not in self._coming
            if is_idle and group is not needed and group.index not in self._plan.lasting:
                self._free(group)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside, nothing is freed."""
        before, self._keep_all = self._keep_all, True
        try:
            yield
        finally:
            self._keep_all = before

    # Changes ----------------------------------------------------------------------------

    def changed(self, places: Iterable[tuple[int, int]]) -> None:
        """Some parameters, by group and place, have new values."""
        self._generation += 1
        self._changed.update(dict.fromkeys(places, self._generation))

    def everything_changed(self) -> None:
        """All parameters may have new values."""
        self._generation += 1
        self._all_changed = self._generation

    def adopt_changes(self, group: FlatGroup) -> None:
        """What a user did to a group's parameters counts; see [Note: changes by hand]."""
        if group.lent and group.index in self._coming:
            self._coming[group.index].wait()  # what is written now must not be overwritten
        if group.adopt_changes():
            self.changed((group.index, place) for place in range(len(group.parameters)))

    # Autograd ---------------------------------------------------------------------------

    def saving(self) -> saved_tensors_hooks:
        """While this is on, what autograd saves of sharded parameters is gathered when needed."""
        return saved_tensors_hooks(self._packing, self._unpack)

    def hide_from_compiler(self) -> None:
        """For models with compiled parts: `torch.compile` leaves alone what is done with them."""
        self._packing = torch.compiler.disable(self._pack)

    def _watching(self) -> AbstractContextManager[Any]:
        """Around one use of a parameter; whoever has hooks of their own knows what to save."""
        return nullcontext() if _is_saving() else self.saving()

    def _pack(self, tensor: Tensor) -> object:
        group = self._storages.get(tensor.untyped_storage()._cdata)
        if group is None or tensor.dtype is not group.whole.dtype or tensor.is_conj():
            return tensor
        return _Saved(
            group, self._generation, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def _unpack(self, packed: object) -> Tensor:
        if not isinstance(packed, _Saved):
            return packed  # type: ignore[return-value]
        if packed.generation != self._generation and self._is_old(packed):
            raise RuntimeError(
                "backward needs parameters that were changed after forward used them, by an "
                "optimizer's step or by hand: run forward again before this backward"
            )
        self.need(packed.group)
        return packed.group.whole.as_strided(packed.shape, packed.stride, packed.offset)

    def _is_old(self, packed: _Saved) -> bool:
        slots = packed.group.layout.slots
        place = bisect_right(slots, packed.offset, key=lambda slot: slot.start) - 1
        changed = self._changed.get((packed.group.index, place), 0)
        return max(changed, self._all_changed) > packed.generation


def _is_saving() -> bool:
    """Whether somebody decides what autograd saves: this engine in forward, or recomputation."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class _Saved(NamedTuple):
    """What autograd keeps of a sharded parameter: where it lies, not its memory."""

    group: FlatGroup
    generation: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
