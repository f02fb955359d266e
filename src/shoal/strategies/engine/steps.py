"""From stepped masters to parameters that are the same on every rank.

[Note: torn parameters]
Where ranks write into memory that others read, they meet before any of them writes and again when
all have written. A rank that fails in between leaves parameters of which some are old and
some new. The surviving ranks must not go on with them: forward refuses.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from shoal.comm import Backend
from shoal.comm.operation import AllGather
from shoal.errors import ShoalError
from shoal.strategies.consistency.progress import Progress
from shoal.strategies.consistency.rounds import Vote
from shoal.strategies.engine.common_memory import CommonChanges
from shoal.strategies.engine.flat_group import FlatGroup, Residence
from shoal.torch_support.memory import copy


class Steps:
    """The optimizer's steps of one model, as its memory sees them."""

    def __init__(self, groups: Sequence[FlatGroup], backend: Backend, progress: Progress) -> None:
        """``backend`` are the ranks that the memory is divided among.

        It carries the reductions of gradients too, so that a rank that leaves out a step is found
        at the next reduction, and the error names both.
        """
        self._groups, self._backend, self._progress = groups, backend, progress
        self.is_torn = False
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

    def tear(self) -> None:
        """A step has stopped half-way."""
        self.is_torn = True

    def mend(self) -> None:
        """All parameters have been given new values."""
        self.is_torn = False

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
                operation = AllGather(group.shard, group.whole)
                operation.signature += f" of new parameters in {what}"
                self._backend.run(operation)

    def _read(self, group: FlatGroup, others: Sequence[Tensor]) -> None:
        begin = time.perf_counter()
        for rank, other in enumerate(others):
            part = slice(*group.layout.bounds[rank : rank + 2])
            if rank != self._backend.rank:
                copy(group.whole[part], other[part])
        self._backend.count_reading(group.whole.nbytes, time.perf_counter() - begin)
