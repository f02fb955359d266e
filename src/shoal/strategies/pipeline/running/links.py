"""Messages between chunks: values forward, gradients backward, in the order of micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.comm import objects
from shoal.comm.work import Work
from shoal.strategies.pipeline.stages.stage import Stage
from shoal.torch_support.raw import as_bytes

# Kinds of messages between two chunks; each has a tag of its own.
VALUES, GRADIENTS, SHAPES, LOANS = range(4)
_NUM_KINDS = 4


class Mail:
    """What one rank sends to and gets from chunks of other ranks, or of its own.

    A send is not waited for: it may be received much later.
    """

    def __init__(self, stage: Stage) -> None:
        """Nothing is under way yet."""
        self._stage = stage
        self._sent: list[Work[Any]] = []
        self._kept: dict[int, list[Any]] = {}

    def _tag(self, kind: int, source: int, target: int) -> int:
        return (source * self._stage.num_chunks + target) * _NUM_KINDS + kind

    def send(self, kind: int, source: int, target: int, values: list[Tensor | None]) -> None:
        """From chunk to chunk; None arrives as None."""
        tag, peer = self._tag(kind, source, target), self._stage.rank_of(target)
        if peer == self._stage.rank:
            self._kept.setdefault(tag, []).append(values)
            return
        self._let_go()
        for value in values:
            tensor = self._nothing() if value is None else _framed(value.detach())
            self._sent.append(self._stage.group.start_send(tensor, peer, tag))

    def _nothing(self) -> Tensor:
        """Stands for None, where the transport carries it: NCCL takes nothing from the CPU."""
        return torch.empty(0, 0, device=self._stage.group.device)

    def receive(self, kind: int, source: int, target: int, count: int) -> list[Tensor | None]:
        """The next message of a kind, once it is there."""
        tag, peer = self._tag(kind, source, target), self._stage.rank_of(source)
        if peer == self._stage.rank:
            kept: list[Tensor | None] = self._kept[tag].pop(0)
            return kept
        return [_unframed(self._stage.group.recv(src=peer, tag=tag)) for _ in range(count)]

    def send_object(self, kind: int, source: int, target: int, value: Any) -> None:
        """Plain data, from chunk to chunk."""
        tag, peer = self._tag(kind, source, target), self._stage.rank_of(target)
        if peer == self._stage.rank:
            self._kept.setdefault(tag, []).append(value)
            return
        data = as_bytes(bytearray(objects.encode(value))).to(self._stage.group.device)
        self._sent.append(self._stage.group.start_send(data, peer, tag))

    def receive_object(self, kind: int, source: int, target: int) -> Any:
        """The inverse."""
        tag, peer = self._tag(kind, source, target), self._stage.rank_of(source)
        if peer == self._stage.rank:
            return self._kept[tag].pop(0)
        return self._stage.group.recv_object(peer, tag)

    def _let_go(self) -> None:
        """Forgets what was received; whatever went wrong with it is raised."""
        for work in [work for work in self._sent if work.is_done()]:
            work.wait()
            self._sent.remove(work)

    def finish(self) -> None:
        """Waits until everything was received."""
        while self._sent:
            self._sent.pop().wait()


# A value that is not there is told from an empty one by its number of dimensions: every message has
# one more in front.


def _framed(value: Tensor) -> Tensor:
    return value.unsqueeze(0)


def _unframed(message: Tensor) -> Tensor | None:
    return None if message.shape[0] == 0 else message.squeeze(0)
