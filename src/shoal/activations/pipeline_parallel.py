"""`PipelineParallelCheckpointManager`: the activations of one stage of a pipeline."""

from __future__ import annotations

from typing import Self

from torch import Tensor

from shoal.activations.checkpoint_manager import Recompute, check_whole
from shoal.activations.distributed_manager import DistributedCheckpointManager


class PipelineParallelCheckpointManager:
    """Keeps a stage's activations; those at its boundary can be fetched by other stages.

    Attributes:
        manager: Keeps the activations at the boundaries.
        local_manager: Keeps the others, for this rank alone.

    Example:
        >>> import shoal, torch
        >>> def boundaries():
        ...     stage = shoal.world().rank
        ...     with DistributedCheckpointManager() as manager:
        ...         stages = PipelineParallelCheckpointManager(manager, 2, stage)
        ...         output = torch.full((2,), float(stage))
        ...         stages.register_stage_checkpoint(f"out {stage}", output, is_boundary=True)
        ...         shoal.world().barrier()
        ...         found = stages.get_next_stage_boundaries()
        ...         shoal.world().barrier()
        ...     return found
        >>> shoal.run(boundaries, ranks=2, backend="memory")
        [['out 1'], []]
    """

    def __init__(
        self, manager: DistributedCheckpointManager, num_stages: int, current_stage: int
    ) -> None:
        """``current_stage`` is this rank's, from 0 to ``num_stages - 1``."""
        check_whole("num_stages", num_stages)
        check_whole("current_stage", current_stage)
        if num_stages < 1:
            raise ValueError(f"num_stages must be at least 1; got {num_stages}")
        if not 0 <= current_stage < num_stages:
            raise ValueError(
                f"current_stage must be from 0 to {num_stages - 1}; got {current_stage}"
            )
        self.manager = manager
        self.num_stages, self.current_stage = num_stages, current_stage
        self.local_manager = manager.open_manager()
        # In the order in which they were registered; whether each is at the boundary.
        self._is_boundary: dict[str, bool] = {}

    def register_stage_checkpoint(
        self, layer_id: str, activation: Tensor, is_boundary: bool = False
    ) -> None:
        """Keeps an activation; at a boundary other stages can fetch it from now on."""
        self._release(layer_id)
        keeper = self.manager if is_boundary else self.local_manager
        keeper.register_checkpoint(layer_id, activation, stage=self.current_stage)
        self._is_boundary[layer_id] = is_boundary

    def retrieve_stage_checkpoint(
        self, layer_id: str, *, recompute: Recompute | None = None
    ) -> Tensor:
        """An activation of this stage, or one at the boundary of another, fetched from there."""
        found = self.local_manager.find(layer_id)
        if found is not None:
            return found.tensor
        return self.manager.retrieve_or_fetch(layer_id, recompute=recompute)

    def get_stage_checkpoints(self, stage: int) -> list[str]:
        """The names of a stage's activations: of this stage all, of others those at boundaries.

        Other ranks are asked; their code takes no part.
        """
        check_whole("stage", stage)
        if not 0 <= stage < self.num_stages:
            raise ValueError(f"stage must be from 0 to {self.num_stages - 1}; got {stage}")
        if stage == self.current_stage:
            return list(self._is_boundary)
        found: dict[str, None] = {}
        for rank in range(self.manager.world_size):
            for key, of_stage in self.manager.list_checkpoints(rank):
                if of_stage == stage:
                    found[key] = None
        return list(found)

    def get_next_stage_boundaries(self) -> list[str]:
        """The names of what the next stage keeps at its boundary; none behind the last stage."""
        following = self.current_stage + 1
        return self.get_stage_checkpoints(following) if following < self.num_stages else []

    def clear_stage_checkpoints(self) -> None:
        """Lets go of this stage's activations, those at the boundary included."""
        for layer_id in list(self._is_boundary):
            self._release(layer_id)

    def _release(self, layer_id: str) -> None:
        keeper = self.manager.local_manager if self._is_boundary.pop(layer_id, False) else None
        (keeper or self.local_manager).release_checkpoint(layer_id)

    def close(self) -> None:
        """Lets go of everything of this stage; the manager underneath goes on. Twice is fine."""
        self.clear_stage_checkpoints()
        self.local_manager.close()

    def __enter__(self) -> Self:
        """For ``with``: closes at the end."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
