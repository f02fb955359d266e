"""Messages between chunks: values forward, gradients backward, in the order of micro-batches."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from shoal.comm import objects
from shoal.comm.work import Work
from shoal.strategies.pipeline.stages.stage import Stage
from shoal.torch_support.memory import as_bytes


class LinkMessage(IntEnum):
    """What a message between two chunks carries; each kind has a tag of its own."""

    VALUES = 0
    GRADIENTS = 1
    SHAPES = 2


class StageLinks:
    """What one rank sends to and receives from the chunks of all ranks, its own included.

    Sends return at once, since the receiver may take the message much later.
    """

    def __init__(self, stage: Stage) -> None:
        """Nothing was sent yet."""
        self._stage, self._group, self._rank = stage, stage.group, stage.rank
        self._pending: list[Work[Any]] = []
        self._local: dict[int, list[Any]] = {}
        """Messages from this rank to itself, by tag."""

    def _tag(self, kind: LinkMessage, source: int, target: int) -> int:
        return (source * self._stage.num_chunks + target) * len(LinkMessage) + kind

    def send(
        self, kind: LinkMessage, source: int, target: int, values: list[Tensor | None]
    ) -> None:
        """Sends from chunk to chunk; None arrives as None."""
        tag, peer = self._tag(kind, source, target), self._stage.rank_of_chunk[target]
        if peer == self._rank:
            self._local.setdefault(tag, []).append(values)
            return
        self._forget_received()
        for value in values:
            self._pending.append(self._group.start_send(self._framed(value), peer, tag))

    def receive(self, kind: LinkMessage, source: int, target: int, count: int) -> list[Any]:
        """Waits for the next message of a kind: ``count`` tensors, or None where None was sent."""
        tag, peer = self._tag(kind, source, target), self._stage.rank_of_chunk[source]
        if peer == self._rank:
            local: list[Tensor | None] = self._local[tag].pop(0)
            return local
        return [_unframed(self._group.recv(src=peer, tag=tag)) for _ in range(count)]

    def send_object(self, kind: LinkMessage, source: int, target: int, value: Any) -> None:
        """Sends plain data from chunk to chunk."""
        tag, peer = self._tag(kind, source, target), self._stage.rank_of_chunk[target]
        if peer == self._rank:
            self._local.setdefault(tag, []).append(value)
            return
        data = as_bytes(bytearray(objects.encode(value))).to(self._group.device)
        self._pending.append(self._group.start_send(data, peer, tag))

    def receive_object(self, kind: LinkMessage, source: int, target: int) -> Any:
        """Waits for what `send_object` sent."""
        tag, peer = self._tag(kind, source, target), self._stage.rank_of_chunk[source]
        if peer == self._rank:
            return self._local[tag].pop(0)
        return self._group.recv_object(peer, tag)

    def _forget_received(self) -> None:
        """Drops sends that have ended; errors of theirs are raised."""
        for work in [work for work in self._pending if work.is_done()]:
            work.wait()
            self._pending.remove(work)

    def finish(self) -> None:
        """Waits until everything was received."""
        while self._pending:
            self._pending.pop().wait()

    # Every message has one dimension more in front than its value, of length 1, or 0 for None.

    def _framed(self, value: Tensor | None) -> Tensor:
        if value is None:  # NCCL takes nothing from the CPU
            return torch.empty(0, 0, device=self._group.device)
        return value.detach().unsqueeze(0)


def _unframed(message: Tensor) -> Tensor | None:
    return None if message.shape[0] == 0 else message.squeeze(0)
