"""The two halves of a message between two ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.operation.base import Operation, Payload
from shoal.comm.operation.flat import flatten, write_back
from shoal.comm.operation.header import Header, mismatch, spec
from shoal.comm.operation.specification import are_alike, encode_spec, make_like


class Send(Operation):
    """One rank's half of a message."""

    kind = "send"

    def __init__(self, tensor: Tensor, peer: int, tag: int) -> None:
        """The peer must receive a tensor of the same shape and dtype."""
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
