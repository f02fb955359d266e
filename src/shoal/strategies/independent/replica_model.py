"""`ReplicaModel`: what models have in common of which every rank trains a replica of its own."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from shoal.comm import Backend, World
from shoal.strategies.layers.materialization import share_values
from shoal.strategies.model import ShardedModel, ranks_for
from shoal.strategies.settings import LEVELS


class ReplicaModel(ShardedModel):
    """Passes and steps are a rank's own, with gradients of its own; see its kinds.

    Its engine has one rank, this one: nothing that it does waits for others.
    """

    sharding = LEVELS[0]
    settled: ClassVar[tuple[str, ...]] = (
        "auto_sync",
        "sync_batchnorm",
        "replica",
        "resident_below",
        "prefetch_bytes",
        "compression_warmup",
        "gather_compression",
    )
    meeting_lane: Backend
    """All ranks, for what this model does among them."""
    _all_ranks: Backend

    def __init__(
        self, module: nn.Module, world: World | Backend | None = None, **options: Any
    ) -> None:
        """Takes over the module's parameters; every rank starts from rank 0's values.

        Args:
            module: The user's.
            world: The ranks that train it; the current world by default.
            options: See `ShardedModel`.
        """
        backend = ranks_for(module, world)
        share_values(module, backend, options.get("seed", 0))
        alone = backend.split(backend.rank)
        # Set before `ShardedModel` has a module, to which it would hand them on afterwards.
        self._all_ranks, self.meeting_lane = backend, backend.lane(self)
        super().__init__(module, alone, **options)

    @property
    def all_ranks(self) -> Backend:
        """All ranks that have a replica."""
        return self._all_ranks

    @property
    def data_group(self) -> Backend:
        """All ranks: each sees other data."""
        return self._all_ranks

    def _warn_of_uneven_parts(self) -> None:
        """Ranks count the same, whatever they are given."""
        self.uneven_rows = 0
