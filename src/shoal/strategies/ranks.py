"""Who trains a model together, and who holds which part of it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.comm import Backend


@dataclass(frozen=True)
class Ranks:
    """Who trains together.

    Attributes:
        all: Everybody.
        shards: Those among whom memory is divided.
        replicas: Those that hold the same shard, if not everybody shares one division.
    """

    all: Backend
    shards: Backend
    replicas: Backend | None = None


def divide(backend: Backend, num_replicas: int, *, is_sharded: bool) -> Ranks:
    """Everybody, or blocks of neighbours that each hold all shards between them."""
    if num_replicas == 1:
        return Ranks(backend, backend)
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
    return Ranks(backend, shards, replicas)
