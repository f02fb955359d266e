"""What a strategy shards, what users may choose besides, and which ranks hold which part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shoal.comm import Backend
from shoal.compression import Codec, Quantize
from shoal.sharding.analyzer import MIN_GROUP_BYTES


@dataclass(frozen=True)
class Sharding:
    """What is cut into shards, one for each rank; the rest every rank has whole."""

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False


LEVELS = {
    0: Sharding(),
    1: Sharding(optimizer=True),
    2: Sharding(optimizer=True, gradients=True),
    3: Sharding(optimizer=True, gradients=True, parameters=True),
}
"""By the number of ZeRO's stage."""


@dataclass(frozen=True)
class Compression:
    """How gradients are compressed."""

    codec: Codec
    error_feedback: bool = True  # see [Note: error feedback]
    warmup_steps: int = 0  # so many steps are made with uncompressed gradients first


@dataclass(frozen=True)
class Settings:
    """What users may choose."""

    min_group_bytes: int = MIN_GROUP_BYTES  # see `ParameterAnalyzer`
    # What to compute with, if not with the parameters' own dtype.
    compute_dtype: torch.dtype | None = None
    # Parameters of fewer elements stay whole on every rank where others are sharded.
    resident_below: int = 0
    # How much is gathered ahead of what is in use; a group at least, unless it is 0.
    prefetch_bytes: int = 1
    # Whether ranks wait for each other in the middle of a pass, for more than parameters, as
    # synchronized BatchNorm does.
    has_meetings: bool = False
    # Whether parameters are parts of others' already, so that what they show for a gradient
    # must not be taken for the whole.
    hides_gradients: bool = False
    # Before every how many-th step the ranks compare their replicas; 0 for never.
    check_every: int = 0
    # Whether ranks go on with the average of their buffers, not rank 0's.
    averages_buffers: bool = False
    compression: Compression | None = None  # of gradients, where there is more than one rank
    # What parameters are gathered as; see [Note: rounded parameters].
    gather_codec: Quantize | None = None
    # Names of parameters that are whole where others are split: other ranks have the same ones
    # beside other parts, and must make the same of their gradients.
    copied: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Ranks:
    """The ranks that train a model together."""

    all: Backend  # all of them
    shard_group: Backend  # the ranks that the memory is divided among
    # The ranks that hold the same shard, if the shards exist several times.
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
    """Who else holds parameters of the same model, beyond the ranks that see other data."""

    # Groups of ranks that hold other layers, or other parts of the same layers.
    axes: tuple[Backend, ...] = ()
    # How many ranks over these axes hold the same elements of a parameter, by its name; one
    # where it is not named.
    copies: Mapping[str, int] = field(default_factory=dict)
    other_layers: Backend | None = None  # the axis whose ranks hold other layers, if there is one
