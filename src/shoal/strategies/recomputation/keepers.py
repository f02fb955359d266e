"""Who may hold activations besides a rank itself, and the store for a policy."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.comm import Backend
from shoal.strategies.recomputation.partition_store import PartitionStore
from shoal.strategies.recomputation.policy import Policy
from shoal.strategies.recomputation.stores import Store


@dataclass(frozen=True)
class Keepers:
    """Ranks that have the same activations as this one, or room for them.

    Attributes:
        tensor: The ranks that layers are split over.
        in_flight: How many forwards of a block there are at most before the backward of the first.
        part: Ranks with the same number have the same blocks.
    """

    tensor: Backend | None = None
    in_flight: int = 1
    part: int = 0


def make_store(policy: Policy, keepers: Keepers) -> Store:
    """Where what blocks keep lies; refuses what there are no ranks for."""
    if policy.store == "local":
        return Store()
    if policy.store == "partition":
        if keepers.tensor is None or keepers.tensor.size == 1:
            raise ValueError(
                'activations="partition" divides what all ranks of a tensor group have alike: use '
                'it with strategy="tensor", or with strategy="hybrid" and tensor= of two or more. '
                'Elsewhere say activations="full"'
            )
        return PartitionStore(keepers.tensor)
    raise ValueError(f"activations: store={policy.store!r} does not exist yet")
