"""Operations that join the rows of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.comm.operation.base import Operation, Payload
from shoal.comm.operation.flat import (
    APART,
    check_out,
    flatten,
    num_rows,
    overlap,
    row_elements,
    row_shape,
    with_rows,
    write_back,
)
from shoal.comm.operation.header import Header, mismatch, spec
from shoal.comm.operation.partition import offsets


class AllGather(Operation):
    """Every rank ends with all ranks' rows, in rank order; ranks may give different numbers."""

    kind = "all_gather"
    rows: Sequence[int]
    """How many rows each rank gave, once known."""

    def __init__(self, tensor: Tensor, out: Tensor | None) -> None:
        """Only the first dimension may differ between ranks."""
        if out is not None:
            check_out(out, tensor)
        self._like, self._out = tensor, out
        self.source = flatten(tensor)
        if out is None:
            self.meta = (num_rows(tensor), -1, APART)
        else:
            self.meta = (num_rows(tensor), num_rows(out), overlap(out, tensor))
        self.signature = f"{self.kind}({spec(tensor.dtype, ('rows', *row_shape(tensor)))})"

    def check(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        """An ``out`` has room for exactly the rows of all: see [Note: results inside inputs]."""
        starts = offsets([header.meta[0] for header in headers])
        row_bytes = row_elements(self._like) * self._like.itemsize
        for header, start in zip(headers, starts, strict=False):
            if header.meta[1] not in (-1, starts[-1]):
                problem = f"{self.kind} of {starts[-1]} rows in all needs an out of as many"
            elif header.meta[2] not in (APART, start * row_bytes):
                problem = f"{self.kind} of rows that lie in the out, but not in their own place"
            else:
                continue
            shown = [h._replace(signature=_gather_text(h)) for h in headers]
            raise mismatch(shown, ranks, problem)

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """A result with the rows of all ranks."""
        self.rows = [header.meta[0] for header in headers]
        if self._out is None:
            self._out = with_rows(self._like, sum(self.rows))
        self._target = flatten(self._out)
        counts = [count * row_elements(self._like) for count in self.rows]
        return Payload(self.source, self._target, counts, total=sum(counts))

    def result(self) -> Tensor | None:
        """The rows of all ranks."""
        assert self._out is not None
        write_back(self._target, self._out)
        return self._out


def _gather_text(header: Header) -> str:
    rows, out_rows, _ = header.meta
    out = "" if out_rows == -1 else f", out of {out_rows} rows"
    return f"{header.signature} with rows={rows}{out}"


class Gather(AllGather):
    """The root ends with all ranks' rows, in rank order."""

    kind = "gather"

    def __init__(self, tensor: Tensor, out: Tensor | None, root: int, is_root: bool) -> None:
        """An ``out`` counts on the root only."""
        super().__init__(tensor, out if is_root else None)
        self._root, self._is_root = root, is_root
        self.signature = f"{self.signature[:-1]}, root={root})"

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """Only the root has a target."""
        if self._is_root:
            payload = super().prepare(headers, rank)
        else:
            elements = row_elements(self._like)
            counts = [header.meta[0] * elements for header in headers]
            payload = Payload(source=self.source, counts=counts, total=sum(counts))
        payload.root = self._root
        return payload

    def result(self) -> Tensor | None:
        """The rows of all ranks on the root, None elsewhere."""
        return super().result() if self._is_root else None
