"""What type checkers and editors know of strategies and their options.

Constructors are what counts; a test compares them with what is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

import torch

from shoal.comm.mesh import Mesh
from shoal.compression import Codec
from shoal.strategies.data_parallel import DataParallelStrategy as DataParallelStrategy
from shoal.strategies.independent.local_model import Outer
from shoal.strategies.recomputation.policy import Policy
from shoal.strategies.tensor.plan.tensor_plan import TensorPlan

Strategy = Literal[DataParallelStrategy, "tensor", "pipeline", "hybrid", "local", "async"]


class _ReplicaOptions(TypedDict, total=False):
    """What also goes with replicas that are trained apart."""

    min_group_bytes: int | None
    average_buffers: bool
    seed: int
    mixed_precision: str | torch.dtype | None
    activations: str | Policy | None
    memory: int | str | None


class AsyncOptions(_ReplicaOptions, total=False):
    """See `AsyncModel`."""

    topology: str
    max_staleness: int
    when_stale: str
    servers: str | Sequence[int]
    partners: str


class _ComparedOptions(_ReplicaOptions, total=False):
    """What goes with ranks that meet."""

    check_every: int
    compression: str | Codec | None
    error_feedback: bool


class _DataAxisOptions(_ComparedOptions, total=False):
    """What goes with an axis of ranks that see other data, whatever the others do."""

    auto_sync: bool
    sync_batchnorm: bool
    replica: int
    resident_below: int
    prefetch_bytes: int
    compression_warmup: int


class DataParallelOptions(_DataAxisOptions, total=False):
    """See `ShardedModel`."""

    gather_compression: str | Codec | None


class LocalOptions(_ComparedOptions, total=False):
    """See `LocalModel`."""

    every: int
    outer: Outer | None


class TensorOptions(_DataAxisOptions, total=False):
    """See `TensorParallelModel`."""

    tensor: int | None
    data: int | None
    zero: int
    plan: Mapping[str, str] | TensorPlan | None
    sequence_parallel: bool
    split_logits: bool


class _StageOptions(_DataAxisOptions, total=False):
    """What pipelines have with and without split layers."""

    data: int | None
    zero: int
    micro_batches: int | None
    schedule: str
    chunks: int | None
    cut: Sequence[str] | None
    balance: Mapping[str, float] | None
    outputs: str


class PipelineOptions(_StageOptions, total=False):
    """See `PipelineParallelModel`."""

    pipeline: int | None
    mesh: Mesh | None


class HybridOptions(_StageOptions, total=False):
    """See `HybridShardedModel`."""

    tensor: int
    pipeline: int
    plan: Mapping[str, str] | TensorPlan | None
