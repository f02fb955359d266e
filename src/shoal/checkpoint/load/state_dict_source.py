"""A plain state_dict as something to load from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.checkpoint.disk.filesystem import DISK
from shoal.checkpoint.format.manifest import TensorRecord
from shoal.checkpoint.load.matching import PREFIX
from shoal.checkpoint.load.slice_reader import Wanted
from shoal.checkpoint.load.tensor_source import TensorSource
from shoal.sharding.extent import Extent, overlap
from shoal.torch_internals.modules import EXTRA_STATE


@dataclass
class StateDictSource(TensorSource):
    """Tensors that are in memory already, whole, on every rank."""

    state_dict: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, state_dict: Mapping[str, Any]) -> StateDictSource:
        """A model's ``state_dict()``, of the plain module or a wrapped one."""
        for name, value in state_dict.items():
            if not isinstance(value, Tensor) and not name.endswith(EXTRA_STATE):
                raise TypeError(
                    f"a model's state_dict has tensors; {name!r} is a {type(value).__name__}. If "
                    "this dict has the model's among others, pass that one."
                )
        tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
        records = {
            PREFIX + name: TensorRecord(value.dtype, value.shape, ())
            for name, value in tensors.items()
        }
        source = cls(DISK, Path("the state_dict"), records, (), is_checked=False)
        source.state_dict = tensors
        return source

    def read(self, wanted: Sequence[Wanted]) -> int:
        """Copies what is wanted."""
        for each in wanted:
            full = self.state_dict[each.tensor.removeprefix(PREFIX)].detach()
            flat = full.cpu().contiguous().view(-1)
            runs = overlap(Extent.whole(full.shape), each.extent)
            for left, right, length in zip(*runs, strict=True):
                each.memory[right : right + length].copy_(flat[left : left + length])
        return sum(each.memory.nbytes for each in wanted)
