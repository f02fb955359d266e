"""One rank's place in a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shoal.comm import Backend
from shoal.strategies.pipeline.learning.chunk_forward import Path
from shoal.strategies.pipeline.stages.stage_parameters import StageParameters


@dataclass(frozen=True)
class Stage:
    """One rank's place in a pipeline, and what it has there.

    Attributes:
        group: The ranks of the pipeline, in order.
        num_chunks: The parts of the model, over all ranks.
        module: The user's module, of which this rank holds a part.
        path: Where its units are called.
        parameters: Who has which parameters.
        places: The chunk of each unit, by name.
    """

    group: Backend
    num_chunks: int
    module: nn.Module
    path: Path
    parameters: StageParameters
    places: dict[str, int]

    @property
    def rank(self) -> int:
        """This rank's number in the pipeline."""
        return self.group.rank

    def rank_of(self, chunk: int) -> int:
        """Who has a chunk."""
        return chunk % self.group.size

    def is_own(self, chunk: int) -> bool:
        """Whether this rank has a chunk."""
        return self.rank_of(chunk) == self.rank

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last chunk, and so the model's output."""
        return self.is_own(self.num_chunks - 1)
