"""Parameters that travel in 8 bits, and that every rank computes with as they arrive.

[Note: rounded parameters]
An owner encodes its masters, and what travels is the payload. All ranks compute with what it stands
for, the owner too, so that they have the same parameters to the last bit. The optimizer steps the
masters, so what rounding leaves out of a step is not lost: it adds up there.

Blocks are counted from the first element of a parameter, and neither two parameters nor two
ranks have a part of one: where a parameter begins and where slices are cut, a block begins. So
what a parameter is rounded to depends on its values alone: not on the number of ranks, on the
parameters beside it, or on whether payloads travel at all. Ranks that share memory read the
rounded values themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.comm import Backend, Work
from shoal.comm.operation import AllGather
from shoal.compression import Payload, Quantize
from shoal.sharding.layout import GroupLayout

if TYPE_CHECKING:
    from shoal.strategies.engine.flat_group import FlatGroup


class Rounding:
    """What the parameters of one group are rounded to, and the bytes that stand for it."""

    def __init__(self, codec: Quantize, layout: GroupLayout, dtype: torch.dtype) -> None:
        """``dtype``: what is computed with."""
        self._codec, self._layout, self._dtype = codec, layout, dtype
        self._sizes = [codec.payload_bytes((length,), dtype) for length in layout.sizes]

    def encode(self, part: Tensor) -> Tensor:
        """The payload of a slice."""
        return self._codec.encode(part.detach()).data

    def rounded(self, part: Tensor) -> Tensor:
        """What any part arrives as that begins where a block does."""
        return self._codec.decode(self._codec.encode(part.detach()))

    def decode(self, data: Tensor, whole: Tensor) -> None:
        """Fills a whole from the payloads of all ranks."""
        parts = zip(data.split(self._sizes), whole.split(self._layout.sizes), strict=True)
        for payload, part in parts:
            self._codec.decode(Payload(payload, part.shape, self._dtype), part)

    def make_room(self, device: torch.device) -> Tensor:
        """Memory for the payloads of all ranks."""
        with torch.inference_mode(False):  # its gather may end outside of that
            return torch.empty(sum(self._sizes), dtype=torch.uint8, device=device)

    def count(self, backend: Backend) -> None:
        """Counts one gather: what this rank sends to the others."""
        rank, others = backend.rank, backend.size - 1
        raw = sum(piece.stop - piece.start for piece in self._layout.pieces(rank))
        raw_bytes = raw * self._dtype.itemsize
        backend.count_compression(others * raw_bytes, others * self._sizes[rank])


class RoundedGather(Work[Tensor]):
    """A gather of payloads under way; its result is the group's whole, which they stand for."""

    def __init__(self, group: FlatGroup, operation: AllGather, backend: Backend) -> None:
        """Begins ``operation``, which gathers payloads, into memory of its own."""
        assert group.rounding is not None
        self._rounding, self._whole, self._account = group.rounding, group.whole, group.account
        room = self._rounding.make_room(group.whole.device)
        self._num_bytes = room.nbytes
        self._rounding.count(backend)
        self._work: Work[Tensor] | None = backend.run(operation.again(room), async_op=True)
        self._account.add("parameters", self._num_bytes)

    def wait(self, timeout: float | None = None) -> Tensor:
        """The whole. A second call finds it filled."""
        if self._work is not None:
            data = self._work.wait(timeout)
            with torch.no_grad():
                self._rounding.decode(data, self._whole)
            self._work = None
            self._account.add("parameters", -self._num_bytes)
        return self._whole

    def is_done(self) -> bool:
        """Whether all payloads are there."""
        return self._work is None or self._work.is_done()
