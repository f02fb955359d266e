"""Operations on whole tensors: reductions in place, broadcasts and messages; and the barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from shoal.comm.operation.base import (
    Header,
    Operation,
    Payload,
    are_alike,
    decode_spec,
    encode_spec,
    flatten,
    make_like,
    mismatch,
    require_tensor,
    require_tensors,
    spec,
    write_back,
)
from shoal.comm.operation.reduction import ReduceOp, check_dtype


class Barrier(Operation):
    """All ranks arrive before any leaves. Comparing headers is all it takes."""

    kind = "barrier"

    def __init__(self, doing: str = "barrier()") -> None:
        """``doing``: what the ranks are at, in words that must be the same on all of them."""
        self.signature = doing

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """Nothing moves."""
        return Payload()

    def result(self) -> None:
        """A barrier has no result."""


class _InPlace(Operation):
    """Operations whose result has the shape of the input: the tensor itself is changed."""

    _memory = Operation._memory | {"_tensor"}

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
        require_tensor(self.kind, tensor)
        check_dtype(op, tensor.dtype)
        super().__init__(tensor)
        self._op = op
        self.signature = f"all_reduce({spec(tensor.dtype, tuple(tensor.shape))}, op={op.value})"

    def again(self, tensor: Tensor) -> Self:
        """The same call with another tensor, which is like the first and not looked at."""
        other = self._copied()
        other._tensor, other.source = tensor, flatten(tensor)
        return other

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The tensor is source and target."""
        return _in_place(self.source, op=self._op)


class Reduce(_InPlace):
    """The root's tensor becomes the reduction; the others' stay as they are."""

    kind = "reduce"

    def __init__(self, tensor: Tensor, op: ReduceOp, root: int, is_root: bool) -> None:
        require_tensor(self.kind, tensor)
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
        require_tensors(self.kind, tensor)
        if tensor is None and is_root:
            raise ValueError("broadcast needs a tensor on the root; got None")
        self._root, self._is_root, self._device = root, is_root, device
        self._tensor = tensor
        self.source = flatten(tensor) if tensor is not None and is_root else None
        if tensor is not None and not is_root and tensor.is_contiguous():
            self.sink = flatten(tensor)
        self.meta = encode_spec(tensor) if tensor is not None else ()
        self.signature = f"broadcast(root={root})"

    @property
    def makes_result(self) -> bool:
        """Where the caller gave no tensor."""
        return self._tensor is None

    def check(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        """A rank that gave a tensor gave one like the root's."""
        expected = headers[self._root].meta
        if any(header.meta and not are_alike(header.meta, expected) for header in headers):
            shown = [header._replace(signature=_shown(header)) for header in headers]
            raise mismatch(shown, ranks, "broadcast needs tensors of one shape and dtype")

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """The root's tensor, or one like it to receive into."""
        if self._tensor is None:
            self._tensor = make_like(headers[self._root].meta, self._device)
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


def _shown(header: Header) -> str:
    if not header.meta:
        return header.signature
    dtype, shape = decode_spec(header.meta)
    return f"{header.signature} of {spec(dtype, shape)}"


class Send(Operation):
    """One rank's half of a message."""

    kind = "send"

    def __init__(self, tensor: Tensor, peer: int, tag: int) -> None:
        """The peer must receive a tensor of the same shape and dtype."""
        require_tensor(self.kind, tensor)
        self.source = flatten(tensor)
        self.meta = encode_spec(tensor)
        shape = spec(tensor.dtype, tuple(tensor.shape))
        self.signature = f"send({shape}, dst={peer}{_tagged(tag)})"
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

    def __init__(self, tensor: Tensor | None, peer: int, tag: int, device: torch.device) -> None:
        """Without a tensor, one like the sender's is made."""
        require_tensors(self.kind, tensor)
        self._tensor, self._peer, self._device = tensor, peer, device
        self.meta = () if tensor is None else encode_spec(tensor)
        shown = "anything" if tensor is None else spec(tensor.dtype, tuple(tensor.shape))
        self.signature = f"recv({shown}, src={peer}{_tagged(tag)})"

    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """A tensor for what the sender's header promises. ``headers`` is the sender's alone."""
        if self._tensor is None:
            self._tensor = make_like(headers[0].meta, self._device)
        self._target = flatten(self._tensor)
        return Payload(target=self._target, root=self._peer, total=self._target.numel())

    def result(self) -> Tensor:
        """The tensor, now as it was sent."""
        assert self._tensor is not None
        write_back(self._target, self._tensor)
        return self._tensor


def _tagged(tag: int) -> str:
    return f", tag={tag}" if tag else ""


def check_message(sent: Header, received: Header, ranks: tuple[int, int]) -> None:
    """Raises on both sides unless the receiver's tensor is like the sender's."""
    if received.meta and not are_alike(received.meta, sent.meta):
        raise mismatch([sent, received], ranks, "a receive differs from what was sent")
