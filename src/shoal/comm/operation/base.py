"""The interface of every operation, and what it hands to a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.comm.operation.header import Header
from shoal.comm.operation.reduction import ReduceOp


@dataclass(slots=True)
class Payload:
    """Flat contiguous tensors for a transport, with the counts of elements that go where.

    Attributes:
        source: What this rank contributes; ``None`` where it contributes nothing.
        target: Where this rank's result goes; the source itself for in-place operations.
        counts: Elements per rank: of the result (gathers), or of the source (scatters).
        arriving: Elements that arrive from each rank, for all_to_all.
        matrix: Elements from each rank (row) to each (column), for all_to_all.
        op: The reduction, where there is one.
        root: The rank of the group that sends or receives alone; or the peer.
        total: Elements the whole group moves; zero when there is nothing to do anywhere.
        wires: What each rank's transport added to its header.
    """

    source: Tensor | None = None
    target: Tensor | None = None
    counts: Sequence[int] = ()
    arriving: Sequence[int] = ()
    matrix: Sequence[Sequence[int]] = ()
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    total: int = 0
    wires: Sequence[bytes] = ()

    @property
    def num_bytes(self) -> int:
        """The larger of what this rank gives and gets."""
        given = self.source.nbytes if self.source is not None else 0
        if self.target is None or self.target is self.source:
            return given
        return max(given, self.target.nbytes)


class Operation(ABC):
    """One call of one collective on one rank."""

    kind: ClassVar[str]
    signature: str
    meta: tuple[int, ...] = ()
    source: Tensor | None = None
    """The flat data of this rank, known before headers are exchanged."""
    sink: Tensor | None = None
    """Where a rank that has no data gets some, if others may write there."""

    def check(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        """Raises `MismatchError` for what the signature alone does not show.

        It looks at the headers only, so every rank comes to the same verdict.
        """

    @abstractmethod
    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """What the transport is to move, now that all headers are known."""

    @abstractmethod
    def result(self) -> Tensor | None:
        """What the caller gets once the payload has moved."""
