"""Random numbers of a stage: a stream of its own, that follows from the user's generator.

Ranks of a pipeline begin with the same seed, and layers on different ranks would drop the same
elements. So for each batch a number is drawn from torch's generator, and each stage goes on from
what that number and its own place give. Seeding the generator again repeats the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.torch_support.random_state import RandomState

_STRIDE = 1_000_003


@contextmanager
def own_stream(rank: int) -> Iterator[None]:
    """Inside, this stage draws from its own stream; outside, one number was drawn."""
    base = int(torch.randint(2**40, ()))
    outside = RandomState.capture()
    torch.default_generator.manual_seed(base + _STRIDE * rank)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(base + _STRIDE * rank)
    try:
        yield
    finally:
        outside.restore()
