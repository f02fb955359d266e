"""What a rank of a pipeline does at a time: one pass of one micro-batch through one chunk."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Pass(StrEnum):
    """A direction through a chunk of the model."""

    FORWARD = "F"
    BACKWARD = "B"
    """With the gradients of the weights, unless these have passes of their own."""
    WEIGHTS = "W"
    """The gradients of the weights, put off until there is nothing more urgent."""


class Tick(NamedTuple):
    """One pass of one micro-batch through one chunk.

    Attributes:
        work: Which pass.
        micro_batch: Its number.
        chunk: The part of the model, counted from its beginning.
    """

    work: Pass
    micro_batch: int
    chunk: int

    def __str__(self) -> str:
        """As in drawings: ``F3`` is micro-batch 3 on its way forward."""
        return f"{self.work}{self.micro_batch}"


Schedule = list[list[Tick]]
"""What each rank does, in order."""
