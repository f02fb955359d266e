"""Random numbers of an optimizer's steps, the same on whichever rank a parameter is stepped.

[Note: streams]
A draw for a parameter is seeded by the base seed, the number of the step, the parameter's number
in the optimizer and how many draws there were for it in this step. So it does not matter which
rank owns it, which other parameters that rank has, or what else was drawn. Generators of the user
are as they were, before and after.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.torch_support.random_state import RandomState

_WHOLE_STEP = -1
"""In place of a parameter's number: what is drawn for no parameter in particular."""


class Streams:
    """Where an optimizer's draws come from; see [Note: streams]."""

    def __init__(self, seed: int) -> None:
        """At the first step; ``seed`` is the same on all ranks."""
        self.seed, self.num_steps = seed, 0
        self.is_in_step = False
        self._counts: Counter[int] = Counter()
        self._outside = RandomState.capture()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around one step. What cannot be told from other draws is seeded for the whole of it."""
        self._outside, self.is_in_step = RandomState.capture(), True
        self._counts.clear()
        seed = self._seed_for(_WHOLE_STEP)
        try:
            torch.manual_seed(seed)
            np.random.seed(seed % (1 << 32))
            random.seed(seed)
            yield
        finally:
            self._outside.restore()
            self.is_in_step = False
        self.num_steps += 1

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Inside of a step, around what draws from the user's generators: a closure."""
        inside = RandomState.capture()
        self._outside.restore()
        try:
            yield
        finally:
            self._outside = RandomState.capture()
            inside.restore()

    def draw(self, number: int, operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operation that draws for the parameter of this number."""
        seed = self._seed_for(number)
        device = _device(args, kwargs)
        if kwargs.get("generator") is not None:
            own = torch.Generator(device).manual_seed(seed)
            return operation(*args, **{**kwargs, "generator": own})
        generator = _default_generator(device)
        before = generator.get_state()
        try:
            generator.manual_seed(seed)
            return operation(*args, **kwargs)
        finally:
            generator.set_state(before)

    def _seed_for(self, number: int) -> int:
        count = self._counts[number]
        self._counts[number] += 1
        text = f"{self.seed} {self.num_steps} {number} {count}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    # A checkpoint's part --------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """What it takes to go on from here."""
        return {"seed": self.seed, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from there."""
        self.seed, self.num_steps = int(state["seed"]), int(state["num_steps"])


def _device(args: Any, kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device
    return torch.device("cpu")


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]
