"""Inputs of blocks in parts on the ranks of a tensor group, which all have the same."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.comm.operation.partition import offsets, split_sizes
from shoal.errors import MismatchError
from shoal.strategies.recomputation.stores.store import Moved, MovedMemory, MovingStore
from shoal.torch_internals.tensors import storage_bytes
from shoal.torch_support.fingerprint import checksum

_SUM_BYTES = 8


class PartitionStore(MovingStore):
    """Each rank keeps a part of what all have, and backward gathers the parts.

    Not all inputs of blocks are equal: between split layers, or where positions are shared out,
    each rank has its own. So the ranks compare the first one in each place, and leave what differs
    where it is. Later ones bring a sum of their bits along, and are compared in backward.
    """

    stays_back = False  # each rank would have the whole

    def __init__(self, group: Backend) -> None:
        """``group``: the ranks that have the same inputs."""
        super().__init__()
        self._group = group
        self._is_equal: dict[str, bool] = {}

    def takes(self, tensor: Tensor) -> bool:
        """Only whole memory: what lies around a view may differ between the ranks."""
        return super().takes(tensor) and storage_bytes(tensor) == tensor.nbytes

    def move(self, memory: MovedMemory, data: Tensor, place: str) -> bool:
        """Keeps this rank's bytes, and a sum of all."""
        bits = checksum(_widest(data))
        if place not in self._is_equal:
            described = [data.numel(), int(bits)]
            everybody = self._group.all_gather_object(described)
            self._is_equal[place] = all(each == described for each in everybody)
        if not self._is_equal[place]:
            return False
        start, stop = offsets(split_sizes(data.numel(), self._group.size))[self._group.rank :][:2]
        part = torch.empty(stop - start + _SUM_BYTES, dtype=torch.uint8, device=data.device)
        part[:-_SUM_BYTES] = data[start:stop]
        part[-_SUM_BYTES:] = bits.view(1).view(torch.uint8)
        memory.place = part
        return True

    def fetch(self, memory: MovedMemory) -> Tensor:
        """Gathers; all ranks of the group do."""
        part: Tensor = memory.place
        gathered: Tensor = self._group.all_gather(part)
        num_bytes = gathered.numel() - _SUM_BYTES * self._group.size
        sizes = split_sizes(num_bytes, self._group.size)
        parts = gathered.split([each for size in sizes for each in (size, _SUM_BYTES)])
        if not torch.equal(
            torch.cat(parts[1::2]), parts[2 * self._group.rank + 1].repeat(len(sizes))
        ):
            raise MismatchError(
                'activations="partition": the ranks of a tensor group have different inputs of a '
                "block, where they had the same in its first call. Does it depend on something "
                "that differs between the ranks, as a random number of Python?"
            )
        return torch.cat(parts[::2])

    def held(self, kept: object) -> Tensor | None:
        """This rank's part."""
        return kept.memory.place if isinstance(kept, Moved) else super().held(kept)

    def describe(self) -> str:
        """One line."""
        return f"; inputs of blocks in parts on {self._group.size} ranks"


def _widest(data: Tensor) -> Tensor:
    """The same bytes in fewer, longer numbers where they divide."""
    return data.view(torch.int64) if data.numel() % 8 == 0 else data
