"""What a strategy shards, and what users may choose besides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
class Settings:
    """What users may choose.

    Attributes:
        min_group_bytes: See `ParameterAnalyzer`.
        compute_dtype: What to compute with, if not with the parameters' own dtype.
        resident_below: Parameters of fewer elements stay whole on every rank where others are
            sharded.
        has_meetings: Whether ranks wait for each other in the middle of a pass, for more than
            parameters, as synchronized BatchNorm does.
        hides_gradients: Whether parameters are parts of others' already, so that what they show
            for a gradient must not be taken for the whole.
        check_every: Before every how many-th step the ranks compare their replicas; 0 for never.
        averages_buffers: Whether ranks go on with the average of their buffers, not rank 0's.
    """

    min_group_bytes: int = MIN_GROUP_BYTES
    compute_dtype: torch.dtype | None = None
    resident_below: int = 0
    has_meetings: bool = False
    hides_gradients: bool = False
    check_every: int = 0
    averages_buffers: bool = False
