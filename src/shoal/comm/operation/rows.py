"""Rows of tensors, and the operations that join those of all ranks, or hand each rank its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from shoal.comm.operation.base import (
    Header,
    Operation,
    Payload,
    decode_spec,
    encode_spec,
    flatten,
    mismatch,
    require_tensor,
    require_tensors,
    spec,
    write_back,
)
from shoal.comm.operation.partition import check_sizes, split_sizes
from shoal.comm.operation.reduction import ReduceOp, check_dtype


class _IntoOut(Operation):
    """Operations whose result is the caller's ``out``, or a new tensor."""

    _out: Tensor | None
    _target: Tensor
    _memory = Operation._memory | {"_out", "_target"}

    @property
    def makes_result(self) -> bool:
        """Where the caller gave no ``out``."""
        return self._out is None

    def result(self) -> Tensor | None:
        assert self._out is not None
        if self._target is not self._out:
            write_back(self._target, self._out)
        return self._out


class AllGather(_IntoOut):
    """Every rank ends with all ranks' rows, in rank order; ranks may give different numbers."""

    kind = "all_gather"
    rows: Sequence[int]
    """How many rows each rank gave, once known."""

    def __init__(self, tensor: Tensor, out: Tensor | None) -> None:
        """Only the first dimension may differ between ranks."""
        require_tensor(self.kind, tensor, out)
        if out is not None:
            check_out(out, tensor)
        self._like, self._out = tensor, out
        self.source = flatten(tensor)
        if out is None:
            self.meta = (num_rows(tensor), -1, APART)
        else:
            self.meta = (num_rows(tensor), num_rows(out), overlap(out, tensor))
        self.signature = f"{self.kind}({spec(tensor.dtype, ('rows', *row_shape(tensor)))})"

    def again(self, out: Tensor | None) -> Self:
        """The same call into other memory, which is like the first and not looked at."""
        other = self._copied()
        other._out = out
        return other

    def check(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        """An ``out`` has room for exactly the rows of all: see [Note: results inside inputs]."""
        start, total = 0, sum(header.meta[0] for header in headers)
        row_bytes = row_elements(self._like) * self._like.itemsize
        for header in headers:
            rows, out_rows, lies = header.meta
            if out_rows not in (-1, total):
                problem = f"{self.kind} of {total} rows in all needs an out of as many"
            elif lies not in (APART, start * row_bytes):
                problem = f"{self.kind} of rows that lie in the out, but not in their own place"
            else:
                start += rows
                continue
            shown = [h._replace(signature=_gather_text(h)) for h in headers]
            raise mismatch(shown, ranks, problem)

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """A result with the rows of all ranks."""
        self.rows = [header.meta[0] for header in headers]
        if self._out is None:
            self._out = with_rows(self._like, sum(self.rows))
        self._target = flatten(self._out)
        elements = row_elements(self._like)
        counts = [count * elements for count in self.rows]
        return Payload(self.source, self._target, counts, total=sum(counts))


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


class ReduceScatter(_IntoOut):
    """The reduction over all ranks, of which each rank keeps its own rows."""

    kind = "reduce_scatter"
    _memory = _IntoOut._memory | {"_like"}

    def __init__(
        self,
        tensor: Tensor,
        op: ReduceOp,
        out: Tensor | None,
        sizes: Sequence[int] | None,
        position: tuple[int, int],
    ) -> None:
        """``position`` is this rank and the size of the group."""
        require_tensor(self.kind, tensor, out)
        check_dtype(op, tensor.dtype)
        rank, size = position
        self._rows = _split(tensor, sizes, size)
        if out is not None:
            check_out(out, tensor)
            _check_rows(out, self._rows[rank])
            check_overlap(tensor, out, sum(self._rows[:rank]))
        self._like, self._op, self._out = tensor, op, out
        self.source = flatten(tensor)
        split = "" if sizes is None else f", sizes={self._rows}"
        shape = spec(tensor.dtype, tuple(tensor.shape))
        self.signature = f"reduce_scatter({shape}, op={op.value}{split})"

    def again(self, tensor: Tensor, out: Tensor | None) -> Self:
        """The same call with other tensors, which are like the first and not looked at."""
        other = self._copied()
        other._like, other._out, other.source = tensor, out, flatten(tensor)
        return other

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The whole tensor goes in, this rank's rows come out."""
        if self._out is None:
            self._out = with_rows(self._like, self._rows[rank])
        self._target = flatten(self._out)
        elements = row_elements(self._like)
        counts = [rows * elements for rows in self._rows]
        return Payload(self.source, self._target, counts, op=self._op, total=sum(counts))


def _split(tensor: Tensor, sizes: Sequence[int] | None, num_parts: int) -> list[int]:
    rows = num_rows(tensor)
    return split_sizes(rows, num_parts) if sizes is None else check_sizes(sizes, rows, num_parts)


def _check_rows(out: Tensor, rows: int) -> None:
    if num_rows(out) != rows:
        raise ValueError(f"out must have the {rows} rows of this rank; got {num_rows(out)}")


class Scatter(_IntoOut):
    """Each rank gets its rows of the root's tensor."""

    kind = "scatter"

    def __init__(
        self,
        tensor: Tensor | None,
        out: Tensor | None,
        sizes: Sequence[int] | None,
        root: int,
        device: torch.device,
        position: tuple[int, int],
    ) -> None:
        """Only the root gives a tensor and its split; the header tells the others."""
        require_tensors(self.kind, tensor, out)
        rank, size = position
        if rank == root and tensor is None:
            raise ValueError("scatter needs a tensor on the root; got None")
        self._root, self._device, self._out = root, device, out
        self.signature = f"scatter(root={root})"
        if rank == root and tensor is not None:
            split = _split(tensor, sizes, size)
            if out is not None:
                check_overlap(tensor, out, sum(split[:rank]))
            self.source = flatten(tensor)
            self.meta = (*split, *encode_spec(tensor))

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The rows that the root's header promises this rank."""
        meta = headers[self._root].meta
        rows = meta[: len(headers)]
        dtype, shape = decode_spec(meta[len(headers) :])
        if self._out is None:
            self._out = torch.empty((rows[rank], *shape[1:]), dtype=dtype, device=self._device)
        elif self._out.dtype != dtype or tuple(self._out.shape) != (rows[rank], *shape[1:]):
            raise ValueError(
                f"out must be {spec(dtype, (rows[rank], *shape[1:]))} to take its part of the "
                f"root's {spec(dtype, shape)}; got {spec(self._out.dtype, tuple(self._out.shape))}"
            )
        self._target = flatten(self._out)
        counts = [count * math.prod(shape[1:]) for count in rows]
        total = sum(counts)
        return Payload(self.source, self._target, counts, root=self._root, total=total)


class AllToAll(_IntoOut):
    """Each rank sends each other rank some rows and gets some from each."""

    kind = "all_to_all"
    rows: Sequence[int]
    """How many rows each rank sent here, once known."""

    def __init__(
        self,
        tensor: Tensor,
        out: Tensor | None,
        sizes: Sequence[int] | None,
        position: tuple[int, int],
    ) -> None:
        """``sizes`` are the rows for each rank; what arrives is read from the headers."""
        require_tensor(self.kind, tensor, out)
        if out is not None:
            check_out(out, tensor)
            if overlap(tensor, out) != APART:
                raise ValueError("out must not share memory with the input of an all_to_all")
        self._like, self._out = tensor, out
        self._parts = _split(tensor, sizes, position[1])
        self.source = flatten(tensor)
        self.meta = (*self._parts, -1 if out is None else num_rows(out))
        self.signature = f"all_to_all({spec(tensor.dtype, ('rows', *row_shape(tensor)))})"

    def check(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        """Every ``out`` has room for exactly what arrives there."""
        for receiver, header in enumerate(headers):
            arriving = sum(sender.meta[receiver] for sender in headers)
            if header.meta[-1] not in (-1, arriving):
                problem = (
                    f"all_to_all sends {arriving} rows to rank {ranks[receiver]}, "
                    f"whose out has {header.meta[-1]}"
                )
                raise mismatch(headers, ranks, problem)

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """What goes out by receiver, what comes in by sender."""
        self.rows = [header.meta[rank] for header in headers]
        if self._out is None:
            self._out = with_rows(self._like, sum(self.rows))
        self._target = flatten(self._out)
        elements = row_elements(self._like)
        matrix = [[count * elements for count in header.meta[:-1]] for header in headers]
        return Payload(
            source=self.source,
            target=self._target,
            counts=matrix[rank],
            arriving=[row[rank] for row in matrix],
            matrix=matrix,
            total=sum(map(sum, matrix)),
        )


# Rows --------------------------------------------------------------------------------------------


def num_rows(tensor: Tensor) -> int:
    """The length of the first dimension; a scalar counts as one row."""
    return tensor.shape[0] if tensor.dim() else 1


def row_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of one row."""
    return tuple(tensor.shape[1:]) if tensor.dim() > 1 else ()


def row_elements(tensor: Tensor) -> int:
    """How many elements a row has."""
    return math.prod(tensor.shape[1:]) if tensor.dim() > 1 else 1


def with_rows(like: Tensor, rows: int) -> Tensor:
    """A new tensor of as many rows like those of another."""
    return torch.empty((rows, *row_shape(like)), dtype=like.dtype, device=like.device)


def check_out(out: Tensor, like: Tensor) -> None:
    """Refuses a result of other rows than the input's."""
    if out.dtype != like.dtype or row_shape(out) != row_shape(like) or out.device != like.device:
        raise ValueError(
            f"out must have the dtype, device and trailing shape of the input, "
            f"{spec(like.dtype, ('rows', *row_shape(like)))} on {like.device}; "
            f"got {spec(out.dtype, tuple(out.shape))} on {out.device}"
        )


# [Note: results inside inputs]
# A result may lie where this rank's own rows are (a shard inside its buffer), and nowhere else
# in the input: transports write one while peers still read the other.
APART = -1


def overlap(whole: Tensor, part: Tensor) -> int:
    """How many bytes into ``whole`` an overlapping part begins; `APART` if none does."""
    if not (whole.is_contiguous() and part.is_contiguous() and whole.numel() and part.numel()):
        return APART  # what is not contiguous is copied
    start = part.data_ptr() - whole.data_ptr()
    if not -part.nbytes < start < whole.nbytes:
        return APART
    return start if start >= 0 else APART - 1


def check_overlap(whole: Tensor, part: Tensor, own_rows: int) -> None:
    """Allows a part of some input only where this rank's own rows begin."""
    own_start = own_rows * row_elements(whole) * whole.itemsize
    if overlap(whole, part) not in (APART, own_start):
        raise ValueError(
            "out may share memory with the input only where this rank's own rows are; "
            "give it memory of its own, or clone the input"
        )
