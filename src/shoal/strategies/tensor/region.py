"""What the split layers of a model share: the ranks, and how split regions are entered and left.

[Note: regions]
Between the columns of a block and its row every rank has other activations: its heads, its part of
the hidden features. Outside all ranks of the group have the same, to the bit. A region is entered
through `RegionEntry`, which hands its input on and sums the gradients that come back, once for all
layers that take the same input; it is left through the row, which sums the results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.comm import Backend
from shoal.comm import differentiable as collective
from shoal.errors import ShoalError
from shoal.strategies.tensor.split_parameter import ReadGuard
from shoal.torch_internals.autograd import is_in_backward


@dataclass
class TensorGroup:
    """The ranks among which layers are split.

    Attributes:
        guard: Of the parameters that are split; see [Note: reads of parts].
        is_whole: Whether all parameters are whole right now, and nothing can be computed.
    """

    backend: Backend
    guard: ReadGuard
    is_whole: bool = False

    def check(self) -> None:
        """Raises if layers have whole weights."""
        if self.is_whole:
            raise ShoalError(
                "the model cannot be called inside of full_parameters(): its layers compute with "
                "their ranks' parts. Leave it first."
            )


class RegionEntry:
    """The way into a region and out of it; see [Note: regions].

    In a sequence-parallel stack (see `sequence`) what goes in is gathered along the positions, and
    what comes out is scattered again.
    """

    def __init__(
        self, group: TensorGroup, sequence_dim: int | None = None, *, gathers_all: bool = False
    ) -> None:
        """``sequence_dim``: along which each rank has a part of the main input, `present`-ed first.

        ``gathers_all``: whether everything that goes in is divided like that.
        """
        self._group, self.sequence_dim, self._gathers_all = group, sequence_dim, gathers_all
        self._handed: list[tuple[Tensor, bool, Tensor]] = []
        self.is_inside = False
        """Whether activations are split right now."""
        self.is_at_block = False
        """Whether everything comes in where the block is called, and not at its columns."""
        self._block: nn.Module | None = None
        self._num_calls = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """The input for a layer of the region; all layers with the same input get the same."""
        self._group.check()
        self.is_inside = True
        has_graph = torch.is_grad_enabled()
        for seen, had_graph, handed in self._handed:
            if (seen is tensor or handed is tensor) and had_graph == has_graph:
                return handed
        if self.is_at_block and not self.is_bypassed:
            return tensor
        if self._gathers_all and self.sequence_dim is not None:
            return self.present(tensor)
        handed = self.share(tensor)
        self._handed.append((tensor, has_graph, handed))
        return handed

    def share(self, tensor: Tensor) -> Tensor:
        """What every rank has whole, for work that differs."""
        return collective.copy(tensor, self._group.backend) if tensor.requires_grad else tensor

    def watch(self, block: nn.Module) -> None:
        """Counts the calls of a block: only in them its layers hand parts to each other."""

        def begin(*_: object) -> None:
            self._num_calls += 1

        def end(*_: object) -> None:
            # An earlier hook may have raised before the call was counted.
            self._num_calls = max(0, self._num_calls - 1)

        self._block = block
        block.register_forward_pre_hook(begin)
        block.register_forward_hook(end, always_call=True)

    @property
    def is_bypassed(self) -> bool:
        """Whether a layer of the region is called outside of its block: results are whole.

        A backward recomputes what a forward did, and may begin in the middle of a block.
        """
        is_called = self._block is None or self._num_calls > 0
        return not is_called and not is_in_backward()

    def present(self, tensor: Tensor) -> Tensor:
        """The whole of the main input, of which each rank has some positions."""
        assert self.sequence_dim is not None
        handed = collective.gather(tensor, self._group.backend, self.sequence_dim)
        self._handed.append((tensor, torch.is_grad_enabled(), handed))
        return handed

    def forget(self) -> None:
        """The region has been left."""
        self.is_inside = False
        self._handed.clear()

    def leave(self, partial: Tensor, dim: int | None = None) -> Tensor:
        """Sums the ranks' results; ``dim`` counts positions, if it is not the usual one."""
        self.forget()
        backend = self._group.backend
        if self.sequence_dim is not None:
            dim = self.sequence_dim if dim is None else dim
            own = collective.reduce_scatter(partial, backend, dim)
            # `whole_mask` goes by strides, and those of a single position may be anything.
            return own.flatten().view(own.shape)
        return collective.reduce(partial, backend)
