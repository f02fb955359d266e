"""The operations: what each must agree on, what it moves, what the caller gets.

An operation knows nothing of transports. It describes itself before the ranks agree,
prepares a `Payload` of flat, contiguous tensors once the others' numbers are known, and
hands over the result afterwards. A transport only ever sees payloads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.comm.header import Header, mismatch, spec
from shoal.comm.partition import check_sizes, offsets, split_sizes
from shoal.comm.reduction import ReduceOp, check_dtype

# The order is part of what ranks tell each other, so it may only ever grow at the end.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}


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
    """The flat data of this rank, known before the ranks agree."""

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


def flatten(tensor: Tensor) -> Tensor:
    """A flat contiguous view, or a copy where there can be no view; bool as bytes."""
    flat = tensor.detach()
    if flat.dim() == 1 and flat.stride(0) == 1 and flat.is_floating_point() and not flat.is_neg():
        return flat  # the usual case, and worth a few microseconds
    flat = flat.contiguous().view(-1)
    flat = flat.resolve_conj().resolve_neg()  # what lies in memory is what counts from here on
    if flat.stride(0) != 1:  # a single element of a longer row keeps that row's stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8) if flat.dtype is torch.bool else flat


def write_back(flat: Tensor, tensor: Tensor) -> None:
    """Copies a result into the caller's tensor where `flatten` had to copy."""
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        values = flat.view(torch.bool) if tensor.dtype is torch.bool else flat
        with writing(tensor):
            tensor.detach().copy_(values.view(tensor.shape))


# Autograd does not follow what `flatten` returns, so there is nothing to switch off.
_AS_IT_IS = nullcontext()


def writing(*tensors: Tensor | None) -> AbstractContextManager[object]:
    """Allows to write to flat tensors, also if they were made in inference mode."""
    for tensor in tensors:
        if tensor is not None and tensor.is_inference():
            return torch.inference_mode()
    return _AS_IT_IS


def num_rows(tensor: Tensor) -> int:
    """The length of the first dimension; a scalar counts as one row."""
    return tensor.shape[0] if tensor.dim() else 1


def _row_shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[1:])


def _row_elements(tensor: Tensor) -> int:
    return math.prod(_row_shape(tensor))


def _with_rows(like: Tensor, rows: int) -> Tensor:
    return torch.empty((rows, *_row_shape(like)), dtype=like.dtype, device=like.device)


def _check_out(out: Tensor, like: Tensor) -> None:
    if out.dtype != like.dtype or _row_shape(out) != _row_shape(like) or out.device != like.device:
        raise ValueError(
            f"out must have the dtype, device and trailing shape of the input, "
            f"{spec(like.dtype, ('rows', *_row_shape(like)))} on {like.device}; "
            f"got {spec(out.dtype, tuple(out.shape))} on {out.device}"
        )


# [Note: results inside inputs]
# A result may lie where this rank's own rows are (a shard inside its buffer), and nowhere else
# in the input: transports write one while peers still read the other.
_APART = -1


def _overlap(whole: Tensor, part: Tensor) -> int:
    """How many bytes into ``whole`` an overlapping part begins; `_APART` if none does."""
    if not (whole.is_contiguous() and part.is_contiguous() and whole.numel() and part.numel()):
        return _APART  # what is not contiguous is copied
    start = part.data_ptr() - whole.data_ptr()
    if not -part.nbytes < start < whole.nbytes:
        return _APART
    return start if start >= 0 else _APART - 1


def _check_overlap(whole: Tensor, part: Tensor, own_rows: int) -> None:
    """Allows a part of some input only where this rank's own rows begin."""
    own_start = own_rows * _row_elements(whole) * whole.itemsize
    if _overlap(whole, part) not in (_APART, own_start):
        raise ValueError(
            "out may share memory with the input only where this rank's own rows are; "
            "give it memory of its own, or clone the input"
        )


class Barrier(Operation):
    """All ranks arrive before any leaves. Agreeing on it is all there is to it."""

    kind = "barrier"
    signature = "barrier()"

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """Nothing moves."""
        return Payload()

    def result(self) -> None:
        """A barrier has no result."""


class _InPlace(Operation):
    """Operations whose result has the shape of the input: the tensor itself is changed."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.source = flatten(tensor)

    def result(self) -> Tensor | None:
        assert self.source is not None
        write_back(self.source, self._tensor)
        return self._tensor


class AllReduce(_InPlace):
    """Every rank ends with the reduction over all ranks."""

    kind = "all_reduce"

    def __init__(self, tensor: Tensor, op: ReduceOp) -> None:
        """Checks that the reduction makes sense for the dtype."""
        check_dtype(op, tensor.dtype)
        super().__init__(tensor)
        self._op = op
        self.signature = f"all_reduce({spec(tensor.dtype, tuple(tensor.shape))}, op={op.value})"

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The tensor is source and target."""
        return _in_place(self.source, op=self._op)


class Reduce(_InPlace):
    """The root's tensor becomes the reduction; the others' stay as they are."""

    kind = "reduce"

    def __init__(self, tensor: Tensor, op: ReduceOp, root: int, is_root: bool) -> None:
        """Checks that the reduction makes sense for the dtype."""
        check_dtype(op, tensor.dtype)
        super().__init__(tensor)
        self._op, self._root, self._is_root = op, root, is_root
        shape = spec(tensor.dtype, tuple(tensor.shape))
        self.signature = f"reduce({shape}, op={op.value}, root={root})"

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """Only the root has a target."""
        payload = _in_place(self.source, op=self._op, root=self._root)
        if not self._is_root:
            payload.target = None
        return payload

    def result(self) -> Tensor | None:
        """The tensor on the root, None elsewhere: a local value is no global result."""
        return super().result() if self._is_root else None


class Broadcast(Operation):
    """Every rank ends with the root's tensor; one that gives none gets a new one."""

    kind = "broadcast"

    def __init__(self, tensor: Tensor | None, root: int, is_root: bool, device: torch.device):
        """A rank without a tensor learns shape and dtype from the root's header."""
        if tensor is None and is_root:
            raise ValueError("broadcast needs a tensor on the root; got None")
        self._root, self._is_root, self._device = root, is_root, device
        self._tensor = tensor
        self.source = flatten(tensor) if tensor is not None and is_root else None
        self.meta = _encode_spec(tensor) if tensor is not None else ()
        self.signature = f"broadcast(root={root})"

    def check(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        """Whoever gave a tensor gave one like the root's."""
        expected = headers[self._root].meta
        if any(header.meta and header.meta != expected for header in headers):
            shown = [header._replace(signature=_shown(header)) for header in headers]
            raise mismatch(shown, ranks, "broadcast needs tensors of one shape and dtype")

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The root's tensor, or one like it to receive into."""
        if self._tensor is None:
            dtype, shape = _decode_spec(headers[self._root].meta)
            self._tensor = torch.empty(shape, dtype=dtype, device=self._device)
        if self.source is None:
            self.source = flatten(self._tensor)
        return _in_place(self.source, root=self._root)

    def result(self) -> Tensor:
        """The tensor, now equal to the root's."""
        assert self.source is not None
        assert self._tensor is not None
        if not self._is_root:
            write_back(self.source, self._tensor)
        return self._tensor


def _in_place(flat: Tensor | None, op: ReduceOp = ReduceOp.SUM, root: int = 0) -> Payload:
    assert flat is not None
    return Payload(source=flat, target=flat, op=op, root=root, total=flat.numel())


def _encode_spec(tensor: Tensor) -> tuple[int, ...]:
    return (_DTYPE_CODE[tensor.dtype], *tensor.shape)


def _decode_spec(meta: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    return _DTYPES[meta[0]], tuple(meta[1:])


def _shown(header: Header) -> str:
    if not header.meta:
        return header.signature
    dtype, shape = _decode_spec(header.meta)
    return f"{header.signature} of {spec(dtype, shape)}"


class AllGather(Operation):
    """Every rank ends with all ranks' rows, in rank order; ranks may give different numbers."""

    kind = "all_gather"
    rows: Sequence[int]
    """How many rows each rank gave, once known."""

    def __init__(self, tensor: Tensor, out: Tensor | None) -> None:
        """Only the first dimension may differ between ranks."""
        if out is not None:
            _check_out(out, tensor)
        self._like, self._out = tensor, out
        self.source = flatten(tensor)
        if out is None:
            self.meta = (num_rows(tensor), -1, _APART)
        else:
            self.meta = (num_rows(tensor), num_rows(out), _overlap(out, tensor))
        self.signature = f"{self.kind}({spec(tensor.dtype, ('rows', *_row_shape(tensor)))})"

    def check(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        """An ``out`` has room for exactly the rows of all: see [Note: results inside inputs]."""
        starts = offsets([header.meta[0] for header in headers])
        row_bytes = _row_elements(self._like) * self._like.itemsize
        for header, start in zip(headers, starts, strict=False):
            if header.meta[1] not in (-1, starts[-1]):
                problem = f"{self.kind} of {starts[-1]} rows in all needs an out of as many"
            elif header.meta[2] not in (_APART, start * row_bytes):
                problem = f"{self.kind} of rows that lie in the out, but not in their own place"
            else:
                continue
            shown = [h._replace(signature=_gather_text(h)) for h in headers]
            raise mismatch(shown, ranks, problem)

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """A result of everybody's rows."""
        self.rows = [header.meta[0] for header in headers]
        if self._out is None:
            self._out = _with_rows(self._like, sum(self.rows))
        self._target = flatten(self._out)
        counts = [count * _row_elements(self._like) for count in self.rows]
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
            elements = _row_elements(self._like)
            counts = [header.meta[0] * elements for header in headers]
            payload = Payload(source=self.source, counts=counts, total=sum(counts))
        payload.root = self._root
        return payload

    def result(self) -> Tensor | None:
        """The rows of all ranks on the root, None elsewhere."""
        return super().result() if self._is_root else None


class ReduceScatter(Operation):
    """The reduction over all ranks, of which each rank keeps its own rows."""

    kind = "reduce_scatter"

    def __init__(
        self,
        tensor: Tensor,
        op: ReduceOp,
        out: Tensor | None,
        sizes: Sequence[int] | None,
        place: tuple[int, int],
    ) -> None:
        """``place`` is the rank and the size of the group."""
        check_dtype(op, tensor.dtype)
        rank, size = place
        self._rows = _split(tensor, sizes, size)
        if out is not None:
            _check_out(out, tensor)
            _check_rows(out, self._rows[rank])
            _check_overlap(tensor, out, sum(self._rows[:rank]))
        self._like, self._op, self._out = tensor, op, out
        self.source = flatten(tensor)
        split = "" if sizes is None else f", sizes={self._rows}"
        shape = spec(tensor.dtype, tuple(tensor.shape))
        self.signature = f"reduce_scatter({shape}, op={op.value}{split})"

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The whole tensor goes in, this rank's rows come out."""
        if self._out is None:
            self._out = _with_rows(self._like, self._rows[rank])
        self._target = flatten(self._out)
        counts = [rows * _row_elements(self._like) for rows in self._rows]
        return Payload(self.source, self._target, counts, op=self._op, total=sum(counts))

    def result(self) -> Tensor:
        """This rank's rows of the reduction."""
        assert self._out is not None
        write_back(self._target, self._out)
        return self._out


def _split(tensor: Tensor, sizes: Sequence[int] | None, num_parts: int) -> list[int]:
    rows = num_rows(tensor)
    return split_sizes(rows, num_parts) if sizes is None else check_sizes(sizes, rows, num_parts)


def _check_rows(out: Tensor, rows: int) -> None:
    if num_rows(out) != rows:
        raise ValueError(f"out must have the {rows} rows of this rank; got {num_rows(out)}")


class Scatter(Operation):
    """Each rank gets its rows of the root's tensor."""

    kind = "scatter"

    def __init__(
        self,
        tensor: Tensor | None,
        out: Tensor | None,
        sizes: Sequence[int] | None,
        root: int,
        device: torch.device,
        place: tuple[int, int],
    ) -> None:
        """Only the root gives a tensor and its split; the header tells the others."""
        rank, size = place
        if rank == root and tensor is None:
            raise ValueError("scatter needs a tensor on the root; got None")
        self._root, self._device, self._out = root, device, out
        self.signature = f"scatter(root={root})"
        if rank == root and tensor is not None:
            split = _split(tensor, sizes, size)
            if out is not None:
                _check_overlap(tensor, out, sum(split[:rank]))
            self.source = flatten(tensor)
            self.meta = (*split, *_encode_spec(tensor))

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The rows that the root's header promises this rank."""
        meta = headers[self._root].meta
        rows = meta[: len(headers)]
        dtype, shape = _decode_spec(meta[len(headers) :])
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

    def result(self) -> Tensor:
        """This rank's rows."""
        assert self._out is not None
        write_back(self._target, self._out)
        return self._out


class AllToAll(Operation):
    """Each rank sends each other rank some rows and gets some from each."""

    kind = "all_to_all"
    rows: Sequence[int]
    """How many rows each rank sent here, once known."""

    def __init__(
        self,
        tensor: Tensor,
        out: Tensor | None,
        sizes: Sequence[int] | None,
        place: tuple[int, int],
    ) -> None:
        """``sizes`` are the rows for each rank; what arrives is read from the headers."""
        if out is not None:
            _check_out(out, tensor)
            if _overlap(tensor, out) != _APART:
                raise ValueError("out must not share memory with the input of an all_to_all")
        self._like, self._out = tensor, out
        self._parts = _split(tensor, sizes, place[1])
        self.source = flatten(tensor)
        self.meta = (*self._parts, -1 if out is None else num_rows(out))
        self.signature = f"all_to_all({spec(tensor.dtype, ('rows', *_row_shape(tensor)))})"

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
            self._out = _with_rows(self._like, sum(self.rows))
        self._target = flatten(self._out)
        elements = _row_elements(self._like)
        matrix = [[count * elements for count in header.meta[:-1]] for header in headers]
        return Payload(
            source=self.source,
            target=self._target,
            counts=matrix[rank],
            arriving=[row[rank] for row in matrix],
            matrix=matrix,
            total=sum(map(sum, matrix)),
        )

    def result(self) -> Tensor:
        """The rows that arrived, by sender."""
        assert self._out is not None
        write_back(self._target, self._out)
        return self._out


class Send(Operation):
    """One rank's half of a message."""

    kind = "send"

    def __init__(self, tensor: Tensor, peer: int) -> None:
        """The peer must receive a tensor of the same shape and dtype."""
        self.source = flatten(tensor)
        self.meta = _encode_spec(tensor)
        self.signature = f"send({spec(tensor.dtype, tuple(tensor.shape))}, dst={peer})"
        self._peer = peer

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The tensor, towards the peer."""
        assert self.source is not None
        return Payload(source=self.source, root=self._peer, total=self.source.numel())

    def result(self) -> None:
        """A send has no result."""


class Receive(Operation):
    """The other half: a tensor to fill, or none to take what comes."""

    kind = "recv"

    def __init__(self, tensor: Tensor | None, peer: int, device: torch.device) -> None:
        """Without a tensor, one like the sender's is made."""
        self._tensor, self._peer, self._device = tensor, peer, device
        self.meta = () if tensor is None else _encode_spec(tensor)
        shown = "anything" if tensor is None else spec(tensor.dtype, tuple(tensor.shape))
        self.signature = f"recv({shown}, src={peer})"

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """A place for what the sender's header promises. ``headers`` is the sender's alone."""
        if self._tensor is None:
            dtype, shape = _decode_spec(headers[0].meta)
            self._tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._target = flatten(self._tensor)
        return Payload(target=self._target, root=self._peer, total=self._target.numel())

    def result(self) -> Tensor:
        """The tensor, now as it was sent."""
        assert self._tensor is not None
        write_back(self._target, self._tensor)
        return self._tensor


def check_message(sent: Header, received: Header, ranks: tuple[int, int]) -> None:
    """Raises on both sides unless the receiver's tensor is like the sender's."""
    if received.meta and received.meta != sent.meta:
        raise mismatch([sent, received], ranks, "a receive differs from what was sent")
