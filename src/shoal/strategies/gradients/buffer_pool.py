"""Memory that the gradients of groups take turns in."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm import Backend
from shoal.comm.accounting.ledger import Account


class BufferPool:
    """Flat buffers that groups use in turn, in memory that the transport reaches directly."""

    def __init__(self, backend: Backend, account: Account) -> None:
        """Nothing in it yet."""
        self._backend, self.account = backend, account
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, like: Tensor, numel: int) -> Tensor:
        """A buffer of at least that length, with any contents."""
        free = self._free.setdefault((like.dtype, like.device), [])
        fitting = [buffer for buffer in free if buffer.numel() >= numel]
        if not fitting:
            if free:  # too short for what comes now: let it go instead of keeping both
                self.account.add("gradients", -free.pop().nbytes)
            self.account.add("gradients", numel * like.itemsize)
            return self._backend.empty(numel, like.dtype, like.device)
        chosen = min(fitting, key=Tensor.numel)
        free[:] = [buffer for buffer in free if buffer is not chosen]
        return chosen

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back."""
        self._free[buffer.dtype, buffer.device].append(buffer)
