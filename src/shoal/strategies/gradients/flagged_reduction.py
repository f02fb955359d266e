"""Reductions of gradients that also tell which parameters were used.

[Note: who used what]
In plain PyTorch a parameter that took no part in the loss has no gradient and is not stepped.
With ranks it counts if any rank used it. Which ones a rank used rides in the header of the
reduction, as bits, so that knowing it costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.comm import ReduceOp
from shoal.comm.operation import AllReduce, Payload, ReduceScatter
from shoal.comm.operation.header import Header

_BITS = 62


class Flags:
    """Which parameters of a group this rank used, and once known which any rank did."""

    def __init__(self, used: set[int], count: int) -> None:
        """``used``: places of ``count`` parameters."""
        words = [0] * (-(-count // _BITS))
        for place in used:
            words[place // _BITS] |= 1 << (place % _BITS)
        self.words = tuple(words)
        self.union: set[int] = set()
        self._all = set(range(count)) if len(used) == count else None

    def unite(self, headers: Sequence[Header]) -> None:
        """Learns from everybody's header what any rank used."""
        if self._all is not None:
            self.union = self._all
            return
        for index in range(len(self.words)):
            union = 0
            for header in headers:
                union |= header.meta[index]
            self.union |= {index * _BITS + bit for bit in range(_BITS) if union >> bit & 1}


class FlaggedAllReduce(AllReduce):
    """An average that every rank has whole."""

    def __init__(self, whole: Tensor, flags: Flags) -> None:
        """``whole`` is replaced by the average."""
        super().__init__(whole, ReduceOp.AVERAGE)
        self.meta, self._flags = flags.words, flags

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The headers have come."""
        self._flags.unite(headers)
        return super().prepare(headers, rank)


class FlaggedReduceScatter(ReduceScatter):
    """An average of which every rank has its part."""

    def __init__(
        self,
        whole: Tensor,
        out: Tensor | None,
        sizes: Sequence[int],
        place: tuple[int, int],
        flags: Flags,
    ) -> None:
        """``place`` is the rank among how many; ``sizes`` are the lengths of all parts."""
        super().__init__(whole, ReduceOp.AVERAGE, out, sizes, place)
        self.meta, self._flags = flags.words, flags

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The headers have come."""
        self._flags.unite(headers)
        return super().prepare(headers, rank)
