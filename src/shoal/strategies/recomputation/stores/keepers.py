"""Who may hold activations besides a rank itself, and the store for a policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.comm import Backend
from shoal.strategies.recomputation.policy import Policy
from shoal.strategies.recomputation.stores.host_store import HostStore
from shoal.strategies.recomputation.stores.partition_store import PartitionStore
from shoal.strategies.recomputation.stores.peer_store import PeerStore
from shoal.strategies.recomputation.stores.store import Store


@dataclass(frozen=True)
class Keepers:
    """Ranks that have the same activations as this one, or room for them.

    Attributes:
        tensor: The ranks that layers are split over.
        in_flight: How many forwards of a block there are at most before the backward of the first.
        part: Ranks with the same number have the same blocks.
        stages: The ranks of a pipeline, if some of them have room for what others keep.
    """

    tensor: Backend | None = None
    in_flight: int = 1
    part: int = 0
    stages: Backend | None = None


def make_store(policy: Policy, keepers: Keepers, device: torch.device) -> Store:
    """Where what blocks keep lies; refuses what there are no ranks for."""
    if policy.store == "local":
        return Store()
    if policy.store == "host":
        return HostStore(device)
    if policy.store == "partition":
        if keepers.tensor is None or keepers.tensor.size == 1:
            raise ValueError(
                'activations="partition" divides what all ranks of a tensor group have alike: use '
                'it with strategy="tensor", or with strategy="hybrid" and tensor= of two or more. '
                'Elsewhere say activations="full"'
            )
        return PartitionStore(keepers.tensor)
    if keepers.stages is None:
        raise ValueError(
            'activations="peer" evens out the stages of a pipeline that have different numbers '
            'of micro-batches under way, as with schedule="1f1b" and four stages or more: here '
            'no stage has room for what another keeps. Say activations="full"'
        )
    return PeerStore(keepers.stages)
