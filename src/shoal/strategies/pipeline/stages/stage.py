"""One rank's part of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shoal.comm import Backend
from shoal.strategies.pipeline.learning.chunk_forward import CallInterceptor
from shoal.strategies.pipeline.stages.stage_parameters import StageParameters
from shoal.strategies.pipeline.stages.units import Unit


class Stage:
    """One rank's part of a pipeline.

    Attributes:
        module: The user's module, of which this rank has some units.
        group: The ranks of the pipeline, in order.
        rank: This rank's number in the pipeline.
        num_chunks: The chunks of the model, over all ranks.
        rank_of_chunk: The rank that has each chunk.
        chunk_of_unit: The chunk of each unit, by name.
        parameters: Which rank has which parameters.
        interceptor: Hands calls of units to the chunk's forward.
        is_last: Whether this rank has the last chunk, and so the model's output.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Backend,
        num_chunks: int,
        units: list[Unit],
        chunk_of_unit: Mapping[str, int],
    ) -> None:
        """Intercepts the calls of the units; ``parameters.release()`` frees what others have."""
        self.module, self.group, self.rank = module, group, group.rank
        self.num_chunks, self.chunk_of_unit = num_chunks, chunk_of_unit
        self.rank_of_chunk = [chunk % group.size for chunk in range(num_chunks)]
        self.is_last = self.rank_of_chunk[-1] == self.rank
        self.parameters = StageParameters(module, units, chunk_of_unit, group.rank, group.size)
        self.interceptor = CallInterceptor(module, units, chunk_of_unit)
        self.parameters.list_all_while(self.interceptor.is_in_users_code)
