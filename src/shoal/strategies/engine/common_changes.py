"""Parameters that ranks share and users change by hand.

[Note: changes of common memory]
Users write to their rank's private view, so that each rank has its own changes and computes with
them at once. They count for all when the ranks next meet, at an optimizer's step for example: each
rank takes its part of them over into the memory that all share, and when everybody has, drops its
copies. All ranks must have changed the same parameters and called the model equally often: what
they did rides in the header of the first meeting, which takes place anyway.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from shoal.comm import Backend
from shoal.comm.operation import Barrier
from shoal.comm.operation.header import Header
from shoal.errors import MismatchError
from shoal.strategies.engine.flat_group import FlatGroup


class CommonChanges:
    """What users did on this rank to the memory that it shares with others."""

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        """``groups``: all of a model; those that are not common are none of its business."""
        self._groups = [group for group in groups if group.is_common]
        self._names = [name for group in self._groups for name in group.names]
        self._changed: list[FlatGroup] = []
        self.num_calls = 0
        """How often the model was called since the ranks met."""

    def __bool__(self) -> bool:
        """Whether anything is common at all."""
        return bool(self._groups)

    def compare(self, backend: Backend, what: str) -> bool:
        """Meets the others for ``what`` and returns whether there are changes, the same on all."""
        places = self._find()
        self.meet(backend, what, places)
        return bool(places)

    def meet(self, backend: Backend, what: str, changed: Sequence[int] = ()) -> None:
        """Raises unless all ranks have called the model equally often and changed the same."""
        meeting = _Meeting(what, self.num_calls, changed, self._names)
        self.num_calls = 0
        backend.run(meeting)

    def _find(self) -> list[int]:
        """Numbers of the parameters that were written to (or lie on one page with such)."""
        places, first = [], 0
        self._changed = []
        for group in self._groups:
            found = group.find_written()
            if found:
                self._changed.append(group)
            places += [first + place for place in found]
            first += len(group.names)
        return places

    def keep(self) -> None:
        """Takes this rank's part of the changes over; nobody may be computing."""
        for group in self._changed:
            group.keep_changes()

    def drop(self) -> None:
        """Everybody has kept its part: the parameters show what all have."""
        for group in self._changed:
            group.drop_written()
        self._changed = []


class _Meeting(Barrier):
    """A barrier of ranks that have done the same since the last one."""

    def __init__(self, what: str, calls: int, places: Sequence[int], names: Sequence[str]) -> None:
        """``places`` in ``names`` are what was changed."""
        self.signature, self._names = what, names
        digest = zlib.crc32(repr(places).encode()) if places else 0
        self.meta = (calls, len(places), digest, places[0] if places else 0)

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
