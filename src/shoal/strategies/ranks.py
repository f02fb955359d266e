"""Who trains a model together, and who holds which part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.comm import Backend


@dataclass(frozen=True)
class Ranks:
    """The ranks that train a model together.

    Attributes:
        all: All of them.
        shard_group: The ranks that the memory is divided among.
        replica_group: The ranks that hold the same shard, if the shards exist several times.
    """

    all: Backend
    shard_group: Backend
    replica_group: Backend | None = None

    @classmethod
    def of(cls, backend: Backend, num_replicas: int, *, is_sharded: bool) -> Ranks:
        """One division over all ranks, or blocks of neighbours that each hold all shards."""
        if num_replicas == 1:
            return cls(backend, backend)
        if not is_sharded:
            raise ValueError("replica= is for sharded parameters: use strategy='fsdp' or 'zero3'")
        if num_replicas < 1 or backend.size % num_replicas:
            raise ValueError(
                f"replica must divide the number of ranks, {backend.size}; got {num_replicas}"
            )
        num_shards = backend.size // num_replicas
        shards = backend.split(backend.rank // num_shards)
        replicas = backend.split(backend.rank % num_shards)
        assert shards is not None
        return cls(backend, shards, replicas)


@dataclass(frozen=True)
class Ownership:
    """Who else holds parameters of the same model, beyond the ranks that see other data.

    Attributes:
        axes: Groups of ranks that hold other layers, or other parts of the same layers.
        copies: How many ranks over these axes hold the same elements of a parameter, by its name;
            one where it is not named.
        other_layers: The axis whose ranks hold other layers, if there is one.
    """

    axes: tuple[Backend, ...] = ()
    copies: Mapping[str, int] = field(default_factory=dict)
    other_layers: Backend | None = None
