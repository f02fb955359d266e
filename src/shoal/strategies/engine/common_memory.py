"""Parameters of which the ranks of one host have a single copy, and what users change in it.

[Note: changes of common memory]
Users write to their rank's private view, so that each rank has its own changes and computes with
them at once. They count for all when the ranks next meet, at an optimizer's step for example: each
rank takes its part of them over into the memory that all share, and when all have, drops its
copies. All ranks must have changed the same parameters and called the model equally often: what
they did rides in the header of the first meeting, which takes place anyway.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.comm import Backend
from shoal.comm.operation import Barrier
from shoal.comm.operation.base import Header
from shoal.errors import MismatchError
from shoal.torch_support.memory import PrivateView, of_dtype

if TYPE_CHECKING:
    from shoal.strategies.engine.flat_group import FlatGroup


class CommonWhole:
    """One memory of all ranks: as all of them see it, and as the parameters of this rank show it.

    See [Note: private views]. A rank steps its part of ``shared``; parameters are views of
    ``view``, where users may write.
    """

    def __init__(self, values: Tensor, backend: Backend, owner: int) -> None:
        """The owner's values count; all ranks make it together."""
        self._num_bytes, self._dtype = values.nbytes, values.dtype
        found = backend.share(max(values.nbytes, 1), owner)
        assert found is not None, f"{backend} does not share memory"
        memory, self._private = found
        self.shared = self._typed(memory)
        if backend.rank == owner:
            self.shared.copy_(values)
        backend.barrier()  # no rank reads it before
        self.view = self._typed(self._private.memory)

    def _typed(self, memory: Tensor) -> Tensor:
        return of_dtype(memory[: self._num_bytes], self._dtype)

    def written(self) -> list[tuple[int, int]]:
        """Ranges of elements that this rank has a copy of, because a user wrote to them."""
        size = self._dtype.itemsize
        return [(start // size, -(-stop // size)) for start, stop in self._private.written()]

    def drop(self) -> None:
        """The view shows what all ranks see."""
        self._private.drop()

    def replace_view(self) -> PrivateView:
        """Takes another view, without copies, and returns the one that was used so far."""
        before, self._private = self._private, self._private.another()
        self.view = self._typed(self._private.memory)
        return before


class CommonChanges:
    """What users did on this rank to the memory that it shares with others."""

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        """``groups``: the common ones of a model."""
        self._groups = groups
        self._names = [name for group in self._groups for name in group.names]
        self._changed: list[FlatGroup] = []
        self.num_calls = 0
        """How often the model was called since the ranks met."""

    def compare(self, backend: Backend, what: str) -> bool:
        """Meets the others for ``what`` and returns whether there are changes, the same on all."""
        changed = self._find()
        self.meet(backend, what, changed)
        return bool(changed)

    def meet(self, backend: Backend, what: str, changed: Sequence[int] = ()) -> None:
        """Raises unless all ranks have called the model equally often and changed the same."""
        meeting = _MeetRanks(what, self.num_calls, changed, self._names)
        self.num_calls = 0
        backend.run(meeting)

    def _find(self) -> list[int]:
        """Indices, over all groups, of parameters that were written to; see `find_written`."""
        indices, first = [], 0
        self._changed = []
        for group in self._groups:
            found = group.changes.find_written()
            if found:
                self._changed.append(group)
            indices += [first + index for index in found]
            first += len(group.names)
        return indices

    def keep(self) -> None:
        """Takes this rank's part of the changes over; no rank may be computing."""
        for group in self._changed:
            group.changes.keep()

    def drop(self) -> None:
        """All ranks have kept their parts: the parameters show what all have."""
        for group in self._changed:
            group.changes.drop_written()
        self._changed = []


class _MeetRanks(Barrier):
    """A barrier of ranks that have done the same since the last one."""

    def __init__(self, what: str, calls: int, changed: Sequence[int], names: Sequence[str]) -> None:
        """``changed``: indices in ``names``."""
        self.signature, self._names = what, names
        digest = zlib.crc32(repr(changed).encode()) if changed else 0
        self.meta = (calls, len(changed), digest, changed[0] if changed else 0)

    def check(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        """Raises if some did something else."""
        if len({header.meta[0] for header in headers}) > 1:
            counts = [f"{header.meta[0]} times" for header in headers]
            raise self._mismatch(
                "call the model equally often, also to evaluate", "called it", ranks, counts
            )
        if len({header.meta for header in headers}) > 1:
            changed = [self._describe(header) for header in headers]
            raise self._mismatch(
                "make the same changes to parameters", "changed in place", ranks, changed
            )

    def _mismatch(
        self, duty: str, deed: str, ranks: Sequence[int], found: Sequence[str]
    ) -> MismatchError:
        listed = ", ".join(
            f"rank {rank} {deed} {what}" for rank, what in zip(ranks, found, strict=True)
        )
        return MismatchError(
            f"ranks that share their parameters must {duty}, but when they met for "
            f"{self.signature}, since the last time {listed}"
        )

    def _describe(self, header: Header) -> str:
        _, count, _, first = header.meta
        if not count:
            return "nothing"
        return self._names[first] + (f" and {count - 1} more" if count > 1 else "")
