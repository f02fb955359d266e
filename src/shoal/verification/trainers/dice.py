"""Random numbers of one participant, put aside while others train in the same process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from shoal.torch_support.random_state import RandomState


class Dice:
    """Generators of torch, numpy and Python that nobody else draws from.

    Example:
        >>> dice = Dice(seed=0)
        >>> with dice.rolling():
        ...     mask = torch.rand(3)
    """

    def __init__(self, seed: int) -> None:
        """The same seed gives the same numbers, in any process."""
        outside = RandomState.capture()
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self._state = RandomState.capture()
        outside.restore()

    @contextmanager
    def rolling(self) -> Iterator[None]:
        """Inside, everybody's generators are these."""
        outside = RandomState.capture()
        self._state.restore()
        try:
            yield
        finally:
            self._state = RandomState.capture()
            outside.restore()
