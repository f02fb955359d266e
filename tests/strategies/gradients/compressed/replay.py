"""The stated algorithm of compressed gradients, replayed in one process for all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.compression import Codec, Form, LowRank
from shoal.compression.low_rank import orthonormal
from shoal.sharding.layout import GroupLayout

Shapes = Sequence[tuple[str, torch.Size]]


class Replay:
    """All ranks of one group of parameters; gradients are lists of flat buffers, by rank."""

    def __init__(
        self, codec: Codec, shapes: Shapes, ranks: int, *, sharded: bool, feedback: bool = True
    ) -> None:
        self.codec, self.ranks, self.sharded, self.feedback = codec, ranks, sharded, feedback
        self.layout = GroupLayout.even(shapes, ranks, 4)
        length = self.layout.num_elements
        self.vectors, self.slots = [], self.layout.slots
        if codec.form is Form.SPARSE:  # sends vectors as they are
            self.vectors = [slot for slot in self.layout.slots if len(slot.shape) < 2]
            self.slots = [slot for slot in self.layout.slots if len(slot.shape) >= 2]
        self.residuals = [torch.zeros(length) for _ in range(ranks)]
        self.rights: dict[str, Tensor] = {}
        self.count = 0

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of all parameters as a buffer of the group."""
        buffer = torch.zeros(self.layout.num_elements)
        for slot, tensor in zip(self.layout.slots, tensors, strict=True):
            buffer[slot.start : slot.stop] = tensor.reshape(-1)
        return buffer

    def average(self, gradients: Sequence[Tensor]) -> Tensor:
        """What all ranks get."""
        self.count += 1
        corrected = [gradient.clone() for gradient in gradients]
        if self.feedback:
            corrected = [g + e for g, e in zip(gradients, self.residuals, strict=True)]
            self.residuals = [torch.zeros_like(each) for each in corrected]
        result = torch.zeros(self.layout.num_elements)
        for slot in self.vectors:
            part = slice(slot.start, slot.stop)
            result[part] = _mean([whole[part] for whole in corrected])
        if isinstance(self.codec, LowRank):
            self._factored(self.codec, corrected, result)
        elif self.codec.form is Form.SPARSE and not self.sharded:
            self._gathered(corrected, result)
        else:
            self._scattered(corrected, result)
        return result

    def _draw(self, name: str, start: int, who: str) -> int:
        who = "" if self.codec.form is Form.SPARSE else who
        return zlib.crc32(f"{name}/{start}/{self.count}/{who}".encode())

    def _keep(self, rank: int, part: slice, error: Tensor) -> None:
        if self.feedback:
            self.residuals[rank][part] += error

    def _gathered(self, corrected: Sequence[Tensor], result: Tensor) -> None:
        for slot in self.slots:
            part = slice(slot.start, slot.stop)
            for rank, whole in enumerate(corrected):
                payload = self.codec.encode(whole[part], draw=self._draw(slot.name, slot.start, ""))
                self._keep(rank, part, whole[part] - self.codec.decode(payload))
                result[part] += self.codec.decode(payload)
            result[part] /= self.ranks

    def _parts(self, owner: int) -> list[tuple[str, slice]]:
        low, high = self.layout.bounds[owner], self.layout.bounds[owner + 1]
        parts = [
            (slot.name, slice(max(slot.start, low), min(slot.stop, high)))
            for slot in self.slots
            if max(slot.start, low) < min(slot.stop, high)
        ]
        if self.codec.joins_tensors and parts:
            return [(parts[0][0], slice(parts[0][1].start, parts[-1][1].stop))]
        return parts

    def _scattered(self, corrected: Sequence[Tensor], result: Tensor) -> None:
        codec = self.codec
        for owner in range(self.ranks):
            for name, part in self._parts(owner):
                total = torch.zeros(part.stop - part.start)
                for rank, whole in enumerate(corrected):
                    if rank == owner:
                        total += whole[part]
                        continue
                    draw = self._draw(name, part.start, str(rank))
                    sent = codec.decode(codec.encode(whole[part], draw=draw))
                    self._keep(rank, part, whole[part] - sent)
                    total += sent
                total /= self.ranks
                if not self.sharded:
                    draw = self._draw(name, part.start, f"{owner}, for all")
                    sent = codec.decode(codec.encode(total, draw=draw))
                    self._keep(owner, part, (total - sent) * self.ranks)
                    total = sent
                result[part] = total

    def _factored(self, codec: LowRank, corrected: Sequence[Tensor], result: Tensor) -> None:
        for slot in self.slots:
            part = slice(slot.start, slot.stop)
            own = [whole[part].view(slot.shape) for whole in corrected]
            if not codec.factors(slot.shape):
                result[part] = _mean(own).view(-1)
                continue
            right = self.rights.get(slot.name, codec.start(slot.shape, torch.device("cpu")))
            left = orthonormal(_mean([codec.left(each, right) for each in own]))
            right = self.rights[slot.name] = _mean([codec.right(each, left) for each in own])
            result[part] = (left @ right.T).view(-1)
            for rank, each in enumerate(own):
                self._keep(rank, part, each.reshape(-1) - result[part])


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors)
