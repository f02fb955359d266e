"""What the split layers of a model share: the ranks, and the ways in and out of a split region.

[Note: regions]
Between the columns of a block and its row every rank has other activations: its heads, its part of
the hidden features. Outside all ranks of the group have the same, to the bit. A region is entered
through `Entry`, which hands its input on and sums the gradients that come back, once for all layers
that take the same input; it is left through the row, which sums the results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.comm import differentiable as collective
from shoal.errors import ShoalError


@dataclass
class TensorGroup:
    """The ranks among which layers are split.

    Attributes:
        backend: They.
        is_whole: Whether all parameters are whole right now, and nothing can be computed.
    """

    backend: Backend
    is_whole: bool = False

    def check(self) -> None:
        """Raises if layers have whole weights."""
        if self.is_whole:
            raise ShoalError(
                "the model cannot be called inside of full_parameters(): its layers compute with "
                "their ranks' parts. Leave it first."
            )


class Entry:
    """The way into a region; see [Note: regions]."""

    def __init__(self, group: TensorGroup, sequence_dim: int | None = None) -> None:
        """``sequence_dim``: along which each rank has a part of the input, if it has."""
        self._group, self._sequence_dim = group, sequence_dim
        self._seen: tuple[Tensor, bool] | None = None
        self._handed: Tensor | None = None
        self.is_inside = False
        """Whether activations are split right now."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """The input for a layer of the region; the same for all layers that ask with the same."""
        self._group.check()
        self.is_inside = True
        has_graph = torch.is_grad_enabled()
        if self._seen is None or self._seen[0] is not tensor or self._seen[1] != has_graph:
            self._seen, self._handed = (tensor, has_graph), self._hand_in(tensor)
        assert self._handed is not None
        return self._handed

    def _hand_in(self, tensor: Tensor) -> Tensor:
        backend = self._group.backend
        if self._sequence_dim is not None:
            return collective.gather(tensor, backend, self._sequence_dim)
        return collective.copy(tensor, backend) if tensor.requires_grad else tensor

    def forget(self) -> None:
        """The region has been left."""
        self.is_inside = False
        self._seen = self._handed = None

    def leave(self, partial: Tensor) -> Tensor:
        """Sums the ranks' results."""
        self.forget()
        backend = self._group.backend
        if self._sequence_dim is not None:
            return collective.reduce_scatter(partial, backend, self._sequence_dim)
        return collective.reduce(partial, backend)
