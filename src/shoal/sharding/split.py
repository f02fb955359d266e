"""Which part of a full tensor a rank of a tensor-parallel group holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Some indices of one dimension of a full tensor, in runs that are joined.

    One run is the usual case; a projection that holds queries, keys and values in one matrix gives
    each rank three.

    Example:
        >>> split = Split(torch.Size([6]), 0, ((0, 1), (3, 5)))
        >>> split.take(torch.arange(6))
        tensor([0, 3, 4])
    """

    shape: torch.Size  # of the full tensor
    dim: int  # the dimension that is divided
    # From where to where, in the order in which the rank's own tensor has them.
    runs: tuple[tuple[int, int], ...]

    @property
    def local_shape(self) -> torch.Size:
        """The shape of what the rank holds."""
        sizes = list(self.shape)
        sizes[self.dim] = sum(stop - start for start, stop in self.runs)
        return torch.Size(sizes)

    def take(self, full: Tensor) -> Tensor:
        """The rank's part of the full tensor, in memory of its own."""
        parts = [full.narrow(self.dim, start, stop - start) for start, stop in self.runs]
        return torch.cat(parts, self.dim)

    def put(self, local: Tensor, full: Tensor) -> None:
        """Writes the rank's part into the full tensor."""
        offset = 0
        for start, stop in self.runs:
            part = local.narrow(self.dim, offset, stop - start)
            full.narrow(self.dim, start, stop - start).copy_(part)
            offset += stop - start
