"""The state of compressed gradients: what of a checkpoint a rank needs to go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.load.tensor_source import TensorSource, Wanted
from shoal.sharding.extent import Extent
from shoal.strategies.gradients.compressed.state import CompressionState


@dataclass
class CompressionLoading:
    """A rank's own residual, or those of all ranks where their number was another.

    What the checkpoint does not have, or has in another shape, begins anew.

    Attributes:
        ties: From a name here to the one in the checkpoint, where they differ.
    """

    source: TensorSource
    state: CompressionState
    ties: Mapping[str, str]
    _numbers: dict[str, int] = field(default_factory=dict)
    _residuals: dict[str, list[Tensor]] = field(default_factory=dict)
    _factors: dict[str, Tensor] = field(default_factory=dict)

    def wanted(self, rank: int) -> Iterator[Wanted]:
        """What is to be read for a rank."""
        self._numbers = _numbers(self.source.values.get("compression", []), rank)
        former = self._numbers.get("ranks", 0)
        is_same = former == self.state.num_ranks
        ranks = [self.state.rank] if is_same else list(range(former))
        for name, extent in self.state.room().items():
            for each in ranks:
                wanted = self._room(f"residual/{each}/{self.ties.get(name, name)}", extent)
                if wanted is not None:
                    self._residuals.setdefault(name, []).append(wanted.memory)
                    yield wanted
        for name, (saved_as, shape) in self.state.factor_names().items():
            wanted = self._room(f"factor/{saved_as}", Extent.whole(shape))
            if wanted is not None:
                self._factors[name] = wanted.memory.view(shape)
                yield wanted

    def _room(self, key: str, extent: Extent) -> Wanted | None:
        record = self.source.tensors.get(key)
        if record is None or record.shape != extent.shape:
            return None
        return Wanted(key, extent, torch.empty(extent.num_elements, dtype=record.dtype))

    def accept(self) -> None:
        """Goes on with what was read."""
        self.state.receive(self._numbers, self._residuals, self._factors)


def _numbers(by_rank: Sequence[Mapping[str, Any]], rank: int) -> dict[str, int]:
    """Those of this rank, or of the one that has most where there are none of its own."""
    if not by_rank:
        return {}
    most = max(by_rank, key=lambda numbers: numbers["exchanges"])
    chosen = by_rank[rank] if rank < len(by_rank) else most
    numbers = {key: chosen[key] for key in ("ranks", "steps", "exchanges")}
    if not all(type(number) is int and number >= 0 for number in numbers.values()):
        raise ValueError("what is said of compressed gradients must be whole numbers")
    return numbers
