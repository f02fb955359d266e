"""What compression has left out so far on this rank, which is added to the next gradients.

[Note: error feedback]
Whatever a payload does not say is kept and added to the next gradient, so that it comes late but is
not lost (arXiv:1901.09847). Where an owner encodes the average anew, that error belongs to the
average: the owner keeps it as many times as there are ranks, because its own gradient is one part
of the next average. A rank's own elements do not travel to itself, so that they are exact.

What is left out of a parameter waits while this rank has no gradient for it. What is not finite is
not kept.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from shoal.comm.accounting import Account
from shoal.sharding.layout import GroupLayout


class Residual:
    """The residual of one group: as long as the group's whole gradient, on every rank."""

    def __init__(self, layout: GroupLayout, account: Account) -> None:
        """Nothing was left out yet."""
        self._layout, self._account = layout, account
        self.memory: Tensor | None = None

    def allocate(self, like: Tensor) -> Tensor:
        """The residual; zeros, if there is none yet."""
        if self.memory is None:
            self.memory = torch.zeros_like(like)
            self._account.add("residual", self.memory.nbytes)
        return self.memory

    def add_to(self, whole: Tensor, collected: Collection[int]) -> None:
        """Adds what was left out of some parameters to their gradients, which then have it."""
        memory = self.allocate(whole)
        if len(collected) == len(self._layout.slots):
            whole.add_(memory)
            memory.zero_()
            return
        for index in collected:
            slot = self._layout.slots[index]
            whole[slot.start : slot.stop] += memory[slot.start : slot.stop]
            memory[slot.start : slot.stop].zero_()

    def keep(self, elements: slice, error: Tensor) -> None:
        """Some elements were sent as something else; the error is used up."""
        assert self.memory is not None
        self.memory[elements] += error.nan_to_num_(0.0, 0.0, 0.0)
