"""`ModelParallelCheckpointStrategy`: which rank of a tensor-parallel model keeps an activation."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shoal.activations.checkpoint_manager import (
    check_activation,
    check_layer_id,
    check_whole,
)
from shoal.activations.distributed_manager import DistributedCheckpointManager


class ModelParallelCheckpointStrategy:
    """Decides who keeps what, where neighbouring ranks hold parts of the same layers.

    The input of a tensor-parallel layer is the same on all ranks of its group, so one copy is
    enough: the first rank's.

    Example:
        >>> import shoal, torch
        >>> def decide():
        ...     with DistributedCheckpointManager() as manager:
        ...         strategy = ModelParallelCheckpointStrategy(manager, tensor_parallel_size=2)
        ...         return strategy.should_checkpoint("mlp", torch.ones(2), is_tensor_parallel=True)
        >>> shoal.run(decide, ranks=4, backend="memory")
        [True, False, True, False]
    """

    def __init__(
        self,
        manager: DistributedCheckpointManager,
        tensor_parallel_size: int,
        layer_to_rank_map: Mapping[str, int] | None = None,
    ) -> None:
        """Tensor groups are blocks of ``tensor_parallel_size`` neighbouring ranks.

        Args:
            manager: The ranks.
            tensor_parallel_size: How many ranks hold the parts of a layer; divides their number.
            layer_to_rank_map: Which rank keeps an activation, for names where it is not rank 0.
        """
        size = manager.world_size
        check_whole("tensor_parallel_size", tensor_parallel_size)
        if tensor_parallel_size < 1 or size % tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size must divide the number of ranks, {size}; "
                f"got {tensor_parallel_size}"
            )
        self.manager, self.tensor_parallel_size = manager, tensor_parallel_size
        self._ranks: dict[str, int] = {}
        for layer_id, rank in (layer_to_rank_map or {}).items():
            self.register_layer_rank(layer_id, rank)

    def should_checkpoint(
        self, layer_id: str, activation: Tensor, is_tensor_parallel: bool = False
    ) -> bool:
        """Whether this rank is to keep the activation."""
        check_layer_id(layer_id)
        check_activation(activation)
        return not is_tensor_parallel or self.manager.rank % self.tensor_parallel_size == 0

    def get_checkpoint_rank(self, layer_id: str) -> int:
        """The rank that keeps the activation: 0 unless another was named."""
        check_layer_id(layer_id)
        return self._ranks.get(layer_id, 0)

    def register_layer_rank(self, layer_id: str, rank: int) -> None:
        """Names the rank that keeps an activation."""
        check_layer_id(layer_id)
        check_whole(f"the rank of {layer_id!r}", rank)
        if not 0 <= rank < self.manager.world_size:
            last = self.manager.world_size - 1
            raise ValueError(f"the rank of {layer_id!r} must be from 0 to {last}; got {rank}")
        self._ranks[layer_id] = rank
