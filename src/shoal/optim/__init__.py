"""Optimizers that step only what their rank owns, around any torch optimizer.

`registry` is the table of strategies, `optimizer` what all optimizers have in common, and `kinds`
what an optimizer may be divided into.
"""

from importlib import import_module
from typing import Any

from shoal.optim.compression_optimizer import (
    GradientCompressionOptimizer as GradientCompressionOptimizer,
)
from shoal.optim.data_parallel_optimizers import *  # noqa: F403 - new ones are named there alone
from shoal.optim.hybrid_optimizer import HybridShardedOptimizer as HybridShardedOptimizer
from shoal.optim.independent.async_optimizer import AsyncSGDOptimizer as AsyncSGDOptimizer
from shoal.optim.independent.local_optimizer import LocalSGDOptimizer as LocalSGDOptimizer
from shoal.optim.kinds import Kind as Kind
from shoal.optim.optimizer import ShardedOptimizer as ShardedOptimizer
from shoal.optim.pipeline_optimizer import PipelineParallelOptimizer as PipelineParallelOptimizer
from shoal.optim.proof.judging import find_kind as find_kind
from shoal.optim.registry import DATA_PARALLEL as DATA_PARALLEL
from shoal.optim.registry import INDEPENDENT as INDEPENDENT
from shoal.optim.registry import PAIRS as PAIRS
from shoal.optim.scaler import GradScaler as GradScaler
from shoal.optim.tensor_optimizer import TensorParallelOptimizer as TensorParallelOptimizer


def __getattr__(name: str) -> Any:
    """`ElasticOptimizer` keeps checkpoints in memory, which is built upon this package."""
    if name == "ElasticOptimizer":
        return import_module("shoal.elastic").ElasticOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
