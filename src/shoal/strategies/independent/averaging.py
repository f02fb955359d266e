"""The parameters of one optimizer as flat memory that is averaged over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from shoal.comm import Backend, ReduceOp
from shoal.comm.operation import AllReduce
from shoal.sharding.layout import GroupLayout
from shoal.strategies.engine.flat_group import FlatGroup
from shoal.strategies.gradients.compressed.exchange import CompressedExchange, ExchangeQueue
from shoal.strategies.gradients.reductions import Flags
from shoal.strategies.model import ShardedModel


class AveragedGroup:
    """Those parameters of a group of memory that one optimizer steps.

    A buffer of it has their elements one after the other, and a slice for each rank.
    """

    def __init__(self, group: FlatGroup, indices: Sequence[int], backend: Backend) -> None:
        """``indices`` are those of the parameters in the group."""
        slots = [group.layout.slots[index] for index in indices]
        shapes = [(slot.name, slot.shape) for slot in slots]
        self.index, self.master_dtype = group.index, group.master_dtype
        self.layout = GroupLayout.even(shapes, backend.size, group.master_dtype.itemsize)
        self.low, self.high = self.layout.bounds[backend.rank : backend.rank + 2]
        self._group, self._slots, self._backend = group, slots, backend
        self.exchange: CompressedExchange | None = None
        """How it travels where it is compressed."""

    @property
    def master(self) -> Tensor:
        """The memory of all parameters of the group."""
        return self._group.master

    @property
    def names(self) -> list[str]:
        """The parameters' full names, in the order of `views`."""
        return [slot.name for slot in self._slots]

    def buffer(self) -> Tensor:
        """A copy of the parameters."""
        buffer = self.master.new_zeros(self.layout.num_elements)
        for view, own in zip(self.views(buffer), self._own(), strict=True):
            view.copy_(own)
        return buffer

    def take(self, buffer: Tensor) -> None:
        """Gives the parameters the values of a buffer."""
        for view, own in zip(self.views(buffer), self._own(), strict=True):
            own.copy_(view)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Each parameter's elements of a buffer, in its shape."""
        return [buffer[slot.start : slot.stop].view(slot.shape) for slot in self.layout.slots]

    def _own(self) -> Iterator[Tensor]:
        for slot in self._slots:
            yield self.master[slot.start : slot.stop].view(slot.shape)

    def average(self, buffer: Tensor, doing: str) -> None:
        """Makes a buffer the average over the ranks; ``doing`` is what they are at, in words."""
        if self._backend.size == 1:
            return
        if self.exchange is None:
            operation = AllReduce(buffer, ReduceOp.AVERAGE)
            operation.signature = f"{doing} (group {self.index}): {operation.signature}"
            self._backend.run(operation)
        else:
            everything = set(range(len(self._slots)))
            flags = Flags(everything, len(self._slots))
            self.exchange.start(buffer, flags, everything, None).wait()


def averaged_groups(
    model: ShardedModel,
    parameters: Sequence[nn.Parameter],
    backend: Backend,
    queue: ExchangeQueue | None,
) -> list[AveragedGroup]:
    """All that can be averaged of an optimizer's parameters, compressed where there is a queue."""
    wanted = {id(parameter) for parameter in parameters}
    found = []
    for group in model.engine.groups:
        indices = [i for i, each in enumerate(group.parameters) if id(each) in wanted]
        if indices and (group.master.is_floating_point() or group.master.is_complex()):
            found.append(AveragedGroup(group, indices, backend))
    compression = model.engine.settings.compression
    if queue is not None and compression is not None:
        account = model.engine.account
        for each in found:
            each.exchange = CompressedExchange(
                each, compression, backend, queue, account, is_sharded=False, what="parameter"
            )
    return found


@torch.no_grad()
def average_tensors(tensors: Sequence[Tensor], backend: Backend, doing: str) -> None:
    """Makes floating tensors the average over the ranks, with one message for each kind."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        joined = torch.cat([tensor.reshape(-1) for tensor in alike])
        operation = AllReduce(joined, ReduceOp.AVERAGE)
        operation.signature = f"{doing}: {operation.signature}"
        backend.run(operation)
        for tensor, part in zip(alike, joined.split([t.numel() for t in alike]), strict=True):
            tensor.copy_(part.view(tensor.shape))
