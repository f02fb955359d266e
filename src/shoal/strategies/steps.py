"""From stepped masters to parameters that are the same on every rank.

[Note: torn parameters]
Where ranks write into memory that others read, they meet before anybody writes and again when
everybody has written. A rank that fails in between leaves parameters of which some are old and
some new. Whoever survives it must not go on with them: forward refuses.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from shoal.comm import Backend
from shoal.comm.copying import copy
from shoal.errors import ShoalError
from shoal.strategies.flat_group import FlatGroup, Residence


class Steps:
    """The optimizer's steps of one model, as its memory sees them."""

    def __init__(self, groups: Sequence[FlatGroup], backend: Backend) -> None:
        """``backend`` are the ranks that the memory is divided among."""
        self._groups, self._backend = groups, backend
        self.is_torn = False
        self._is_common = any(group.residence is Residence.COMMON for group in groups)
        is_replicated = [group.residence is Residence.REPLICATED for group in groups]
        self._divided = [
            group
            for group, is_whole in zip(groups, is_replicated, strict=True)
            if is_whole and group.owns_part and backend.size > 1
        ]
        self._others = [self._reach(group) for group in self._divided]

    def _reach(self, group: FlatGroup) -> list[Tensor]:
        """Everybody's whole, where ranks can read each other's; or nothing."""
        if not self._backend.shares_memory or not group.whole.is_cpu or not group.whole.numel():
            return []
        return self._backend.reach(group.whole) or []

    @property
    def _is_direct(self) -> bool:
        """Whether ranks read or write memory of others."""
        return self._is_common or any(self._others)

    def meet(self) -> None:
        """Nobody goes on while another still reads or writes what is shared."""
        if self._is_direct:
            self._backend.barrier()

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
    def taking(self) -> Iterator[None]:
        """Around the optimizer's own step."""
        self.meet()
        self.is_torn = self._is_direct
        yield
        for group in self._groups:
            group.refresh()
        self.meet()
        self._spread()
        if any(self._others):  # nobody changes what another still reads
            self.meet()
        self.is_torn = False

    def _spread(self) -> None:
        """Where every rank has all parameters and steps its part, the parts are exchanged."""
        for group, others in zip(self._divided, self._others, strict=True):
            if others:
                self._read(group, others)
            else:
                self._backend.all_gather(group.shard, out=group.whole)

    def _read(self, group: FlatGroup, others: Sequence[Tensor]) -> None:
        begin = time.perf_counter()
        for rank, other in enumerate(others):
            part = slice(*group.layout.bounds[rank : rank + 2])
            if rank != self._backend.rank:
                copy(group.whole[part], other[part])
        self._backend.count_reading(group.whole.nbytes, time.perf_counter() - begin)
