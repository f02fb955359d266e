"""The random generators that all threads of a process share, as something to put aside."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RandomState:
    """A copy of torch's, numpy's and Python's generators.

    Example:
        >>> state = RandomState.capture()
        >>> first = torch.rand(1)
        >>> state.restore()
        >>> torch.equal(first, torch.rand(1))
        True
    """

    def __init__(self, torch_cpu: torch.Tensor, torch_cuda: Any, numpy: Any, python: Any) -> None:
        """Use `capture`."""
        self._torch_cpu, self._torch_cuda = torch_cpu, torch_cuda
        self._numpy, self._python = numpy, python

    @classmethod
    def capture(cls) -> RandomState:
        """The generators as they are now; CUDA's only where CUDA is in use."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())

    def restore(self) -> None:
        """Puts the generators back to the captured state."""
        torch.set_rng_state(self._torch_cpu)
        if self._torch_cuda is not None:
            torch.cuda.set_rng_state_all(self._torch_cuda)
        elif torch.cuda.is_initialized():  # as its first use would have found it
            torch.cuda.manual_seed_all(torch.initial_seed())
        np.random.set_state(self._numpy)
        random.setstate(self._python)
